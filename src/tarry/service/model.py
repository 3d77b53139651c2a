"""The stored values of the service: tasks, attempts, policies, lanes, API keys, workers, replays.

The states of a task, with the event that leads from one state to the next:

    PENDING    ── claim ──▶ IN_FLIGHT
    PENDING    ── cancel ─▶ CANCELLED
    IN_FLIGHT  ── success ▶ SUCCEEDED
    IN_FLIGHT  ── Wait ───▶ PENDING      the core's verdict: another attempt after a delay
    IN_FLIGHT  ── Stop ───▶ EXHAUSTED    the core's verdict: no other attempt (a dead letter)
    IN_FLIGHT  ── cancel ─▶ CANCELLED    when the attempt ends without success
    IN_FLIGHT  ── release ▶ PENDING      when the worker cannot start the attempt
    EXHAUSTED  ── replay ─▶ PENDING
    CANCELLED  ── retry ──▶ PENDING

This module does no I/O. Times are epoch milliseconds on the store's clock. Durations are
milliseconds, except `Task.previous_delay`.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.wire.tasks import Search

if TYPE_CHECKING:
    from tarry.wire.tasks import WaitReason


class Status(IntEnum):
    """The status of a task. Stores keep the number; API and logs show the name."""

    PENDING = 0
    IN_FLIGHT = 1
    SUCCEEDED = 2
    EXHAUSTED = 3
    CANCELLED = 4

    is_finished: bool
    """Whether no other attempt follows, unless an EXHAUSTED or CANCELLED task is retried."""

    def __init__(self, number: int) -> None:
        self.is_finished = number > 1  # neither PENDING nor IN_FLIGHT


# To read a member of an enum takes 0.27 us in Python 3.11, a constant 0.01 us.
_PENDING, _IN_FLIGHT = Status.PENDING, Status.IN_FLIGHT

TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.PENDING: frozenset({Status.IN_FLIGHT, Status.CANCELLED}),
    Status.IN_FLIGHT: frozenset(
        {Status.PENDING, Status.SUCCEEDED, Status.EXHAUSTED, Status.CANCELLED}
    ),
    Status.SUCCEEDED: frozenset(),
    Status.EXHAUSTED: frozenset({Status.PENDING}),
    Status.CANCELLED: frozenset({Status.PENDING}),
}
"""The statuses to which a task can change from each status."""

MAX_ATTEMPT_NUMBER = 2**24 - 1
"""The largest number of an attempt; the number is part of the row id of the attempt log."""
LOST = "lost"
"""The logged outcome of an attempt whose lease expired before the worker reported a result."""


class TaskContent(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The request to send. It is stored packed (as msgpack) and, if configured, encrypted."""

    url: str
    method: str = "POST"
    headers: dict[str, str] = {}
    body: bytes = b""
    body_ref: str | None = None
    """The object in the `BodyStore` that contains the body; None: the body is in `body`."""
    body_size: int = 0
    checksum: bytes | None = None
    """SHA-256 of a body that the service wrote to the `BodyStore`."""
    etag: str | None = None
    """If the caller wrote the object `body_ref`: its entity tag when the task was added. A
    different entity tag later shows that the object was replaced."""
    body_stored_by_service: bool = msgspec.field(default=False, name="owned")  # stored as `owned`
    """Whether the service wrote the object `body_ref`, and deletes it when the task is deleted."""
    overrides: dict[str, Any] | None = None
    """Policy fields that this task overrides."""
    callback_url: str | None = None
    callback_policy_id: str | None = None
    """The policy of the task that sends the callback; None: the policy `default`."""
    prior_attempts: int = 0
    """The number of attempts that the caller made before it created the task."""
    secret_headers: dict[str, str] | None = None
    """The names of secrets by the names of headers. Their values are not stored, see
    `engine.secrets`."""
    trace: str | None = None
    """The `traceparent` (W3C) of the task, or of the header of the request that created it."""
    tracestate: str | None = None
    """The `tracestate` (W3C) that belongs to `trace`: valid, and at most 512 characters."""
    hide_body: bool = False
    """Whether the API never shows the body, not even its beginning."""
    vendor: str | None = None
    """The vendor whose API created the task, and whose headers its attempts have: `qstash` or
    `cloud_tasks`."""


