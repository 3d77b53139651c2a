"""The JSON bodies of the service's API, shared by the service and its client.

Names are camelCase, times are epoch milliseconds, durations are milliseconds. An optional field can
be left out or null, with the same meaning. This is the only module of `tarry.wire` that
needs msgspec, which the service and the client extras install.
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
)

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from tarry.core.verdict import Reason
from tarry.wire.policies import MAX_DURATION_MS

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MIN_TIME_MS = 100_000_000_000
"""A time in 1973. The service rejects smaller numbers, because they are probably in seconds."""
MAX_TIME_MS = 253_402_300_799_999
"""The end of the year 9999."""
MAX_BATCH_SIZE = 1_000
MAX_PAGE_SIZE = 1_000
DEFAULT_REPLAY_RATE = 50.0
"""Dead letters that a replay replays per second if its request has no rate."""
MIN_REPLAY_RATE = 0.001

StatusName: TypeAlias = Literal["PENDING", "IN_FLIGHT", "SUCCEEDED", "EXHAUSTED", "CANCELLED"]
STATUS_NAMES: tuple[StatusName, ...] = get_args(StatusName)
"""The index of a name is the number of the status in the store."""
BreakerStateName: TypeAlias = Literal["closed", "open", "half-open"]
LaneStateName: TypeAlias = Literal["ACTIVE", "PAUSED", "PARKED", "PROBING"]
"""PAUSED: by an operator. PARKED: its breaker is open. PROBING: half-open. ACTIVE: otherwise."""
WaitReason: TypeAlias = Literal[
    "free-slot",
    "rate-limit",
    "concurrency-limit",
    "retry-budget",
    "secret",
    "breaker",
    "blocked",
    "local-failure",
    "pause",
]
"""Why tasks of a lane wait although they are due. `free-slot`: for a process with a free slot;
`blocked`: until a process allows the target; `local-failure`: until the service can reach the
target, for example until a DNS server answers; `pause`: until an operator resumes the lane."""
WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)
LANE_STATE_NAMES: tuple[LaneStateName, ...] = get_args(LaneStateName)
EventKind: TypeAlias = Literal[
    "added",
    "attempt",
    "succeeded",
    "exhausted",
    "cancelled",
    "superseded",  # the lease was lost before the result of the attempt was stored
    "deferred",  # an attempt was not started, see `ServiceEvent.reason`
    "parked",  # the breaker of a lane opened
    "probing",  # the breaker of a lane is half-open
    "resumed",  # the breaker of a lane closed, or an operator resumed the lane
    "paused",  # by an operator
    "missed",  # events were dropped, because the stream was read too slowly
]
LimitsSource: TypeAlias = Literal["API", "SETTINGS", "DEFAULT"]
BackoffType: TypeAlias = Literal["EXPONENTIAL", "FIXED", "LINEAR", "SCHEDULE"]
JitterType: TypeAlias = Literal["DECORRELATED", "EQUAL", "FULL", "NONE"]
SecretType: TypeAlias = Literal["HMAC", "ED25519"]
KeyFormatName: TypeAlias = Literal["PLAIN", "QUOTED"]
PolicyName: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=100, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")
]
LaneName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
ReasonName: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=100, extra_json_schema={"enum": list(Reason)})
]
"""The value of a `Reason`. The service rejects other values; the client accepts them."""
_KEY_SCHEMA = {
    "description": "Visible ASCII characters, with spaces only inside.",
    "pattern": "^[!-~](?:[ -~]*[!-~])?$",
}
IdempotencyKeyText: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=255, extra_json_schema=_KEY_SCHEMA)
]
TRACEPARENT_PATTERN = "^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$"
"""W3C Trace Context: version ff, and ids of zeros only, are invalid."""
TraceparentText: TypeAlias = Annotated[
    str, Meta(max_length=64, extra_json_schema={"pattern": TRACEPARENT_PATTERN})
]
SECRET_NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"  # noqa: S105 - a pattern of names
LaneKeyText: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=64,
        extra_json_schema={"pattern": "^[A-Za-z0-9][A-Za-z0-9._~-]*$"},
    ),
]
KeyFilterText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=255)]
"""An idempotency key to search for: any text. A key that is not valid matches no task."""
UrlText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=8192)]
# Clients must not interpret a cursor. The pattern is in the OpenAPI document for programs that
# generate requests from it.
TaskCursor: TypeAlias = Annotated[
    str, Meta(max_length=1024, extra_json_schema={"pattern": "^[0-9]{1,18}$"})
]
_LAST_STATUS_SCHEMA = {"description": "503, a class such as 5xx, or a gRPC code."}
LastStatusText: TypeAlias = Annotated[
    str,
    Meta(
        max_length=30,
        pattern="^([1-5][0-9]{2}|[1-5][xX]{2}|[A-Za-z_]+)$",
        extra_json_schema=_LAST_STATUS_SCHEMA,
    ),
]
ErrorText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]
EpochMs: TypeAlias = Annotated[
    int, Meta(le=MAX_TIME_MS, extra_json_schema={"minimum": MIN_TIME_MS})
]
"""Epoch milliseconds. The service rejects a time below `MIN_TIME_MS` in a separate check."""


class Body(msgspec.Struct, rename="camel", kw_only=True, gc=False):
    """Base class of bodies."""


class RequestBody(Body, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of request bodies: unknown fields are rejected."""


