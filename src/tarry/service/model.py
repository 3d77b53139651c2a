"""The stored values of the service: tasks, attempts, policies, lanes, API keys, replays.

The states of a task:

    PENDING ──claim──▶ IN_FLIGHT ──2xx──▶ SUCCEEDED
       ▲  │                │ ├── Wait ──▶ PENDING
       │  └─cancel─▶ CANCELLED◀─ cancel ─┤ └── Stop ──▶ EXHAUSTED (reason) ──replay──▶ PENDING

This module does no I/O. Times are epoch milliseconds on the store's clock, durations milliseconds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec


class Status(IntEnum):
    """The status of a task. Stores keep the number; API and logs show the name."""

    PENDING = 0
    IN_FLIGHT = 1
    SUCCEEDED = 2
    EXHAUSTED = 3
    CANCELLED = 4

    is_finished: bool
    """Whether no attempt follows, unless an operator replays the task."""

    def __init__(self, number: int) -> None:
        self.is_finished = number > 1  # neither PENDING nor IN_FLIGHT


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.PENDING: frozenset({Status.IN_FLIGHT, Status.CANCELLED}),
    Status.IN_FLIGHT: frozenset(
        {Status.PENDING, Status.SUCCEEDED, Status.EXHAUSTED, Status.CANCELLED}
    ),
    Status.SUCCEEDED: frozenset(),
    Status.EXHAUSTED: frozenset({Status.PENDING}),
    Status.CANCELLED: frozenset(),
}
"""The statuses that may follow each status."""

LOST = "lost"
"""The outcome of an attempt whose worker disappeared: its real outcome is unknown."""


class TaskContent(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The request to send, and its target. A store keeps it packed, and encrypted if configured."""

    url: str
    method: str = "POST"
    headers: dict[str, str] = {}
    body: bytes = b""
    body_ref: str | None = None
    """The object in the `BodyStore` that contains the body; None if `body` contains it."""
    body_size: int = 0
    checksum: bytes | None = None
    """SHA-256 of a body that the service wrote to the `BodyStore`."""
    etag: str | None = None
    """The entity tag of the caller's object `body_ref` when the task was added. A different entity
    tag later shows that the caller has replaced the object."""
    service_owns_body: bool = msgspec.field(default=False, name="owned")  # stored by this name
    """Whether the service wrote the object `body_ref`, and deletes it with the task."""
    overrides: dict[str, Any] | None = None
    """Policy fields that this task overrides."""
    callback_url: str | None = None
    trace: str | None = None
    """The `traceparent` header of the request that created the task."""


