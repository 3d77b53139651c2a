"""Deliveries of a running service: bodies, signatures, idempotency keys, callbacks, batches."""

from __future__ import annotations

import hmac
import json
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.integration.service import Response, Service, Target, service, target

NEW_SECRET, OLD_SECRET = b"n" * 24, b"o" * 32
QUICK_RETRIES = {"initialDelayMs": 1, "maxDelayMs": 20}
LARGE_BODY = "x" * 100_000


@pytest.fixture(scope="module")
def running_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a service that signs requests with two secrets."""
    secrets = ",".join(f"whsec_{b64encode(secret).decode()}" for secret in (NEW_SECRET, OLD_SECRET))
    flags = ("--set", f"signing_secrets={secrets}")
    with service(tmp_path_factory.mktemp("service"), *flags) as started:
        yield started


@pytest.fixture
def ok_target() -> Iterator[Target]:
    """Run a target that responds with 200."""
    with target() as started:
        yield started


def _signature(secret: bytes, headers: dict[str, str], body: bytes) -> str:
    """Compute a signature of Standard Webhooks without code of the service."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    return "v1," + b64encode(hmac.new(secret, signed, sha256).digest()).decode()


def test_every_attempt_is_signed_with_every_secret(
    running_service: Service, ok_target: Target
) -> None:
    """Each attempt has a signature per secret, and the task id as webhook id."""
    ok_target.respond = lambda _path, number: 503 if number == 1 else 200
    task = running_service.post(
        targetUrl=f"{ok_target.url}/signed", body={"a": "ü"}, policy=QUICK_RETRIES
    )
    running_service.wait_until_finished(task["taskId"])
    first, second = ok_target.received_requests["/signed"]
    for headers, body in zip((first, second), ok_target.bodies["/signed"], strict=True):
        assert task["taskId"] == headers["webhook-id"]
        expected = [_signature(secret, headers, body) for secret in (NEW_SECRET, OLD_SECRET)]
        assert expected == headers["webhook-signature"].split(" ")
    assert {"a": "ü"} == json.loads(ok_target.bodies["/signed"][0])
    assert "application/json" == first["Content-Type"]
    assert first["Idempotency-Key"] == second["Idempotency-Key"] == task["idempotencyKey"]
    assert ("1", "2") == (first["X-Retry-Attempt"], second["X-Retry-Attempt"])


def stored_bodies(running_service: Service, task_id: str = "*") -> set[Path]:
    """Return the files of bodies that the service has stored."""
    return {*running_service.folder.glob(f"bodies/.tarry/*/default/{task_id}")}


def test_large_body_is_stored_in_a_folder(running_service: Service, ok_target: Target) -> None:
    """A large body is stored in a file, and the target receives it unchanged."""
    task = running_service.post(targetUrl=f"{ok_target.url}/large", body=LARGE_BODY)
    [file] = stored_bodies(running_service, task["taskId"])
    assert LARGE_BODY == file.read_text()
    assert "SUCCEEDED" == running_service.wait_until_finished(task["taskId"])["status"]
    assert [LARGE_BODY.encode()] == ok_target.bodies["/large"]
    assert len(LARGE_BODY) == task["bodySize"]


def test_object_of_the_caller_is_sent(running_service: Service, ok_target: Target) -> None:
    """An object below the name of the tenant is sent and not deleted; others are rejected."""
    file = running_service.folder / "bodies" / "default" / "invoices" / "7.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b'{"total": 7}')
    task = running_service.post(
        targetUrl=f"{ok_target.url}/named", bodyRef="default/invoices/7.json"
    )
    assert "SUCCEEDED" == running_service.wait_until_finished(task["taskId"])["status"]
    assert [b'{"total": 7}'] == ok_target.bodies["/named"]
    assert file.exists()
    for ref in ("default/nothing", "other/invoices/7.json", "default/../../tarry.db"):
        rejected = running_service.send(
            "POST", "/retry-tasks", {"targetUrl": ok_target.url, "bodyRef": ref}
        )
        assert (422, "bodyRef") == (rejected.status, rejected.body["field"])


@pytest.mark.parametrize("damage", ["delete", "change"])
def test_changed_body_is_not_sent(running_service: Service, ok_target: Target, damage: str) -> None:
    """A task whose stored body was deleted or changed is exhausted, and the log has the error."""
    task = running_service.post(
        targetUrl=f"{ok_target.url}/damaged", body=LARGE_BODY, delayMs=3_600_000
    )
    [file] = stored_bodies(running_service, task["taskId"])
    if damage == "delete":
        file.unlink()
    else:
        file.write_text("something else")
    running_service.request("POST", f"/retry-tasks/{task['taskId']}/retry")
    finished = running_service.wait_until_finished(task["taskId"])
    assert ("EXHAUSTED", "permanent") == (finished["status"], finished["reason"])
    [attempt] = running_service.attempts(task["taskId"])
    assert "invalid" == attempt["errorClass"]
    assert task["taskId"] in attempt["errorMessage"]
    assert not ok_target.received_requests["/damaged"]