class SecretReference(TypedDict):
    """The value of a header that is a secret: the name of the secret in the service's settings."""

    secret: str


class RetryTaskRequest(RequestBody):
    """The body that creates a task: an HTTP or gRPC request that the service sends and retries.

    At most one of `body`, `bodyBase64` and `bodyRef` can be set. If `body` is a string, it is sent
    as UTF-8. Any other JSON value is sent as JSON, with the content type of JSON.
    """

    target_url: UrlText
    method: Annotated[str, Meta(min_length=1, max_length=32)] = "POST"
    headers: dict[str, Any] | None = None
    """A value is a string, or a `SecretReference`: `{"secret": "orders-api"}`."""
    body: Raw | UnsetType = UNSET
    """The JSON text as received. It is not parsed, so that no number is rounded."""
    body_base64: str | None = None
    body_ref: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    policy_id: PolicyName | None = None
    policy_version: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    idempotency_key: IdempotencyKeyText | None = None
    lane_key: LaneKeyText | None = None
    """Gives the tasks with this key a lane of their own among the tasks for the same host."""
    delay_ms: Annotated[int, Meta(ge=0, le=MAX_DURATION_MS)] | None = None
    next_attempt_at: EpochMs | None = None
    policy_overrides: dict[str, Any] | None = msgspec.field(default=None, name="policy")
    """Values that replace fields of the policy for this task."""
    callback_url: UrlText | None = None
    callback_policy_id: PolicyName | None = None
    """The policy of the callback; null: the policy `default`."""
    prior_attempts: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Number of attempts that the caller has made itself. `X-Retry-Attempt` includes them."""
    traceparent: TraceparentText | None = None
    """The trace of the caller (W3C Trace Context); null: that of the request's header, if any."""
    tracestate: str | None = None
    """Belongs to `traceparent`. It is ignored if it is not valid, or without `traceparent`."""


class TargetResponse(Body, omit_defaults=True):
    """The response of the target to the last attempt, for an API request with `Prefer: wait`.

    The response is not stored. A body of valid UTF-8 is in `body`, any other in `bodyBase64`.
    """

    status: int | str | None  # an HTTP status, or the name of a gRPC status code
    headers: dict[str, str]
    body: str | None = None
    body_base64: str | None = None
    truncated: bool = False
    """Whether only the beginning of the body is returned, because it was too long."""


