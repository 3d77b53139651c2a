"""The interface of a store (`Store`): the operations that the service needs from it.

A store has two parts. `TaskStore` has everything that changes or counts tasks and lanes. Each
engine implements these operations in its own language, because they have to be fast and atomic.
`RecordStore` keeps small records by key, such as API keys and heartbeats. Each engine implements
four operations, and `tarry.service.records` has the rules of all records, once.

Every implementation follows these rules, which one conformance suite checks:

* Every call may be repeated after an error or a lost reply. The same change is not made twice: a
  repeated `claim` or `sweep` continues with other tasks.
* A call that raises `StoreUnavailable` may still take effect seconds later, after the caller has
  repeated it: the request may wait in a network buffer or at a busy server. `finish`, `release` and
  `release_unknown_leases` depend on the versions of tasks, so a late effect does not change a task
  that was leased or finished meanwhile.
* The changes of a call are durable when it returns. `add`, `finish` and `release` take batches, and
  calls that wait are committed together (see `tarry.service.group_commit`), whether they are
  awaited or not. If one of them raises `StoreUnavailable`, it has applied its whole batch or
  nothing of it. A store that divides tenants among servers (Redis Cluster) promises this only for
  the tasks of each tenant: no transaction spans its servers. The caller repeats the batch in both
  cases.
* A call that is cancelled raises `CancelledError`, even if a reply arrives at the same time. It may
  still take effect.
* The store's clock decides what is due; `claim` returns the time of that clock. Times are epoch ms.
* The cost of a call depends on the number of tasks that it returns or changes, not on the number of
  stored tasks and lanes. Only `count_tasks` reads all tasks of a tenant, and `counters` reads all
  lanes.
* Counters are updated with each change, not computed when they are read.
* Changes of one task are atomic. Every change of a task increments its version, except a request to
  cancel the task and the renewal of a lease by `claim`. `finish` and `release` detect a lost lease
  by the version.
* Changing a returned value does not change the store.
* An id that is unknown, malformed or of another tenant is treated as missing.

A task is *live* while it is PENDING or IN_FLIGHT, and *finished* when it is SUCCEEDED, EXHAUSTED or
CANCELLED. The operation `finish` ends an attempt; its task is finished only if no retry follows.

A lane is the queue of one downstream. It is *parked* while the downstream's breaker is open. After
that it is *half-open*: only a few tasks, the probes, are leased at a time, until `unpark`.
"""

from __future__ import annotations

from enum import StrEnum
from math import exp
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service.model import (  # noqa: TC001 - msgspec reads the types
    AttemptRecord,
    LaneRecord,
    Status,
    Task,
    TaskContent,
)
from tarry.wire.tasks import DownstreamLimits, WaitReason  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from tarry.service.model import (
        PolicyVersion,
        ReplayRecord,
    )

T = TypeVar("T")

MAX_BUSIEST_LANES = 100
MAX_DUE_LANES = 100
MAX_PAGE_BYTES = 2 << 20
"""A page of tasks, attempts, policies or records ends with the item that reaches this size. The
size is that of the stored content of tasks, of encoded attempts, of the documents of policies, or
of the values of records."""
MAX_LISTED_RECORDS = 1_000
"""The number of records that `RecordStore.list_records` returns by default."""
POLICY_RETENTION_MS = 86_400_000
"""How long a replaced version of a policy is kept although no task refers to it."""
BUDGET_DECAY_MS = 10_000
"""The value of a retry budget decays to 1/e in this time, see `Store.add_to_budgets`."""


def decay_budget(value: float, elapsed_ms: float) -> float:
    """Return the value of a retry budget after this time."""
    return value * exp(-max(0.0, elapsed_ms) / BUDGET_DECAY_MS)


class LeaseTerms(msgspec.Struct, frozen=True):
    """For which worker, how early and for how long a call leases tasks.

    A task is leased at most `horizon_ms` (the horizon) before its `wake_at`. The lease ends
    `length_ms` after that time, or `length_ms` from now if the task is overdue.
    """

    worker: str
    length_ms: int
    horizon_ms: int


class NewTask(msgspec.Struct, array_like=True, gc=False):
    """A task to add.

    Its first attempt is due `delay_ms` from now or, if `delay_ms` is None, at
    `task.next_attempt_at`. If that time is in the past, the attempt is due now. The store ignores
    fields of `task` that it sets itself, such as status and attempts.
    """

    task: Task
    delay_ms: int | None = None
    lease_on_add: bool = False
    """Lease the task to the worker that adds it, if the task is due within the horizon and its lane
    is neither paused nor parked nor half-open."""


