"""JSON representations of stored records: public names, secrets redacted."""

from __future__ import annotations

from base64 import b64encode
from codecs import utf_8_decode
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.api.redact import redact_bytes, redact_headers, redact_text, redact_url
from tarry.service.encryption import DecryptionFailed
from tarry.service.model import TaskContent
from tarry.wire.tasks import (
    STATUS_NAMES,
    AttemptLog,
    Decision,
    DownstreamInfo,
    LaneStateName,
    LocalStats,
    ReplayFilter,
    ReplayJob,
    RetryPolicy,
    RetryTask,
    TargetResponse,
)

if TYPE_CHECKING:
    from tarry.service import model
    from tarry.service.api.context import ApiContext
    from tarry.service.delivery.messages import DeliveryResult
    from tarry.service.model import Status, Task

_ENCRYPTED = "[encrypted]"
_UNREADABLE_CONTENT = TaskContent(url=_ENCRYPTED, method=_ENCRYPTED)
"""Shown instead of content whose encryption key is not configured."""


def task_view(task: Task, content: TaskContent, status: Status) -> RetryTask:
    """Return the view of a task; `status` is its current status."""
    return RetryTask(
        # The first twelve arguments are positional for speed: CPython builds a dict for a call in
        # which the keyword arguments have more than 30 names and values.
        task.id,
        STATUS_NAMES[status],
        task.reason,
        task.key,
        redact_url(content.url),
        content.method,
        redact_headers(content.headers),
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
        callback_url=None if content.callback_url is None else redact_url(content.callback_url),
        cancelling=task.cancelling and not status.is_terminal,
        replays=task.replays,
        version=task.version,
    )


def stored_task_view(context: ApiContext, task: Task) -> RetryTask:
    """Return the view of a task that was read from the store."""
    status = task.status_at(context.engine.clock.now())
    return task_view(task, read_content(context, task) or _UNREADABLE_CONTENT, status)


def read_content(context: ApiContext, task: Task) -> TaskContent | None:
    """Return the content of a task; None if its encryption key is not configured.

    A task without its content can still be listed and cancelled.
    """
    try:
        return context.codec.unpack(task.content)
    except DecryptionFailed:
        return None


def response_view(delivered: DeliveryResult, secrets: list[str] | None) -> TargetResponse:
    """Return the view of a target's response. The task's `secrets` are redacted in it."""
    headers: dict[str, str] = {}
    for name, value in delivered.headers:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    response = TargetResponse(
        status=delivered.status,
        headers={
            name: redact_text(value, secrets) or ""
            for name, value in redact_headers(headers).items()
        },
        truncated=delivered.truncated,
    )
    text = _decode_excerpt(delivered)
    if text is None:
        redacted = redact_bytes(delivered.excerpt, secrets, is_truncated=delivered.truncated)
        response.body_base64 = b64encode(redacted).decode()
    else:
        response.body = redact_text(text, secrets, is_truncated=delivered.truncated)
    return response


def _decode_excerpt(delivered: DeliveryResult) -> str | None:
    """Return the excerpt of a response as text, or None if it is not UTF-8.

    A truncated excerpt may end within a character, which is dropped.
    """
    try:
        return utf_8_decode(delivered.excerpt, "strict", not delivered.truncated)[0]
    except UnicodeDecodeError:
        return None


def attempt_view(
    task_id: str, attempt: model.AttemptRecord, secrets: list[str] | None
) -> AttemptLog:
    """Return one entry of the attempt log. The task's `secrets` are redacted in it."""
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
        error_message=redact_text(attempt.error, secrets),
        error_class=attempt.error_class,
        outcome=attempt.outcome,
        decision=None if decision is None else _decision_view(decision),
        response_excerpt=redact_text(attempt.excerpt, secrets, is_truncated=attempt.truncated),
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
    """Return the view of a policy with all its fields."""
    fields = {**document, "policyId": policy_id, "version": version, "createdAt": created_at}
    return msgspec.convert(fields, RetryPolicy)


def replay_view(job: model.ReplayRecord, *, dry_run: bool = False) -> ReplayJob:
    """Return the view of a replay job; with `dry_run`, of a job that was not started."""
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


def downstream_view(lane: model.LaneRecord, local: LocalStats | None, now: int) -> DownstreamInfo:
    """Return the view of a lane: its stored state, and the `local` state of this process."""
    return DownstreamInfo(
        lane=public_lane_name(lane.name),
        state=_lane_state(lane, now),
        parked_until=lane.parked_until,
        consecutive_opens=lane.opened,
        pending=lane.pending,
        in_flight=lane.in_flight,
        dead=lane.dead,
        last_claim_at=lane.served_at,
        local=local,
    )


def _lane_state(lane: model.LaneRecord, now: int) -> LaneStateName:
    if lane.paused:
        return "PAUSED"
    if lane.parked_until is None:
        return "OPEN"
    return "PARKED" if now < lane.parked_until else "PROBING"


def public_lane_name(lane: str) -> str:
    """Return the name of a lane without its tenant, as the API shows it."""
    return lane.partition("/")[2]


def internal_lane_name(tenant: str, public_name: str) -> str:
    """Return the name of a lane in the store, which begins with its tenant."""
    return f"{tenant}/{public_name}"
