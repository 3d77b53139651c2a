"""What the store keeps, as the API tells it: names for people, no secrets."""

from __future__ import annotations

from base64 import b64encode
from codecs import utf_8_decode
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.api import redact
from tarry.service.encryption import DecryptionFailed
from tarry.service.model import TaskContent
from tarry.wire.tasks import (
    STATUS_NAMES,
    AttemptLog,
    Decision,
    Downstream,
    LaneState,
    ReplayFilter,
    ReplayJob,
    RetryPolicy,
    RetryTask,
    Standing,
    TargetResponse,
)

if TYPE_CHECKING:
    from tarry.service import model
    from tarry.service.api.context import ApiContext
    from tarry.service.delivery.messages import DeliveryResult
    from tarry.service.model import Status, Task

_ENCRYPTED = "[encrypted]"
_UNREADABLE = TaskContent(url=_ENCRYPTED, method=_ENCRYPTED)
"""Stands for a content whose key is not here."""


def task_view(task: Task, content: TaskContent, status: Status) -> RetryTask:
    """Tell a task."""
    return RetryTask(
        # So many by name would make it slow: CPython calls with a dict from 31 names and values on.
        task.id,
        STATUS_NAMES[status],
        task.reason,
        task.key,
        redact.url(content.url),
        content.method,
        redact.headers(content.headers),
        task.policy_id,
        task.policy_version,
        content.overrides,
        public_lane_name(task.lane),
        task.attempts,
        next_attempt_at=None if status.is_terminal else task.next_attempt_at,
        created_at=task.created_at,
        finished_at=task.finished_at,
        body_size=content.body_size,
        body_ref=None if content.owned else content.body_ref,
        callback_url=None if content.callback_url is None else redact.url(content.callback_url),
        cancelling=task.cancelling and not status.is_terminal,
        replays=task.replays,
        version=task.version,
    )


def stored_task_view(around: ApiContext, task: Task) -> RetryTask:
    """Tell a task that was read from the store, as it stands now."""
    status = task.status_at(around.engine.clock.now())
    return task_view(task, read_content(around, task) or _UNREADABLE, status)


def read_content(around: ApiContext, task: Task) -> TaskContent | None:
    """Return what a task sends; None: it is encrypted, and its key is not here.

    One such task does not keep others from being told, and it can be cancelled.
    """
    try:
        return around.codec.unpack(task.content)
    except DecryptionFailed:
        return None


def response_view(delivered: DeliveryResult, secrets: list[str] | None) -> TargetResponse:
    """Tell what the target answered; `secrets` are those that its task sends."""
    headers: dict[str, str] = {}
    for name, value in delivered.headers:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    response = TargetResponse(
        status=delivered.status,
        headers={
            name: redact.text(value, secrets) or ""
            for name, value in redact.headers(headers).items()
        },
        truncated=delivered.truncated,
    )
    text = _text_in(delivered)
    if text is None:
        shown = redact.body(delivered.excerpt, secrets, cut=delivered.truncated)
        response.body_base64 = b64encode(shown).decode()
    else:
        response.body = redact.text(text, secrets, cut=delivered.truncated)
    return response


def _text_in(delivered: DeliveryResult) -> str | None:
    """Return a body as text, or None; one that was cut may end within a character."""
    try:
        return utf_8_decode(delivered.excerpt, "strict", not delivered.truncated)[0]
    except UnicodeDecodeError:
        return None


def attempt_view(
    task_id: str, attempt: model.AttemptRecord, secrets: list[str] | None
) -> AttemptLog:
    """Tell one line of the attempt log; `secrets` are those that its task sends."""
    decision = attempt.decision
    return AttemptLog(
        task_id=task_id,
        attempt_number=attempt.number,
        scheduled_at=attempt.scheduled_at,
        started_at=attempt.started_at,
        duration_ms=attempt.duration_ms,
        dns_ms=attempt.dns_ms,
        connect_ms=attempt.connect_ms,
        tls_ms=attempt.tls_ms,
        first_byte_ms=attempt.first_byte_ms,
        remote_address=attempt.remote,
        response_status=attempt.status,
        error_message=redact.text(attempt.error, secrets),
        error_class=attempt.error_class,
        outcome=attempt.outcome,
        decision=None if decision is None else _decision_view(decision),
        response_excerpt=redact.text(attempt.excerpt, secrets, cut=attempt.truncated),
        response_truncated=attempt.truncated,
        worker=attempt.worker,
    )


def _decision_view(decision: model.Decision) -> Decision:
    return Decision(
        action=decision.action,
        reason=decision.reason,
        delay_ms=decision.delay_ms,
        ceiling_ms=decision.ceiling_ms,
        jitter=decision.jitter,
        hint_ms=decision.hint_ms,
        hint_source=decision.hint_source,
        policy_version=decision.policy_version,
        budget=decision.budget,
        breaker=decision.breaker,
    )


def policy_view(
    policy_id: str, version: int | None, created_at: int | None, document: dict[str, Any]
) -> RetryPolicy:
    """Tell a policy: its name, and its fields in full."""
    whole = {**document, "policyId": policy_id, "version": version, "createdAt": created_at}
    return msgspec.convert(whole, RetryPolicy)


def replay_view(job: model.ReplayRecord, *, dry_run: bool = False) -> ReplayJob:
    """Tell a replay job, or what one would do."""
    names: dict[str, Any] = {"running": "RUNNING", "done": "DONE", "cancelled": "CANCELLED"}
    return ReplayJob(
        replay_id=None if dry_run else job.id,
        status="DRY_RUN" if dry_run else names[job.status],
        filter=ReplayFilter(
            lane=None if job.lane is None else public_lane_name(job.lane),
            policy_id=job.policy_id,
            reason=job.reason,
            before=job.before or None,
        ),
        rate=job.rate,
        matched=job.matched,
        replayed=job.replayed,
        created_at=None if dry_run else job.created_at,
        finished_at=job.finished_at,
    )


def downstream_view(lane: model.LaneRecord, here: dict[str, Any] | None, now: int) -> Downstream:
    """Tell a lane: what all processes share, and what this one knows."""
    parked = lane.parked_until
    return Downstream(
        lane=public_lane_name(lane.name),
        state=_state(lane, now),
        parked_until=parked,
        opened=lane.opened,
        pending=lane.pending,
        in_flight=lane.in_flight,
        dead=lane.dead,
        served_at=lane.served_at,
        here=None if here is None else msgspec.convert(here, Standing),
    )


def _state(lane: model.LaneRecord, now: int) -> LaneState:
    if lane.paused:
        return "PAUSED"
    if lane.parked_until is None:
        return "OPEN"
    return "PARKED" if now < lane.parked_until else "PROBING"


def public_lane_name(lane: str) -> str:
    """Return a lane's name as its tenant sees it, which is without the tenant."""
    return lane.partition("/")[2]


def internal_lane_name(tenant: str, shown: str) -> str:
    """Return the lane that a tenant means."""
    return f"{tenant}/{shown}"
