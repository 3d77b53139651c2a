"""One attempt on paper: the request that goes out, what its answer means, what is written down.

Pure functions between the service's words (tasks, deliveries, milliseconds) and the core's.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import msgspec

from tarry.core.durable_call import DurableCall
from tarry.core.outcome import (
    PERMANENT,
    SUCCESS,
    TRANSIENT,
    Kind,
    Outcome,
    outcome_of_code,
    outcome_of_status,
)
from tarry.core.verdict import Wait
from tarry.service.delivery.messages import DeliveryRequest, DeliveryResult, Fault
from tarry.service.model import AttemptRecord, Decision, Status, Task
from tarry.service.store import TaskResult
from tarry.wire import http

if TYPE_CHECKING:
    from tarry.core.downstream import Downstream
    from tarry.core.policy import Policy
    from tarry.core.verdict import Stop
    from tarry.service.engine.policies import EffectivePolicy
    from tarry.service.model import TaskContent
    from tarry.service.store import Lease

_FIRST_SUCCESS, _FIRST_REDIRECT, _FIRST_ERROR = 200, 300, 400
_THROTTLED = Outcome(Kind.THROTTLED)
_NO_CHANCE = frozenset({Fault.BLOCKED, Fault.INVALID})
_EXCERPT = 512
"""Characters of an answer that the attempt log keeps."""


def call_of(task: Task, policy: Policy, downstream: Downstream) -> DurableCall:
    """Return a task as the core knows it, with how far it has come since its last replay.

    Nobody knows whether a lost attempt was made, so another takes its place: a worker that dies has
    many tasks in hand that it never sent.
    """
    call = DurableCall(policy, downstream, task.started_at / 1000)
    call.attempts = task.attempts - task.forgiven - task.lost
    call.previous_delay = task.previous_delay
    call.backoff_offset = task.restarted
    return call


def last_outcome(task: Task) -> Outcome:
    """Return what the attempt before came to, as far as it sets the price of a retry."""
    return _THROTTLED if task.last_kind == _THROTTLED.kind else TRANSIENT


def request_for(
    task: Task, content: TaskContent, body: bytes, timeout: float, more: list[tuple[str, str]]
) -> DeliveryRequest:
    """Return what goes out: the caller's headers, and ours."""
    headers = [
        *content.headers.items(),
        (http.KEY, http.key_text(task.key)),
        (http.ATTEMPT, str(task.attempts + 1)),
    ]
    if content.trace is not None:
        headers.append(("traceparent", content.trace))
    headers += more
    return DeliveryRequest(
        url=content.url,
        method=content.method,
        headers=headers,
        body=body,
        timeout=timeout,
    )


def outcome_of(delivered: DeliveryResult, policy: Policy, now: float) -> Outcome | None:
    """Classify what came back; None: our own side failed, and nothing is counted."""
    status, fault = delivered.status, delivered.fault
    if fault is Fault.INTERNAL:
        return None
    if fault is not None:
        if fault in _NO_CHANCE:
            return PERMANENT.replace(detail=str(fault))
        return Outcome(Kind.TRANSIENT, timeout=fault is Fault.TIMEOUT, detail=str(fault))
    if isinstance(status, int):
        if status < _FIRST_ERROR and status not in policy.retryable_statuses:
            if _FIRST_SUCCESS <= status < _FIRST_REDIRECT:
                return SUCCESS
            return PERMANENT.replace(detail=str(status))  # nobody asked us to go elsewhere
        return outcome_of_status(
            status, delivered.headers, now=now, retryable=policy.retryable_statuses
        )
    return outcome_of_code(status or "UNKNOWN", delivered.headers, retryable=policy.retryable_codes)