class RetryTask(Body, kw_only=False):
    """A stored task; secrets are redacted."""

    task_id: str
    status: StatusName
    reason: str | None
    idempotency_key: str
    target_url: str
    method: str
    headers: dict[str, str | SecretReference]
    policy_id: str
    policy_version: int | None
    policy: dict[str, Any] | None
    """Values that replace fields of the policy for this task."""
    lane: str
    attempt_number: int
    """Number of attempts so far."""
    next_attempt_at: int | None
    created_at: int
    finished_at: int | None
    body_size: int
    body_ref: str | None
    callback_url: str | None
    callback_policy_id: str | None
    cancelling: bool
    """Whether the task will be CANCELLED when its attempt ends, unless the attempt succeeds."""
    replays: int  # the number of replays of this dead letter
    version: int
    """Incremented by every change of the task, except a request to cancel it."""
    last_status: int | str | None = None
    """The status of the last attempt; null without a response. Like the next two fields, it is not
    set in the response to the creation of a task, unless the request waited for the result."""
    last_error: str | None = None
    """The error of the last attempt: its class, and the message if there is one."""
    last_attempt_at: int | None = None
    response: TargetResponse | None = None
    """Set only when the API request waited for the result (`Prefer: wait`)."""


class BatchRequest(RequestBody):
    """Up to 1,000 tasks."""

    tasks: list[Raw]


class BatchResult(Body, omit_defaults=True):
    """The result for one task of a batch; `status` is the HTTP status as for a single task."""

    status: int
    task: RetryTask | None = None
    task_id: str | None = None
    """Set instead of `task` when the request has `Prefer: return=minimal`."""
    problem: dict[str, Any] | None = None


class BatchResults(Body):
    """The results of a batch, in the order of its tasks."""

    results: list[BatchResult]


class Page(msgspec.Struct, Generic[T], rename="camel", kw_only=True):
    """A page of a list; `nextCursor` is the cursor of the next page, null on the last page."""

    items: list[T]
    next_cursor: str | None


class CallbackBody(Body):
    """The result of a task, as posted to its `callbackUrl`."""

    task_id: str
    idempotency_key: str
    target_url: str
    """The URL without its query, which may contain secrets."""
    status: StatusName
    reason: str | None
    attempt_number: int
    """Number of attempts."""
    response_status: int | str | None
    """The HTTP status or gRPC status code of the last attempt; null without a response."""
    created_at: int


class Decision(Body):
    """The decision after an attempt, and the values on which it is based."""

    action: str
    reason: str | None
    delay_ms: float | None
    ceiling_ms: float | None
    """The delay before jitter. A hint or decorrelated jitter can make `delayMs` longer."""
    jitter: str | None
    """The jitter that chose the delay; null when the delay is not random."""
    hint_ms: float | None
    """The wait that the target asked for, in the header `hintSource` (such as Retry-After)."""
    hint_source: str | None
    policy_version: int | None
    budget: float | None
    """The balance of the retry budget; null without a budget."""
    breaker: str | None
    """The state of the breaker; null without a breaker."""


class AttemptLog(Body):
    """One attempt: an entry of a task's attempt log."""

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
    """Why there was no response: dns, refused, tls, timeout, reset and so on."""
    outcome: str
    decision: Decision | None
    response_excerpt: str | None
    worker: str | None
    response_truncated: bool = False
    """Whether the body of the response is longer than `response_excerpt`."""


class ServiceEvent(
    msgspec.Struct, rename="camel", kw_only=True, frozen=True, omit_defaults=True, gc=False
):
    """An event of a task or a lane: the data of one message of the `/events` stream."""

    kind: str  # an `EventKind`, or one that a newer service has added
    at: int | None = None
    """The time of the event."""
    lane: str | None = None
    task_id: str | None = None
    policy_id: str | None = None
    attempt: AttemptLog | None = None
    reason: str | None = None
    next_attempt_at: int | None = None
    attempt_number: int | None = None
    missed: int | None = None
    """Number of dropped events."""