class Ingest(NewTask, kw_only=True, array_like=True, gc=False):
    """A task to add with its unpacked content, which the process that adds it can use at once."""

    content: TaskContent
    """What `task.packed_content` contains; the store ignores it."""


class AddStatus(StrEnum):
    """The result of adding a task."""

    ADDED = "added"
    EXISTING = "existing"
    """A task with this idempotency key and fingerprint is stored already. A key can be used again
    after its task was cancelled or deleted."""
    CONFLICT = "conflict"
    """A task with this idempotency key and another fingerprint is stored already."""
    OVER_QUOTA = "over_quota"
    """The tenant has reached its quota of live tasks; the task was not stored."""
    TOO_MANY_LANES = "too_many_lanes"
    """The task needs a new lane, but the tenant has reached its quota of lanes. The task was not
    stored."""


class AddResult(msgspec.Struct, gc=False):
    """The result for one new task.

    `task` is the task of the caller if it was added or rejected, else the one that is stored.
    """

    status: AddStatus
    task: Task
    leased: bool = False


class StoreLost(StoreUnavailable):
    """The store, or a partition of it, was emptied or replaced after it was opened.

    Nothing is written to it until it is restored.
    """


class ClaimResult(msgspec.Struct):
    """The tasks that a claim has leased, sorted by due time."""

    now: int
    tasks: list[Task]
    consecutive_opens_by_lane: dict[str, int]
    """For each half-open lane of these tasks: how often in a row its breaker has opened."""
    next_at: int | None
    """The next claim cannot lease a task before this time; None: no task waits.

    Tasks of paused lanes are ignored. If all probes of a half-open lane are leased, the next task
    of the lane can be leased when the first of these leases ends. If no task was claimed and no
    lease renewed, `next_at` is later than `now`."""
    lost_attempts: int = 0
    """The number of attempts that this claim has logged as lost: their leases had expired."""
    renewed_tasks: list[Task] = []
    """Tasks whose leases had expired and were renewed, because the claiming worker has them."""
    errors: dict[int, StoreUnavailable] = {}
    """The error of each partition that has failed, which may have leased tasks nevertheless."""


class TaskResult(msgspec.Struct, kw_only=True, gc=False):
    """What `finish` writes for a leased task; fields as in `Task`, unless described here."""

    task: Task
    """The task as it was leased."""
    attempt: AttemptRecord | None
    """The entry for the attempt log; None: no attempt was made, so no attempt is counted."""
    status: Status
    reason: str | None = None
    next_attempt_at: int = 0
    """Required if `status` is PENDING."""
    renewed_lease: LeaseTerms | None = None
    """A lease for the next attempt, if `status` is PENDING and that attempt is due within the
    horizon. The stored status then stays IN_FLIGHT. The version is incremented only once."""
    previous_delay: float | None = None
    backoff_offset: int = 0
    last_outcome_kind: str | None = None
    callback_task: Task | None = None
    """A task to add in the same transaction, if `finish` returns APPLIED and no other task has its
    idempotency key. No quota applies to it."""


class FinishStatus(StrEnum):
    """What `finish` or `release` returns for one task."""

    APPLIED = "applied"
    SUPERSEDED = "superseded"
    """The lease was lost, or the task was deleted, so nothing was changed. A lease is not lost when
    it expires, but when a later claim finds the expired lease."""
    CANCELLED = "cancelled"
    """A cancellation had been requested. The attempt, if any, is logged, and the task is CANCELLED.
    If the attempt succeeded, the task is SUCCEEDED instead, and `finish` returns APPLIED."""


class Release(msgspec.Struct, gc=False):
    """A lease to release before the attempt starts; `task` is the task as it was leased.

    The task keeps its due time, also if the attempt is deferred: it is late from then on.
    """

    task: Task
    deferred_until: int | None = None
    """The task is not due for claims before this time."""


