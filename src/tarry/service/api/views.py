"""Views: JSON representations of stored records, with public names and redacted secrets."""

from __future__ import annotations

from base64 import b64encode
from codecs import utf_8_decode
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.core.text import format_duration
from tarry.core.verdict import Reason
from tarry.errors import ConfigurationError
from tarry.service.delivery import Fault
from tarry.service.delivery.targets import public_lane_name
from tarry.service.encryption import DecryptionFailed
from tarry.service.model import LOST, Status, TaskContent
from tarry.service.records.lane_activity import estimate_quantiles
from tarry.service.redaction import (
    find_secrets,
    redact_bytes,
    redact_headers,
    redact_named_values,
    redact_text,
    redact_url,
)
from tarry.service.task_search import last_error_class
from tarry.wire import tasks as wire
from tarry.wire.policies import MAX_ATTEMPTS, SERVICE_PRESETS, policy_from_json
from tarry.wire.tasks import STATUS_NAMES, RetryTask

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.service.api.context import ApiContext
    from tarry.service.delivery import DeliveryResult
    from tarry.service.model import (
        AttemptRecord,
        DecisionRecord,
        LaneActivity,
        LaneRecord,
        ReplayRecord,
        Task,
    )
    from tarry.service.task_search import FoundTask, TaskGroup

_ENCRYPTED = "[encrypted]"
_UNREADABLE_CONTENT = TaskContent(url=_ENCRYPTED, method=_ENCRYPTED)
"""Shown instead of content that cannot be decrypted or decoded."""
_COPIED_ATTEMPT_FIELDS = tuple(
    name
    for name in wire.AttemptLog.__struct_fields__
    if name not in {"task_id", "error_message", "decision", "response_excerpt", "worker"}
)
"""Fields of an `AttemptRecord` that the API shows as they are."""
_REASON_TEXTS = {reason.value: reason.description for reason in Reason}
_MAX_ERROR_CHARS = 200
_MAX_REQUEST_CHARS = 512
_MAX_REDACTED_BYTES = 4 * _MAX_REQUEST_CHARS
"""This much of a body is redacted before it is cut to `_MAX_REQUEST_CHARS`, so that no beginning of
a secret is left."""
_EARLY_TOLERANCE_MS, _LATE_TOLERANCE_MS = 50, 1_000
"""If the actual wait is at most this much shorter or longer than the planned wait, only the planned
wait is described."""


def task_view(task: Task, content: TaskContent, status: Status) -> RetryTask:
    """Return the view of a task; `status` is the status to show, see `Task.status_at`."""
    headers: dict[str, Any] = redact_headers(content.headers)
    if content.secret_headers is not None:
        headers |= {name: {"secret": secret} for name, secret in content.secret_headers.items()}
    return RetryTask(
        # 14 arguments are positional for speed: CPython builds a tuple and a dict for a call with
        # more than 30 arguments, where keyword arguments count twice: 14 + 2 * 8 = 30.
        task.id,
        STATUS_NAMES[status],
        task.reason,
        task.key,
        redact_url(content.url),
        content.method,
        headers,
        task.policy_id,
        task.policy_version,
        content.overrides,
        public_lane_name(task.lane),
        task.attempts,
        None if status.is_finished else _next_attempt_at(task),
        task.created_at,
        finished_at=task.finished_at,
        body_size=content.body_size,
        body_ref=None if content.body_stored_by_service else content.body_ref,
        callback_url=None if content.callback_url is None else redact_url(content.callback_url),
        callback_policy_id=content.callback_policy_id,
        cancelling=task.cancelling and not status.is_finished,
        replays=task.replays,
        version=task.version,
    )


def _next_attempt_at(task: Task) -> int:
    """Return when the next attempt is due or, if it was deferred, when that ends."""
    return task.wake_at if task.status is Status.PENDING else task.next_attempt_at


