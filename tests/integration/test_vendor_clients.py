"""The Python clients of QStash and Google Cloud Tasks, with a running service."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.auth.exceptions import RefreshError
from google.cloud import tasks_v2
from google.cloud.tasks_v2.services.cloud_tasks.transports import CloudTasksRestTransport
from google.oauth2.credentials import Credentials
from qstash import QStash, Receiver
from qstash.errors import QStashError, RateLimitExceededError, SignatureError
from qstash.message import BatchJsonRequest, PublishResponse

from tests.integration.service import Target, target
from tests.integration.tenants import Tenants, two_tenants
from tests.test_docs import DOCS, blocks_of

PAGE = DOCS / "moving-from-qstash-and-cloud-tasks.md"
LATER = datetime(2100, 1, 1, tzinfo=UTC)
FLAGS = ("--compatibility", "qstash", "--compatibility", "cloud_tasks")


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """A service that requires API keys."""
    folder = tmp_path_factory.mktemp("service")
    with two_tenants(folder, *FLAGS, "--allow-target", "127.0.0.1") as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[Target]:
    """A target that fails the first request for /flaky."""

    def respond(path: str, number: int) -> int:
        return 404 if path == "/flaky" and number == 1 else 200

    with target(respond) as started:
        yield started


@contextmanager
def qstash_client(tenants: Tenants, token: str) -> Iterator[QStash]:
    """Return a client of QStash for the service."""
    client = QStash(token, base_url=f"http://127.0.0.1:{tenants.service.port}", retry=False)
    with closing(client.http._client):
        yield client


@pytest.fixture
def qstash(tenants: Tenants) -> Iterator[QStash]:
    """A client of QStash with an API key of the service."""
    with qstash_client(tenants, tenants.secrets["ann"]) as client:
        yield client


def cloud_tasks_client(tenants: Tenants, token: str) -> tasks_v2.CloudTasksClient:
    """Return a client of Cloud Tasks for the service."""
    transport = CloudTasksRestTransport(
        host=f"127.0.0.1:{tenants.service.port}",
        url_scheme="http",
        credentials=Credentials(token=token),  # type: ignore[no-untyped-call]
    )
    return tasks_v2.CloudTasksClient(transport=transport)


@pytest.fixture
def cloud_tasks(tenants: Tenants) -> Iterator[tasks_v2.CloudTasksClient]:
    """A client of Cloud Tasks with an API key of the service."""
    with cloud_tasks_client(tenants, tenants.secrets["ann"]) as client:
        yield client


def find_task(tenants: Tenants, task_id: str) -> dict[str, Any]:
    """Return a task of the service."""
    task: dict[str, Any] = tenants.request("ann", "GET", f"/retry-tasks/{task_id}").body
    return task


def published_id(response: object) -> str:
    """Return the id of a message that is not a duplicate."""
    assert isinstance(response, PublishResponse)
    assert not response.deduplicated
    return response.message_id


def test_qstash_message_is_delivered(tenants: Tenants, qstash: QStash, receiver: Target) -> None:
    """Method, headers, query and body reach the target; a 404 is retried; the callback follows."""
    message_id = published_id(
        qstash.message.publish_json(
            url=f"{receiver.url}/flaky",
            body={"order": 7},
            method="PUT",
            headers={"X-Order": "7"},
            retries=2,
            retry_delay="10 * (1 + retried)",
            timeout=10,
            callback=f"{receiver.url}/done",
            flow_control={"key": "orders"},
            label="ignored",
            redact={"body": True},
        )
    )

    tenants.service.wait_for(lambda: bool(receiver.bodies["/done"]))

    assert ["PUT", "PUT"] == receiver.methods["/flaky"]
    assert [{"order": 7}] * 2 == list(map(json.loads, receiver.bodies["/flaky"]))
    headers = receiver.received_requests["/flaky"][1]
    assert ("7", "application/json", message_id, "2") == (
        headers["x-order"],
        headers["content-type"],
        headers["Idempotency-Key"],
        headers["X-Retry-Attempt"],
    )
    callback = json.loads(receiver.bodies["/done"][0])
    assert (message_id, "SUCCEEDED", 2) == (
        callback["taskId"],
        callback["status"],
        callback["attemptNumber"],
    )
    task = find_task(tenants, message_id)
    assert ("qstash", 3, 10_000) == (
        task["policyId"],
        task["policy"]["maxAttempts"],
        task["policy"]["attemptTimeoutMs"],
    )


def test_receiver_of_qstash_verifies_each_attempt(
    tenants: Tenants, qstash: QStash, receiver: Target
) -> None:
    """Attempts and callbacks are signed for QStash's own receiver, with the oldest secret."""
    keys = [tenants.request("ann", "POST", "/signing-secrets", {}).body["secret"] for _ in range(2)]
    receiver.respond = lambda path, number: 404 if path == "/signed?a=b" and number == 1 else 200
    url = f"{receiver.url}/signed?a=b"
    message_id = published_id(
        qstash.message.publish(
            url=url, body="ü", retries=1, retry_delay="100", callback=f"{receiver.url}/done"
        )
    )
    tenants.service.wait_for(lambda: bool(receiver.bodies["/done"]))

    requests = receiver.received_requests["/signed?a=b"]
    verify_with = [Receiver(keys[0], "other"), Receiver("other", keys[0])]
    for qstash_receiver, headers in zip(verify_with, requests, strict=True):
        qstash_receiver.verify(signature=headers["Upstash-Signature"], body="ü", url=url)
        with pytest.raises(SignatureError):
            qstash_receiver.verify(signature=headers["Upstash-Signature"], body="u", url=url)
        with pytest.raises(SignatureError):
            Receiver(keys[1], "other").verify(signature=headers["Upstash-Signature"], body="ü")
    assert [(message_id, "0", "Upstash-QStash"), (message_id, "1", "Upstash-QStash")] == [
        (headers["Upstash-Message-Id"], headers["Upstash-Retried"], headers["User-Agent"])
        for headers in requests
    ]
    callback = receiver.received_requests["/done"][0]
    verify_with[0].verify(
        signature=callback["Upstash-Signature"],
        body=receiver.bodies["/done"][0].decode(),
        url=f"{receiver.url}/done",
    )


