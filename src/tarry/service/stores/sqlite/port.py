"""The port's calls as operations on the file; how they are run is left to a driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace as changed

from tarry.service.stores.sqlite import (
    add,
    claim,
    dead,
    finish,
    lanes,
    life,
    reading,
    registry,
    upkeep,
)
from tarry.service.stores.sqlite.operations import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tarry.service import store as port
    from tarry.service.model import (
        ApiKey,
        AttemptRecord,
        LaneRecord,
        PolicyVersion,
        ReplayRecord,
        Task,
    )
    from tarry.service.stores.sqlite.ledger import Ledger, View

T = TypeVar("T")


class Port(ABC):
    """Every call of the port `Store` but open and close; what each does is said there."""

    # ruff: noqa: D102 - the port's own words would only be repeated

    @abstractmethod
    async def _write(self, operation: Callable[[Ledger], T], weight: int = 1) -> T:
        """Run an operation in a transaction that is durable before this returns."""

    @abstractmethod
    async def _read(self, question: Callable[[View], T]) -> T:
        """Ask the file as it stands."""

    async def ping(self) -> int:
        return await self._write(Call(upkeep.ping))

    # --- the life of a task -----------------------------------------------------------------------

    async def add(
        self,
        tasks: Sequence[port.NewTask],
        lease: port.Lease | None = None,
        *,
        quota: int | None = None,
    ) -> list[port.AddResult]:
        answers = await self._write(Call(add.add, tasks, lease, quota), len(tasks))
        return add.told(tasks, lease, answers)

    async def claim(
        self, lease: port.Lease, *, limit: int, per_lane: int, skip: Collection[str] = ()
    ) -> port.ClaimResult:
        return await self._write(Call(claim.claim, lease, limit, per_lane, skip), limit)

    async def finish(self, results: Sequence[port.TaskResult]) -> list[port.FinishStatus]:
        ends = [finish.end_of(result) for result in results]
        return await self._write(Call(finish.finish, ends), len(ends))

    async def release(self, leases: Sequence[port.Release]) -> list[port.FinishStatus]:
        return await self._write(Call(life.release, leases), len(leases))

    # --- lanes ------------------------------------------------------------------------------------

    async def park(self, lane: str, until: int, *, probes: int, opened: int) -> None:
        await self._write(Call(lanes.park, lane, until, probes, opened))

    async def unpark(self, lane: str) -> None:
        await self._write(Call(lanes.unpark, lane))

    async def resume(self, lane: str) -> None:
        await self._write(Call(lanes.resume, lane))

    async def pause(self, lane: str) -> None:
        await self._write(Call(lanes.pause, lane))

    async def lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> port.Page[LaneRecord]:
        return await self._read(lambda view: lanes.lanes(view, tenant, cursor, limit))

    async def lane(self, name: str) -> LaneRecord | None:
        return await self._read(lambda view: lanes.lane(view, name))

    # --- what people ask for, by tenant -----------------------------------------------------------

    async def get(self, tenant: str, task_id: str) -> Task | None:
        return await self._read(lambda view: reading.get(view, tenant, task_id))

    async def tasks(
        self, tenant: str, query: port.TaskFilter, *, cursor: str | None = None, limit: int = 100
    ) -> port.Page[Task]:
        return await self._read(lambda view: reading.listed(view, tenant, query, cursor, limit))

    async def attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[AttemptRecord]:
        return await self._read(lambda view: reading.attempts(view, tenant, task_id, after, limit))

    async def cancel(self, tenant: str, task_id: str) -> port.CancelStatus | None:
        return await self._write(Call(life.cancel, tenant, task_id))

    async def retry_now(self, tenant: str, task_id: str) -> port.RetryNowStatus | None:
        return await self._write(Call(life.retry_now, tenant, task_id))

    # --- dead letters -----------------------------------------------------------------------------

    async def count_dead(self, replay: ReplayRecord) -> int:
        """Count in steps, so that other questions have their turn between them."""
        total, after = 0, 0
        while True:
            count, cursor = await self._read(_counting(replay, after))
            total += count
            if cursor is None:
                return total
            after = cursor

    async def start_replay(self, replay: ReplayRecord) -> ReplayRecord:
        found, now = await self._read(lambda view: (dead.job(view, replay.id), view.now))
        if found is not None:
            return found
        job = changed(replay, before=min(replay.before or now, now))
        job.matched = await self.count_dead(job)
        return await self._write(Call(dead.start_replay, job))

    async def replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        return await self._read(lambda view: dead.job_of(view, tenant, replay_id))

    async def replays(self, *, running: bool, tenant: str | None = None) -> list[ReplayRecord]:
        return await self._read(lambda view: dead.jobs(view, running=running, tenant=tenant))

    async def replay_step(self, replay_id: str, limit: int) -> ReplayRecord | None:
        return await self._write(Call(dead.replay_step, replay_id, limit), limit)

    async def cancel_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        return await self._write(Call(dead.cancel_replay, tenant, replay_id))

    async def purge(self, tenant: str, query: port.TaskFilter, limit: int) -> int:
        """Remove in steps, so that other operations have their turn between them."""
        total, after = 0, 0
        while total < limit:
            step = Call(dead.purge, tenant, query, after, limit - total)
            count, cursor = await self._write(step, limit - total)
            total += count
            if cursor is None:
                break
            after = cursor
        return total

    # --- policies and keys ------------------------------------------------------------------------

    async def put_policy(
        self, policy: PolicyVersion, *, replace: bool
    ) -> tuple[port.PolicyWriteStatus, PolicyVersion]:
        return await self._write(Call(registry.put_policy, policy, replace))

    async def policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> PolicyVersion | None:
        return await self._read(lambda view: registry.policy(view, tenant, policy_id, version))

    async def policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> port.Page[PolicyVersion]:
        return await self._read(lambda view: registry.policies(view, tenant, cursor, limit))

    async def delete_policy(self, tenant: str, policy_id: str) -> port.PolicyWriteStatus:
        return await self._write(Call(registry.delete_policy, tenant, policy_id))

    async def put_key(self, key: ApiKey) -> None:
        await self._write(Call(registry.put_key, key))

    async def key(self, digest: bytes) -> ApiKey | None:
        return await self._read(lambda view: registry.key(view, digest))

    async def keys(self, tenant: str | None = None) -> list[ApiKey]:
        return await self._read(lambda view: registry.keys(view, tenant))

    async def revoke_key(self, key_id: str) -> bool:
        return await self._write(Call(registry.revoke_key, key_id))

    # --- numbers and upkeep -----------------------------------------------------------------------

    async def counters(self, tenant: str | None = None) -> port.Counters:
        return await self._read(lambda view: reading.counters(view, tenant))

    async def series(self, tenant: str | None, *, since: int) -> list[port.SeriesPoint]:
        return await self._read(lambda view: reading.series(view, tenant, since))

    async def sweep(self, retention: port.Retention, limit: int) -> port.SweepResult:
        return await self._write(Call(upkeep.sweep, retention, limit), limit)

    async def orphans(self, limit: int) -> list[str]:
        return await self._read(lambda view: upkeep.orphans(view, limit))

    async def forget_orphans(self, refs: Sequence[str]) -> None:
        await self._write(Call(upkeep.forget_orphans, refs), len(refs))


def _counting(replay: ReplayRecord, after: int) -> Callable[[View], tuple[int, int | None]]:
    return lambda view: dead.count(view, replay, after)
