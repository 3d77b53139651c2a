"""Why a task was retried or not, and what comes next: in words, and in parts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.explain import format_duration
from tarry.core.verdict import Reason
from tarry.errors import ConfigurationError
from tarry.service.api.redact import secrets_of
from tarry.service.api.views import attempt_view
from tarry.service.model import LOST, Status
from tarry.wire.policies import SERVICE_PRESETS, policy_from_wire
from tarry.wire.tasks import STATUS_NAMES, ExplainedStep, Explanation, WhatNext

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.service.model import AttemptRecord, Decision, LaneRecord, Task, TaskContent

_REASONS = {one.value: one.words for one in Reason}
_DONE = frozenset({Status.SUCCEEDED, Status.CANCELLED})
_SAYS_ALL = frozenset({"refused"})
"""Classes to which the words of whoever noticed it add nothing."""
_MOST_OF_ERROR = 200
_EARLY, _LATE = 50, 1_000
"""Milliseconds by which a wait may differ from what was decided: two clocks, and some work."""


def explain_task(
    task: Task,
    content: TaskContent | None,
    attempts: list[AttemptRecord],
    *,
    chosen: Policy | None,
    lane: LaneRecord | None,
    now: int,
) -> Explanation:
    """Return the story of a task; `chosen` is the policy that it names, None: it is gone."""
    status = task.status_at(now)
    policy = _with_overrides(chosen or SERVICE_PRESETS["default"], content)
    secrets = secrets_of(content)
    ends = [max(one.started_at, one.scheduled_at) for one in attempts[1:]]
    steps: list[ExplainedStep] = []
    for attempt, until in zip(attempts, [*ends, _end_of_wait(task, status, now)], strict=False):
        view = attempt_view(task.id, attempt, secrets)
        words = _step(attempt, view.error_message, until)
        if _stopped(attempt) and (attempt is not attempts[-1] or not status.is_terminal):
            words += "; was replayed"
        steps.append(ExplainedStep(attempt_number=attempt.number, words=words, attempt=view))
    following = _next(task, status, policy, lane, now)
    if chosen is None and status not in _DONE:
        gone = f"Its policy {task.policy_id} is gone: it goes by the service's default."
        following = WhatNext(words=f"{following.words} {gone}", at=following.at)
    story = [step.words for step in steps]
    if attempts and attempts[0].number > 1:
        story.insert(0, f"{attempts[0].number - 1} attempts before")
    if task.reason is not None and not (attempts and _stopped(attempts[-1])):
        story.append(f"stopped: {reason_text(task.reason)}")
    if not story:
        story = ["no attempt was made yet" if not status.is_terminal else "no attempt was made"]
    return Explanation(
        task_id=task.id,
        status=STATUS_NAMES[status],
        reason=task.reason,
        text=f"{'; '.join(story)}. {following.words}",
        steps=steps,
        next=following,
    )


def reason_text(reason: str) -> str:
    """Return a reason as part of a sentence."""
    return _REASONS.get(reason, reason)


def _end_of_wait(task: Task, status: Status, now: int) -> int | None:
    """Return when the wait after the last attempt was over; None: it is not."""
    if status.is_terminal:
        return task.finished_at
    waits = status is Status.PENDING and task.next_attempt_at > now
    return None if waits else task.next_attempt_at


def _with_overrides(chosen: Policy, content: TaskContent | None) -> Policy:
    if content is None or not content.overrides:
        return chosen
    try:
        return policy_from_wire(content.overrides, chosen)
    except ConfigurationError:  # the policy beneath was changed, and no longer goes with them
        return chosen


def _step(attempt: AttemptRecord, error: str | None, until: int | None) -> str:
    """Tell an attempt, its `error` without secrets, and the wait that was over at `until`."""
    if attempt.outcome == LOST:
        came_to = f"attempt {attempt.number} was lost with its worker"
    elif attempt.status is not None:
        came_to = f"attempt {attempt.number} got {attempt.status}"
    else:
        why = attempt.error_class or attempt.outcome
        if error and why not in _SAYS_ALL:
            why += f": {error[:_MOST_OF_ERROR].rstrip('.')}"
        came_to = f"attempt {attempt.number} failed ({why})"
    if attempt.decision is None or attempt.decision.action == "done":
        return came_to
    waited = None
    if until is not None:
        waited = until - attempt.started_at - (attempt.duration_ms or 0.0)
    return f"{came_to}; {_decided(attempt.decision, waited)}"


def _decided(decision: Decision, waited: float | None) -> str:
    """Tell what was decided; `waited`: the ms that it was, None while it waits."""
    by: list[str] = []
    if decision.ceiling_ms is not None:
        by.append(f"ceiling {format_duration(decision.ceiling_ms / 1000)}")
    if decision.jitter is not None:
        by.append(f"{decision.jitter} jitter")
    if decision.hint_ms is not None:
        source = decision.hint_source or "the server"
        by.append(f"{source} asked for {format_duration(decision.hint_ms / 1000)}")
    reasons = f" ({', '.join(by)})" if by else ""
    if decision.action == "stop":
        return f"stopped: {reason_text(decision.reason or 'unknown')}{reasons}"
    delay = decision.delay_ms or 0.0
    words = f"{format_duration(delay / 1000)}{reasons}"
    if waited is None:
        return f"waits {words}"
    if -_EARLY <= waited - delay <= _LATE:
        return f"waited {words}"
    real = format_duration(max(0.0, waited) / 1000)
    ending = f"cut short after {real}" if waited < delay else f"waited {real}"
    return f"was to wait {words}, {ending}"


def _stopped(attempt: AttemptRecord) -> bool:
    return attempt.decision is not None and attempt.decision.action == "stop"


def _next(
    task: Task, status: Status, policy: Policy, lane: LaneRecord | None, now: int
) -> WhatNext:
    """Say what comes next, and when."""
    number = task.attempts + 1
    match status:
        case Status.SUCCEEDED:
            return WhatNext(words="It succeeded; nothing follows.", at=None)
        case Status.CANCELLED:
            return WhatNext(words="It was cancelled; nothing follows.", at=None)
        case Status.EXHAUSTED:
            words = (
                "It is a dead letter: nothing follows until somebody replays it "
                f"(POST /retry-tasks/{task.id}/retry)."
            )
            return WhatNext(words=words, at=None)
        case Status.IN_FLIGHT:
            ending = ", and none follows: it was cancelled" if task.cancelling else ""
            return WhatNext(words=f"Attempt {number} is running{ending}.", at=None)
        case Status.PENDING:
            pass
    most = f" of {policy.max_attempts + task.forgiven + task.lost}"
    due = task.next_attempt_at
    if lane is not None and lane.paused:
        words = f"Attempt {number}{most} waits until an operator resumes its downstream."
        return WhatNext(words=words, at=None)
    if lane is not None and lane.parked_until is not None and lane.parked_until > max(now, due):
        until = lane.parked_until
        words = (
            f"Attempt {number}{most} waits for its downstream, whose breaker is open for another "
            f"{format_duration((until - now) / 1000)}."
        )
        return WhatNext(words=words, at=until)
    when = f"in {format_duration((due - now) / 1000)}" if due > now else "now"
    return WhatNext(words=f"Attempt {number}{most} is due {when}.", at=due)