def test_qstash_message_is_delayed_and_cancelled(qstash: QStash, receiver: Target) -> None:
    """`get` shows a delayed message until it is cancelled."""
    url = f"{receiver.url}/later?a=b"
    message_id = published_id(qstash.message.publish(url=url, body="text", delay="1h"))
    at_time = published_id(qstash.message.publish(url=url, not_before=int(LATER.timestamp())))

    message = qstash.message.get(message_id)
    assert (url, "POST", 3, 3_600_000) == (
        message.url,
        message.method,
        message.max_retries,
        message.not_before - message.created_at,
    )
    assert LATER.timestamp() * 1000 == qstash.message.get(at_time).not_before
    qstash.message.cancel(message_id)
    assert 1 == qstash.message.cancel_many([message_id, at_time])
    with pytest.raises(QStashError, match=r"404.*CANCELLED"):
        qstash.message.get(message_id)


def test_qstash_duplicates(qstash: QStash, receiver: Target) -> None:
    """A message with the id or the content of another one is a duplicate."""
    url = f"{receiver.url}/once"
    first = published_id(qstash.message.publish(url=url, body="a", deduplication_id="once"))
    second = qstash.message.publish(url=url, body="b", deduplication_id="once")
    third = published_id(
        qstash.message.publish(url=url, body="c", content_based_deduplication=True)
    )
    fourth = qstash.message.publish(url=url, body="c", content_based_deduplication=True)

    assert [PublishResponse(first, True), PublishResponse(third, True)] == [second, fourth]


def test_qstash_batch(tenants: Tenants, qstash: QStash, receiver: Target) -> None:
    """Each message of a batch is delivered."""
    qstash.message.batch_json(
        [
            {"url": f"{receiver.url}/1", "body": {"number": 1}},
            {"url": f"{receiver.url}/2", "body": {"number": 2}, "method": "PUT"},
        ]
    )

    tenants.service.wait_for(lambda: {"/1", "/2"} <= receiver.bodies.keys())

    assert (["POST"], ["PUT"]) == (receiver.methods["/1"], receiver.methods["/2"])
    assert {"number": 2} == json.loads(receiver.bodies["/2"][0])