class ExplainedStep(Body):
    """One attempt, and the decision after it as a sentence."""

    attempt_number: int
    text: str
    attempt: AttemptLog


class NextStep(Body):
    """What happens next, as a sentence; `at` is the time of the next step, null if not known."""

    text: str
    at: int | None


class Explanation(Body):
    """Why a task was retried or not: a text for the task, and one for each attempt."""

    task_id: str
    status: StatusName
    reason: str | None
    text: str
    steps: list[ExplainedStep]
    next: NextStep
    request_excerpt: str | None = None
    """The first 512 characters of the request's body, with secrets redacted; null if there is no
    body, if it is hidden or not text, or if it is stored in the storage of large bodies."""
    request_truncated: bool = False
    """Whether the body is longer than `request_excerpt`."""


class RetryPolicy(Body, omit_defaults=True):
    """A complete policy; `version` is null for a preset of the service."""

    policy_id: str
    version: int | None
    created_at: int | None
    max_attempts: int
    initial_delay_ms: int | float
    multiplier: int | float
    max_delay_ms: int | float
    total_budget_ms: int | float | None
    attempt_timeout_ms: int | float | None
    backoff_type: BackoffType
    jitter_type: JitterType
    retryable_status_codes: list[int]
    retryable_grpc_codes: list[str]
    throttled_delay_ms: int | float
    max_hint_ms: int | float
    idempotency_key_header: str
    idempotency_key_format: KeyFormatName
    schedule_ms: list[int | float] | None = None


class PlannedRetry(Body):
    """A retry that a policy allows: its ceiling, and the range of its delay after jitter."""

    retry_number: int
    ceiling_ms: float
    shortest_delay_ms: float
    longest_delay_ms: float


class PolicySchedule(Body):
    """The retries of a task of which every attempt fails.

    `retries` has the first 50. `averageRetries` is the number that fits into the total budget if
    all delays are average; null if there are more than 1,000.
    """

    retries: list[PlannedRetry]
    max_retries: int
    average_retries: int | None
    longest_wait_ms: float


class SimulatedRun(Body):
    """The load that simulated clients put on their server, and the results of their calls.

    `peakLoad` is the highest rate of requests after the outage, divided by the capacity of the
    server. `recoveredAfterMs` is the time from the end of the outage until the calls are healthy
    again; null if they do not recover in the simulated time.
    """

    requests_per_second: list[float]
    calls: int
    requests: int
    requests_per_call: float
    peak_load: float
    crashes: int
    success_rate: float
    unfinished_calls: int
    recovered_after_ms: float | None


class PolicySimulation(Body):
    """An outage that is simulated twice: with clients that have the policy, and without retries.

    `requestsPerSecond` has one value for each interval of `stepMs`. The outage lasts from
    `outageStartMs` to `outageEndMs` after the start of the simulation.
    """

    description: str
    clients: int
    step_ms: float
    outage_start_ms: float
    outage_end_ms: float
    with_policy: SimulatedRun
    without_retries: SimulatedRun


class PolicyAdviceRequest(RequestBody):
    """A request for advice on a policy, from the recorded attempts of a downstream."""

    lane: LaneName
    policy_id: PolicyName = "default"


class PolicySuggestion(Body):
    """The proposed value of one field of a policy, with its reason.

    `basis` describes the data that the value is based on. `hasEnoughData` is false if there is too
    little data to determine the value; then the current value is kept.
    """

    field: str
    current: int | float | None
    proposed: int | float | None
    reason: str
    basis: str
    has_enough_data: bool


class PolicyAdvice(Body):
    """A proposal for a policy, from the newest attempts of a downstream.

    `spanMs` is the time from the first of these attempts to the last. `simulation` describes how
    the results of calls would change, or why the policies were not simulated.
    """

    lane: str
    policy_id: str
    attempts: int
    calls: int
    outages: int
    span_ms: float
    suggestions: list[PolicySuggestion]
    warnings: list[str]
    simulation: str


