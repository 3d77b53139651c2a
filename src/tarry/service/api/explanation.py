"""Explanation of the retry decisions of a task, as text and as data. Does no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.text import format_duration
from tarry.core.verdict import Reason
from tarry.errors import ConfigurationError
from tarry.service.api.views import attempt_view, find_secrets
from tarry.service.model import LOST, Status
from tarry.wire.policies import SERVICE_PRESETS, policy_from_json
from tarry.wire.tasks import STATUS_NAMES, ExplainedStep, Explanation, NextStep

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.service.model import AttemptRecord, Decision, LaneRecord, Task, TaskContent


_REASON_TEXTS = {reason.value: reason.description for reason in Reason}
_DONE = frozenset({Status.SUCCEEDED, Status.CANCELLED})
_SELF_EXPLANATORY = frozenset({"refused"})
"""Error classes whose error message adds no information."""
_MAX_ERROR_LENGTH = 200
_EARLY_TOLERANCE_MS, _LATE_TOLERANCE_MS = 50, 1_000
"""Differences between the decided and the actual wait up to which only one wait is described."""


def explain_task(
    task: Task,
    content: TaskContent | None,
    attempts: list[AttemptRecord],
    *,
    chosen: Policy | None,
    lane: LaneRecord | None,
    now: int,
) -> Explanation:
    """Explain the attempts of a task and its next step.

    `attempts` are the latest attempts. `chosen` is the policy that the task names, None if that
    policy was deleted. `lane` is the queue of the task. `now` is in epoch milliseconds.
    """
    status = task.status_at(now)
    policy = _with_overrides(chosen or SERVICE_PRESETS["default"], content)
    secrets = find_secrets(content)
    next_starts = [max(attempt.started_at, attempt.scheduled_at) for attempt in attempts[1:]]
    wait_ends = [*next_starts, _wait_end(task, status, now)]
    steps: list[ExplainedStep] = []
    for attempt, wait_end in zip(attempts, wait_ends, strict=False):
        view = attempt_view(task.id, attempt, secrets)
        text = _describe_attempt(attempt, view.error_message, wait_end)
        if _was_stopped_by(attempt) and (attempt is not attempts[-1] or not status.is_terminal):
            text += "; was replayed"
        steps.append(ExplainedStep(attempt_number=attempt.number, text=text, attempt=view))
    next_step = _next_step(task, status, policy, lane, now)
    if chosen is None and status not in _DONE:
        deleted = f"Its policy {task.policy_id} was deleted: it uses the default policy."
        next_step = NextStep(text=f"{next_step.text} {deleted}", at=next_step.at)
    sentences = [step.text for step in steps]
    if attempts and attempts[0].number > 1:
        sentences.insert(0, f"{attempts[0].number - 1} attempts before")
    if task.reason is not None and not (attempts and _was_stopped_by(attempts[-1])):
        sentences.append(f"stopped: {reason_text(task.reason)}")
    if not sentences:
        sentences = ["no attempt was made yet" if not status.is_terminal else "no attempt was made"]
    return Explanation(
        task_id=task.id,
        status=STATUS_NAMES[status],
        reason=task.reason,
        text=f"{'; '.join(sentences)}. {next_step.text}",
        steps=steps,
        next=next_step,
    )


def reason_text(reason: str) -> str:
    """Return a description of a reason that fits into a sentence."""
    return _REASON_TEXTS.get(reason, reason)


def _wait_end(task: Task, status: Status, now: int) -> int | None:
    """Return when the wait after the last attempt ended; None while it lasts."""
    if status.is_terminal:
        return task.finished_at
    is_waiting = status is Status.PENDING and task.next_attempt_at > now
    return None if is_waiting else task.next_attempt_at


def _with_overrides(chosen: Policy, content: TaskContent | None) -> Policy:
    if content is None or not content.overrides:
        return chosen
    try:
        return policy_from_json(content.overrides, chosen)
    except ConfigurationError:  # the policy has changed, and the overrides are no longer valid
        return chosen


def _describe_attempt(attempt: AttemptRecord, error: str | None, wait_end: int | None) -> str:
    """Describe an attempt and the wait after it, which ended at `wait_end` (None: not yet).

    `error` is the error message of the attempt without secrets.
    """
    if attempt.outcome == LOST:
        result = f"attempt {attempt.number} was lost with its worker"
    elif attempt.status is not None:
        result = f"attempt {attempt.number} got {attempt.status}"
    else:
        cause = attempt.error_class or attempt.outcome
        if error and cause not in _SELF_EXPLANATORY:
            cause += f": {error[:_MAX_ERROR_LENGTH].rstrip('.')}"
        result = f"attempt {attempt.number} failed ({cause})"
    if attempt.decision is None or attempt.decision.action == "done":
        return result
    waited_ms = None
    if wait_end is not None:
        waited_ms = wait_end - attempt.started_at - (attempt.duration_ms or 0.0)
    return f"{result}; {_describe_decision(attempt.decision, waited_ms)}"


def _describe_decision(decision: Decision, waited_ms: float | None) -> str:
    """Describe a decision; `waited_ms` is the actual wait, None while it lasts."""
    details: list[str] = []
    if decision.ceiling_ms is not None:
        details.append(f"ceiling {format_duration(decision.ceiling_ms / 1000)}")
    if decision.jitter is not None:
        details.append(f"{decision.jitter} jitter")
    if decision.hint_ms is not None:
        source = decision.hint_source or "the server"
        details.append(f"{source} asked for {format_duration(decision.hint_ms / 1000)}")
    suffix = f" ({', '.join(details)})" if details else ""
    if decision.action == "stop":
        return f"stopped: {reason_text(decision.reason or 'unknown')}{suffix}"
    delay_ms = decision.delay_ms or 0.0
    planned = f"{format_duration(delay_ms / 1000)}{suffix}"
    if waited_ms is None:
        return f"waits {planned}"
    if -_EARLY_TOLERANCE_MS <= waited_ms - delay_ms <= _LATE_TOLERANCE_MS:
        return f"waited {planned}"
    actual = format_duration(max(0.0, waited_ms) / 1000)
    ending = f"cut short after {actual}" if waited_ms < delay_ms else f"waited {actual}"
    return f"was to wait {planned}, {ending}"


def _was_stopped_by(attempt: AttemptRecord) -> bool:
    return attempt.decision is not None and attempt.decision.action == "stop"


def _next_step(
    task: Task, status: Status, policy: Policy, lane: LaneRecord | None, now: int
) -> NextStep:
    """Describe the next step of a task, and when it happens."""
    number = task.attempts + 1
    match status:
        case Status.SUCCEEDED:
            return NextStep(text="It succeeded; no attempt follows.", at=None)
        case Status.CANCELLED:
            return NextStep(text="It was cancelled; no attempt follows.", at=None)
        case Status.EXHAUSTED:
            text = (
                "It is a dead letter: no attempt follows until it is replayed "
                f"(POST /retry-tasks/{task.id}/retry)."
            )
            return NextStep(text=text, at=None)
        case Status.IN_FLIGHT:
            ending = ", and is the last one: the task was cancelled" if task.cancelling else ""
            return NextStep(text=f"Attempt {number} is running{ending}.", at=None)
        case Status.PENDING:
            pass
    total = f" of {policy.max_attempts + task.forgiven + task.lost}"
    due = task.next_attempt_at
    if lane is not None and lane.paused:
        text = f"Attempt {number}{total} waits until an operator resumes its downstream."
        return NextStep(text=text, at=None)
    if lane is not None and lane.parked_until is not None and lane.parked_until > max(now, due):
        until = lane.parked_until
        text = (
            f"Attempt {number}{total} waits for its downstream: the breaker is open for another "
            f"{format_duration((until - now) / 1000)}."
        )
        return NextStep(text=text, at=until)
    when = f"in {format_duration((due - now) / 1000)}" if due > now else "now"
    return NextStep(text=f"Attempt {number}{total} is due {when}.", at=due)