def test_qstash_client_reads_when_the_quota_has_capacity(tmp_path: Path) -> None:
    """The error for a batch that is partly over the quota has the time of the next try."""
    flags = (*FLAGS, "--allow-target", "127.0.0.1", "--set", "tenant_pending=1")
    before = int(time.time())
    later: BatchJsonRequest = {"url": "http://127.0.0.1:1/", "body": 1, "delay": "1h"}
    with (
        two_tenants(tmp_path, *flags) as tenants,
        qstash_client(tenants, tenants.secrets["ann"]) as client,
        pytest.raises(RateLimitExceededError) as caught,
    ):
        client.message.batch_json([later, later])

    assert before + 10 <= int(caught.value.reset or 0)


def test_qstash_errors(tenants: Tenants, qstash: QStash) -> None:
    """The client shows the header that is not supported, and an unknown token."""
    url = "https://example.com"
    for options, error in (
        ({"url": url, "delay": "soon"}, "Upstash-Delay must be a duration, such as 10s"),
        ({"url": url, "failure_callback": url}, "Upstash-Failure-Callback is not supported"),
        ({"url_group": "orders"}, "The destination must be a URL"),
    ):
        with pytest.raises(QStashError, match=f'status: 400, body: .*"error":"{error}'):
            qstash.message.publish(**options)  # type: ignore[arg-type]
    with pytest.raises(QStashError, match=r"501.*Queues are not supported"):
        qstash.message.enqueue(queue="q", url=url)
    with qstash_client(tenants, "unknown") as client, pytest.raises(QStashError, match="401"):
        client.message.publish(url=url)


def test_cloud_task_is_delivered(
    tenants: Tenants, cloud_tasks: tasks_v2.CloudTasksClient, receiver: Target
) -> None:
    """Method, headers and body reach the target; a 404 is retried."""
    parent = cloud_tasks.queue_path("shop", "europe-west1", "orders")
    task = tasks_v2.Task(
        http_request=tasks_v2.HttpRequest(
            url=f"{receiver.url}/flaky",
            http_method=tasks_v2.HttpMethod.PUT,
            headers={"X-Order": "7", "Content-Type": "application/octet-stream"},
            body=b"\xff\x00",
        ),
        dispatch_deadline="15s",
    )

    created = cloud_tasks.create_task(parent=parent, task=task)
    tenants.service.wait_for(lambda: len(receiver.bodies["/flaky"]) == 2)

    assert created.name.startswith(f"{parent}/tasks/")
    assert (f"{receiver.url}/flaky", tasks_v2.HttpMethod.PUT, "7") == (
        created.http_request.url,
        created.http_request.http_method,
        created.http_request.headers["X-Order"],
    )
    assert created.schedule_time == created.create_time
    assert 15 == created.dispatch_deadline.total_seconds()
    assert (["PUT"] * 2, [b"\xff\x00"] * 2) == (
        receiver.methods["/flaky"],
        receiver.bodies["/flaky"],
    )
    headers = receiver.received_requests["/flaky"][0]
    assert ("7", "application/octet-stream") == (headers["X-Order"], headers["Content-Type"])
    stored = find_task(tenants, created.name.rpartition("/")[2])
    assert "cloud-tasks" == stored["policyId"]
    assert stored["lane"].endswith("@orders")


def test_attempts_have_the_headers_of_cloud_tasks(
    tenants: Tenants, cloud_tasks: tasks_v2.CloudTasksClient
) -> None:
    """The headers are those that Google's service sent in a recorded run: 503, 404, 200."""
    parent = cloud_tasks.queue_path("shop", "europe-west1", "recorded")
    with target(lambda _path, number: (503, 404, 200)[number - 1]) as recorder:
        task = tasks_v2.Task(
            http_request=tasks_v2.HttpRequest(url=recorder.url, headers={"user-agent": "mine"}),
            name=f"{parent}/tasks/order-9",
            retry_config={"min_backoff": {"nanos": 100_000_000}},
        )
        created = cloud_tasks.create_task(parent=parent, task=task)
        tenants.service.wait_for(lambda: len(recorder.bodies["/"]) == 3)
        received = recorder.received_requests["/"]

    names = ("TaskRetryCount", "TaskExecutionCount", "TaskPreviousResponse", "TaskRetryReason")
    assert [
        ("0", "0", None, None),
        ("1", "0", "503", ""),
        ("2", "1", "404", ""),
    ] == [tuple(headers.get(f"X-CloudTasks-{name}") for name in names) for headers in received]
    for headers in received:
        assert ("recorded", "order-9") == (
            headers["X-CloudTasks-QueueName"],
            headers["X-CloudTasks-TaskName"],
        )
        agents = [value for name, value in headers.items() if name.lower() == "user-agent"]
        assert ["Google-Cloud-Tasks"] == agents
    eta = float(received[0]["X-CloudTasks-TaskETA"])
    assert pytest.approx(created.schedule_time.timestamp()) == eta


