"""A running attempt, and pure functions that convert it between the service and the core.

The service has tasks, deliveries and milliseconds; the core (`tarry.core`) has calls, outcomes and
seconds.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

from msgspec import Struct

from tarry.core.call import DurableCall, NewDurableCall
from tarry.core.hints import hint_from_headers
from tarry.core.outcome import (
    PERMANENT,
    SUCCESS,
    Kind,
    Outcome,
    outcome_of_code,
    outcome_of_error_status,
)
from tarry.core.verdict import Wait
from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.model import AttemptRecord, DecisionRecord, Status, Task
from tarry.service.redaction import find_secrets, redact_named_values, redact_text
from tarry.service.store import TaskResult
from tarry.wire.http import ATTEMPT_HEADER, IDEMPOTENCY_KEY_HEADER, format_idempotency_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.downstream import Downstream
    from tarry.core.policy import Policy
    from tarry.core.verdict import Stop
    from tarry.service.engine.attempt_slots import Slot
    from tarry.service.engine.lanes import LeasedTask
    from tarry.service.engine.policies import EffectivePolicy
    from tarry.service.engine.secrets import ResolvedSecrets
    from tarry.service.engine.signers import TenantSigners
    from tarry.service.model import TaskContent
    from tarry.service.store import LeaseTerms

_MIN_SUCCESS_STATUS, _MIN_REDIRECT_STATUS, _MIN_ERROR_STATUS = 200, 300, 400
# Reading an enum member takes 0.27 us in Python 3.11; reading a constant takes 0.01 us.
_PENDING = Status.PENDING
_PERMANENT_FAULTS = frozenset({Fault.BLOCKED, Fault.INVALID})
_MAX_TEXT_CHARS = 512  # of the error and of the excerpt in the attempt log
_MAX_REDACTED_CHARS = 2 * _MAX_TEXT_CHARS
"""A text is redacted before it is cut to `_MAX_TEXT_CHARS`, so that no beginning of a secret is
left. A longer text is cut to this length before it is redacted, because the redaction of a long
text takes longer than the rest of a failed attempt."""


class RunningAttempt(Struct, eq=False):
    """An attempt in flight, with everything that applied when it started."""

    leased_task: LeasedTask
    content: TaskContent
    """The unpacked content; if the attempt has a span, this is the trace."""
    effective_policy: EffectivePolicy
    signers: TenantSigners
    secrets: ResolvedSecrets | None
    call: DurableCall
    slot: Slot
    timeout_s: float
    started_at: int


def build_call(task: Task, policy: Policy, downstream: Downstream) -> DurableCall:
    """Return the core's call for a task, with its progress since it was added or last replayed."""
    if not task.attempts:
        return NewDurableCall(policy, downstream, task.first_due_at / 1000)
    # Lost attempts do not count: a worker that died may not have sent its leased tasks.
    counted_attempts = task.attempts - task.attempts_before_replay - task.lost_attempts
    return DurableCall(
        policy,
        downstream,
        task.first_due_at / 1000,
        None,
        counted_attempts,
        task.previous_delay,
        task.backoff_offset,
    )