class Search(RequestBody):
    """Which tasks to find; a field that is None matches all tasks.

    `SEARCH_FIELDS` has the names of the fields in the client and the command line. The fields of a
    query or a body are a selection, see `select_fields`.
    """

    policy_id: PolicyName | None = None
    lane: LaneName | None = None
    reason: ReasonName | None = None
    url_prefix: UrlText | None = None
    """The beginning of the target URL, with the whole host."""
    idempotency_key: KeyFilterText | None = None
    created_after: EpochMs | None = None  # the limits of both ranges of times are included
    created_before: EpochMs | None = None
    finished_after: EpochMs | None = None
    finished_before: EpochMs | None = None
    last_status: LastStatusText | None = None
    """The status of the last attempt: 503, a class such as 5xx, or the name of a gRPC code."""
    error: ErrorText | None = None
    """The error class of the last attempt, or a part of its error message; the case is ignored."""
    status: StatusName | None = None


SearchT = TypeVar("SearchT", bound=Search)


def select_fields(*names: str) -> Callable[[type[SearchT]], type[SearchT]]:
    """Return a class decorator that keeps these fields of a subclass of `Search`, in this order.

    The other fields of `Search` are None in all objects of the class. JSON must not have them.
    """

    def select(cls: type[SearchT]) -> type[SearchT]:
        types = get_type_hints(Search, include_extras=True)
        types |= get_type_hints(cls, include_extras=True)
        defaults = {field.name: field.default for field in msgspec.structs.fields(cls)}
        other_names = [name for name in Search.__struct_fields__ if name not in names]
        selected = msgspec.defstruct(
            cls.__name__,
            [(name, types[name], defaults.get(name)) for name in names],
            bases=(RequestBody,),
            module=cls.__module__,
            namespace={"__doc__": cls.__doc__, **dict.fromkeys(other_names)},
            kw_only=True,
        )
        return cast("type[SearchT]", selected)

    return select


@select_fields(
    "lane",
    "policy_id",
    "url_prefix",
    "idempotency_key",
    "created_after",
    "created_before",
    "last_status",
    "error",
)
class SearchFilter(Search):
    """A filter for tasks; an empty filter matches all."""


@select_fields(
    *SearchFilter.__struct_fields__, "reason", "before", "finished_after", "finished_before"
)
class ReplayFilter(Search):
    """A filter for dead letters; an empty filter matches all dead letters."""

    before: EpochMs | None = None
    """Matches tasks that became dead letters at this time or earlier, like `finishedBefore`."""


class BulkCancelRequest(RequestBody):
    """A request to cancel all unfinished tasks that match the filter; a dry run counts them.

    Without a filter, `all` must be true, except in a dry run. `cursor` is the `nextCursor` of an
    earlier response with the same filter.
    """

    filter: SearchFilter | None = None
    all: bool = False
    dry_run: bool = False
    cursor: TaskCursor | None = None


class BulkCancelResult(Body):
    """The number of tasks that a request has cancelled. `nextCursor` is null if it was the last."""

    matched: int
    cancelled: int
    running: int
    """Number of tasks with a running attempt, which is the last one and may still succeed."""
    next_cursor: str | None


_RATE_SCHEMA: dict[str, Any] = {"anyOf": [{"const": 0}, {"minimum": MIN_REPLAY_RATE}]}


class ReplayRequest(RequestBody):
    """A request to replay dead letters: `rate` per second, by default 50; 0: all at once.

    Without a filter, `all` must be true, except in a dry run.
    """

    filter: ReplayFilter | None = None
    all: bool = False
    rate: Annotated[float, Meta(ge=0, le=1_000_000, extra_json_schema=_RATE_SCHEMA)] | None = None
    dry_run: bool = False