def test_cloud_task_is_scheduled_run_and_deleted(
    tenants: Tenants, cloud_tasks: tasks_v2.CloudTasksClient, receiver: Target
) -> None:
    """A named task exists once; `get` shows its time, `run` delivers it, `delete` cancels it."""
    path = ("shop", "europe-west1", "orders")
    parent = cloud_tasks.queue_path(*path)
    names = [cloud_tasks.task_path(*path, task_id) for task_id in ("order-7", "order-8")]
    tasks = [
        tasks_v2.Task(
            name=name,
            http_request=tasks_v2.HttpRequest(url=f"{receiver.url}/scheduled"),
            schedule_time=LATER,
            retry_config={"max_attempts": 3, "min_backoff": {"seconds": 1}, "max_doublings": 2},
        )
        for name in names
    ]

    for task in tasks:
        assert LATER == cloud_tasks.create_task(parent=parent, task=task).schedule_time
        with pytest.raises(exceptions.Conflict, match="already exists"):
            cloud_tasks.create_task(parent=parent, task=task)
    assert (names[0], LATER) == (
        cloud_tasks.get_task(name=names[0]).name,
        cloud_tasks.get_task(name=names[0]).schedule_time,
    )
    assert cloud_tasks.run_task(name=names[0]).schedule_time < LATER
    tenants.service.wait_for(lambda: bool(receiver.bodies["/scheduled"]))
    assert names[0] == receiver.received_requests["/scheduled"][0]["Idempotency-Key"]
    cloud_tasks.delete_task(name=names[1])
    with pytest.raises(exceptions.NotFound, match="CANCELLED"):
        cloud_tasks.get_task(name=names[1])


def test_cloud_tasks_errors(tenants: Tenants, cloud_tasks: tasks_v2.CloudTasksClient) -> None:
    """The client raises the exception for the status, with the field that is not supported."""
    parent = cloud_tasks.queue_path("shop", "europe-west1", "orders")
    request = tasks_v2.HttpRequest(
        url="https://example.com", oidc_token={"service_account_email": "a@example.com"}
    )
    with pytest.raises(exceptions.BadRequest, match=r"task\.httpRequest\.oidcToken is not supp"):
        cloud_tasks.create_task(parent=parent, task=tasks_v2.Task(http_request=request))
    with pytest.raises(exceptions.MethodNotImplemented, match="Queues need not be created"):
        cloud_tasks.get_queue(name=parent)
    task = tasks_v2.Task(http_request=tasks_v2.HttpRequest(url="https://example.com"))
    with (
        cloud_tasks_client(tenants, "unknown") as client,
        pytest.raises(RefreshError),  # the client reacts to 401
    ):
        client.create_task(parent=parent, task=task)


def test_code_on_the_page_delivers_a_request(tenants: Tenants, receiver: Target) -> None:
    """The Python blocks of the page deliver the requests that they describe."""
    replacements = {
        "127.0.0.1:8080": f"127.0.0.1:{tenants.service.port}",
        "http://127.0.0.1:9009": receiver.url,
        "tarry_KEY": tenants.secrets["ann"],
    }
    blocks = [block for block in blocks_of(PAGE) if block.info == "python notest"]
    assert 2 == len(blocks)
    for block in blocks:
        pattern = "|".join(map(re.escape, replacements))
        code = re.sub(pattern, lambda match: replacements[match[0]], block.text)
        namespace: dict[str, Any] = {}
        exec(compile(code, str(PAGE), "exec"), namespace)  # noqa: S102 - code of the project
        client = namespace["client"]
        (client.http._client if isinstance(client, QStash) else client.transport).close()

    paths = {"/from-qstash", "/from-cloud-tasks"}
    tenants.service.wait_for(lambda: paths <= receiver.bodies.keys())
