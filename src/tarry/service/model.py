"""What the service keeps: tasks, their attempts, policies, lanes, and the table of states.

    PENDING ──claim──▶ IN_FLIGHT ──2xx──▶ SUCCEEDED
       ▲  │                │ ├── Wait ──▶ PENDING
       │  └─cancel─▶ CANCELLED◀─ cancel ─┤ └── Stop ──▶ EXHAUSTED (reason) ──replay──▶ PENDING

Plain values without I/O. Times are epoch milliseconds on the store's clock, durations milliseconds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec


class Status(IntEnum):
    """Where a task stands. Stores keep the number; people see the name."""

    PENDING = 0
    IN_FLIGHT = 1
    SUCCEEDED = 2
    EXHAUSTED = 3
    CANCELLED = 4

    is_terminal: bool
    """Whether no attempt follows by itself."""

    def __init__(self, number: int) -> None:
        self.is_terminal = number > 1


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.PENDING: frozenset({Status.IN_FLIGHT, Status.CANCELLED}),
    Status.IN_FLIGHT: frozenset(
        {Status.PENDING, Status.SUCCEEDED, Status.EXHAUSTED, Status.CANCELLED}
    ),
    Status.SUCCEEDED: frozenset(),
    Status.EXHAUSTED: frozenset({Status.PENDING}),
    Status.CANCELLED: frozenset(),
}
"""From each status, the ones that may follow."""

LOST = "lost"
"""The outcome of an attempt whose worker went away: nobody knows what came of it."""


class TaskContent(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What is sent, and where. A store keeps it packed, and perhaps sealed, and never looks in."""

    url: str
    method: str = "POST"
    headers: dict[str, str] = {}
    body: bytes = b""
    body_ref: str | None = None
    """The object that holds the body, when it is not here."""
    body_size: int = 0
    checksum: bytes | None = None
    """SHA-256 of a body that lies elsewhere."""
    etag: str | None = None
    """The tag of a caller's own object, which changes when somebody writes it anew."""
    owned: bool = False
    """Whether `body_ref` is ours to delete."""
    overrides: dict[str, Any] | None = None
    """Fields of the policy that this task has otherwise."""
    callback_url: str | None = None
    trace: str | None = None
    """The `traceparent` of the request that made the task."""


class Task(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """One call that the service keeps, as a store keeps it."""

    id: str
    """A UUIDv7 in its text form."""
    tenant: str
    lane: str
    """The queue of one downstream: `tenant/scheme:host:port`."""
    key: str
    """The `Idempotency-Key` of every attempt; never changes."""
    fingerprint: bytes
    """A digest of what the caller asked for: the same key with another one is a conflict. Empty
    where the caller gave no key."""
    content: bytes
    """A `TaskContent`, packed."""
    body_ref: str | None = None
    """The object to delete with the task: a copy of the one in `content`, where it is ours."""
    policy_id: str = "default"
    policy_version: int | None = None
    """The version that the caller pinned; None follows the newest."""
    created_at: int = 0
    """Set by the store that adds it."""
    next_attempt_at: int = 0
    """When to make the next attempt; a task that is added may say it as `delay` instead."""
    started_at: int = 0
    """When the first attempt was due: the total budget counts from here. A replay sets it anew."""
    status: Status = Status.PENDING
    reason: str | None = None
    """Why it is EXHAUSTED."""
    attempts: int = 0
    """Attempts made, the lost ones included."""
    forgiven: int = 0
    """Attempts made before the last replay: they do not count against the policy any more."""
    lost: int = 0
    """Attempts since then whose worker went away: nobody knows whether they were made. They do not
    count either, but there may not be many of them."""
    previous_delay: float | None = None
    """Seconds: with `restarted` and `last_kind`, what the next decision has to know."""
    restarted: int = 0
    last_kind: str | None = None
    """The class of the last outcome; None before the first attempt."""
    version: int = 0
    """Changes with every change of the task but a request to cancel."""
    worker: str | None = None
    """Who holds the lease, while IN_FLIGHT."""
    wake_at: int = 0
    """When the task wants attention: `next_attempt_at` or, while IN_FLIGHT, the lease's end."""
    cancelling: bool = False
    """Whether somebody cancelled it while an attempt ran: no other follows."""
    replays: int = 0
    finished_at: int | None = None
    """When it became terminal."""

    def begun(
        self, created_at: int, due: int, *, wake_at: int | None = None, worker: str | None = None
    ) -> Task:
        """Return the task as it begins in a store: with what a caller may set, and nothing else.

        Its first attempt is due then; a worker that holds it at once does so until `wake_at`.
        """
        return Task(
            id=self.id,
            tenant=self.tenant,
            lane=self.lane,
            key=self.key,
            fingerprint=self.fingerprint,
            content=self.content,
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
        """Return the status that people see: a lease taken ahead of its time is no attempt yet."""
        early = self.status is Status.IN_FLIGHT and now < self.next_attempt_at
        return Status.PENDING if early else self.status


class Decision(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What the core said after an attempt, and what it went by."""

    action: str
    """`done`, `wait` or `stop`."""
    reason: str | None = None
    delay_ms: float | None = None
    ceiling_ms: float | None = None
    jitter: str | None = None
    """How the delay was drawn below the ceiling; None: it was not."""
    hint_ms: float | None = None
    hint_source: str | None = None
    policy_version: int | None = None
    budget: float | None = None
    breaker: str | None = None


class AttemptRecord(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One line of a task's attempt log."""

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
    """The HTTP status, or the name of a gRPC code."""
    error: str | None = None
    error_class: str | None = None
    outcome: str
    """The class of the outcome, or `lost`."""
    decision: Decision | None = None
    excerpt: str | None = None
    """The beginning of the answer: bounded, redacted, text."""
    truncated: bool = False
    """Whether the answer has more than the excerpt."""
    worker: str | None = None


class PolicyVersion(msgspec.Struct, kw_only=True, gc=False):
    """One version of a tenant's policy; `document` is its JSON form."""

    tenant: str
    id: str
    version: int
    document: bytes
    created_at: int = 0


class LaneRecord(msgspec.Struct, kw_only=True, gc=False):
    """The queue of one downstream, and the state of its breaker, shared by all workers."""

    name: str
    tenant: str
    parked_until: int | None = None
    """No task is claimed before; after it, `probes` at a time until somebody resumes the lane."""
    probes: int = 0
    opened: int = 0
    """How often in a row the breaker has opened: it stays open for longer each time."""
    paused: bool = False
    """Whether an operator stopped it, for as long as he likes."""
    pending: int = 0
    in_flight: int = 0
    dead: int = 0
    served_at: int | None = None
    """When tasks were last claimed."""


class ApiKey(msgspec.Struct, kw_only=True, gc=False):
    """An API key: its digest, and whose it is."""

    id: str
    tenant: str
    digest: bytes
    name: str = ""
    created_at: int = 0
    revoked_at: int | None = None


class ReplayRecord(msgspec.Struct, kw_only=True, gc=False):
    """A job that brings dead letters back, with a cursor, so that it survives a crash."""

    id: str
    tenant: str
    lane: str | None = None
    policy_id: str | None = None
    reason: str | None = None
    before: int = 0
    """Letters that died after the job was made are not its business."""
    rate: float = 0.0
    """Tasks a second; 0 is no limit."""
    matched: int = 0
    replayed: int = 0
    cursor: str | None = None
    status: str = "running"
    """`running`, `done` or `cancelled`."""
    created_at: int = 0
    next_at: int = 0
    """When the next step is due, by the rate."""
    finished_at: int | None = None
