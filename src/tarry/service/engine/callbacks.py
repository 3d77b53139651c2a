"""The task that tells the end of another: a call of its own, so as durable as any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.delivery.targets import parse_target
from tarry.service.model import Task, TaskContent
from tarry.wire.tasks import STATUS_NAMES, TaskEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.store import TaskResult

_encode = msgspec.json.Encoder().encode


def callback_for(
    task: Task,
    content: TaskContent,
    finish: TaskResult,
    *,
    new_id: Callable[[], str],
    pack: Callable[[TaskContent], bytes],
) -> Task:
    """Return the task that posts how `task` ended to its `callbackUrl`."""
    url = content.callback_url
    assert url is not None  # noqa: S101 - asked for with one
    target = parse_target(url)
    attempt = finish.attempt
    body = _encode(
        TaskEnd(
            task_id=task.id,
            idempotency_key=task.key,
            target_url=content.url.partition("?")[0],
            status=STATUS_NAMES[finish.status],
            reason=finish.reason,
            attempt_number=task.attempts + (attempt is not None),
            response_status=None if attempt is None else attempt.status,
            created_at=task.created_at,
        )
    )
    told = TaskContent(
        url=target.url,
        headers={"content-type": "application/json"},
        body=body,
        body_size=len(body),
        trace=content.trace,
    )
    return Task(
        id=new_id(),
        tenant=task.tenant,
        lane=f"{task.tenant}/{target.origin}",
        # One end, one callback; a replay that ends again tells it again.
        key=f"{task.id}-callback-{task.replays}",
        fingerprint=b"",
        content=pack(told),
    )