def attempt_of(
    task: Task, delivered: DeliveryResult, outcome: Outcome, started_at: int, worker: str
) -> AttemptRecord:
    """Write an attempt down, all but the decision."""
    fault = delivered.fault
    attempt = AttemptRecord(
        number=task.attempts + 1,
        scheduled_at=task.next_attempt_at,
        started_at=started_at,
        duration_ms=delivered.duration_ms,
        dns_ms=delivered.dns_ms,
        connect_ms=delivered.connect_ms,
        tls_ms=delivered.tls_ms,
        first_byte_ms=delivered.first_byte_ms,
        remote=delivered.remote,
        status=delivered.status,
        error=delivered.error,
        error_class=None if fault is None else str(fault),
        outcome=str(outcome.kind),
        worker=worker,
    )
    if outcome is not SUCCESS and delivered.excerpt:
        attempt.excerpt, attempt.truncated = _text(delivered)
    return attempt


def decision_of(
    verdict: Wait | Stop,
    outcome: Outcome,
    chosen: EffectivePolicy,
    standing: tuple[str | None, float | None],
) -> Decision:
    """Write the core's verdict down, with what it went by."""
    breaker, balance = standing
    decision = Decision(
        action="stop", policy_version=chosen.version, budget=balance, breaker=breaker
    )
    if isinstance(verdict, Wait):
        decision.action = "wait"
        decision.delay_ms = round(verdict.delay * 1000, 3)
        decision.ceiling_ms = round(verdict.ceiling * 1000, 3)
        jitter = chosen.policy.jitter
        decision.jitter = jitter if isinstance(jitter, str) and jitter != "none" else None
    else:
        decision.reason = str(verdict.reason)
    hint = outcome.hint
    if hint is not None:
        decision.hint_ms = None if hint.delay is None else round(hint.delay * 1000, 3)
        decision.hint_source = hint.source
    return decision


def succeeded(task: Task, attempt: AttemptRecord) -> TaskResult:
    """Return the end of a task that got through."""
    return TaskResult(
        task=task, attempt=attempt, status=Status.SUCCEEDED, last_kind=attempt.outcome
    )


def exhausted(task: Task, attempt: AttemptRecord | None, reason: str) -> TaskResult:
    """Return the end of a task that waits for a person now."""
    kind = task.last_kind if attempt is None else attempt.outcome
    return TaskResult(
        task=task, attempt=attempt, status=Status.EXHAUSTED, reason=reason, last_kind=kind
    )


def waiting(
    task: Task, attempt: AttemptRecord, wait: Wait, outcome: Outcome, now: int, lease: Lease | None
) -> TaskResult:
    """Return the next attempt's date; the lease, if there is one, is kept for one that is near."""
    hint = outcome.hint
    exact = hint is not None and hint.exact
    # Rounded up: a hint is a floor, and an attempt never comes early.
    next_attempt_at = now + ceil(wait.delay * 1000)
    near = lease is not None and next_attempt_at - now <= lease.horizon
    return TaskResult(
        task=task,
        attempt=attempt,
        status=Status.PENDING,
        next_attempt_at=next_attempt_at,
        keep=lease if near else None,
        previous_delay=None if exact else wait.delay,
        restarted=task.attempts + 1 - task.forgiven - task.lost if exact else task.restarted,
        last_kind=attempt.outcome,
    )


def kept(task: Task, finish: TaskResult) -> Task:
    """Return a task whose lease was kept, as the store has it now."""
    lease = finish.keep
    assert lease is not None  # noqa: S101 - asked for with it
    return msgspec.structs.replace(
        task,
        version=task.version + 1,
        attempts=task.attempts + 1,
        next_attempt_at=finish.next_attempt_at,
        wake_at=finish.next_attempt_at + lease.length,
        previous_delay=finish.previous_delay,
        restarted=finish.restarted,
        last_kind=finish.last_kind,
    )


def _text(delivered: DeliveryResult) -> tuple[str, bool]:
    """Return the beginning of an answer as text for any screen, and whether there is more of it."""
    text = delivered.excerpt.decode("utf-8", "replace")
    kept = text[:_EXCERPT]
    shown = kept
    if not kept.isprintable():
        shown = "".join(character if character.isprintable() else " " for character in kept)
    return shown, delivered.truncated or len(kept) < len(text)