class ReplayJob(Body):
    """The progress of a replay. A `rate` of 0 means no limit. A dry run has no id.

    The replay is DONE when all replayed tasks have finished.
    """

    replay_id: str | None
    status: Literal["DRY_RUN", "RUNNING", "DONE", "CANCELLED"]
    filter: ReplayFilter
    rate: float
    matched: int  # the number of dead letters that match the filter
    replayed: int  # the number of dead letters that were replayed
    created_at: int | None
    finished_at: int | None
    finished: dict[str, int] = {}
    """The number of replayed tasks that have finished, by their final status: SUCCEEDED, EXHAUSTED
    or CANCELLED; or DELETED."""


class DeadLetterGroup(Body):
    """Dead letters of one downstream with the same reason, and the last result of the newest."""

    reason: str | None
    lane: str
    count: int
    newest_task_id: str
    newest_finished_at: int | None
    newest_status: int | str | None
    newest_error: str | None


class PurgeResult(Body):
    """The number of deleted dead letters; `more` is true if a further request can delete others.

    The further request has `nextCursor` as `cursor`, so that it does not search the same tasks.
    """

    purged: int
    more: bool
    next_cursor: str | None = None


class _Settings(
    msgspec.Struct, rename="camel", kw_only=True, gc=False, omit_defaults=True, frozen=True
):
    """Base class of limits, which are compared and shared."""


class BreakerSettings(_Settings, frozen=True):
    """The breaker of a downstream. Omitted fields have the service's defaults."""

    enabled: bool = True
    failure_rate: Annotated[float, Meta(gt=0, le=1)] | None = None
    """The share of failed attempts in the window at which the breaker opens."""
    min_calls: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """The attempts in the window below which `failureRate` does not apply."""
    window_ms: Annotated[int, Meta(ge=1_000, le=3_600_000)] | None = None
    consecutive_failures: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """The breaker also opens after this many failures in a row."""
    open_for_ms: Annotated[int, Meta(ge=1, le=MAX_DURATION_MS)] | None = None
    """How long the breaker stays open; longer each time in a row, up to `maxOpenMs`."""
    max_open_ms: Annotated[int, Meta(ge=1, le=MAX_DURATION_MS)] | None = None
    probes: Annotated[int, Meta(ge=1, le=1_000)] | None = None
    """The attempts at a time that test the downstream before the breaker closes."""


