"""The store port: the operations that the service needs from a store.

Every implementation follows these rules, which one conformance suite checks:

* Calls take batches. Every call is idempotent: repeating it after an error or a lost reply leads to
  the same state.
* The changes of a call are durable when it returns. A call that raises `StoreUnavailable` may have
  applied all of its batch or nothing.
* The store's own clock decides what is due; `claim` returns its time. Times are epoch milliseconds.
* The cost of a call depends on what it returns, not on how many tasks and lanes are stored.
* Counters are updated with each change, not computed when they are read.
* Changes of one task are atomic. Each change of a task except a request to cancel it increments
  its version. Returned values are copies.
* Live tasks are PENDING or IN_FLIGHT. An id that is unknown, malformed or of another tenant counts
  as missing.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from tarry.service.model import AttemptRecord, Status, Task  # noqa: TC001 - msgspec reads the types

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tarry.service.model import ApiKeyRecord, LaneRecord, PolicyVersion, ReplayRecord

T = TypeVar("T")

MAX_REPLAY_LAG_MS = 1000
"""A replay that is behind its rate catches up on at most this much time."""
_MAX_REPLAY_PAUSE_MS = 1e12
"""Thirty years: a very small rate must not lead to a time that overflows an integer column."""


class LeaseTerms(msgspec.Struct, frozen=True):
    """The terms on which one worker leases tasks: who, how early and for how long.

    A task is leased at most `horizon_ms` before its `next_attempt_at`. The lease ends `length_ms`
    after `next_attempt_at`, or after now if the task is overdue.
    """

    worker: str
    length_ms: int
    horizon_ms: int


class NewTask(msgspec.Struct, array_like=True, gc=False):
    """A task to add. Its first attempt is due after `delay_ms`, or at `task.next_attempt_at`.

    A time in the past means now. State in `task`, such as its status or attempts, is ignored.
    """

    task: Task
    delay_ms: int | None = None
    lease_on_add: bool = False
    """Lease the task to the worker that adds it, if it is due within the horizon and its lane is
    neither paused nor parked nor half-open."""


class AddStatus(StrEnum):
    """The result of adding a task."""

    ADDED = "added"
    EXISTING = "existing"
    """A task with this idempotency key and fingerprint is stored. A key is known until its task is
    deleted."""
    CONFLICT = "conflict"
    """A task with this idempotency key and another fingerprint is stored."""
    FULL = "full"
    """The tenant has reached its quota of live tasks. `AddResult.task` was not stored."""


class AddResult(msgspec.Struct, gc=False):
    """The result for one new task; `task` is the stored task, or the refused one if FULL."""

    status: AddStatus
    task: Task
    leased: bool = False


class ClaimResult(msgspec.Struct):
    """The tasks that a claim has leased, earliest first."""

    now: int
    tasks: list[Task]
    opens_by_half_open_lane: dict[str, int]
    """For each half-open lane of these tasks: how often in a row its breaker has opened."""
    next_at: int | None
    """The earliest time at which the next claim may find a task; None: no task is waiting.

    Tasks of paused lanes do not count. Tasks of a half-open lane whose probes are all leased count
    from the end of the earliest of these leases. The time is later than `now` if nothing could be
    claimed."""
    lost_attempts: int = 0
    """Attempts with expired leases that were logged as lost."""


class TaskResult(msgspec.Struct, kw_only=True, gc=False):
    """The result of an attempt, and the next state. `task` is the task as it was leased.

    A status of PENDING requires `next_attempt_at`. With `renewed_lease`, the worker keeps its
    lease for the next attempt, which must be due within the horizon; the version is incremented
    only once, for the result and the lease together. If `attempt` is None, no attempt is counted.
    """

    task: Task
    attempt: AttemptRecord | None
    status: Status
    reason: str | None = None
    next_attempt_at: int = 0
    renewed_lease: LeaseTerms | None = None
    previous_delay: float | None = None
    backoff_offset: int = 0
    last_outcome_kind: str | None = None
    callback_task: Task | None = None
    """A task to add in the same change, if the result is APPLIED. Its key is unique, and no quota
    applies to it."""


class FinishStatus(StrEnum):
    """The result of `finish` or `release` for one task."""

    APPLIED = "applied"
    SUPERSEDED = "superseded"
    """The lease was lost, or the task was deleted: nothing was changed. An expired lease is lost
    only when a claim leases the task again."""
    CANCELLED = "cancelled"
    """The task was cancelled during the attempt: the attempt is logged, and no other attempt
    follows. If the attempt succeeded, the task is SUCCEEDED and this result is APPLIED."""


class Release(msgspec.Struct, gc=False):
    """A lease to release before an attempt.

    The task is due as before, or at `next_attempt_at` if that is later.
    """

    task: Task
    next_attempt_at: int | None = None


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter for tasks; None matches all. `status` is compared with the stored status."""

    status: Status | None = None
    policy_id: str | None = None
    lane: str | None = None
    reason: str | None = None


class Page(msgspec.Struct, Generic[T]):
    """One page of a list; `cursor` requests the next page, and is None on the last page.

    A page may be short or even empty before the end: with a filter that rarely matches, only a
    bounded number of rows is read for one page.
    """

    items: list[T]
    cursor: str | None


