"""The port: what the service needs of a store, by intent.

Rules for every engine behind it, held by one conformance suite:

* Batch-first, and every call is safe to repeat: after an error or a lost answer the same call again
  comes to the same state.
* What a call has changed is durable when it returns. A call that raises `StoreUnavailable` may have
  changed nothing or everything of its batch.
* The store's own clock decides what is due, and `claim` tells it. Times are epoch milliseconds.
* Cost grows with what a call returns, not with what waits: however many tasks and lanes there are.
* Counts are kept as things happen.
* A task is changed by one step at a time, and each step but a request to cancel raises its version
  by one. What is handed out is a copy.
* Live tasks are those that are PENDING or IN_FLIGHT. An id that is unknown, malformed or another
  tenant's is one that is not there.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from tarry.service.model import AttemptRecord, Status, Task  # noqa: TC001 - structs are sent

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tarry.service.model import ApiKey, LaneRecord, PolicyVersion, ReplayRecord

T = TypeVar("T")

ARREARS = 1000
"""Milliseconds by which the steps of a replay may lag behind its rate and still catch up."""
_LONGEST_PAUSE = 1e12
"""Milliseconds, thirty years: a rate may be a very small number, and a time must fit everywhere."""


class Lease(msgspec.Struct, frozen=True):
    """The right of one worker to run attempts for `length` ms; `horizon`: how far ahead it looks.

    A task is leased no earlier than `horizon` ms before its `next_attempt_at`, and the lease ends
    `length` ms after the later of now and that time.
    """

    worker: str
    length: int
    horizon: int


class NewTask(msgspec.Struct, array_like=True, gc=False):
    """A task to add. Its next attempt is due `delay` ms after it is added, or at its own time.

    A time that has passed is now. The task begins afresh: state that it carries is not looked at.
    """

    task: Task
    delay: int | None = None
    direct: bool = False
    """Lease it to the worker who adds it, if it is due within the horizon and its lane is open:
    not paused, not parked, not half-open."""


class AddStatus(StrEnum):
    """What became of a task that was to be added."""

    ADDED = "added"
    EXISTING = "existing"
    """The key was there, with the same fingerprint. It is there as long as its task is kept."""
    CONFLICT = "conflict"
    """The key was there, with another fingerprint."""
    FULL = "full"
    """The tenant has as many live tasks as it may have; `task` is the one that was not added."""


class AddResult(msgspec.Struct, gc=False):
    """The answer for one new task: `task` is the one that is stored, also when it was there."""

    status: AddStatus
    task: Task
    leased: bool = False


class ClaimResult(msgspec.Struct):
    """What a worker got: leased tasks, earliest first, and what it has to know about them."""

    now: int
    tasks: list[Task]
    probing: dict[str, int]
    """The half-open lanes among theirs, and how often in a row each had opened."""
    next_at: int | None
    """A lower bound for when the same call may find something to claim, as things stand (a paused
    lane gives nothing, a half-open one that is full gives when a lease ends); None when nothing
    waits. It lies ahead of now when nothing could be claimed."""
    lost: int = 0
    """Attempts that were found abandoned, and written to the log as lost."""


class TaskResult(msgspec.Struct, kw_only=True, gc=False):
    """How an attempt ended, and what follows. `task` is the one that was leased.

    PENDING needs `next_attempt_at`. `keep` keeps the lease for it, for a time within the horizon
    (the caller sees to that); the version is then one higher. Without `attempt` none is counted.
    """

    task: Task
    attempt: AttemptRecord | None
    status: Status
    reason: str | None = None
    next_attempt_at: int = 0
    keep: Lease | None = None
    previous_delay: float | None = None
    restarted: int = 0
    last_kind: str | None = None
    callback: Task | None = None
    """A task to add with it, in the same step, if the finish is DONE; its key is its own, and no
    quota holds it back."""


class FinishStatus(StrEnum):
    """What a finish, or a release, came to."""

    DONE = "done"
    SUPERSEDED = "superseded"
    """The lease was lost, or the task is gone: nothing was changed. A lease that ran out is lost
    when another claims the task."""
    CANCELLED = "cancelled"
    """Somebody cancelled the task meanwhile: the attempt is logged, and no other follows. A success
    stays one, and is DONE."""


class Release(msgspec.Struct, gc=False):
    """An unstarted lease to hand back: due when it was, or not before a later time."""

    task: Task
    next_attempt_at: int | None = None


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks to list; None asks for all. `status` is the one that is stored."""

    status: Status | None = None
    policy_id: str | None = None
    lane: str | None = None
    reason: str | None = None


class Page(msgspec.Struct, Generic[T]):
    """A part of a list; `cursor` goes on from here, None ends it.

    A page may be short, or empty, before the end: a filter that matches rarely looks at a bounded
    number of rows at a time.
    """

    items: list[T]
    cursor: str | None