def build_request(
    attempt: RunningAttempt,
    body: bytes,
    timeout_s: float,
    signatures: list[tuple[str, str]],
    secret_headers: dict[str, str] | None = None,
    vendor_headers: dict[str, str] | None = None,
) -> DeliveryRequest:
    """Return the request of an attempt; tarry's headers follow the headers of the task.

    `secret_headers` are the headers of the task whose values are secrets, with these values.
    `vendor_headers` replace headers of the task.
    """
    task, content = attempt.leased_task.task, attempt.content
    policy = attempt.effective_policy.policy
    headers = content.headers.copy()
    if secret_headers is not None:
        headers.update(secret_headers)
    key_header = policy.idempotency_key_header
    if key_header != IDEMPOTENCY_KEY_HEADER:
        # The API rejects a task that has the default header. Any other header can be in the task,
        # because its policy may change later. Many servers read `_` in a name as `-`.
        dropped = key_header.lower().replace("_", "-")
        headers = {
            name: value
            for name, value in headers.items()
            if name.lower().replace("_", "-") != dropped
        }
    # The assignments below replace no header of the task: the key header was dropped above, and the
    # API rejects the other names in a task, and as the `idempotency_key_header` of a policy.
    headers[key_header] = format_idempotency_key(task.key, policy.idempotency_key_format)
    headers[ATTEMPT_HEADER] = str(content.prior_attempts + task.attempts + 1)
    if content.trace is not None:
        headers["traceparent"] = content.trace
        if content.tracestate is not None:
            headers["tracestate"] = content.tracestate
    if signatures:
        headers.update(signatures)
    if vendor_headers is not None:
        replaced = {name.lower() for name in vendor_headers}
        headers = {name: headers[name] for name in headers if name.lower() not in replaced}
        headers.update(vendor_headers)
    return DeliveryRequest(
        tenant=task.tenant,
        url=content.url,
        method=content.method,
        headers=headers,
        body=body,
        timeout=timeout_s,
    )


def classify(
    delivery: DeliveryResult, policy: Policy, unix_time: Callable[[], float]
) -> Outcome | None:
    """Return the outcome of a delivery; None if it failed inside the service and does not count.

    `unix_time` returns the wall clock time, from which the delay until a date in `Retry-After` is
    computed.
    """
    status, fault = delivery.status, delivery.fault
    if fault is not None:
        if fault is Fault.INTERNAL or delivery.pause_s is not None:
            return None
        if fault in _PERMANENT_FAULTS:
            return PERMANENT.replace(detail=str(fault))
        return Outcome(Kind.TRANSIENT, timeout=fault is Fault.TIMEOUT, detail=str(fault))
    if isinstance(status, int):
        is_retryable = status in policy.retryable_statuses
        if status < _MIN_ERROR_STATUS and not is_retryable:
            if _MIN_SUCCESS_STATUS <= status < _MIN_REDIRECT_STATUS:
                return SUCCESS
            return PERMANENT.replace(detail=str(status))  # a redirect, which is not followed
        hint = hint_from_headers(delivery.headers, unix_time())
        return outcome_of_error_status(status, hint, is_retryable)
    return outcome_of_code(status or "UNKNOWN", delivery.headers, retryable=policy.retryable_codes)


def build_record(
    attempt: RunningAttempt,
    delivery: DeliveryResult,
    outcome: Outcome,
    decision: DecisionRecord,
    worker: str,
) -> AttemptRecord:
    """Return the attempt log entry of a delivery; `add_error_and_excerpt` adds these texts."""
    task, fault = attempt.leased_task.task, delivery.fault
    return AttemptRecord(
        attempt_number=task.attempts + 1,
        scheduled_at=task.next_attempt_at,
        started_at=attempt.started_at,
        duration_ms=delivery.duration_ms,
        dns_ms=delivery.dns_ms,
        connect_ms=delivery.connect_ms,
        tls_ms=delivery.tls_ms,
        first_byte_ms=delivery.first_byte_ms,
        remote_address=delivery.remote,
        response_status=delivery.status,
        error_class=None if fault is None else str(fault),
        outcome=str(outcome.kind),
        decision=decision,
        worker=worker,
    )


def add_error_and_excerpt(
    record: AttemptRecord, delivery: DeliveryResult, content: TaskContent | None
) -> None:
    """Add the error and the excerpt of a failed delivery to its attempt log entry.

    Secrets in these texts are redacted, because the entry is stored.
    """
    if delivery.error or delivery.excerpt:
        secrets = find_secrets(content, delivery.sent_secrets)
        if delivery.fault is None and delivery.has_unknown_secrets:
            secrets = None  # the texts are from the target
        if delivery.error:
            record.error_message, _ = _redact_and_cut(delivery.error, secrets, is_truncated=False)
        if delivery.excerpt:
            text = delivery.excerpt.decode("utf-8", "replace")
            record.response_excerpt, record.response_truncated = _redact_and_cut(
                text, secrets, is_truncated=delivery.truncated
            )