class CancelStatus(StrEnum):
    """The result of a request to cancel a task."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"
    """The task is IN_FLIGHT, so an attempt may be running; no further attempt follows."""
    FINISHED = "finished"
    """The task was terminal before, perhaps because it was cancelled earlier."""


class RetryNowStatus(StrEnum):
    """The result of a request to retry a task now."""

    DUE = "due"
    """The task was PENDING or EXHAUSTED and is due now; its lane may still be parked or paused."""
    IN_FLIGHT = "in_flight"
    """The task is IN_FLIGHT."""
    SUCCEEDED_OR_CANCELLED = "succeeded_or_cancelled"
    """The task succeeded or was cancelled."""


class PolicyWriteStatus(StrEnum):
    """The result of writing or deleting a policy."""

    CREATED = "created"
    """The policy did not exist, or was deleted before."""
    REPLACED = "replaced"
    """A new version was added."""
    DELETED = "deleted"
    UNCHANGED = "unchanged"
    """The newest version has this content already."""
    CONFLICT = "conflict"
    """Writing: the id exists with other content. Deleting: live tasks use the policy."""
    MISSING = "missing"


class Counters(msgspec.Struct):
    """The number of stored tasks for every status, and the number of superseded results."""

    task_counts: dict[Status, int]
    superseded_count: int = 0


class AttemptsOfMinute(msgspec.Struct):
    """Attempts of one minute, by outcome. `minute` is its start."""

    minute: int
    counts_by_outcome: dict[str, int]


class SweepResult(msgspec.Struct):
    """The number of removed tasks, and whether further expired tasks remain."""

    removed_task_count: int
    has_more: bool


class Retention(msgspec.Struct, frozen=True):
    """How long terminal tasks are stored after they finished."""

    succeeded_ms: int  # also for cancelled tasks
    exhausted_ms: int


def next_replay_step_at(replay: ReplayRecord, replayed: int, now: int) -> int:
    """Return when the next step of a replay is due, after a step that replayed `replayed` tasks."""
    if replay.rate <= 0:
        return now
    pause = min(replayed * 1000 / replay.rate, _MAX_REPLAY_PAUSE_MS)
    return max(replay.next_at, now - MAX_REPLAY_LAG_MS) + ceil(pause)


class Store(Protocol):
    """Durable storage of tasks, lanes, policies and API keys."""

    async def open(self) -> None:
        """Connect, and migrate the schema to the current version."""
        ...

    async def close(self) -> None:
        """Finish pending calls and release all resources."""
        ...

    async def ping(self) -> int:
        """Do a small write and a read, to prove that both work; return the store's time."""
        ...

    async def add(
        self, tasks: Sequence[NewTask], terms: LeaseTerms | None = None, *, quota: int | None = None
    ) -> list[AddResult]:
        """Add tasks independently of each other; `quota` limits the live tasks of each tenant.

        If two tasks of a batch have the same tenant and idempotency key, the second is EXISTING or
        CONFLICT. These two take precedence over FULL.
        """
        ...

    async def claim(
        self, terms: LeaseTerms, *, limit: int, per_lane: int, skip: Collection[str] = ()
    ) -> ClaimResult:
        """Lease tasks that are due within the horizon, and tasks whose lease has expired.

        Tenants take turns, and the least recently served lane of a tenant comes first. At most
        `per_lane` tasks of a lane and none of the lanes in `skip` are leased. Within a lane the
        order is `wake_at`, then the order of adding. Nothing is leased from paused and parked
        lanes, and of a half-open lane at most `probes` tasks are leased at a time. With a `limit`
        of 0, only the time is returned.

        The attempt of an expired lease is logged as lost, with its due time as its start and with
        the worker that had the lease, and counted in `lost_attempts`. The due time of the next
        attempt is the end of that lease. A task that is being cancelled becomes CANCELLED instead
        of leased, and counts towards the limit.
        """
        ...

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Store each attempt and next state atomically, if the version still matches."""
        ...

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        """Release leases that still exist, without counting an attempt.

        A task that is being cancelled becomes CANCELLED. For a lost lease the result is SUPERSEDED,
        which the counter of superseded results does not include.
        """
        ...

    async def park(self, lane: str, until: int, *, probes: int, consecutive_opens: int) -> None:
        """Lease no task of the lane until this time, and afterwards `probes` tasks at a time.

        The last call wins. A lane that does not exist is created, as by `pause`; its tenant is the
        part of its name before the first slash.
        """
        ...

    async def unpark(self, lane: str) -> None:
        """End the parking of a lane whose downstream has recovered; a paused lane stays paused."""
        ...

    async def resume(self, lane: str) -> None:
        """End the parking and the pause of a lane."""
        ...

    async def pause(self, lane: str) -> None:
        """Lease no task of the lane until `resume`."""
        ...

    async def list_lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[LaneRecord]:
        """List lanes by name, of one tenant or of all (None)."""
        ...

    async def get_lane(self, name: str) -> LaneRecord | None:
        """Return a lane, or None."""
        ...

    async def get_task(self, tenant: str, task_id: str) -> Task | None:
        """Return a task, or None."""
        ...

    async def list_tasks(
        self, tenant: str, task_filter: TaskFilter, *, cursor: str | None = None, limit: int = 100
    ) -> Page[Task]:
        """List tasks, newest first. Raises `ConfigurationError` for a malformed cursor.

        Ids grow with time, so that the order of ids is the order of adding.
        """
        ...

    async def list_attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[AttemptRecord]:
        """Return the attempt log of a task, beginning after attempt number `after`."""
        ...

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task; None: there is no such task."""
        ...

    async def retry_now(self, tenant: str, task_id: str) -> RetryNowStatus | None:
        """Make a PENDING or EXHAUSTED task due now; None: there is no such task.

        An EXHAUSTED task is replayed: `attempts_before_replay` is set to `attempts`, so that the
        policy no longer counts them, `started_at` is now, the inputs of the next decision are
        reset, and `replays` is incremented. A task that is due already keeps its due time.
        """
        ...

    async def count_dead_letters(self, replay: ReplayRecord) -> int:
        """Return how many dead letters a replay would replay; nothing is changed.

        A dead letter matches if it has the tenant, lane, policy and reason of the replay and became
        EXHAUSTED at `replay.before` or earlier; a `before` of 0 means now.
        """
        ...

    async def start_replay(self, replay: ReplayRecord) -> ReplayRecord:
        """Store a replay job that is due at once; return an existing job with this id unchanged.

        The store sets `before` (now at the latest), `matched` and the times.
        """
        ...

    async def get_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """Return a replay job, or None."""
        ...

    async def list_replays(self, *, running: bool, tenant: str | None = None) -> list[ReplayRecord]:
        """Return at most 100 jobs: only `running` ones by due time, or all jobs, newest first."""
        ...

    async def replay_step(self, replay_id: str, limit: int) -> ReplayRecord | None:
        """Replay up to `limit` dead letters if the job is due, oldest first; set its next due time.

        After n tasks the next step is due n / rate seconds later, counted from the due time of this
        step. So a late job catches up, but on at most `MAX_REPLAY_LAG_MS`. A step that finds
        fewer than `limit` dead letters ends the job. A job that is not due is returned unchanged.
        """
        ...

    async def cancel_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """End a running job; tasks that it has replayed are not changed."""
        ...

    async def purge(self, tenant: str, task_filter: TaskFilter, limit: int) -> int:
        """Remove up to `limit` dead letters with their logs, oldest first; return how many.

        Their bodies become orphans. A filter for a status other than EXHAUSTED removes nothing.
        """
        ...

    async def put_policy(
        self, policy: PolicyVersion, *, replace: bool
    ) -> tuple[PolicyWriteStatus, PolicyVersion]:
        """Write a policy. If it exists with other content: CONFLICT, or a new version if `replace`.

        The store numbers versions from 1 and ignores the given number. Numbers continue after a
        deletion, so that a pinned version never refers to other content. Returns the newest stored
        version.
        """
        ...

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> PolicyVersion | None:
        """Return a version of a policy, by default the newest; None if it does not exist."""
        ...

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[PolicyVersion]:
        """List the newest version of each policy, by id."""
        ...

    async def delete_policy(self, tenant: str, policy_id: str) -> PolicyWriteStatus:
        """Delete all versions of a policy, unless live tasks use it."""
        ...

    async def put_api_key(self, key: ApiKeyRecord) -> None:
        """Store an API key; a stored key with the same id is not changed."""
        ...

    async def find_api_key(self, digest: bytes) -> ApiKeyRecord | None:
        """Return the API key with this digest, revoked or not; None if there is no such key."""
        ...

    async def list_api_keys(self, tenant: str | None = None) -> list[ApiKeyRecord]:
        """Return at most 1,000 API keys."""
        ...

    async def revoke_api_key(self, key_id: str) -> bool:
        """Revoke an API key, unless it is revoked already; return whether there is such a key."""
        ...

    async def counters(self, tenant: str | None = None) -> Counters:
        """Return the counters of one tenant, or of all (None)."""
        ...

    async def attempts_per_minute(
        self, tenant: str | None, *, since: int
    ) -> list[AttemptsOfMinute]:
        """Return the attempts of each minute since `since`, earliest first; one day is stored.

        Minutes without attempts are omitted.
        """
        ...

    async def sweep(self, retention: Retention, limit: int) -> SweepResult:
        """Remove up to `limit` terminal tasks after their retention time, with their logs.

        `list_orphaned_bodies` returns the references of their bodies until
        `forget_orphaned_bodies` is called. While a replay of a tenant runs, the tenant's dead
        letters stay, because the replay has counted them. Finished replays are removed after the
        retention time of dead letters. Empty lanes that are neither parked nor paused may be
        removed too.
        """
        ...

    async def list_orphaned_bodies(self, limit: int) -> list[str]:
        """Return references to bodies of removed tasks, to be deleted from the `BodyStore`."""
        ...

    async def forget_orphaned_bodies(self, refs: Sequence[str]) -> None:
        """Forget orphans, after their bodies were deleted."""
        ...
