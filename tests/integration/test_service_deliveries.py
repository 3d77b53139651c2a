"""Deliveries of a running service: stored_bodies, signatures, keys, callbacks, waiting."""

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

from tests.integration.service import Reply, Service, Target, service, target

NEW, OLD = b"n" * 24, b"o" * 32
"""Signing secrets."""
SOON = {"initialDelayMs": 1, "maxDelayMs": 20}
LARGE = "x" * 100_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a service that signs."""
    secrets = ",".join(f"whsec_{b64encode(secret).decode()}" for secret in (NEW, OLD))
    flags = ("--set", f"signing_secrets={secrets}")
    with service(tmp_path_factory.mktemp("service"), *flags) as one:
        yield one


@pytest.fixture
def ok_target() -> Iterator[Target]:
    """Run a target that responds with 200."""
    with target() as one:
        yield one


def _signature(secret: bytes, headers: dict[str, str], body: bytes) -> str:
    """Compute a signature as Standard Webhooks describes it, without code of the service."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    return "v1," + b64encode(hmac.new(secret, signed, sha256).digest()).decode()


def test_every_attempt_is_signed_with_every_secret(running: Service, ok_target: Target) -> None:
    """A receiver can verify with any of the secrets; the id is that of the task."""
    ok_target.answer = lambda _path, number: 503 if number == 1 else 200
    task = running.post(targetUrl=f"{ok_target.url}/signed", body={"a": "ü"}, policy=SOON)
    running.wait_until_finished(task["taskId"])
    first, second = ok_target.seen["/signed"]
    for headers, body in zip((first, second), ok_target.bodies["/signed"], strict=True):
        assert task["taskId"] == headers["webhook-id"]
        expected = [_signature(secret, headers, body) for secret in (NEW, OLD)]
        assert expected == headers["webhook-signature"].split(" ")
    assert {"a": "ü"} == json.loads(ok_target.bodies["/signed"][0])
    assert "application/json" == first["Content-Type"]
    assert first["Idempotency-Key"] == second["Idempotency-Key"] == f'"{task["idempotencyKey"]}"'
    assert ("1", "2") == (first["X-Retry-Attempt"], second["X-Retry-Attempt"])


def stored_bodies(running: Service, task_id: str = "*") -> set[Path]:
    """Return the files of stored stored_bodies."""
    return {*running.folder.glob(f"bodies/.tarry/*/default/{task_id}")}


def test_large_body_is_stored_in_a_folder(running: Service, ok_target: Target) -> None:
    """The body is stored as long as its task, and arrives unchanged."""
    task = running.post(targetUrl=f"{ok_target.url}/large", body=LARGE)
    [file] = stored_bodies(running, task["taskId"])
    assert LARGE == file.read_text()
    assert "SUCCEEDED" == running.wait_until_finished(task["taskId"])["status"]
    assert [LARGE.encode()] == ok_target.bodies["/large"]
    assert len(LARGE) == task["bodySize"]


def test_body_ref_to_an_object_of_the_caller(running: Service, ok_target: Target) -> None:
    """An object under the tenant's name is sent and not deleted."""
    file = running.folder / "bodies" / "default" / "invoices" / "7.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b'{"total": 7}')
    task = running.post(targetUrl=f"{ok_target.url}/named", bodyRef="default/invoices/7.json")
    assert "SUCCEEDED" == running.wait_until_finished(task["taskId"])["status"]
    assert [b'{"total": 7}'] == ok_target.bodies["/named"]
    assert file.exists()
    for ref in ("default/nothing", "other/invoices/7.json", "default/../../tarry.db"):
        refused = running.reply(
            "POST", "/retry-tasks", {"targetUrl": ok_target.url, "bodyRef": ref}
        )
        assert (422, "bodyRef") == (refused.status, refused.body["field"])


@pytest.mark.parametrize("harm", ["delete", "change"])
def test_changed_body_is_not_sent(running: Service, ok_target: Target, harm: str) -> None:
    """The task is exhausted, with the reason in its log."""
    task = running.post(targetUrl=f"{ok_target.url}/harmed", body=LARGE, delayMs=3_600_000)
    [file] = stored_bodies(running, task["taskId"])
    if harm == "delete":
        file.unlink()
    else:
        file.write_text("something else")
    running.request("POST", f"/retry-tasks/{task['taskId']}/retry")
    ended = running.wait_until_finished(task["taskId"])
    assert ("EXHAUSTED", "permanent") == (ended["status"], ended["reason"])
    [attempt] = running.attempts(task["taskId"])
    assert "invalid" == attempt["errorClass"]
    assert task["taskId"] in attempt["errorMessage"]
    assert not ok_target.seen["/harmed"]