class LaneLimits(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The limits of a lane that a process has found, see `tarry.core.adaptive_limit`."""

    lane: str
    rate: float | None
    """Attempts per second; None: not limited."""
    concurrency: int
    """Attempts at a time."""


class ConfiguredLimits(msgspec.Struct, frozen=True):
    """Limits and pauses that operators have set, and the number of processes that share them."""

    version: int = 0
    """A number that grows with each change of the limits, and each pause and resumption. It is
    smaller after a failover that has lost such changes."""
    process_count: int = 1
    """The number of processes that lease tasks, at least 1; they share the limits. It is the number
    of records of `PROCESS_KIND`, or comes from a source that detects the exit of a process
    sooner."""
    by_lane: dict[str, DownstreamLimits] = {}
    paused_lanes: frozenset[str] = frozenset()
    """The names of the paused lanes. A process also stops the tasks that it has leased there."""


class StoredTaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter for tasks; None matches all."""

    status: Status | None = None  # as stored: a task leased before its due time is IN_FLIGHT
    is_live: bool = False
    """Whether only live (PENDING or IN_FLIGHT) tasks match."""
    policy_id: str | None = None
    lane: str | None = None
    lane_prefix: str | None = None
    """Matches tasks of lanes whose names start with this text."""
    reason: str | None = None
    key: str | None = None
    created_from: int | None = None  # times in epoch ms; the limits of both ranges are included
    created_until: int | None = None
    finished_from: int | None = None
    finished_until: int | None = None
    # The store cannot decode tasks, so it calls these functions, perhaps in another thread. They
    # are called only for tasks that match all other fields.
    matches_attempt: Callable[[AttemptRecord], bool] | None = None
    """Called with the latest entry of the attempt log. Tasks without an entry do not match."""
    matches_content: Callable[[bytes], bool] | None = None
    """Called with `Task.packed_content`."""


class RecordPage(msgspec.Struct, Generic[T]):
    """One page of a list; pass `cursor` to get the next page. It is None on the last page.

    The store reads only a bounded number of rows and bytes for one page. So a page with large items
    may be short although it is not the last one. With a filter that rarely matches, a page may even
    be empty.
    """

    items: list[T]
    cursor: str | None


class CancelStatus(StrEnum):
    """The result of a request to cancel a task."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"
    """The task is IN_FLIGHT, so an attempt may be running. No further attempt follows."""
    FINISHED = "finished"
    """The task was finished before the request, perhaps because it had been cancelled already."""


class RetryNowStatus(StrEnum):
    """The result of a request to retry a task now."""

    DUE = "due"
    """The task was not IN_FLIGHT, and is due now. Its lane may still be parked or paused."""
    IN_FLIGHT = "in_flight"
    """The task is leased, so nothing was changed."""
    SUCCEEDED = "succeeded"
    """The task cannot be retried any more."""
    OVER_QUOTA = "over_quota"
    """The task is finished, and its tenant has reached its quota of live tasks."""


class LaneWriteStatus(StrEnum):
    """The result of a change of a lane that an operator requested."""

    CHANGED = "changed"
    TOO_MANY_LANES = "too_many_lanes"
    """Not changed: the lane does not exist, and its tenant has reached its quota of lanes."""
    TOO_MANY_LIMITED = "too_many_limited"
    """Not changed: the tenant has reached its maximum number of lanes with limits."""


class PolicyWriteStatus(StrEnum):
    """The result of writing or deleting a policy."""

    CREATED = "created"
    """The policy did not exist, or had been deleted."""
    REPLACED = "replaced"
    """The policy existed, and has a new version now."""
    UNCHANGED = "unchanged"
    """The newest version has this document already."""
    DELETED = "deleted"
    CONFLICT = "conflict"
    """Not written, because the policy exists with another document; or not deleted, because live
    tasks use the policy."""
    OVER_QUOTA = "over_quota"
    """Not written, because the tenant has reached its quota of policy versions."""
    MISSING = "missing"


class DueLane(msgspec.Struct, frozen=True, array_like=True):
    """A lane with PENDING tasks that are due."""

    lane: str
    due_at: int
    """The earliest due time of these tasks."""
    waiting_for: WaitReason | None = None
    """`pause`, `breaker` (also if the lane is half-open) or `local-failure`; None: a claim can
    lease tasks of the lane."""


class Counters(msgspec.Struct):
    """The number of stored tasks in each status, and the number of SUPERSEDED results so far."""

    task_counts: dict[Status, int]
    superseded_count: int = 0
    due_lanes: list[DueLane] = []
    """Lanes with PENDING tasks that are due: of each value of `DueLane.waiting_for` the
    `MAX_DUE_LANES` with the earliest due times, sorted by due time and name."""
    busiest_lanes: list[LaneRecord] = []
    """The `MAX_BUSIEST_LANES` lanes with the most PENDING tasks, then by name. Lanes without tasks
    are omitted."""


def select_due_lanes(due_lanes: Iterable[DueLane]) -> list[DueLane]:
    """Return `Counters.due_lanes`, given all lanes with due tasks."""
    selected: list[DueLane] = []
    counts: dict[str | None, int] = {}
    for due_lane in sorted(due_lanes, key=lambda each: (each.due_at, each.lane)):
        counts[due_lane.waiting_for] = count = counts.get(due_lane.waiting_for, 0) + 1
        if count <= MAX_DUE_LANES:
            selected.append(due_lane)
    return selected


class AttemptsOfMinute(msgspec.Struct):
    """The number of attempts in one minute, by outcome; `minute` is the start of the minute."""

    minute: int
    counts_by_outcome: dict[str, int]


class SweepResult(msgspec.Struct):
    """The number of removed tasks, and whether another sweep would find more to remove."""

    removed_task_count: int
    has_more: bool


class Retention(msgspec.Struct, frozen=True):
    """How long finished tasks stay stored."""

    succeeded_ms: int  # also for cancelled tasks
    exhausted_ms: int


class DeletedPolicy(msgspec.Struct, frozen=True, gc=False):
    """A deleted policy to which tasks may refer: the numbers of its versions are not reused."""

    tenant: str
    id: str
    last_version: int


class LaneExport(msgspec.Struct, frozen=True, gc=False):
    """Everything that is stored about a lane, except its tasks."""

    lane: LaneRecord
    """Its numbers of tasks are ignored by `Store.import_records`, which counts imported tasks."""
    limits: DownstreamLimits | None = None
    """See `Store.set_limits`."""
    rate: float | None = None
    """See `LaneLimits`, also for `concurrency`."""
    concurrency: int | None = None
    budget: float = 0.0
    """The value of the retry budget at `budget_at`, see `Store.add_to_budgets`."""
    budget_at: int = 0


class TaskAttempt(msgspec.Struct, frozen=True, gc=False):
    """One entry of the attempt log of a task."""

    tenant: str
    task_id: str
    attempt: AttemptRecord


class ReplayedTask(msgspec.Struct, frozen=True, gc=False):
    """A task of a replay that was not counted as finished yet; see `ReplayRecord.unfinished`."""

    replay_id: str
    task_id: str


class RecordKind(StrEnum):
    """The kinds of records of a store, in the order in which `import_records` needs them."""

    POLICY = "policies"
    """`PolicyVersion`: all versions of a policy in ascending order."""
    DELETED_POLICY = "deleted policies"
    LANE = "lanes"
    """`LaneExport`."""
    RECORD = "records"
    """`StoredRecord`, except those that expire."""
    TASK = "tasks"
    """`Task` in every status; the tasks of each tenant in the order of adding."""
    ATTEMPT = "attempts"
    """`TaskAttempt`; those of each task in ascending order."""
    REPLAY = "replays"
    """`ReplayRecord` without its cursors, whose format depends on the store. A replay without a
    cursor begins again with the oldest dead letter. It finds none that it has replayed: these are
    not dead letters any more, or became EXHAUSTED after `ReplayRecord.before`."""
    REPLAYED_TASK = "replayed tasks"


class RecordAddress(NamedTuple):
    """The name of a record."""

    owner: str
    """A tenant, a lane (its name contains a slash), or empty: the service. A record of a lane is
    written only if the lane exists, and is removed with the lane."""
    kind: str
    key: str = ""


class StoredRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A small value that is stored under an address."""

    owner: str
    kind: str
    key: str
    value: bytes
    written_at: int
    """When the store wrote the record."""
    expires_at: int | None = None
    """From then on, the record is not found any more, and `TaskStore.sweep` removes it."""


class RecordChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record to write or delete."""

    owner: str
    kind: str
    key: str
    value: bytes | None
    """None: delete the record."""
    expected: bytes | None = None
    """The change conflicts unless this is the stored value; None: unless there is no record."""
    is_unconditional: bool = False
    """Whether `expected` is ignored."""
    lifetime_ms: int | None = None
    """The record expires after this time; None: it does not expire."""


PROCESS_KIND = "processes"
"""The kind of the records of processes that lease tasks, which `TaskStore.load_limits` counts."""


class RecordStore(Protocol):
    """Durable storage of small records that are seldom changed."""

    async def read_records(
        self, addresses: Sequence[RecordAddress]
    ) -> tuple[int, list[StoredRecord | None]]:
        """Return the time of the store, and each record or None, in the order of the addresses."""
        ...

    async def list_records(
        self, owner: str, kind: str, *, after: str = "", limit: int = MAX_LISTED_RECORDS
    ) -> tuple[int, list[StoredRecord]]:
        """Return the time of the store, and records with keys greater than `after`, by key.

        Fewer are returned if their size reaches `MAX_PAGE_BYTES`, but at least one, unless there is
        none. Keys are compared as UTF-8.
        """
        ...

    async def write_records(self, changes: Sequence[RecordChange]) -> bool:
        """Apply all changes, and return True. If one of them conflicts, apply none; return False.

        The changes have different addresses, and their owners are the same tenant or its lanes, or
        all of them are the service. A change that conflicts may have been applied by an earlier
        call that raised `StoreUnavailable`.
        """
        ...


class TaskStore(Protocol):
    """Durable storage of tasks, lanes, policies and replays."""

    async def open(self) -> None:
        """Connect, and migrate the schema to the current version."""
        ...

    async def close(self) -> None:
        """Finish pending calls and release all resources."""
        ...

    @property
    def partition_count(self) -> int:
        """The number of partitions, which fail independently; known after `open`."""
        ...

    def partition_of(self, tenant: str) -> int:
        """Return the number of the partition that has all data of a tenant, counted from 0."""
        ...

    async def ping(self, partition: int | None = None) -> int:
        """Make a small write, to check that tasks can be added; return the store's time.

        With `partition`, only this partition is checked; otherwise, one that works is sufficient.
        """
        ...

    def add(
        self,
        tasks: Sequence[NewTask],
        terms: LeaseTerms | None = None,
        *,
        quota: int | None = None,
        lane_quota: int | None = None,
    ) -> Awaitable[list[AddResult]]:
        """Add tasks, and return a result for each.

        The fields of an added task that the store sets are set in the caller's `NewTask.task`.
        Tasks of up to `MAX_URGENT_TASKS` are stored before larger batches that wait already.

        `quota` limits the live tasks of each tenant, and `lane_quota` its lanes. A task is rejected
        because of a quota only if it would be added otherwise. If two tasks of a batch have the
        same tenant and idempotency key, the second is EXISTING or CONFLICT. If another task with
        the key is CANCELLED, the new task replaces it: the cancelled task is deleted. `terms` are
        for `lease_on_add`.
        """
        ...

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        """Lease tasks that are due within the horizon, and tasks whose lease has expired.

        Tenants take turns, and of each tenant the least recently served lane comes first. At most
        `limit` tasks, and at most `per_lane` tasks of a lane, are leased. `lane_limits` has lower
        limits by name of a lane. Nothing is leased from lanes that are paused, parked or have a
        limit of 0. A limit of 0 may also be set for a tenant: then all its lanes are skipped. With
        a `limit` of 0, no task is leased, and the result has only `now` and `next_at`.

        Of a lane, tasks with an expired lease come first. If tasks without and with a failed
        attempt are due, a third of the others are retries: (limit + now in ms modulo 3) // 3, so
        that a limit of 1 also selects retries. Of a half-open lane, at most `LaneRecord.probes`
        tasks are leased at a time. A third of them, with the same formula, are tasks without a
        failed attempt, because a task that has failed may be one that always fails. The others are
        retries that are due now, because a target may refuse the first attempt of each task. Then
        come more tasks without a failed attempt, expired leases, retries that are due within the
        horizon, and last, if it is a retry, the task that was leased last as a probe. Within each
        of these groups the order is `wake_at` (the due time, or the end of an expired lease), then
        the order of adding.

        The attempt of another worker's expired lease is logged as lost. The log entry has the
        attempt's due time as its start, and the worker of the lease. The task's next attempt counts
        as due since the end of that lease. If a cancellation of the task was requested, the task is
        not leased but becomes CANCELLED. An expired lease of `terms.worker` is renewed: the task is
        in `ClaimResult.renewed_tasks`, and its version stays the same. CANCELLED and renewed tasks
        count towards `limit` and `per_lane` too.

        Nothing is leased in the partitions `skip`. If some of the others fail, the tasks of the
        rest are returned, with `ClaimResult.errors`.
        """
        ...

    def finish(self, results: Sequence[TaskResult]) -> Awaitable[list[FinishStatus]]:
        """Log ended attempts and write their tasks' next states, unless the lease was lost."""
        ...

    def release(self, releases: Sequence[Release]) -> Awaitable[list[FinishStatus]]:
        """Make leased tasks PENDING again, without counting an attempt.

        If a cancellation was requested, the task becomes CANCELLED. For a lost lease the status is
        SUPERSEDED, but `Counters.superseded_count` stays the same, because no result was lost.
        """
        ...

    def record_start(self, slot: int, task: Task) -> None:
        """Record that an attempt of a leased task starts.

        The record shows after a crash of this process which of its leased tasks were attempted. It
        replaces the last record of this process with the same `slot`, a number from 0, and applies
        to this version of the task only. It need not survive a crash of the machine.
        """
        ...

    async def release_unknown_leases(
        self, terms: LeaseTerms, known_ids: Collection[str], partition: int | None = None
    ) -> int:
        """Release all leases of `terms.worker`, except those of tasks with one of `known_ids`.

        With `partition`, only those of this partition are released.

        Called after a lost reply: the store may have leased tasks of which the worker does not
        know. The tasks keep their due times and their deferrals, and no attempt is counted, also if
        a lease has expired. A deferral ends `terms.length_ms` before the lease does. If a
        cancellation was requested, the task becomes CANCELLED. A call that takes effect late
        releases no lease that the worker has got after the call. Return the number of released
        leases.
        """
        ...

    async def park(self, lane: str, until: int, *, probes: int, consecutive_opens: int) -> None:
        """Lease no task of the lane until this time, and afterwards `probes` tasks at a time.

        `consecutive_opens` is how often in a row the breaker has opened. It is 0 if the breaker is
        closed, and the target cannot be attempted for a local reason. The values of an earlier call
        are overwritten. Like `pause`, this creates the lane if it does not exist, but without a
        quota. The part of the lane's name before the first slash is the tenant.
        """
        ...

    async def unpark(self, lane: str) -> None:
        """End the parking of a lane whose downstream has recovered; a paused lane stays paused."""
        ...

    async def resume(self, lane: str) -> None:
        """End the parking and the pause of a lane."""
        ...

    async def pause(self, lane: str, *, lane_quota: int | None = None) -> LaneWriteStatus:
        """Lease no task of the lane until `resume`; `lane_quota` limits the tenant's lanes."""
        ...

    async def record_lane_limits(self, limits: Sequence[LaneLimits]) -> None:
        """Store the limits of lanes, so that they are kept over a restart.

        The limits of an earlier call are overwritten. Lanes that do not exist are ignored.
        """
        ...

    async def list_lane_limits(self, limit: int, partition: int | None = None) -> list[LaneLimits]:
        """Return the limits of up to `limit` lanes whose rate is limited, last used lanes first.

        With `partition`, only lanes of this partition are returned. A lane is used by a claim and
        by `add_to_budgets`.
        """
        ...

    async def set_limits(
        self,
        lane: str,
        limits: DownstreamLimits | None,
        *,
        max_limited: int,
        lane_quota: int | None = None,
    ) -> LaneWriteStatus:
        """Set the limits of a lane, which is created if needed; None removes its limits.

        `max_limited` bounds the lanes of the tenant that have limits, and `lane_quota` all of them.
        """
        ...

    async def load_limits(self, known: ConfiguredLimits) -> ConfiguredLimits | None:
        """Return the limits and pauses of lanes; None if nothing has changed since `known`."""
        ...

    async def add_to_budgets(self, changes: dict[str, float]) -> dict[str, float]:
        """Add to the values of the retry budgets of lanes; return the new values by lane.

        A value decays as in `decay_budget`, and is 0 at first. Unknown lanes are ignored. A call
        that fails is not repeated, because it may have been applied.
        """
        ...

    async def list_lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> RecordPage[LaneRecord]:
        """List the lanes of one tenant, or of all tenants (None), sorted by name."""
        ...

    async def get_lane(self, name: str) -> LaneRecord | None:
        """Return a lane, or None if it does not exist."""
        ...

    async def get_task(self, tenant: str, task_id: str) -> Task | None:
        """Return a task, or None if it does not exist."""
        ...

    async def list_tasks(
        self,
        tenant: str,
        task_filter: StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
        oldest_first: bool = False,
    ) -> RecordPage[Task]:
        """List tasks, newest first by default.

        Raises `ConfigurationError` for a malformed cursor.
        """
        ...

    async def count_tasks(self, tenant: str, task_filter: StoredTaskFilter) -> int:
        """Return the number of tasks that match a filter."""
        ...

    async def last_attempts(self, tenant: str, task_ids: Sequence[str]) -> dict[str, AttemptRecord]:
        """Return the latest entry of the attempt log of each task that has one, by task id."""
        ...

    async def list_attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[AttemptRecord]:
        """Return up to `limit` attempts of a task, starting after attempt number `after`.

        Fewer are returned if their size reaches `MAX_PAGE_BYTES`. Attempts are numbered from 1, and
        `Task.attempts` is the number of the last one.
        """
        ...

    async def list_attempts_of_tasks(
        self,
        tenant: str,
        task_filter: StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
    ) -> RecordPage[tuple[str, AttemptRecord]]:
        """List attempts with the ids of their tasks: newest task first, its attempts in order.

        Raises `ConfigurationError` for a malformed cursor.
        """
        ...

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task; if it is leased, only request its cancellation. None: no such task."""
        ...

    async def retry_now(
        self, tenant: str, task_id: str, *, quota: int | None = None
    ) -> RetryNowStatus | None:
        """Make a task due now, unless it is IN_FLIGHT or SUCCEEDED; None: no such task.

        A PENDING task that is overdue keeps its due time. An EXHAUSTED or CANCELLED task is
        replayed: `first_due_at` is set to now, and `replays` is incremented.
        `attempts_before_replay` is set to `attempts`, so that the policy does not count the
        attempts so far. `lost_attempts`, `previous_delay`, `backoff_offset`, `last_outcome_kind`
        and `cancelling` are reset. `quota` limits the live tasks of the tenant; a finished task
        that would exceed it does not change.
        """
        ...

    async def start_replay(self, replay: ReplayRecord) -> ReplayRecord:
        """Store a replay, whose first step is due at once, and return it.

        If a replay with this id is stored already, return the stored one unchanged. The store sets
        the times. A `before` of 0 or in the future is set to now.
        """
        ...

    async def get_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """Return a replay, or None if it does not exist."""
        ...

    async def list_replays(self, *, running: bool, tenant: str | None = None) -> list[ReplayRecord]:
        """Return up to 100 replays, newest first.

        If `running`, only replays that need further steps are returned, by due time.
        """
        ...

    async def replay_step(
        self,
        replay_id: str,
        cursor: str | None,
        task_ids: Sequence[str],
        next_cursor: str | None,
        *,
        quota: int | None = None,
    ) -> ReplayRecord | None:
        """Make a step of a replay, if it is due; return the replay, or None if it does not exist.

        A running replay replays those of the tasks that are dead letters. `task_ids` are the page
        of the replay's dead letters at `cursor`. If the replay has another cursor, another process
        has made this step, and nothing is changed. `next_cursor` is the cursor of the next page;
        None: all dead letters were replayed. After n replayed tasks the next step is due n / rate
        seconds later, counted from the due time of this step. So a replay that is behind catches
        up, on at most `rules.replays.MAX_REPLAY_LAG_MS`.

        `quota` limits the live tasks of the tenant. If only some of the tasks can be replayed, or
        none, the replay continues with the others after `rules.replays.REPLAY_QUOTA_PAUSE_MS`.

        Each step also counts replayed tasks that have finished since the last step. The replay is
        done when all have finished. A task that was deleted is counted as `DELETED`.
        """
        ...

    async def cancel_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """End a replay; tasks that it has replayed do not change. None: no such replay."""
        ...

    async def delete_dead_letters(self, tenant: str, task_ids: Sequence[str]) -> int:
        """Remove the dead letters among these tasks; return their number.

        Their attempt logs are removed, too. `list_orphaned_bodies` then returns their bodies.
        """
        ...

    async def put_policy(
        self, policy: PolicyVersion, *, replace: bool, quota: int | None = None
    ) -> tuple[PolicyWriteStatus, PolicyVersion]:
        """Create a policy; if it exists and `replace` is true, add a version to it.

        `quota` limits the versions of all policies of the tenant. Returns the newest version, or
        the given policy if it was not stored. The store numbers versions from 1 and ignores
        `policy.version`. The numbers of a deleted policy are not reused as long as a task refers to
        the policy. So the version to which a task refers (`Task.policy_version`) never has another
        document.
        """
        ...

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> PolicyVersion | None:
        """Return a version of a policy, by default the newest, or None if it does not exist."""
        ...

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> RecordPage[PolicyVersion]:
        """List the newest version of each policy, sorted by id."""
        ...

    async def delete_policy(self, tenant: str, policy_id: str) -> PolicyWriteStatus:
        """Delete all versions of a policy, unless live tasks use it."""
        ...

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the event loop when another process may have made tasks claimable.

        This is the case when the other process has added, released or replayed tasks that are due,
        or has unparked or resumed a lane. Called once, while the store is open, and applies until
        `close`. Best effort: a call may be missing, late or needless, so the caller also polls.
        """
        ...

    async def try_lead(self) -> bool:
        """Return whether this store is the leader; become the leader if there is none.

        Of all open stores with the same data, at most one is the leader, until it is closed or its
        process ends. The result is also True if a store cannot determine the leader.
        """
        ...

    async def counters(self, tenant: str | None = None) -> Counters:
        """Return the counters of one tenant, or their sums over all tenants (None)."""
        ...

    async def attempts_per_minute(
        self, tenant: str | None, *, since: int
    ) -> list[AttemptsOfMinute]:
        """Return the attempt counts of one tenant, or of all tenants (None), sorted by minute.

        The list starts with the minute of `since`, or a day ago if that is later. Minutes without
        attempts are omitted.
        """
        ...

    async def sweep(self, retention: Retention, limit: int) -> SweepResult:
        """Remove up to `limit` finished tasks after their retention time, with their attempt logs.

        `list_orphaned_bodies` then returns their bodies. While a replay of a tenant runs, the
        tenant's dead letters stay, because the replay has counted them. Replays that have ended are
        removed after the retention time of dead letters, and records when they have expired. Lanes
        without tasks are removed, with their records. A lane stays while it is paused or parked, or
        has limits that an operator has set. A version of a policy that was replaced
        `POLICY_RETENTION_MS` ago is removed, unless it is the `Task.policy_version` of a task.
        """
        ...

    async def list_orphaned_bodies(self, limit: int) -> list[str]:
        """Return references to orphaned bodies (their task was removed) in the `BodyStore`."""
        ...

    async def forget_orphaned_bodies(self, refs: Sequence[str]) -> None:
        """Remove references to orphaned bodies, after the `BodyStore` has deleted the bodies."""
        ...

    async def export_records(
        self, kind: RecordKind, *, cursor: str | None = None, limit: int = 1000
    ) -> RecordPage[Any]:
        """Return a page of the records of one kind, of all tenants; see `RecordKind` for the types.

        The records have everything that another store needs to continue in the same state. Not
        exported are the numbers of attempts per minute and of superseded results, the positions of
        lanes in the rotation, references to orphaned bodies, and records that expire. A page ends
        when its tasks, attempts, documents or values reach `MAX_PAGE_BYTES`.
        Changes between two pages may be missing, so no service may run on the store meanwhile.
        """
        ...

    async def import_records(self, kind: RecordKind, records: Sequence[Any]) -> None:
        """Store records of one kind with all their fields, including times and versions.

        The kinds are imported in the order of `RecordKind`, and the records of a kind in the order
        of the export, into a store that is not served. Importing records again changes nothing: a
        task whose id or idempotency key is stored is skipped, and likewise other records that
        exist. A `LaneExport` overwrites the lane. The counters of tenants, lanes and policies
        include the imported tasks. Each version of a policy counts as replaced when the next one
        was created. A leased task keeps its worker and the end of its lease: a claim after that
        time logs its attempt as lost. Attempts of unknown tasks are ignored. No quota applies.
        """
        ...

    async def has_other_processes(self) -> bool | None:
        """Return whether another process uses the store; None: the store cannot detect it."""
        ...


class Store(TaskStore, RecordStore, Protocol):
    """Durable storage of everything that the service keeps."""