class Task(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """A stored request, which the service sends until it succeeds or the policy stops."""

    id: str
    """A UUIDv7 in its text form."""
    tenant: str
    lane: str
    """The name of the lane (the queue of one downstream): `tenant/scheme:host:port`, and `@key` if
    the task has a lane key."""
    key: str
    """The idempotency key, which is sent with every attempt and never changes."""
    fingerprint: bytes
    """A digest of the request that created the task. Another request with the same idempotency key
    and a different digest is a conflict. Empty if the caller gave no idempotency key."""
    packed_content: bytes
    """A `TaskContent`, packed and, if keys are configured, encrypted."""
    owned_body_ref: str | None = None
    """The object to delete with the task: `TaskContent.body_ref` if the service owns it."""
    policy_id: str = "default"
    policy_version: int | None = None
    """The policy version that the caller requested; None: the newest version applies."""
    created_at: int = 0
    """Set by the store when the task is added."""
    next_attempt_at: int = 0
    """When the next attempt is due. For a new task, the store computes this time from
    `NewTask.delay_ms`, unless the delay is None."""
    first_due_at: int = 0
    """When the first attempt was due. The policy's `total_budget`, which limits the time for all
    attempts, starts then. A replay sets `first_due_at` to the time of the replay."""
    status: Status = Status.PENDING
    reason: str | None = None
    """Why the task is EXHAUSTED."""
    attempts: int = 0
    """The number of attempts made, including lost ones."""
    attempts_before_replay: int = 0
    """The number of attempts made before the last replay. `attempts` includes them, but the policy
    does not count them."""
    lost_attempts: int = 0
    """The number of attempts since the last replay whose lease expired: their worker has probably
    crashed, perhaps before it sent the request. The policy does not count them, but the engine
    limits their number."""
    previous_delay: float | None = None
    """The last delay, in seconds, from which the core may compute the next one; None before the
    first retry and after an exact hint (gRPC pushback, which sets the delay exactly)."""
    backoff_offset: int = 0
    """The number of counted attempts when an exact hint last restarted the backoff; 0: none has."""
    last_outcome_kind: str | None = None
    """The kind of the last attempt's outcome, not counting lost attempts; None if there is none."""
    version: int = 0
    """Incremented by every change of the task, except a request to cancel it."""
    worker: str | None = None
    """The worker that has the lease, while IN_FLIGHT."""
    wake_at: int = 0
    """Claims select tasks by this time. While PENDING, it is `next_attempt_at`, or a later time if
    the attempt was deferred (see `Release`). While IN_FLIGHT, it is the end of the lease, which is
    the length of a lease after that time."""
    cancelling: bool = False
    """Whether a cancellation was requested while the task was IN_FLIGHT."""
    replays: int = 0
    """How often the task was replayed."""
    finished_at: int | None = None
    """When the task became SUCCEEDED, EXHAUSTED or CANCELLED."""

    def set_added(
        self, created_at: int, due: int, *, wake_at: int | None = None, worker: str | None = None
    ) -> None:
        """Set what the store has set when it has added this new task.

        Its first attempt is due at `due`. With `worker`, the task is leased to that worker until
        `wake_at`.
        """
        self.created_at = created_at
        self.next_attempt_at = self.first_due_at = due
        self.wake_at = due if wake_at is None else wake_at
        if worker is not None:
            self.status, self.worker = _IN_FLIGHT, worker

    def status_at(self, now: int) -> Status:
        """Return the status to show: a task that was leased early is PENDING until it is due."""
        is_early = self.status is Status.IN_FLIGHT and now < self.next_attempt_at
        return Status.PENDING if is_early else self.status


class DecisionRecord(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The verdict of the core after an attempt, and values on which the verdict was based."""

    action: str
    """`done`, `wait` or `stop`."""
    reason: str | None = None
    delay_ms: float | None = None
    ceiling_ms: float | None = None
    """The upper bound of the delay, before jitter."""
    jitter: str | None = None
    """The kind of jitter that was applied; None: no jitter."""
    hint_ms: float | None = None
    """The delay that the server asked for (Retry-After or pushback)."""
    hint_source: str | None = None
    policy_version: int | None = None
    budget: float | None = None
    """The balance of the retry budget when the core decided."""
    breaker: str | None = None
    """The state of the breaker when the core decided."""


class AttemptRecord(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One entry of the attempt log of a task."""

    attempt_number: int = msgspec.field(name="number")
    scheduled_at: int
    started_at: int
    duration_ms: float | None = None
    dns_ms: float | None = None
    connect_ms: float | None = None
    tls_ms: float | None = None
    first_byte_ms: float | None = None
    remote_address: str | None = msgspec.field(default=None, name="remote")
    """The network address of the server."""
    response_status: int | str | None = msgspec.field(default=None, name="status")
    """The HTTP status, or the name of the gRPC status code."""
    error_message: str | None = msgspec.field(default=None, name="error")
    error_class: str | None = None
    outcome: str
    """The kind of the outcome, or `LOST`."""
    decision: DecisionRecord | None = None
    response_excerpt: str | None = msgspec.field(default=None, name="excerpt")
    """The beginning of the response body; unprintable characters are replaced by spaces."""
    response_truncated: bool = msgspec.field(default=False, name="truncated")
    """Whether the response body is longer than the excerpt."""
    worker: str | None = None
    encrypted_texts: bytes | None = None
    """`error_message` and `response_excerpt`, which are None then; see `Codec.encrypt_attempt`."""


class PolicyVersion(msgspec.Struct, kw_only=True, gc=False):
    """One version of a tenant's policy; `document` is the policy as JSON."""

    tenant: str
    id: str
    version: int
    document: bytes
    created_at: int = 0


class LaneRecord(msgspec.Struct, kw_only=True, gc=False):
    """A lane: the queue of one downstream, with the state of the breaker that all workers share.

    `pending`, `in_flight` and `exhausted` are the numbers of its tasks in these statuses.
    """

    name: str
    tenant: str
    parked_until: int | None = None
    """No task is leased before this time, because the breaker is open, or because the target cannot
    be attempted for a local reason (the lane is parked). After this time the lane is half-open,
    until it is unparked or resumed. None: the lane is neither."""
    probes: int = 0
    """How many tasks may be leased at a time while the lane is half-open."""
    consecutive_opens: int = 0
    """How often in a row the breaker has opened. Each time, the breaker stays open longer. 0 in a
    parked lane: it was parked for a local reason, and its breaker is closed."""
    paused: bool = False
    """Whether an operator has paused the lane: no task is leased until the lane is resumed."""
    pending: int = 0
    in_flight: int = 0
    exhausted: int = 0
    last_claim_at: int | None = None
    """When a claim last leased tasks of the lane; None: never."""

    @property
    def waiting_for(self) -> WaitReason | None:
        """Why no task of the lane is leased, or only probes are; None: no such reason."""
        if self.paused:
            return "pause"
        if self.parked_until is None:
            return None
        return "breaker" if self.consecutive_opens else "local-failure"


class BreakerChangeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A change of the breaker of a lane. All processes share the state of the breaker."""

    at: int
    before: str
    """`closed`, `open` or `half-open`, like `after`."""
    after: str
    reason: str | None = None


class LatencyWindow(msgspec.Struct, frozen=True, gc=False):
    """A histogram of the durations of attempts of a lane in an interval of time."""

    at: int
    """The start of the interval, a multiple of `LATENCY_WINDOW_MS`."""
    counts: dict[str, int]
    """The number of attempts by bucket, see `lane_activity.latency_bucket`."""


class LaneActivity(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Recent changes of the breaker of a lane, and latencies of its attempts, in all processes."""

    changes: list[BreakerChangeRecord] = []
    """The last changes of the breaker, oldest first; `before` is `after` of the previous change."""
    windows: list[LatencyWindow] = []
    """The last intervals with attempts, oldest first, however long ago they were."""


class ApiKeyRecord(msgspec.Struct, kw_only=True, gc=False):
    """An API key. Only its digest is stored, not the key itself."""

    id: str
    tenant: str
    digest: bytes
    name: str = ""
    created_at: int = 0
    revoked_at: int | None = None
    role: str = "admin"
    """What the key may do, see `api.roles`. Keys that are older than roles are `admin`."""


class SigningSecretRecord(msgspec.Struct, kw_only=True, gc=False):
    """A secret that signs the attempts of a tenant (Standard Webhooks)."""

    tenant: str
    id: str
    lane: str | None = None  # None: signs in all lanes that have no secret of their own
    secret: bytes  # encrypted if encryption keys are configured
    public_key: str | None = None  # `whpk_...` of an ed25519 key; None: HMAC-SHA256
    created_at: int = 0
    expires_at: int | None = None  # set when another secret replaces this one


class LaneWait(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why due tasks of a lane wait in a process."""

    reason: str
    """A `WaitReason`. A newer version of tarry may report others."""
    due_at: int | None = None
    """The earliest due time of these tasks; None: they are not leased to the process."""


class WorkerRecord(msgspec.Struct, kw_only=True, gc=False):
    """A running process of the service, as it last reported itself (a heartbeat)."""

    name: str
    """Unique; the `Task.worker` of the tasks that are leased to the process."""
    host: str
    pid: int
    role: str = "all"
    """`all`, `api` (accepts requests only) or `worker` (delivers only)."""
    version: str = ""
    """The version of tarry."""
    started_at: int = 0
    seen_at: int = 0
    """When the store received the last heartbeat. Set by the store."""
    running_attempts: int = 0
    leased_tasks: int = 0
    """The number of tasks that are leased to the process, including those of running attempts."""
    allow_target: tuple[str, ...] = ()
    """The targets that the process allows besides public addresses, sorted (`--allow-target`)."""
    blocked_lanes: dict[str, str] = {}
    """Lanes whose target the process does not allow, with the reason; not necessarily all."""
    waiting_lanes: dict[str, LaneWait] = {}
    """Lanes whose tasks wait for their limits, their retry budget or a secret, or for a local
    reason: those with the earliest due times. The store knows the other reasons."""
    is_stopping: bool = False
    """Whether the process starts no more attempts, and waits for those that run."""


class ReplayRecord(msgspec.Struct, kw_only=True, gc=False):
    """A replay: it makes dead letters (EXHAUSTED tasks) PENDING again, step by step.

    Only dead letters that match its search are replayed. The progress of the replay is stored, so
    that the replay continues after a crash.
    """

    id: str
    tenant: str
    # With a status, so that the search always has a field: Lua encodes an empty table as an array.
    search: Search = msgspec.field(default_factory=partial(Search, status="EXHAUSTED"))
    before: int = 0
    """Only dead letters that became EXHAUSTED at this time or earlier are replayed. This time
    replaces `search.finished_before`."""
    rate: float = 0.0
    """The maximum number of tasks per second; 0: no limit."""
    matched: int = 0
    """The number of dead letters that matched when the replay was created."""
    replayed: int = 0
    """The number of dead letters replayed so far."""
    cursor: str | None = None
    """The position after which the next step continues, in a format that the store chooses."""
    unfinished: int = 0
    """The number of replayed tasks that have not finished yet, or were not counted yet."""
    finished: dict[str, int] = {}
    """The number of replayed tasks that have finished, by their final status or `DELETED`."""
    count_cursor: str | None = None
    """The task after which the search for finished tasks continues."""
    status: str = "running"
    """`running`, `waiting` (all dead letters were replayed, and some have not finished), `done` or
    `cancelled`."""
    created_at: int = 0
    next_at: int = 0
    """When the next step is due. Depends on `rate`."""
    finished_at: int | None = None

    @property
    def needs_steps(self) -> bool:
        """Whether there are dead letters to replay or replayed tasks to wait for.

        A cancelled replay still counts the tasks that it has replayed.
        """
        return self.status == "running" or self.unfinished > 0
