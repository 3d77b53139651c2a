"""The JSON forms of the service's API, for both of its ends: what is asked for, what is answered.

camelCase, times in epoch milliseconds, durations in milliseconds. A field that may be left out may
be null as well, which means the same. The one file of this layer that needs msgspec: service and
client have it.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from tarry.core.verdict import Reason
from tarry.wire.policies import MAX_DURATION_MS

T = TypeVar("T")

FIRST_TIME = 100_000_000_000
"""In 1973: an earlier time is one in seconds."""
LAST_TIME = 253_402_300_799_999
"""The end of the year 9999."""
MOST_IN_BATCH = 1_000
MOST_IN_PAGE = 1_000

StatusName: TypeAlias = Literal["PENDING", "IN_FLIGHT", "SUCCEEDED", "EXHAUSTED", "CANCELLED"]
STATUS_NAMES: tuple[StatusName, ...] = get_args(StatusName)
"""At the number of each status."""
LaneState: TypeAlias = Literal["OPEN", "PAUSED", "PARKED", "PROBING"]
PolicyName: TypeAlias = Annotated[
    str,
    Meta(min_length=1, max_length=100, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$"),
]
LaneName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
ReasonName: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=100, extra_json_schema={"enum": list(Reason)})
]
"""A reason to end. The service takes no other; a client takes what a newer one may tell."""
KeyText: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        description="Visible ASCII characters and spaces.",
        extra_json_schema={"pattern": "^[ -~]+$"},
    ),
]
UrlText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=8192)]
Time: TypeAlias = Annotated[
    int, Meta(ge=0, le=LAST_TIME, extra_json_schema={"minimum": FIRST_TIME})
]
"""Epoch milliseconds. One below `FIRST_TIME` is refused with a question, and not by its form."""


class _Asked(
    msgspec.Struct,
    rename="camel",
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    gc=False,
):
    """What a caller sends: an unknown field is refused."""


class _Told(msgspec.Struct, rename="camel", kw_only=True, gc=False):
    """What the service answers: every field is there."""


# --- tasks ----------------------------------------------------------------------------------------


class RetryTaskRequest(_Asked):
    """A call for the service to make until it succeeds, or its policy ends it.

    One of `body`, `bodyBase64` and `bodyRef`, or none. A `body` that is a string is sent as UTF-8,
    any other JSON value as JSON with that content type.
    """

    target_url: UrlText
    method: Annotated[str, Meta(min_length=1, max_length=32)] = "POST"
    headers: dict[str, Any] | None = None
    body: Raw | UnsetType = UNSET
    """As the caller wrote it: no number is rounded on the way."""
    body_base64: str | None = None
    body_ref: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    policy_id: PolicyName | None = None
    policy_version: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    idempotency_key: KeyText | None = None
    delay_ms: Annotated[int, Meta(ge=0, le=MAX_DURATION_MS)] | None = None
    next_attempt_at: Time | None = None
    policy: dict[str, Any] | None = None
    callback_url: UrlText | None = None


class TargetResponse(_Told, omit_defaults=True):
    """What the target answered to the last attempt, for who waited for it while it ran: it is not
    kept. The body is text where it is UTF-8.
    """

    status: int | str | None
    headers: dict[str, str]
    body: str | None = None
    body_base64: str | None = None
    truncated: bool = False
    """Whether the target's body is longer than this: only its beginning is kept."""


class RetryTask(_Told, kw_only=False):
    """A task as the service tells it; secrets are redacted."""

    task_id: str
    status: StatusName
    reason: str | None
    idempotency_key: str
    target_url: str
    method: str
    headers: dict[str, str]
    policy_id: str
    policy_version: int | None
    policy: dict[str, Any] | None
    """The fields that this task has otherwise."""
    lane: str
    attempt_number: int
    """Attempts made so far."""
    next_attempt_at: int | None
    created_at: int
    finished_at: int | None
    body_size: int
    body_ref: str | None
    callback_url: str | None
    cancelling: bool
    replays: int
    version: int
    response: TargetResponse | None = None
    """Only in the answer to a request that waited for it."""


class NewBatch(_Asked):
    """Up to 1,000 tasks at once."""

    tasks: list[Raw]


class BatchResult(_Told, omit_defaults=True):
    """The verdict on one task of a batch, as if it had been sent alone."""

    status: int
    task: RetryTask | None = None
    task_id: str | None = None
    """In its place, for who prefers a minimal answer, as `tarry.Client` never does."""
    problem: dict[str, Any] | None = None


class BatchResults(_Told):
    """The verdicts, in the order of the tasks."""

    results: list[BatchResult]


class Page(msgspec.Struct, Generic[T], rename="camel", kw_only=True):
    """A part of a list; `nextCursor` goes on from here, and null ends it."""

    items: list[T]
    next_cursor: str | None