class CancelStatus(StrEnum):
    """What became of a request to cancel."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"
    """It is IN_FLIGHT, so an attempt may be running; none follows."""
    TERMINAL = "terminal"
    """It was terminal already, perhaps by an earlier request to cancel."""


class RetryNowStatus(StrEnum):
    """What became of a request to retry a task now."""

    DUE = "due"
    """It was waiting, or dead, and is due now; its lane may still hold it back."""
    RUNNING = "running"
    """It is IN_FLIGHT."""
    FINISHED = "finished"
    """It succeeded, or was cancelled."""


class PolicyWriteStatus(StrEnum):
    """What became of a policy that was to be written or deleted."""

    CREATED = "created"
    """It is the first of this id, or the first since a deletion."""
    DONE = "done"
    SAME = "same"
    CONFLICT = "conflict"
    """Another content has this id; or, for a deletion, live tasks use it."""
    MISSING = "missing"


class Counters(msgspec.Struct):
    """The tasks that are there, by status (every status is named), and finishes superseded."""

    tasks: dict[Status, int]
    superseded: int = 0


class SeriesPoint(msgspec.Struct):
    """What was logged in one minute: attempts by outcome. `minute` is the time it begins."""

    minute: int
    outcomes: dict[str, int]


class SweepResult(msgspec.Struct):
    """What one step of maintenance removed; `more` when there is more to do at once."""

    tasks: int
    more: bool


class Retention(msgspec.Struct, frozen=True):
    """How long terminal tasks are kept, in ms after they ended."""

    succeeded: int
    """Also for those that were cancelled."""
    dead: int


def next_step(replay: ReplayRecord, brought: int, now: int) -> int:
    """Return when a replay is due again whose step has brought so many letters back."""
    if replay.rate <= 0:
        return now
    pause = min(brought * 1000 / replay.rate, _LONGEST_PAUSE)
    return max(replay.next_at, now - ARREARS) + ceil(pause)


class Store(Protocol):
    """What an engine, the API and maintenance ask of a store."""

    async def open(self) -> None:
        """Connect, and bring the schema up to date."""
        ...

    async def close(self) -> None:
        """Let go of everything; what was promised is durable."""
        ...

    async def ping(self) -> int:
        """Write and read something; return the store's time."""
        ...

    # --- the life of a task -----------------------------------------------------------------------

    async def add(
        self, tasks: Sequence[NewTask], lease: Lease | None = None, *, quota: int | None = None
    ) -> list[AddResult]:
        """Add tasks, each in its own right; `quota` bounds the live tasks of each tenant.

        Two with one tenant and key in the same batch are as two batches: the first is added. A key
        that is there is told before a quota that is full.
        """
        ...

    async def claim(
        self, lease: Lease, *, limit: int, per_lane: int, skip: Collection[str] = ()
    ) -> ClaimResult:
        """Lease tasks that are due within the horizon, or abandoned, from lanes that are open.

        Least recently served lane first and tenants in turn, at most `per_lane` of a lane, none of
        the lanes in `skip`; with a `limit` of 0 it only tells the time. Of a lane the earliest
        `wake_at` comes first, then the order of adding. A half-open lane gives no more than its
        probes less the leases that have not run out.

        A lease is abandoned when its end has come. The attempt is written to the log as lost (begun
        when it was due, by the worker that held it) and counted in `lost`; the next is due since
        that end. A task that was being cancelled is CANCELLED instead of leased, and takes the
        place of one.
        """
        ...

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Write attempt and next state in one step each, if the version still matches."""
        ...

    async def release(self, leases: Sequence[Release]) -> list[FinishStatus]:
        """Hand unstarted leases back, where they are still held; no attempt is counted.

        A task that was being cancelled is CANCELLED. A lease that is not held is SUPERSEDED, and
        not counted as that.
        """
        ...

    # --- lanes ------------------------------------------------------------------------------------

    async def park(self, lane: str, until: int, *, probes: int, opened: int) -> None:
        """Give no task of the lane until then, and afterwards `probes` at a time.

        The last call stands. A lane without tasks is made, as by `pause`: what stands before the
        first slash of its name is its tenant.
        """
        ...

    async def unpark(self, lane: str) -> None:
        """Open a lane whose downstream has recovered; one that an operator paused stays paused."""
        ...

    async def resume(self, lane: str) -> None:
        """Open a lane: forget that it was parked or paused."""
        ...

    async def pause(self, lane: str) -> None:
        """Give no task of the lane until somebody resumes it."""
        ...

    async def list_lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[LaneRecord]:
        """List lanes by name; None asks for those of all tenants."""
        ...

    async def get_lane(self, name: str) -> LaneRecord | None:
        """Return one lane."""
        ...

    # --- what people ask for, by tenant -----------------------------------------------------------

    async def get_task(self, tenant: str, task_id: str) -> Task | None:
        """Return a task."""
        ...

    async def list_tasks(
        self, tenant: str, query: TaskFilter, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Task]:
        """List tasks, newest first. A malformed cursor is a `ConfigurationError`.

        Ids grow with time, so that the order of ids and that of adding are the same.
        """
        ...

    async def list_attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[AttemptRecord]:
        """Return a task's attempt log, from the attempt that follows number `after`."""
        ...

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task; None: there is no such task."""
        ...

    async def retry_now(self, tenant: str, task_id: str) -> RetryNowStatus | None:
        """Make a task due that waits or is dead. A dead one begins anew, as in a replay.

        That is: its attempts are forgiven, `started_at` is now, what the next decision has to know
        is forgotten, and `replays` is one more. A task that is due already keeps its time.
        """
        ...

    # --- dead letters -----------------------------------------------------------------------------

    async def count_dead(self, replay: ReplayRecord) -> int:
        """Say how many letters a replay would bring back; nothing is changed.

        Those of its tenant, lane, policy and reason that died at `before` or earlier; 0 is now.
        """
        ...

    async def start_replay(self, replay: ReplayRecord) -> ReplayRecord:
        """Keep a replay job, due at once; the same id again is the same job, unchanged.

        The store sets `before` (now at the latest), `matched` and the times.
        """
        ...

    async def get_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """Return a job."""
        ...

    async def list_replays(self, *, running: bool, tenant: str | None = None) -> list[ReplayRecord]:
        """Return at most 100 jobs: all, newest first; or those that run, by when they are due."""
        ...

    async def replay_step(self, replay_id: str, limit: int) -> ReplayRecord | None:
        """Bring back up to `limit` letters if the job is due, and set when it is due again.

        Oldest task first. By its rate, n letters put the next step off by n / rate seconds, counted
        from when this one was due: what comes late catches up, but for no more than `ARREARS`. A
        step that finds fewer than `limit` ends the job. One that is not due changes nothing.
        """
        ...

    async def cancel_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """End a job that runs; what it brought back stays."""
        ...

    async def purge(self, tenant: str, query: TaskFilter, limit: int) -> int:
        """Remove up to `limit` dead letters, oldest first, with their logs; tell how many.

        Their bodies become orphans. A query for another status than EXHAUSTED removes nothing.
        """
        ...

    # --- policies and keys ------------------------------------------------------------------------

    async def put_policy(
        self, policy: PolicyVersion, *, replace: bool
    ) -> tuple[PolicyWriteStatus, PolicyVersion]:
        """Write a policy; `replace` makes a new version of other content, else it is a conflict.

        The store numbers versions from 1, whatever the policy says, and goes on with the numbers
        after a deletion: what a task has pinned is never something else. The policy in the answer
        is the newest that is stored.
        """
        ...

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> PolicyVersion | None:
        """Return a version of a policy, by default the newest."""
        ...

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[PolicyVersion]:
        """List the newest version of each policy, by id."""
        ...

    async def delete_policy(self, tenant: str, policy_id: str) -> PolicyWriteStatus:
        """Forget all versions of a policy that no live task uses."""
        ...

    async def put_key(self, key: ApiKey) -> None:
        """Keep an API key; an id that is there stays as it is."""
        ...

    async def find_key(self, digest: bytes) -> ApiKey | None:
        """Return the key with a digest, revoked or not."""
        ...

    async def list_keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Return the keys, at most 1,000."""
        ...

    async def revoke_key(self, key_id: str) -> bool:
        """End a key; one that has ended keeps its time. False: there is none with this id."""
        ...

    # --- numbers and upkeep -----------------------------------------------------------------------

    async def counters(self, tenant: str | None = None) -> Counters:
        """Return the counts of a tenant's tasks, or of all."""
        ...

    async def series(self, tenant: str | None, *, since: int) -> list[SeriesPoint]:
        """Return what happened in each minute from that of `since` on; a day of it is kept.

        Earliest first. Minutes in which nothing happened are left out.
        """
        ...

    async def sweep(self, retention: Retention, limit: int) -> SweepResult:
        """Remove up to `limit` terminal tasks whose time is up, their logs too.

        The bodies that they owned are named by `orphans` until somebody has deleted them. Dead
        letters of a tenant with a replay that runs stay: it may have promised them. Replays go when
        they have ended as long ago as dead letters are kept. Lanes in which nothing is left, and
        that are neither parked nor paused, may go too.
        """
        ...

    async def orphans(self, limit: int) -> list[str]:
        """Return the bodies of tasks that are gone."""
        ...

    async def forget_orphans(self, refs: Sequence[str]) -> None:
        """Forget orphans that were deleted."""
        ...