def stored_task_view(context: ApiContext, task: Task) -> RetryTask:
    """Return the view of a task that was read from the store."""
    status = task.status_at(context.engine.clock.now_ms())
    return task_view(task, read_content(context, task) or _UNREADABLE_CONTENT, status)


def found_task_view(found: FoundTask, now: int) -> RetryTask:
    """Return the view of a task of a list, with the result of its last attempt."""
    task, attempt = found.task, found.last_attempt
    view = task_view(task, found.content or _UNREADABLE_CONTENT, task.status_at(now))
    if attempt is not None:
        _set_last_attempt(view, found.content, attempt)
    return view


async def read_last_attempt(context: ApiContext, task: Task, view: RetryTask) -> None:
    """Set the result of the last attempt in the view of a task, unless no attempt has ended."""
    if not view.attempt_number:
        return
    attempt = (await context.store.last_attempts(task.tenant, [task.id])).get(task.id)
    if attempt is not None:
        (attempt,) = read_attempts(context, [attempt])
        _set_last_attempt(view, read_content(context, task), attempt)


def _set_last_attempt(view: RetryTask, content: TaskContent | None, attempt: AttemptRecord) -> None:
    """Set the result of the last attempt, with the secrets in `content` redacted."""
    view.last_status, view.last_attempt_at = attempt.response_status, attempt.started_at
    message = attempt.error_message
    if message is not None:
        message = _shorten_error(redact_text(message, find_secrets(content)), attempt)
    view.last_error = ": ".join(filter(None, (last_error_class(attempt), message))) or None


def dead_letter_group_view(group: TaskGroup, now: int) -> wire.DeadLetterGroup:
    """Return the view of a group of dead letters."""
    view = found_task_view(group.newest, now)
    return wire.DeadLetterGroup(
        reason=view.reason,
        lane=view.lane,
        count=group.task_count,
        newest_task_id=view.task_id,
        newest_finished_at=view.finished_at,
        newest_status=view.last_status,
        newest_error=view.last_error,
    )


def read_content(context: ApiContext, task: Task) -> TaskContent | None:
    """Return the content of a task, or None if its key is not configured or it is damaged."""
    try:
        return context.codec.unpack(task.packed_content)
    except (DecryptionFailed, msgspec.MsgspecError):
        return None  # the task can still be listed and cancelled


def read_attempts(context: ApiContext, stored: list[AttemptRecord]) -> list[AttemptRecord]:
    """Return attempts of the store with decrypted texts, except texts whose key is missing."""
    attempts: list[AttemptRecord] = []
    for attempt in stored:
        try:
            attempts.append(context.codec.decrypt_attempt(attempt))
        except DecryptionFailed:
            attempts.append(attempt)
    return attempts


def response_view(result: DeliveryResult, secrets: list[str] | None) -> wire.TargetResponse:
    """Return the view of a target's response, with the `secrets` of the task redacted."""
    headers: dict[str, str] = {}
    for name, value in result.headers:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    for name, value in redact_headers(headers).items():
        headers[name] = redact_text(value, secrets)
    is_truncated = result.truncated
    response = wire.TargetResponse(status=result.status, headers=headers, truncated=is_truncated)
    try:
        # A truncated excerpt may end within a character, which is dropped.
        text, _ = utf_8_decode(result.excerpt, "strict", not is_truncated)
    except UnicodeDecodeError:
        redacted = redact_bytes(result.excerpt, secrets, is_truncated=is_truncated)
        response.body_base64 = b64encode(redacted).decode()
    else:
        response.body = redact_text(text, secrets, is_truncated=is_truncated)
    return response