def test_callback_gets_the_result(running: Service, ok_target: Target) -> None:
    """A success and a failure are each sent once, with their own key, and retried."""
    ok_target.answer = lambda path, number: {
        "/dead": 400,
        "/told": 503 if number == 1 else 200,
    }.get(path, 200)
    ids = {
        path: running.post(targetUrl=ok_target.url + path, callbackUrl=f"{ok_target.url}/told")[
            "taskId"
        ]
        for path in ("/dead", "/fine")
    }
    running.wait_for(lambda: len(ok_target.seen["/told"]) == 3)
    told = {
        headers["Idempotency-Key"]: json.loads(body)
        for headers, body in zip(ok_target.seen["/told"], ok_target.bodies["/told"], strict=True)
    }
    assert {f'"{task_id}-callback-0"' for task_id in ids.values()} == set(told)
    by_task = {news["taskId"]: news for news in told.values()}
    dead, fine = by_task[ids["/dead"]], by_task[ids["/fine"]]
    assert ("EXHAUSTED", "permanent", 400) == (
        dead["status"],
        dead["reason"],
        dead["responseStatus"],
    )
    assert ("SUCCEEDED", None, 1) == (fine["status"], fine["reason"], fine["attemptNumber"])


def _waiting(running: Service, task: dict[str, Any], seconds: int) -> Reply:
    prefer = {"Prefer": f"wait={seconds}"}
    return running.reply("POST", "/retry-tasks", task, prefer)


def test_prefer_wait_returns_the_result(running: Service, ok_target: Target) -> None:
    """The response has the result of the target, or the pending task after the time."""
    ok_target.answer = lambda _path, number: 503 if number < 3 else 200
    answered = _waiting(running, {"targetUrl": f"{ok_target.url}/waited", "policy": SOON}, 50)
    assert (201, "wait=50") == (answered.status, answered.headers["preference-applied"])
    assert ("SUCCEEDED", 3) == (answered.body["status"], answered.body["attemptNumber"])
    assert 200 == answered.body["response"]["status"]

    late = _waiting(running, {"targetUrl": f"{ok_target.url}/late", "delayMs": 3_600_000}, 1)
    assert (201, "PENDING") == (late.status, late.body["status"])
    assert "response" not in late.body or late.body["response"] is None


def test_batch_has_one_result_per_task(running: Service, ok_target: Target) -> None:
    """Valid tasks are delivered, invalid ones are reported."""
    tasks: list[dict[str, Any]] = [{"targetUrl": f"{ok_target.url}/batch/{n}"} for n in range(1000)]
    tasks[7]["targetUrl"] = "ftp://a.b/"
    tasks[8]["delayMs"] = -1
    status, answer = running.request("POST", "/retry-tasks/batch", {"tasks": tasks})
    verdicts = [result["status"] for result in answer["results"]]
    assert (200, {7, 8}) == (status, {n for n, verdict in enumerate(verdicts) if verdict != 201})
    fields = [answer["results"][n]["problem"]["field"] for n in (7, 8)]
    assert ["targetUrl", "delayMs"] == fields
    running.wait_for(lambda: len(ok_target.seen) == 998)
    assert {1} == {len(requests) for requests in ok_target.seen.values()}


def test_concurrent_posts_with_one_key_create_one_task(running: Service, ok_target: Target) -> None:
    """One caller gets 201, the others get 200 and the same task, and no extra body is stored."""
    together, before = Barrier(50), stored_bodies(running)
    task = {"targetUrl": f"{ok_target.url}/once", "idempotencyKey": "the-one", "body": LARGE}

    def ask(_: int) -> Reply:
        together.wait()
        return running.reply("POST", "/retry-tasks", task)

    with ThreadPoolExecutor(50) as callers:
        replies = list(callers.map(ask, range(50)))
    assert [200] * 49 + [201] == sorted(reply.status for reply in replies)
    [task_id] = {reply.body["taskId"] for reply in replies}
    running.wait_until_finished(task_id)
    assert 1 == len(ok_target.seen["/once"])
    other = running.reply("POST", "/retry-tasks", {**task, "body": "other"})
    assert (422, "idempotencyKey") == (other.status, other.body["field"])
    assert [task_id] == [file.name for file in stored_bodies(running) - before]