def test_callback_gets_the_result(running_service: Service, ok_target: Target) -> None:
    """Each finished task causes one callback with its own key, and callbacks are retried."""
    ok_target.respond = lambda path, number: {
        "/dead": 400,
        "/callback": 503 if number == 1 else 200,
    }.get(path, 200)
    ids = {
        path: running_service.post(
            targetUrl=ok_target.url + path, callbackUrl=f"{ok_target.url}/callback"
        )["taskId"]
        for path in ("/dead", "/ok")
    }
    running_service.wait_for(lambda: len(ok_target.received_requests["/callback"]) == 3)
    callbacks = {
        headers["Idempotency-Key"]: json.loads(body)
        for headers, body in zip(
            ok_target.received_requests["/callback"], ok_target.bodies["/callback"], strict=True
        )
    }
    assert {f"{task_id}-callback-0" for task_id in ids.values()} == set(callbacks)
    by_task = {body["taskId"]: body for body in callbacks.values()}
    dead, succeeded = by_task[ids["/dead"]], by_task[ids["/ok"]]
    assert ("EXHAUSTED", "permanent", 400) == (
        dead["status"],
        dead["reason"],
        dead["responseStatus"],
    )
    assert ("SUCCEEDED", None, 1) == (
        succeeded["status"],
        succeeded["reason"],
        succeeded["attemptNumber"],
    )


def _post_and_wait(running_service: Service, task: dict[str, Any], seconds: int) -> Response:
    prefer = {"Prefer": f"wait={seconds}"}
    return running_service.send("POST", "/retry-tasks", task, prefer)


def test_prefer_wait_returns_the_result(running_service: Service, ok_target: Target) -> None:
    """The response has the result of the target, or the pending task after the wait."""
    ok_target.respond = lambda _path, number: 503 if number < 3 else 200
    finished = _post_and_wait(
        running_service, {"targetUrl": f"{ok_target.url}/waited", "policy": QUICK_RETRIES}, 50
    )
    assert (201, "wait=50") == (finished.status, finished.headers["preference-applied"])
    assert ("SUCCEEDED", 3) == (finished.body["status"], finished.body["attemptNumber"])
    assert 200 == finished.body["response"]["status"]

    late = _post_and_wait(
        running_service, {"targetUrl": f"{ok_target.url}/late", "delayMs": 3_600_000}, 1
    )
    assert (201, "PENDING") == (late.status, late.body["status"])
    assert "response" not in late.body or late.body["response"] is None


def test_batch_has_one_result_per_task(running_service: Service, ok_target: Target) -> None:
    """Valid tasks are delivered, and invalid tasks have a problem."""
    tasks: list[dict[str, Any]] = [{"targetUrl": f"{ok_target.url}/batch/{n}"} for n in range(1000)]
    tasks[7]["targetUrl"] = "ftp://a.b/"
    tasks[8]["delayMs"] = -1
    status, batch = running_service.request("POST", "/retry-tasks/batch", {"tasks": tasks})
    statuses = [result["status"] for result in batch["results"]]
    assert (200, {7, 8}) == (status, {n for n, result in enumerate(statuses) if result != 201})
    fields = [batch["results"][n]["problem"]["field"] for n in (7, 8)]
    assert ["targetUrl", "delayMs"] == fields
    running_service.wait_for(lambda: len(ok_target.received_requests) == 998)
    assert {1} == {len(requests) for requests in ok_target.received_requests.values()}


def test_concurrent_posts_with_one_key_create_one_task(
    running_service: Service, ok_target: Target
) -> None:
    """One caller gets a 201, the others a 200 with the same task, and one body is stored."""
    barrier, before = Barrier(50), stored_bodies(running_service)
    task = {"targetUrl": f"{ok_target.url}/once", "idempotencyKey": "order-7", "body": LARGE_BODY}

    def post(_: int) -> Response:
        barrier.wait()
        return running_service.send("POST", "/retry-tasks", task)

    with ThreadPoolExecutor(50) as callers:
        responses = list(callers.map(post, range(50)))
    assert [200] * 49 + [201] == sorted(response.status for response in responses)
    [task_id] = {response.body["taskId"] for response in responses}
    running_service.wait_until_finished(task_id)
    assert 1 == len(ok_target.received_requests["/once"])
    other = running_service.send("POST", "/retry-tasks", {**task, "body": "other"})
    assert (422, "idempotencyKey") == (other.status, other.body["field"])
    assert [task_id] == [file.name for file in stored_bodies(running_service) - before]
