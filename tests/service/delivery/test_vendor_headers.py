"""Headers of QStash and Cloud Tasks, which test_vendor_clients.py checks with their own clients."""

from __future__ import annotations

import json
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256

import pytest

from tarry.service.delivery.signing import Signer
from tarry.service.delivery.vendor_headers import cloud_tasks_headers, qstash_headers
from tarry.service.model import AttemptRecord, DecisionRecord, Task, TaskContent

URL = "https://example.com/hook?a=b"


def make_task(attempts: int = 0, lost_attempts: int = 0) -> Task:
    """Return a task of a queue."""
    return Task(
        id="0190a000-0000-7000-8000-000000000001",
        tenant="default",
        lane="default/https:example.com:443@orders",
        key="projects/p/locations/l/queues/orders/tasks/order-7",
        fingerprint=b"",
        packed_content=b"",
        next_attempt_at=1_800_000_000_250,
        attempts=attempts,
        lost_attempts=lost_attempts,
    )


def records(first_number: int, *statuses: int | None) -> list[AttemptRecord]:
    """Return attempts with these statuses."""
    return [
        AttemptRecord(
            attempt_number=number,
            scheduled_at=0,
            started_at=0,
            response_status=status,
            outcome="transient",
            decision=DecisionRecord(action="wait"),
            worker="w",
        )
        for number, status in enumerate(statuses, first_number)
    ]


def test_token_of_qstash() -> None:
    """The token has the claims of QStash's documentation, and lasts five minutes."""
    content = TaskContent(url=URL)
    headers = qstash_headers(make_task(attempts=2), content, b"body", 1_800_000_000, b"key")

    head, claims, _ = headers["Upstash-Signature"].split(".")
    assert {"alg": "HS256", "typ": "JWT"} == json.loads(urlsafe_b64decode(head + "=="))
    assert {
        "iss": "Upstash",
        "sub": URL,
        "exp": 1_800_000_300,
        "nbf": 1_800_000_000,
        "iat": 1_800_000_000,
        "jti": "jwt_0190a000-0000-7000-8000-000000000001_3",
        "body": urlsafe_b64encode(sha256(b"body").digest()).decode(),
    } == json.loads(urlsafe_b64decode(claims + "=="))
    assert ("2", "Upstash-QStash") == (headers["Upstash-Retried"], headers["User-Agent"])


def test_message_without_a_key_has_no_signature() -> None:
    """Without a signing secret there is no token; a User-Agent of the message is kept."""
    content = TaskContent(url=URL, headers={"user-agent": "mine"})
    headers = qstash_headers(make_task(), content, b"", 1_800_000_000, None)

    assert {"Upstash-Message-Id": make_task().id, "Upstash-Retried": "0"} == headers


def test_oldest_hmac_secret_signs_tokens() -> None:
    """Of several secrets, the newest first, the last HMAC secret is the key of tokens."""
    old, new = (f"whsec_{b64encode(name * 8).decode()}" for name in (b"old-", b"new-"))
    ed25519 = f"whsk_{b64encode(bytes(32)).decode()}"

    assert old.encode() == Signer([new, old, ed25519]).token_key
    assert None is Signer([ed25519]).token_key


@pytest.mark.parametrize(
    ("task", "previous", "executions", "response"),
    [
        (make_task(), [], "0", None),
        (make_task(1), records(1, None), "0", None),
        (make_task(3), records(1, 404, 503, 500), "2", "500"),
        (make_task(3, 1), records(2, 404, 503), "1", "503"),
        (make_task(102), records(3, *[500] * 100), "102", "500"),
    ],
    ids=["first", "no response", "503", "lost attempt", "many attempts"],
)
def test_counts_of_cloud_tasks(
    task: Task, previous: list[AttemptRecord], executions: str, response: str | None
) -> None:
    """Executions are the attempts with a response that is not 503."""
    headers = cloud_tasks_headers(task, previous)

    assert (str(task.attempts), executions, response) == (
        headers["X-CloudTasks-TaskRetryCount"],
        headers["X-CloudTasks-TaskExecutionCount"],
        headers.get("X-CloudTasks-TaskPreviousResponse"),
    )
    assert ("orders", "order-7", "1800000000.250000") == (
        headers["X-CloudTasks-QueueName"],
        headers["X-CloudTasks-TaskName"],
        headers["X-CloudTasks-TaskETA"],
    )