def attempt_view(
    task_id: str, attempt: AttemptRecord, secrets: list[str] | None
) -> wire.AttemptLog:
    """Return one entry of the attempt log, with the `secrets` of the task redacted."""
    decision, error, excerpt = None, attempt.error_message, attempt.response_excerpt
    if attempt.decision is not None:
        decision = msgspec.convert(attempt.decision, wire.Decision, from_attributes=True)
    if error is not None:
        error = redact_text(error, secrets)
    if excerpt is not None:
        excerpt = redact_text(excerpt, secrets, is_truncated=attempt.response_truncated)
    if attempt.encrypted_texts is not None:  # their key is missing, see `read_attempts`
        error = excerpt = _ENCRYPTED
    return wire.AttemptLog(
        task_id=task_id,
        **{name: getattr(attempt, name) for name in _COPIED_ATTEMPT_FIELDS},
        error_message=error,
        decision=decision,
        response_excerpt=excerpt,
        # The random part of the name: host names and process ids are not for tenants.
        worker=attempt.worker and attempt.worker.rpartition("-")[2],
    )


def exported_attempt_view(task_id: str, attempt: AttemptRecord) -> wire.AttemptLog:
    """Return one entry of the attempt log without texts, which may be encrypted."""
    without_texts = msgspec.structs.replace(
        attempt, error_message=None, response_excerpt=None, encrypted_texts=None
    )
    return attempt_view(task_id, without_texts, [])


def replay_view(replay: ReplayRecord, *, dry_run: bool = False) -> wire.ReplayJob:
    """Return the view of a replay; with `dry_run`, of a replay that was not started."""
    status_names: dict[str, Any] = {
        "running": "RUNNING",
        "waiting": "RUNNING",
        "done": "DONE",
        "cancelled": "CANCELLED",
    }
    url_prefix = replay.search.url_prefix
    search_filter = msgspec.structs.replace(
        msgspec.convert(replay.search, wire.ReplayFilter, from_attributes=True),
        before=replay.before or None,
        # An earlier version of tarry may have accepted a prefix with a secret.
        url_prefix=None if url_prefix is None else redact_url(url_prefix),
    )
    return wire.ReplayJob(
        replay_id=None if dry_run else replay.id,
        status="DRY_RUN" if dry_run else status_names[replay.status],
        filter=search_filter,
        rate=replay.rate,
        matched=replay.matched,
        replayed=replay.replayed,
        finished=replay.finished,
        created_at=None if dry_run else replay.created_at,
        finished_at=replay.finished_at,
    )


def downstream_view(
    lane: LaneRecord,
    configured_limits: tuple[wire.DownstreamLimits, wire.LimitsSource],
    local_stats: wire.LocalStats | None,
    activity: LaneActivity,
    now: int,
    *,
    waiting_for: wire.WaitReason | None,
    with_history: bool,
) -> wire.DownstreamInfo:
    """Return the view of a lane (downstream of the API); `local_stats` is that of this process."""
    limits, limits_source = configured_limits
    state: wire.LaneStateName = "ACTIVE"
    if lane.paused:
        state = "PAUSED"
    elif lane.parked_until is not None:
        state = "PARKED" if now < lane.parked_until else "PROBING"
    if waiting_for == "blocked":
        state = "PARKED"
    breaker: wire.BreakerStateName = "closed"
    if lane.parked_until is not None and lane.consecutive_opens:
        breaker = "open" if now < lane.parked_until else "half-open"
    changes = [
        wire.BreakerChange(at=change.at, from_=change.before, to=change.after, reason=change.reason)
        for change in reversed(activity.changes)
    ]
    return wire.DownstreamInfo(
        tenant=lane.tenant,
        lane=public_lane_name(lane.name),
        state=state,
        parked_until=lane.parked_until,
        consecutive_opens=lane.consecutive_opens,
        waiting_for=waiting_for,
        pending=lane.pending,
        in_flight=lane.in_flight,
        dead=lane.exhausted,
        last_claim_at=lane.last_claim_at,
        local=local_stats,
        limits=limits,
        limits_source=limits_source,
        shared_breaker=breaker,
        breaker_changed_at=changes[0].at if changes else None,
        breaker_history=changes if with_history else None,
        latency=_latency_stats(activity),
    )


