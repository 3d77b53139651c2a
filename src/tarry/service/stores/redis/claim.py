"""Claims over several partitions: each partition gets a share of the limit.

The first scripts lease tasks only in partitions that had more due tasks after the last claim; in
the others, a small script checks whether tasks are due. Then the rest of the limit is divided
among the partitions with due tasks, the least recently served one first. So tenants of different
partitions take turns as well. With one partition, a claim is one script.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.errors import StoreUnavailable
from tarry.service.store import ClaimResult
from tarry.service.stores.redis.codec import decode_tasks, split_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tarry.service.model import Task
    from tarry.service.store import LeaseTerms
    from tarry.service.stores.redis.partitions import Partitions


class _ClaimReply(NamedTuple):
    """The reply of `claim.lua` for one partition."""

    now: int
    next_at: int
    """When a claim may find a task; -1: never."""
    counted: int
    """How many tasks count towards the limit."""
    lost_attempts: int
    leased: list[bytes]
    renewed: list[bytes]
    names_and_opens: list[Any]
    """Name and number of consecutive opens of each half-open lane, in one list."""


class ClaimMerger:
    """Claims tasks from all partitions of a store, and merges the results."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._order = list(range(partitions.partition_count))
        """The partitions; the least recently served one is the first."""
        self._busy = {0} if len(self._order) == 1 else set[int]()
        """The partitions that had more due tasks after the last claim."""

    async def claim(
        self,
        terms: LeaseTerms,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int],
        skip: Collection[int],
    ) -> ClaimResult:
        """Lease tasks; see `Store.claim`."""
        active = [partition for partition in self._order if partition not in skip]
        if not active:  # the clock of the store is read, and nothing is leased
            active, limit = self._order, 0
        claim = _Claim(terms, limit, per_lane, lane_limits)
        errors: dict[int, StoreUnavailable] = {}
        busy = self._busy
        while active:
            shares = divide(claim.remaining, active, busy)
            replies = await self._run_on_each(active, claim, shares)
            next_active: list[int] = []
            for partition, share, reply in zip(active, shares, replies, strict=True):
                if isinstance(reply, StoreUnavailable):
                    errors[partition] = reply
                elif claim.add(partition, share, reply):
                    next_active.append(partition)
            active = next_active if claim.remaining > 0 else []
            busy = set(active)
        if errors and not claim.next_times:
            raise next(iter(errors.values()))
        if len(self._order) > 1:
            self._busy = claim.busy_partitions
        served = claim.served_partitions
        self._order = [each for each in self._order if each not in served] + list(served)
        result = claim.result()
        result.errors = errors
        return result

    async def _run_on_each(
        self, partitions: list[int], claim: _Claim, shares: list[int]
    ) -> list[_ClaimReply | StoreUnavailable]:
        """Run a script on each partition; return replies and errors."""
        if len(partitions) == 1:  # without the cost of an asyncio task
            try:
                return [await self._run(partitions[0], claim, shares[0])]
            except StoreUnavailable as error:
                return [error]
        calls = {
            partition: self._run(partition, claim, share)
            for partition, share in zip(partitions, shares, strict=True)
        }
        replies = await self._partitions.connection.gather_available(calls)
        return [*replies.values()]

    async def _run(self, partition: int, claim: _Claim, share: int) -> _ClaimReply:
        """Lease up to `share` tasks of a partition; if it is 0, only find the next time."""
        if share:
            reply = await self._partitions.run(partition, "claim", *claim.arguments(share))
            return _ClaimReply(*reply)
        now, next_at = await self._partitions.run(partition, "peek", claim.terms.horizon_ms)
        return _ClaimReply(now, next_at, 0, 0, [], [], [])


def divide(limit: int, partitions: list[int], busy: set[int]) -> list[int]:
    """Return a share of the limit for each partition; those that are not busy get none."""
    busy_count = sum(partition in busy for partition in partitions)
    if not busy_count:
        return [0] * len(partitions)
    share, extra = divmod(limit, busy_count)
    shares: list[int] = []
    for partition in partitions:
        is_busy = partition in busy
        shares.append(share + (extra > 0) if is_busy else 0)
        extra -= is_busy
    return shares


class _Claim:
    """The state of one claim over several partitions."""

    def __init__(
        self, terms: LeaseTerms, limit: int, per_lane: int, lane_limits: Mapping[str, int]
    ) -> None:
        self.terms = terms
        self._per_lane = per_lane
        self._lane_limits = lane_limits
        self._lane_counts: Counter[str] = Counter()
        self._leased: list[tuple[int, int, int, Task]] = []
        """The due time, partition and number of each task, by which they are sorted."""
        self._merged = ClaimResult(0, [], {}, None)
        self.busy_partitions: set[int] = set()
        """Partitions with more due tasks. A partition that was served stays busy, because a later
        script may skip lanes that have reached their limits, but have more due tasks."""
        self.remaining = limit
        """How many more tasks may be leased."""
        self.next_times: dict[int, int] = {}
        """The next time of each partition that has replied; -1: none."""
        self.served_partitions: dict[int, None] = {}
        """The partitions in which tasks were leased, the last one at the end."""

    def arguments(self, limit: int) -> tuple[Any, ...]:
        """Return the arguments of the script, with the remaining limits of lanes."""
        lane_limits = dict(self._lane_limits)
        for lane, count in self._lane_counts.items():
            lane_limits[lane] = min(lane_limits.get(lane, self._per_lane), self._per_lane) - count
        terms = self.terms
        return (
            terms.worker,
            terms.length_ms,
            terms.horizon_ms,
            limit,
            self._per_lane,
            lane_limits,
        )

    def add(self, partition: int, share: int, reply: _ClaimReply) -> bool:
        """Add the reply of a partition; return whether a larger share may lease more tasks."""
        merged = self._merged
        merged.now = max(merged.now, reply.now)
        merged.lost_attempts += reply.lost_attempts
        self.remaining -= reply.counted
        if reply.counted:
            self.served_partitions.pop(partition, None)
            self.served_partitions[partition] = None
        for number, task in decode_tasks(reply.leased):
            self._leased.append((task.next_attempt_at, partition, number, task))
            self._lane_counts[task.lane] += 1
        for _, task in decode_tasks(reply.renewed):
            merged.renewed_tasks.append(task)
            self._lane_counts[task.lane] += 1
        for name, opens in split_rows(reply.names_and_opens, 2):
            merged.consecutive_opens_by_lane[name.decode()] = opens
        has_more = 0 <= reply.next_at <= reply.now
        if has_more:
            self.busy_partitions.add(partition)
        elif partition not in self.served_partitions:
            self.busy_partitions.discard(partition)
        is_busy = partition in self.busy_partitions
        self.next_times[partition] = reply.now if is_busy else reply.next_at
        return has_more and reply.counted >= share

    def result(self) -> ClaimResult:
        """Return the merged result, sorted by due time."""
        self._leased.sort(key=lambda entry: entry[:3])
        merged = self._merged
        merged.tasks = [task for *_, task in self._leased]
        merged.next_at = min((at for at in self.next_times.values() if at >= 0), default=None)
        return merged
