"""Headers that QStash and Cloud Tasks send with each attempt, for tasks of their clients.

So a receiver that was written for one of these vendors need not be changed.
"""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tarry.service.model import AttemptRecord, Task, TaskContent

QSTASH, CLOUD_TASKS = "qstash", "cloud_tasks"
"""The values of `TaskContent.vendor`, which are also those of the setting `compatibility`."""
_TOKEN_LIFETIME_S = 300
_TOKEN_HEADER = {"alg": "HS256", "typ": "JWT"}
_UNAVAILABLE = 503


def cloud_tasks_headers(task: Task, previous: Sequence[AttemptRecord]) -> dict[str, str]:
    """Return the headers of Cloud Tasks for the next attempt.

    `previous` are the earlier attempts, or the last ones if there are many.
    """
    statuses = [attempt.response_status for attempt in previous]
    # Google's service does not count a 503, because it means a lack of instances.
    executions = sum(status not in {None, _UNAVAILABLE} for status in statuses)
    if previous and previous[0].attempt_number > 1 + task.lost_attempts:
        executions += previous[0].attempt_number - 1  # not read; most of them had a response
    headers = {
        "User-Agent": "Google-Cloud-Tasks",
        "X-CloudTasks-QueueName": task.lane.partition("@")[2],
        "X-CloudTasks-TaskName": task.key.rpartition("/")[2],
        "X-CloudTasks-TaskRetryCount": str(task.attempts),
        "X-CloudTasks-TaskExecutionCount": str(executions),
        "X-CloudTasks-TaskETA": f"{task.next_attempt_at / 1000:.6f}",
    }
    if statuses:
        headers["X-CloudTasks-TaskRetryReason"] = ""
        if statuses[-1] is not None:
            headers["X-CloudTasks-TaskPreviousResponse"] = str(statuses[-1])
    return headers


def qstash_headers(
    task: Task, content: TaskContent, body: bytes, timestamp: int, signing_key: bytes | None
) -> dict[str, str]:
    """Return the headers of QStash for an attempt made at `timestamp` (epoch seconds).

    Without a key, there is no signature.
    """
    headers = {"Upstash-Message-Id": task.id, "Upstash-Retried": str(task.attempts)}
    if not any(name.lower() == "user-agent" for name in content.headers):
        headers["User-Agent"] = "Upstash-QStash"
    if signing_key is not None:
        claims = {
            "iss": "Upstash",
            "sub": content.url,
            "exp": timestamp + _TOKEN_LIFETIME_S,
            "nbf": timestamp,
            "iat": timestamp,
            "jti": f"jwt_{task.id}_{task.attempts + 1}",
            "body": urlsafe_b64encode(sha256(body).digest()).decode(),
        }
        headers["Upstash-Signature"] = _encode_token(claims, signing_key)
    return headers


def _encode_token(claims: Mapping[str, object], key: bytes) -> str:
    """Return a JSON Web Token (RFC 7519), signed with HMAC-SHA256."""
    parts = [_encode_part(json.dumps(part).encode()) for part in (_TOKEN_HEADER, claims)]
    parts.append(_encode_part(hmac.digest(key, ".".join(parts).encode(), "sha256")))
    return ".".join(parts)


def _encode_part(part: bytes) -> str:
    return urlsafe_b64encode(part).decode().rstrip("=")