def _latency_stats(activity: LaneActivity) -> wire.LatencyStats | None:
    counts: Counter[str] = Counter()
    for window in activity.windows:
        counts.update(window.counts)
    quantiles = estimate_quantiles(counts, (0.5, 0.9, 0.99))
    if not quantiles:
        return None
    p50_ms, p90_ms, p99_ms = (round(quantile, 3) for quantile in quantiles)
    return wire.LatencyStats(
        since=activity.windows[0].at,
        attempts=counts.total(),
        p50_ms=p50_ms,
        p90_ms=p90_ms,
        p99_ms=p99_ms,
    )


def explain_task(
    task: Task,
    content: TaskContent | None,
    attempts: list[AttemptRecord],
    *,
    named_policy: Policy | None,
    lane: LaneRecord | None,
    wait_reason: str | None = None,
    blocked_reason: str | None = None,
    waiting_for: wire.WaitReason | None = None,
    is_running: bool | None = True,
    missing_secret: str | None = None,
    now: int,
) -> wire.Explanation:
    """Explain the latest attempts of a task and its next step.

    `named_policy` is the policy that the task names, or None if that policy was deleted.
    `wait_reason` is why the lane is parked, if its breaker is closed (`LocalStats.wait_reason`).
    `blocked_reason` is set if no process allows the target of the lane. `waiting_for` is why tasks
    of the lane wait.
    `is_running` is whether an attempt of a leased task runs; None: another process has the lease.
    `missing_secret` is the name of a secret that the task needs and that is not available.
    """
    status = task.status_at(now)
    policy = named_policy or SERVICE_PRESETS["default"]
    if content is not None and content.overrides:
        # ConfigurationError: the policy has changed, and the overrides are no longer valid.
        with suppress(ConfigurationError):
            policy = policy_from_json(content.overrides, policy)
    secrets = find_secrets(content)
    # The time at which the wait after each attempt ended; None if the task still waits.
    wait_ends: list[int | None] = [
        max(attempt.started_at, attempt.scheduled_at) for attempt in attempts[1:]
    ]
    if status.is_finished:
        wait_ends.append(task.finished_at)
    else:
        is_waiting = status is Status.PENDING and task.next_attempt_at > now
        wait_ends.append(None if is_waiting else task.next_attempt_at)
    steps: list[wire.ExplainedStep] = []
    for attempt, wait_end in zip(attempts, wait_ends, strict=False):
        view = attempt_view(task.id, attempt, secrets)
        is_cancelled = status is Status.CANCELLED and attempt is attempts[-1]
        text = _describe_attempt(attempt, view.error_message, wait_end, is_cancelled=is_cancelled)
        if _led_to_stop(attempt) and (attempt is not attempts[-1] or not status.is_finished):
            text += "; was replayed"
        steps.append(
            wire.ExplainedStep(attempt_number=attempt.attempt_number, text=text, attempt=view)
        )
    is_blocked = bool(attempts) and attempts[-1].error_class == Fault.BLOCKED
    if status is Status.IN_FLIGHT:
        next_step = _leased_step(task, is_running=is_running)
    else:
        next_step = _next_step(
            task,
            status,
            policy,
            lane,
            wait_reason,
            blocked_reason,
            waiting_for,
            now,
            is_blocked=is_blocked,
        )
    if missing_secret is not None and status is Status.PENDING:
        note = f"It waits for the secret {missing_secret}, which is not available."
        next_step = wire.NextStep(text=f"{next_step.text} {note}", at=next_step.at)
    if named_policy is None and status not in {Status.SUCCEEDED, Status.CANCELLED}:
        note = f"Its policy {task.policy_id} was deleted: the task uses the default policy."
        next_step = wire.NextStep(text=f"{next_step.text} {note}", at=next_step.at)
    sentences = [step.text for step in steps]
    if attempts and attempts[0].attempt_number > 1:
        sentences.insert(0, f"earlier attempts not shown: {attempts[0].attempt_number - 1}")
    if task.reason is not None and not (attempts and _led_to_stop(attempts[-1])):
        sentences.append(f"stopped: {_REASON_TEXTS.get(task.reason, task.reason)}")
    if not sentences:
        sentences = ["no attempt was made yet" if not status.is_finished else "no attempt was made"]
    request_excerpt, is_request_truncated = _excerpt_request(content, secrets)
    return wire.Explanation(
        task_id=task.id,
        status=STATUS_NAMES[status],
        reason=task.reason,
        text=f"{'; '.join(sentences)}. {next_step.text}",
        steps=steps,
        next=next_step,
        request_excerpt=request_excerpt,
        request_truncated=is_request_truncated,
    )