class Task(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """One durable call, as stored."""

    id: str
    """A UUIDv7 in its text form."""
    tenant: str
    lane: str
    """The name of its lane: `tenant/scheme:host:port`."""
    key: str
    """The idempotency key, sent with every attempt; never changes."""
    fingerprint: bytes
    """A digest of the request that created the task: another request with the same idempotency
    key but a different digest is a conflict. Empty when the caller gave no idempotency key."""
    packed_content: bytes
    """A `TaskContent`, packed and, if keys are configured, encrypted."""
    body_ref: str | None = None
    """The object to delete with the task: `TaskContent.body_ref` if the service owns it."""
    policy_id: str = "default"
    policy_version: int | None = None
    """The version that the caller pinned; None: the newest version applies."""
    created_at: int = 0
    """Set by the store when the task is added."""
    next_attempt_at: int = 0
    """When the next attempt is due. A new task may have `NewTask.delay_ms` instead."""
    started_at: int = 0
    """When the first attempt was due: the policy's `total_budget` of time counts from here. A
    replay resets it."""
    status: Status = Status.PENDING
    reason: str | None = None
    """Why the task is EXHAUSTED."""
    attempts: int = 0
    """Attempts made, including lost ones."""
    attempts_before_replay: int = 0
    """Attempts made before the last replay. `attempts` includes them, but the policy does not
    count them."""
    lost_attempts: int = 0
    """Attempts since the last replay whose worker disappeared, perhaps before it sent them. The
    policy does not count them, but their number is limited."""
    previous_delay: float | None = None
    """The delay, in seconds, that the last decision set. It is an input of the next decision, like
    `backoff_offset` and `last_outcome_kind`."""
    backoff_offset: int = 0
    """Counted attempts when an exact hint of the server last restarted the backoff, which grows
    with the attempts since then; 0 if there was no such hint."""
    last_outcome_kind: str | None = None
    """The kind of the last outcome; None before the first attempt."""
    version: int = 0
    """Incremented by every change of the task, except a request to cancel it."""
    worker: str | None = None
    """The worker that has the lease, while IN_FLIGHT."""
    wake_at: int = 0
    """The time by which claims select the task: `next_attempt_at` while PENDING, the end of the
    lease while IN_FLIGHT."""
    cancelling: bool = False
    """Whether the task was cancelled during an attempt: no further attempt follows."""
    replays: int = 0
    finished_at: int | None = None
    """When the task became terminal."""

    def as_stored(
        self, created_at: int, due: int, *, wake_at: int | None = None, worker: str | None = None
    ) -> Task:
        """Return this new task as it is first stored: only fields that a caller may set are copied.

        Its first attempt is due at `due`. With `worker`, it is leased to that worker at once, until
        `wake_at`.
        """
        return Task(
            id=self.id,
            tenant=self.tenant,
            lane=self.lane,
            key=self.key,
            fingerprint=self.fingerprint,
            packed_content=self.packed_content,
            body_ref=self.body_ref,
            policy_id=self.policy_id,
            policy_version=self.policy_version,
            created_at=created_at,
            next_attempt_at=due,
            started_at=due,
            status=Status.PENDING if worker is None else Status.IN_FLIGHT,
            worker=worker,
            wake_at=due if wake_at is None else wake_at,
        )

    def status_at(self, now: int) -> Status:
        """Return the status to show: a task that is leased before it is due still is PENDING."""
        is_early = self.status is Status.IN_FLIGHT and now < self.next_attempt_at
        return Status.PENDING if is_early else self.status


class Decision(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The verdict of the core after an attempt, and the inputs of that verdict."""

    action: str
    """`done`, `wait` or `stop`."""
    reason: str | None = None
    delay_ms: float | None = None
    ceiling_ms: float | None = None
    """Upper bound of the delay, before jitter."""
    jitter: str | None = None
    """The kind of jitter by which the delay was drawn below the ceiling; None: no jitter."""
    hint_ms: float | None = None
    hint_source: str | None = None
    policy_version: int | None = None
    budget: float | None = None
    """Balance of the retry budget when the verdict was made."""
    breaker: str | None = None
    """State of the breaker when the verdict was made."""


class AttemptRecord(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One entry of the attempt log of a task."""

    number: int
    scheduled_at: int
    started_at: int
    duration_ms: float | None = None
    dns_ms: float | None = None
    connect_ms: float | None = None
    tls_ms: float | None = None
    first_byte_ms: float | None = None
    remote: str | None = None
    """The address that was connected to."""
    status: int | str | None = None
    """The HTTP status, or the name of a gRPC status code."""
    error: str | None = None
    error_class: str | None = None
    outcome: str
    """The kind of the outcome, or `lost`."""
    decision: Decision | None = None
    excerpt: str | None = None
    """The beginning of the response: shortened, redacted, printable."""
    truncated: bool = False
    """Whether the response is longer than the excerpt."""
    worker: str | None = None


class PolicyVersion(msgspec.Struct, kw_only=True, gc=False):
    """One version of a tenant's policy; `document` is its JSON."""

    tenant: str
    id: str
    version: int
    document: bytes
    created_at: int = 0


class LaneRecord(msgspec.Struct, kw_only=True, gc=False):
    """The queue of one downstream, and the breaker state that all workers share."""

    name: str
    tenant: str
    parked_until: int | None = None
    """No task is claimed before this time. After it the lane is half-open: at most
    `probes` tasks are leased at a time, until the lane is unparked or resumed."""
    probes: int = 0
    consecutive_opens: int = 0
    """How often in a row the breaker has opened. It stays open longer each time."""
    paused: bool = False
    """Whether an operator paused the lane, until it is resumed."""
    pending: int = 0
    in_flight: int = 0
    exhausted: int = 0
    last_claim_at: int | None = None
    """When tasks of the lane were last claimed."""


class ApiKeyRecord(msgspec.Struct, kw_only=True, gc=False):
    """The digest of an API key, and its tenant. The key itself is not stored."""

    id: str
    tenant: str
    digest: bytes
    name: str = ""
    created_at: int = 0
    revoked_at: int | None = None


class ReplayRecord(msgspec.Struct, kw_only=True, gc=False):
    """A job that replays dead letters; its cursor is stored, so that it survives a crash."""

    id: str
    tenant: str
    lane: str | None = None
    policy_id: str | None = None
    reason: str | None = None
    before: int = 0
    """Only dead letters that became EXHAUSTED at this time or earlier are replayed."""
    rate: float = 0.0
    """Tasks per second; 0: no limit."""
    matched: int = 0
    """Dead letters that matched when the job was created."""
    replayed: int = 0
    cursor: str | None = None
    status: str = "running"
    """`running`, `done` or `cancelled`."""
    created_at: int = 0
    next_at: int = 0
    """When the next step is due, according to the rate."""
    finished_at: int | None = None
