"""Invalid requests, and requests of other tenants, to a service with API keys and without --dev."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service import service, target
from tests.integration.tenants import Tenants, two_tenants

TARGET = "https://example.com/hook"
HOSTS = {
    "rebound.example": "127.0.0.1",
    "six.example": "::1",
    "metadata.example": "169.254.169.254",
    "private.example": "10.0.0.1",
    "mapped.example": "::ffff:10.0.0.1",
}


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """Run a service with two tenants."""
    with two_tenants(tmp_path_factory.mktemp("service")) as started:
        yield started


# --- targets with private addresses ---------------------------------------------------------------

PRIVATE_URLS = [
    "http://127.0.0.1/",
    "http://127.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0177.0.0.1/",
    "http://127.0.0.1./",
    "http://localhost/",
    "http://LOCALHOST./",
    "http://a.localhost/",
    "http://0.0.0.0/",
    "http://[::]/",
    "http://[::1]/",
    "http://[0:0:0:0:0:0:0:1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:7f00:1::]/",
    "http://[fe80::1%25eth0]/",
    "http://[fd00:ec2::254]/",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://192.168.0.1/",
    "http://100.64.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/",
    "http://168.63.129.16/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://\uff11\uff12\uff17.\uff10.\uff10.\uff11/",
    "http://①②⑦.0.0.1/",
    "http://127%2e0%2e0%2e1/",
    "http://example.com@127.0.0.1/",
    "http://127.0.0.1#@example.com/",
    "http://127.0.0.1\\@example.com/",
    "http:127.0.0.1/",
    "http:///127.0.0.1/",
    "//127.0.0.1/",
    "file:///etc/passwd",
    "gopher://127.0.0.1/",
    "grpc://127.0.0.1:50051/a.B/C",
    "grpcs://localhost:50051/a.B/C",
]


@pytest.mark.parametrize("field", ["targetUrl", "callbackUrl"])
def test_every_spelling_of_a_private_address_is_rejected(tenants: Tenants, field: str) -> None:
    """A private address is rejected as target and as callback, and the problem has the field."""
    with tenants.check_nothing_stored():
        for url in PRIVATE_URLS:
            task = {"targetUrl": TARGET} | {field: url}
            rejected = tenants.request("ann", "POST", "/retry-tasks", task)
            assert (422, field) == (rejected.status, rejected.body.get("field")), url
        tasks = [{"targetUrl": url} for url in PRIVATE_URLS]
        results = tenants.request("ann", "POST", "/retry-tasks/batch", {"tasks": tasks}).body[
            "results"
        ]
        assert {422} == {result["status"] for result in results}


def mount_file(folder: Path, path: str, text: str) -> tuple[str, ...]:
    """Return a command that runs another one, for which the file at `path` has another text."""
    file = folder / Path(path).name
    file.write_text(text)
    script = f'mount --bind "$0" {path} && exec "$@"'
    command = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, str(file))
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"a private {path} needs user namespaces: run as root, or allow them")
    return command


def mount_hosts(folder: Path) -> tuple[str, ...]:
    """Return a command that runs another one with `HOSTS` as its /etc/hosts."""
    text = "".join(f"{address} {name}\n" for name, address in HOSTS.items())
    return mount_file(folder, "/etc/hosts", text)


def test_a_name_that_resolves_to_a_private_address_is_blocked_at_connect(tmp_path: Path) -> None:
    """With `on_blocked = "fail"`, the task is accepted, not sent, and not retried."""
    command_prefix = mount_hosts(tmp_path)
    with (
        target() as started_target,
        service(
            tmp_path, "--set", "on_blocked=fail", dev=False, command_prefix=command_prefix
        ) as running_service,
    ):
        port = started_target.url.rpartition(":")[2]
        urls = [f"http://{name}:{port}/{name}" for name in HOSTS]
        tasks = [
            running_service.post(targetUrl=url)["taskId"] for url in [*urls, f"grpc{urls[0][4:]}/M"]
        ]
        for task_id in tasks:
            finished = running_service.wait_until_finished(task_id)
            assert ("EXHAUSTED", "permanent") == (finished["status"], finished["reason"])
            [attempt] = running_service.attempts(task_id)
            assert "blocked" == attempt["errorClass"]
            assert not [each for each in HOSTS.values() if each in attempt["errorMessage"]]
        assert not started_target.received_requests


def test_an_attempt_is_not_counted_if_no_dns_server_answers(tmp_path: Path) -> None:
    """The task waits, its explanation has the reason, and the service is ready."""
    nothing_listens = "nameserver 127.255.255.254\noptions timeout:1 attempts:1\n"
    command_prefix = mount_file(tmp_path, "/etc/resolv.conf", nothing_listens)
    with service(tmp_path, command_prefix=command_prefix) as running_service:
        task_id = running_service.post(targetUrl="http://somewhere.example/")["taskId"]
        path = f"/retry-tasks/{task_id}/explain"
        expected = "Could not resolve somewhere.example: no DNS server has answered."
        running_service.wait_for(
            lambda: running_service.request("GET", path)[1]["text"].endswith(expected)
        )
        task = running_service.task(task_id)
        assert ("PENDING", 0) == (task["status"], task["attemptNumber"])
        assert not running_service.attempts(task_id)
        assert 200 == running_service.request("GET", "/readyz")[0]


def test_tasks_can_wait_until_their_target_is_allowed(tmp_path: Path) -> None:
    """The task is sent when the operator has allowed its target."""
    command_prefix = mount_hosts(tmp_path)
    with target() as started_target:
        port = started_target.url.rpartition(":")[2]
        with service(tmp_path, dev=False, command_prefix=command_prefix) as running_service:
            task_id = running_service.post(targetUrl=f"http://rebound.example:{port}/")["taskId"]
            path = f"/retry-tasks/{task_id}/explain"
            running_service.wait_for(
                lambda: "--allow-target" in running_service.request("GET", path)[1]["text"]
            )
            text = running_service.request("GET", path)[1]["text"]
            assert "--allow-target CIDR (setting allow_target)" in text
            task = running_service.task(task_id)
            assert ("PENDING", 0) == (task["status"], task["attemptNumber"])
            assert not started_target.received_requests
            running_service.stop()
        flags = "--allow-target", "127.0.0.0/8"
        with service(tmp_path, *flags, dev=False, command_prefix=command_prefix) as running_service:
            assert "SUCCEEDED" == running_service.wait_until_finished(task_id)["status"]


def test_lane_keys_do_not_multiply_a_limit_of_the_settings(tmp_path: Path) -> None:
    """Also with flow-control keys of QStash and queues of Cloud Tasks, one attempt runs."""
    running, peaks, lock = [0], [0], threading.Lock()

    def respond(_path: str, _number: int) -> int:
        with lock:
            running[0] += 1
            peaks[0] = max(peaks[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return 200

    with target(respond) as started_target:
        lane = started_target.url.replace("//", "")
        settings = tmp_path / "tarry.toml"
        settings.write_text(f'[[downstreams]]\nlane = "{lane}"\nconcurrency = 1\n')
        flags = ["--config", str(settings), "--compatibility", "qstash"]
        flags += ["--compatibility", "cloud_tasks"]
        with service(tmp_path, *flags) as running_service:
            for number in range(10):
                url = f"{started_target.url}/{number}"
                running_service.post(targetUrl=url, laneKey=f"k{number}")
                headers = {"Upstash-Flow-Control-Key": f"flow{number}"}
                assert (
                    201
                    == running_service.request("POST", f"/v2/publish/{url}", {}, headers=headers)[0]
                )
                queue = f"/v2/projects/p/locations/l/queues/q{number}/tasks"
                task = {"task": {"httpRequest": {"url": url}}}
                assert 200 == running_service.request("POST", queue, task)[0]
            running_service.wait_for(
                lambda: 30 == sum(map(len, started_target.received_requests.values()))
            )
    assert 1 == peaks[0]


# --- invalid documents ----------------------------------------------------------------------------

DEEPLY_NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff\xfe{}", 400, None),
        (b'{"targetUrl": "https://example.com/\xff"}', 400, None),
        (b'{"targetUrl": "https://example.com/", "body": "\xff"}', 400, None),
        (f'{{"targetUrl": "{TARGET}", "body": {DEEPLY_NESTED}}}'.encode(), 400, None),
        (f'{{"targetUrl": "{TARGET}", "policy": {{"a": {DEEPLY_NESTED}}}}}'.encode(), 400, None),
        (DEEPLY_NESTED.encode(), 422, ""),
        (b"[]", 422, ""),
        (b'{"targetUrl": 7}', 422, "targetUrl"),
        (b'{"targetUrl": "https://example.com/", "delayMs": 1e999}', 422, "delayMs"),
        (b'{"targetUrl": "https://example.com/", "delayMs": "1"}', 422, "delayMs"),
        (b'{"targetUrl": "https://example.com/", "nonsense": 1}', 422, "nonsense"),
        (b'{"targetUrl": "https://example.com/\\r\\nX-A: b"}', 422, "targetUrl"),
        (b'{"targetUrl": "https://example.com/", "method": "GET\\r\\nX"}', 422, "method"),
        (
            b'{"targetUrl": "https://example.com/", "headers": {"X-A": "b\\r\\nX-C: d"}}',
            422,
            "headers.X-A",
        ),
        (
            b'{"targetUrl": "https://example.com/", "idempotencyKey": "a\\r\\nX-C: d"}',
            422,
            "idempotencyKey",
        ),
        (
            b'{"targetUrl": "https://example.com/", "policy": {"maxAttempts": -1}}',
            422,
            "policy.maxAttempts",
        ),
        (
            b'{"targetUrl": "https://example.com/", "bodyRef": "bob/secret"}',
            422,
            "bodyRef",
        ),
    ],
)
def test_an_invalid_document_is_rejected_with_its_field(
    tenants: Tenants, body: bytes, status: int, field: str | None
) -> None:
    """Wrong types, deep nesting, invalid UTF-8 and line breaks are rejected."""
    with tenants.check_nothing_stored():
        rejected = tenants.request("ann", "POST", "/retry-tasks", body)
    assert (status, field) == (rejected.status, rejected.body.get("field"))
    assert "application/problem+json" == rejected.headers["content-type"]
    assert rejected.body["detail"]


# --- tasks of other tenants -----------------------------------------------------------------------


def test_a_key_is_required(tenants: Tenants) -> None:
    """All paths except health return 401 without a valid key."""
    running_service = tenants.service
    with tenants.check_nothing_stored():
        for headers in ({}, {"authorization": "Bearer tarry_wrong"}, {"x-api-key": "ü"}):
            rejected = running_service.send("POST", "/retry-tasks", {"targetUrl": TARGET}, headers)
            assert 401 == rejected.status
            assert "www-authenticate" in rejected.headers
            for path in ("/retry-tasks", "/dead-letters", "/downstreams", "/metrics", "/events"):
                assert 401 == running_service.send("GET", path, headers=headers).status
        assert 200 == running_service.request("GET", "/healthz")[0]


def test_resources_of_another_tenant_do_not_exist(tenants: Tenants) -> None:
    """Operations on resources of another tenant return 404, and lists are empty."""
    delayed_task = {"targetUrl": TARGET, "delayMs": 3_600_000, "idempotencyKey": "one"}
    created = tenants.request("ann", "POST", "/retry-tasks", delayed_task)
    assert 201 == created.status
    task_id = created.body["taskId"]
    policy = {"policyId": "private", "maxAttempts": 3}
    assert 201 == tenants.request("ann", "POST", "/retry-policies", policy).status
    before = tenants.request("ann", "GET", f"/retry-tasks/{task_id}").body

    for method, path in (
        ("GET", ""),
        ("GET", "/attempts"),
        ("GET", "/explain"),
        ("POST", "/retry"),
        ("DELETE", ""),
    ):
        assert 404 == tenants.request("bob", method, f"/retry-tasks/{task_id}{path}").status
    for path in ("/retry-tasks", "/dead-letters", "/downstreams"):
        assert [] == tenants.request("bob", "GET", path).body["items"]
    assert 404 == tenants.request("bob", "GET", "/retry-policies/private").status
    assert 404 == tenants.request("bob", "DELETE", "/retry-policies/private").status
    # A lane of the same name can be paused, but it belongs to the tenant that paused it.
    lane_path = "/downstreams/" + before["lane"].replace("/", "%2F")
    assert (
        "PAUSED" == tenants.request("bob", "POST", f"{lane_path}/pause?create=true").body["state"]
    )
    assert "ACTIVE" == tenants.request("ann", "GET", lane_path).body["state"]
    named = tenants.request(
        "bob", "POST", "/retry-tasks", {"targetUrl": TARGET, "policyId": "private"}
    )
    assert (422, "policyId") == (named.status, named.body["field"])

    other = tenants.request("bob", "POST", "/retry-tasks", delayed_task)
    assert 201 == other.status  # the same idempotency key of another tenant is no conflict
    assert task_id != other.body["taskId"]
    assert before == tenants.request("ann", "GET", f"/retry-tasks/{task_id}").body
    listed = tenants.request("ann", "GET", "/retry-tasks").body
    assert [task_id] == [task["taskId"] for task in listed["items"]]
    assert "bob" not in json.dumps(listed)


def test_only_the_operator_reads_metrics_of_the_process(tmp_path: Path) -> None:
    """Other tenants read only the number of their own tasks."""
    with two_tenants(tmp_path, "--set", "operator=bob") as tenants:
        delayed_task = {"targetUrl": TARGET, "delayMs": 3_600_000}
        for tenant in ("ann", "ann", "bob"):
            assert 201 == tenants.request(tenant, "POST", "/retry-tasks", delayed_task).status
        ann_metrics, bob_metrics = (
            tenants.request(tenant, "GET", "/metrics").body for tenant in ("ann", "bob")
        )
    assert 'retry_tasks{status="PENDING"} 2.0' in ann_metrics
    assert "retry_attempts_total" not in ann_metrics
    assert 'retry_tasks{status="PENDING"} 3.0' in bob_metrics
    assert "retry_attempts_total" in bob_metrics