def _excerpt_request(
    content: TaskContent | None, secrets: list[str] | None
) -> tuple[str | None, bool]:
    """Return the redacted beginning of a task's body, and whether the body is longer.

    Return None if there is no body in `content`, or if it is hidden or not UTF-8.
    """
    if content is None or content.hide_body or not content.body:
        return None, False
    is_cut = len(content.body) > _MAX_REDACTED_BYTES
    try:
        # The bytes may be cut within a character, which is dropped.
        text, _ = utf_8_decode(content.body[:_MAX_REDACTED_BYTES], "strict", not is_cut)
    except UnicodeDecodeError:
        return None, False
    text = redact_named_values(redact_text(text, secrets, is_truncated=is_cut))
    return text[:_MAX_REQUEST_CHARS], is_cut or len(text) > _MAX_REQUEST_CHARS


def _describe_attempt(
    attempt: AttemptRecord, error: str | None, wait_end: int | None, *, is_cancelled: bool
) -> str:
    """Describe an attempt and the wait after it, which ended at `wait_end` (None: still waiting).

    `error` is the error message of the attempt, with secrets redacted. `is_cancelled`: the task was
    cancelled during the attempt or the wait.
    """
    if attempt.outcome == LOST:
        result = f"attempt {attempt.attempt_number} was lost with its worker"
    elif attempt.response_status is not None:
        result = f"attempt {attempt.attempt_number} got {attempt.response_status}"
    else:
        cause = attempt.error_class or attempt.outcome
        if error and cause != "refused":  # the message of a refused connection adds nothing
            cause += f": {_shorten_error(error, attempt).rstrip('.')}"
        result = f"attempt {attempt.attempt_number} failed ({cause})"
    if attempt.decision is None or attempt.decision.action == "done":
        return result
    waited_ms = None
    if wait_end is not None:
        waited_ms = wait_end - attempt.started_at - (attempt.duration_ms or 0.0)
    decision = _describe_decision(attempt.decision, waited_ms, is_cancelled=is_cancelled)
    return f"{result}; {decision}"


def _shorten_error(error: str, attempt: AttemptRecord) -> str:
    """Return the beginning of an error, or all of it if it ends with the setting to change."""
    return error if attempt.error_class == Fault.BLOCKED else error[:_MAX_ERROR_CHARS]


def _describe_decision(
    decision: DecisionRecord, waited_ms: float | None, *, is_cancelled: bool
) -> str:
    """Describe a decision; `waited_ms` is the actual wait, or None if the task still waits."""
    details: list[str] = []
    if decision.ceiling_ms is not None:
        details.append(f"ceiling {format_duration(decision.ceiling_ms / 1000)}")
    if decision.jitter is not None:
        details.append(f"{'no' if decision.jitter == 'none' else decision.jitter} jitter")
    if decision.hint_ms is not None:
        source = decision.hint_source or "the server"
        details.append(f"{source} asked for {format_duration(decision.hint_ms / 1000)}")
    suffix = f" ({', '.join(details)})" if details else ""
    if decision.action == "stop":
        reason = decision.reason or "unknown"
        return f"stopped: {_REASON_TEXTS.get(reason, reason)}{suffix}"
    delay_ms = decision.delay_ms or 0.0
    planned_wait = f"{format_duration(delay_ms / 1000)}{suffix}"
    if is_cancelled:
        return f"a retry was planned after {planned_wait}"
    if waited_ms is None:
        return f"waits {planned_wait}"
    if -_EARLY_TOLERANCE_MS <= waited_ms - delay_ms <= _LATE_TOLERANCE_MS:
        return f"waited {planned_wait}"
    actual_wait = format_duration(max(0.0, waited_ms) / 1000)
    ending = f"cut short after {actual_wait}" if waited_ms < delay_ms else f"waited {actual_wait}"
    return f"was to wait {planned_wait}, {ending}"