class BudgetSettings(_Settings, frozen=True):
    """The retry budget of a downstream. Omitted fields have the service's defaults."""

    enabled: bool = True
    ratio: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Retries per attempt, in the last ten seconds."""
    min_per_second: Annotated[float, Meta(ge=0, le=100_000)] | None = None
    """Retries per second that are allowed in addition."""


class DownstreamLimits(_Settings, frozen=True):
    """The limits of a downstream. Omitted fields have the service's defaults."""

    rate_per_second: Annotated[float, Meta(ge=0.001, le=100_000)] | None = None
    """Attempts per second, of all processes together."""
    concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Attempts at a time, of all processes together."""
    breaker: BreakerSettings | None = None
    budget: BudgetSettings | None = None


class BreakerSettingsRequest(BreakerSettings, frozen=True, forbid_unknown_fields=True):
    """`BreakerSettings` in a request: unknown fields are rejected."""


class BudgetSettingsRequest(BudgetSettings, frozen=True, forbid_unknown_fields=True):
    """`BudgetSettings` in a request: unknown fields are rejected."""


class DownstreamLimitsRequest(DownstreamLimits, frozen=True, forbid_unknown_fields=True):
    """The body that sets the limits of a downstream. An empty body removes them."""

    breaker: BreakerSettingsRequest | None = None
    budget: BudgetSettingsRequest | None = None


class SigningSecretRequest(RequestBody):
    """The body that creates a signing secret. Without `secret`, the service generates one."""

    lane: LaneName | None = None
    """The lane whose attempts it signs; null: all lanes without secrets of their own."""
    type: SecretType = "HMAC"  # not used if `secret` is set
    secret: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """Your own secret: whsec_... (HMAC-SHA256) or whsk_... (ed25519)."""
    expire_previous_ms: Annotated[int, Meta(ge=0, le=MAX_DURATION_MS)] = 86_400_000
    """How long the previous secrets of this lane sign, too."""


class SigningSecret(Body, omit_defaults=True):
    """A signing secret."""

    secret_id: str
    lane: str | None
    type: SecretType
    created_at: int
    expires_at: int | None
    """When it stops signing, because another secret has replaced it."""
    public_key: str | None = None
    """The public key of an ED25519 secret (whpk_...). Receivers verify signatures with it."""
    secret: str | None = None
    """Only in the response that creates an HMAC secret, unless the request contained it."""


class Caller(Body):
    """The tenant and the role of the API key of a request."""

    tenant: str
    role: str
    """`read`, `write` or `admin`. Without API keys, all callers are `admin`."""


class WorkerInfo(Body):
    """A process of the service that uses the store, as it last reported itself."""

    name: str
    host: str
    pid: int
    role: str
    """`all`, `api` (accepts requests only) or `worker` (delivers only)."""
    version: str
    started_at: int
    seen_at: int
    """The time of its last heartbeat. A process sends one every five seconds, and is not listed any
    more after 30 seconds without one."""
    running_attempts: int
    leased_tasks: int


class LocalStats(Body):
    """The state of a downstream in this process; `running` is the number of running attempts."""

    breaker: str | None = None
    budget: float | None = None
    running: int = 0
    leased: int = 0
    """Number of tasks that this process has leased and not finished."""
    p50_ms: float | None = None
    p95_ms: float | None = None
    wait_reason: str | None = None
    """Why the lane is parked although its breaker is closed: its target is not allowed
    (`on_blocked`), or its name cannot be resolved now."""
    rate_per_second: float | None = None
    """The current limit of attempts per second; None: the rate is not limited."""
    concurrency_limit: int | None = None
    """The current limit of attempts at a time."""


class BreakerChange(Body):
    """A change of the state of a breaker that all processes share."""

    at: int
    from_: str = msgspec.field(name="from")
    """`closed`, `open` or `half-open`, like `to`."""
    to: str
    reason: str | None = None


class LatencyStats(Body):
    """Quantiles of the durations of attempts of all processes, with any outcome.

    They cover the last 5 to 10 minutes in which there were attempts. They are estimated from a
    histogram whose buckets grow by 19 %. Other processes report their attempts every 30 seconds.
    """

    since: int
    """The start of the time that the quantiles cover."""
    attempts: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


class DownstreamInfo(Body):
    """A downstream: its lane (the queue that all processes share) and its state in this process."""

    tenant: str
    lane: str
    state: LaneStateName
    parked_until: int | None
    consecutive_opens: int
    """How often in a row the breaker has opened, without closing in between."""
    pending: int
    in_flight: int
    dead: int  # the number of dead letters
    last_claim_at: int | None
    """The time at which a worker last claimed a task of the lane."""
    local: LocalStats | None
    waiting_for: WaitReason | None = None
    """Why tasks of the lane wait although they are due; null: none waits, or no reason is known.
    Other processes report their reasons every five seconds."""
    limits: DownstreamLimits = DownstreamLimits()
    limits_source: LimitsSource = "DEFAULT"
    """Where the limits are set: with `PUT /downstreams/{lane}`, or in the service's settings."""
    shared_breaker: BreakerStateName = msgspec.field(default="closed", name="breaker")
    """The state of the breaker, shared by all processes; `local` has its state in this process."""
    breaker_changed_at: int | None = None
    """When the state of the breaker last changed; null if no change is recorded."""
    breaker_history: list[BreakerChange] | None = None
    """The last 20 changes of the breaker, newest first; null in a list of downstreams."""
    latency: LatencyStats | None = None
    """Null if no attempt was made since the downstream was created or reset. After a reset, other
    processes may still add attempts that they made in the 30 s before."""