def _redact_and_cut(
    text: str, secrets: list[str] | None, *, is_truncated: bool
) -> tuple[str, bool]:
    """Return the beginning of a text of the target for the log, and whether the text is longer."""
    is_truncated = is_truncated or len(text) > _MAX_REDACTED_CHARS
    text = redact_text(text[:_MAX_REDACTED_CHARS], secrets, is_truncated=is_truncated)
    text = redact_named_values(text)
    beginning = text[:_MAX_TEXT_CHARS]
    if not beginning.isprintable():
        # Control characters could change what a terminal shows.
        beginning = "".join(char if char.isprintable() else " " for char in beginning)
    return beginning, is_truncated or len(beginning) < len(text)


@lru_cache(1024)
def success_decision(policy_version: int | None) -> DecisionRecord:
    """Return the decision after a success, which many attempt log entries share."""
    return DecisionRecord(action="done", policy_version=policy_version)


def build_decision(
    attempt: RunningAttempt, verdict: Wait | Stop, outcome: Outcome
) -> DecisionRecord:
    """Return the decision of an attempt log entry: the verdict, and the state before it."""
    effective_policy = attempt.effective_policy
    breaker, budget = attempt.call.last_status
    version, hint = effective_policy.version, outcome.hint
    if isinstance(verdict, Wait):
        jitter = effective_policy.policy.jitter
        decision = DecisionRecord(
            action="wait",
            delay_ms=round(verdict.delay * 1000, 3),
            ceiling_ms=round(verdict.ceiling * 1000, 3),
            jitter=jitter if isinstance(jitter, str) and jitter != "none" else None,
            policy_version=version,
            budget=budget,
            breaker=breaker,
        )
    else:
        decision = DecisionRecord(
            action="stop",
            reason=str(verdict.reason),
            policy_version=version,
            budget=budget,
            breaker=breaker,
        )
    if hint is not None:
        decision.hint_ms = None if hint.delay is None else round(hint.delay * 1000, 3)
        decision.hint_source = hint.source
    return decision


def final_result(
    task: Task, attempt: AttemptRecord | None, status: Status, reason: str | None = None
) -> TaskResult:
    """Return the result that finishes a task; `attempt` is None if no attempt was made."""
    outcome_kind = task.last_outcome_kind if attempt is None else attempt.outcome
    return TaskResult(
        task=task, attempt=attempt, status=status, reason=reason, last_outcome_kind=outcome_kind
    )


def retry_result(
    task: Task,
    attempt: AttemptRecord,
    wait: Wait,
    outcome: Outcome,
    now: int,
    lease_terms: LeaseTerms | None,
) -> TaskResult:
    """Return the result of an attempt with a retry; without `lease_terms`, the lease ends."""
    hint = outcome.hint
    # An exact hint (gRPC pushback, which sets the delay exactly) restarts the backoff.
    is_exact = hint is not None and hint.exact
    # Rounded up, because an attempt must not be early: a server's hint is a minimum.
    next_attempt_at = now + ceil(wait.delay * 1000)
    # A retry that is due later than the horizon is claimed again, perhaps by another process.
    can_renew = lease_terms is not None and next_attempt_at - now <= lease_terms.horizon_ms
    counted_attempts = task.attempts + 1 - task.attempts_before_replay - task.lost_attempts
    return TaskResult(
        task=task,
        attempt=attempt,
        status=_PENDING,
        next_attempt_at=next_attempt_at,
        renewed_lease=lease_terms if can_renew else None,
        previous_delay=None if is_exact else wait.delay,
        backoff_offset=counted_attempts if is_exact else task.backoff_offset,
        last_outcome_kind=attempt.outcome,
    )