def _led_to_stop(attempt: AttemptRecord) -> bool:
    return attempt.decision is not None and attempt.decision.action == "stop"


def _leased_step(task: Task, *, is_running: bool | None) -> wire.NextStep:
    """Describe the next step of a leased task; for `is_running`, see `explain_task`."""
    text = f"Attempt {task.attempts + 1} is running"
    if is_running is None:
        text += " in another process, or waits there for a free slot"
    elif not is_running:
        text = f"Attempt {task.attempts + 1} waits for a free slot (limits of concurrency and rate)"
    if task.cancelling:
        text += ", and is the last one: the task was cancelled"
    return wire.NextStep(text=f"{text}.", at=None)


def _next_step(
    task: Task,
    status: Status,
    policy: Policy,
    lane: LaneRecord | None,
    wait_reason: str | None,
    blocked_reason: str | None,
    waiting_for: wire.WaitReason | None,
    now: int,
    *,
    is_blocked: bool,
) -> wire.NextStep:
    """Describe the next step of a task that is not leased.

    `is_blocked` is whether the guard blocked the last attempt.
    """
    number = task.attempts + 1
    if status is Status.SUCCEEDED:
        return wire.NextStep(text="It succeeded; no attempt follows.", at=None)
    if status is Status.CANCELLED:
        return wire.NextStep(text="It was cancelled; no attempt follows.", at=None)
    if status is Status.EXHAUSTED:
        text = "It is a dead letter: no attempt follows until it is replayed"
        if is_blocked:
            text = "It is a dead letter: replay it when the operator has allowed its target"
        return wire.NextStep(text=f"{text} (tarry tasks retry {task.id}).", at=None)
    attempt_text = f"Attempt {number}"
    if policy.max_attempts < MAX_ATTEMPTS:
        last = policy.max_attempts + task.attempts_before_replay + task.lost_attempts
        attempt_text += f" of {last}"
    due = task.next_attempt_at
    if lane is not None and lane.paused:
        text = f"{attempt_text} waits until an operator resumes its downstream."
        return wire.NextStep(text=text, at=None)
    if blocked_reason is not None and due <= now:
        text = f"{attempt_text} waits until its target is allowed: {blocked_reason}."
        return wire.NextStep(text=text, at=None)
    if lane is not None and lane.parked_until is not None and lane.parked_until > max(now, due):
        left = format_duration((lane.parked_until - now) / 1000)
        text = f"{attempt_text} waits for its downstream: the breaker is open for another {left}."
        if not lane.consecutive_opens:
            reason = wait_reason or "the last attempt could not be made"
            text = f"{attempt_text} waits for another {left}: {reason}."
        return wire.NextStep(text=text, at=lane.parked_until)
    if lane is not None and lane.parked_until is not None and due <= now:
        why = "its target failed, so only a few tasks at a time are tried until one succeeds"
        if not lane.consecutive_opens:
            why = (
                wait_reason or "the last attempt could not be made, so one task at a time is tried"
            )
        return wire.NextStep(text=f"{attempt_text} waits for its downstream: {why}.", at=None)
    if task.wake_at > now >= due:
        left = format_duration((task.wake_at - now) / 1000)
        text = f"{attempt_text} has been due for {format_duration((now - due) / 1000)}. It waits"
        if waiting_for is not None:
            text += f" for: {waiting_for.replace('-', ' ')}"
        return wire.NextStep(text=f"{text}, and is tried again in {left}.", at=task.wake_at)
    when = f"in {format_duration((due - now) / 1000)}" if due > now else "now"
    return wire.NextStep(text=f"{attempt_text} is due {when}.", at=due)