class TaskEnd(_Told):
    """How a task ended: what is posted to its `callbackUrl`."""

    task_id: str
    idempotency_key: str
    target_url: str
    """Without its query, which may hold secrets."""
    status: StatusName
    reason: str | None
    attempt_number: int
    """Attempts made."""
    response_status: int | str | None
    """Of the last attempt; null where there was no answer."""
    created_at: int


# --- attempts -------------------------------------------------------------------------------------


class Decision(_Told):
    """What was decided after an attempt, and what it went by."""

    action: str
    reason: str | None
    delay_ms: float | None
    ceiling_ms: float | None
    jitter: str | None
    """How the delay was drawn below the ceiling; None: it was not."""
    hint_ms: float | None
    hint_source: str | None
    policy_version: int | None
    budget: float | None
    breaker: str | None


class AttemptLog(_Told):
    """One line of a task's attempt log."""

    task_id: str
    attempt_number: int
    scheduled_at: int
    started_at: int
    duration_ms: float | None
    dns_ms: float | None
    connect_ms: float | None
    tls_ms: float | None
    first_byte_ms: float | None
    remote_address: str | None
    response_status: int | str | None
    error_message: str | None
    error_class: str | None
    outcome: str
    decision: Decision | None
    response_excerpt: str | None
    worker: str | None
    response_truncated: bool = False
    """Whether the target's body is longer than the excerpt."""


class EventNews(
    msgspec.Struct, rename="camel", kw_only=True, frozen=True, omit_defaults=True, gc=False
):
    """Something that happened to a task or to a lane: the data of one event of `/events`."""

    kind: str
    """added, attempt, succeeded, exhausted, cancelled, superseded, deferred, parked, probing,
    resumed, paused; or missed, when this reader was too slow for some events."""
    at: int | None = None
    lane: str | None = None
    task_id: str | None = None
    policy_id: str | None = None
    attempt: AttemptLog | None = None
    reason: str | None = None
    next_attempt_at: int | None = None
    attempt_number: int | None = None
    missed: int | None = None
    """How many events were missed."""


class ExplainedStep(_Told):
    """One attempt, and what followed from it, in words."""

    attempt_number: int
    words: str
    attempt: AttemptLog


class WhatNext(_Told):
    """What happens next, in words, and when, where that is known."""

    words: str
    at: int | None


class Explanation(_Told):
    """Why a task was retried or not, in words and in parts."""

    task_id: str
    status: StatusName
    reason: str | None
    text: str
    steps: list[ExplainedStep]
    next: WhatNext


# --- policies -------------------------------------------------------------------------------------

Backoff: TypeAlias = Literal["EXPONENTIAL", "FIXED", "LINEAR", "SCHEDULE"]
Jitter: TypeAlias = Literal["DECORRELATED", "EQUAL", "FULL", "NONE"]


class RetryPolicy(_Told, omit_defaults=True):
    """A policy in full; `version` is null for one that comes with the service."""

    policy_id: str
    version: int | None
    created_at: int | None
    max_attempts: int
    initial_delay_ms: int | float
    multiplier: int | float
    max_delay_ms: int | float
    total_budget_ms: int | float | None
    attempt_timeout_ms: int | float | None
    backoff_type: Backoff
    jitter_type: Jitter
    retryable_status_codes: list[int]
    retryable_grpc_codes: list[str]
    throttled_delay_ms: int | float
    max_hint_ms: int | float
    schedule_ms: list[int | float] | None = None


# --- dead letters and downstreams -----------------------------------------------------------------


class ReplayFilter(_Asked):
    """Which dead letters; nothing asks for all."""

    lane: LaneName | None = None
    policy_id: PolicyName | None = None
    reason: ReasonName | None = None
    before: Time | None = None
    """Those that died at this time or earlier."""


class NewReplay(_Asked):
    """A job that brings dead letters back, `rate` a second; without one, all at once."""

    filter: ReplayFilter | None = None
    rate: Annotated[float, Meta(ge=0.001, le=1_000_000)] | None = None
    dry_run: bool = False


class ReplayJob(_Told):
    """How far a replay has come; a `rate` of 0 is none. A dry run has no id and changes nothing."""

    replay_id: str | None
    status: Literal["DRY_RUN", "RUNNING", "DONE", "CANCELLED"]
    filter: ReplayFilter
    rate: float
    matched: int
    replayed: int
    created_at: int | None
    finished_at: int | None


class Purged(_Told):
    """How many dead letters were removed; `more` when some are left, for another request."""

    purged: int
    more: bool


class Standing(_Told):
    """What the process that answers knows of a downstream."""

    breaker: str | None = None
    budget: float | None = None
    running: int = 0
    held: int = 0
    p50_ms: float | None = None
    p95_ms: float | None = None


class Downstream(_Told):
    """One downstream: its queue, which all processes share, and what this one knows of it."""

    lane: str
    state: LaneState
    parked_until: int | None
    opened: int
    """How often in a row its breaker has opened."""
    pending: int
    in_flight: int
    dead: int
    served_at: int | None
    here: Standing | None
