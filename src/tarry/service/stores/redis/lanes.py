"""The operations on lanes: state, limits, retry budgets and lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.store import (
    BUDGET_DECAY_MS,
    PROCESS_KIND,
    ConfiguredLimits,
    LaneLimits,
    LaneWriteStatus,
    RecordPage,
)
from tarry.service.stores.records import decode_limits, encode_limits
from tarry.service.stores.redis.codec import StoredLane, decode_lane, split_rows, to_raw
from tarry.service.stores.redis.partitions import GLOBAL_PARTITION, gather, tenant_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tarry.service.model import LaneRecord
    from tarry.service.stores.redis.partitions import Partitions
    from tarry.wire.tasks import DownstreamLimits

_LANE_PAGE_SIZE = 500


async def park(
    partitions: Partitions, lane: str, until: int, *, probes: int, consecutive_opens: int
) -> None:
    """Lease no task of a lane until this time, and afterwards `probes` tasks at a time."""
    arguments = ("park", lane, until, probes, consecutive_opens)
    await partitions.run_for_lane(lane, "change_lane", *arguments)


async def unpark(partitions: Partitions, lane: str) -> None:
    """End the parking of a lane."""
    await partitions.run_for_lane(lane, "change_lane", "unpark", lane)


async def resume(partitions: Partitions, lane: str) -> None:
    """End the parking and the pause of a lane."""
    await partitions.run_for_lane(lane, "change_lane", "resume", lane)


async def pause(
    partitions: Partitions, lane: str, *, lane_quota: int | None = None
) -> LaneWriteStatus:
    """Lease no task of a lane until `resume`."""
    status = await partitions.run_for_lane(lane, "change_lane", "pause", lane, lane_quota)
    return LaneWriteStatus(status.decode())


async def set_limits(
    partitions: Partitions,
    lane: str,
    limits: DownstreamLimits | None,
    *,
    max_limited: int,
    lane_quota: int | None = None,
) -> LaneWriteStatus:
    """Set or remove the limits of a lane."""
    arguments = ("set_limits", lane, encode_limits(limits), max_limited, lane_quota)
    status = await partitions.run_for_lane(lane, "change_lane", *arguments)
    return LaneWriteStatus(status.decode())


async def record_lane_limits(partitions: Partitions, limits: Sequence[LaneLimits]) -> None:
    """Store limits of lanes that a process has found."""
    groups = partitions.group(limits, lambda each: tenant_of(each.lane))
    await gather(
        partitions.run(partition, "record_limits", group) for partition, group in groups.items()
    )


async def list_lane_limits(
    partitions: Partitions, limit: int, partition: int | None = None
) -> list[LaneLimits]:
    """Return limits that processes have found, those of the last used lanes first."""
    numbers = range(partitions.partition_count) if partition is None else [partition]
    replies = await partitions.run_on(numbers, "list_limits", limit)
    found = [(score, decode_lane(packed)) for reply in replies for score, packed in reply]
    found.sort(key=lambda entry: (entry[0], entry[1].name))
    return [LaneLimits(lane.name, lane.rate, lane.concurrency or 0) for _, lane in found[:limit]]


async def load_limits(partitions: Partitions, known: ConfiguredLimits) -> ConfiguredLimits | None:
    """Return the limits and pauses of lanes; None if nothing has changed since `known`."""
    numbers = range(partitions.partition_count)
    replies = await partitions.run_on_available(numbers, "load_limits", PROCESS_KIND)
    if _sum_versions(replies, known) == (known.version, known.process_count):
        return None
    arguments = (PROCESS_KIND, "with contents")
    replies = await partitions.run_on_available(numbers, "load_limits", *arguments)

    def is_read(lane: str) -> bool:
        return partitions.partition_of(tenant_of(lane)) in replies

    # The limits of a partition that is unavailable are kept.
    limits: dict[str, DownstreamLimits] = {
        lane: each for lane, each in known.by_lane.items() if not is_read(lane)
    }
    paused_lanes = {lane for lane in known.paused_lanes if not is_read(lane)}
    for *_, limit_pairs, names in replies.values():
        for name, document in split_rows(limit_pairs, 2):
            limits[name.decode()] = decode_limits(document)
        paused_lanes.update(name.decode() for name in names)
    return ConfiguredLimits(*_sum_versions(replies, known), limits, frozenset(paused_lanes))


def _sum_versions(replies: dict[int, Any], known: ConfiguredLimits) -> tuple[int, int]:
    """Return the version of the limits, and the number of processes, from all partitions."""
    process_count = sum(reply[1] for reply in replies.values())
    if GLOBAL_PARTITION not in replies:
        process_count = known.process_count
    return sum(reply[0] for reply in replies.values()), max(1, process_count)


async def add_to_budgets(partitions: Partitions, changes: dict[str, float]) -> dict[str, float]:
    """Add to the values of the retry budgets of lanes; return the new values by lane."""
    groups = partitions.group(changes.items(), lambda change: tenant_of(change[0]))
    replies = await gather(
        partitions.run(partition, "add_to_budgets", group, BUDGET_DECAY_MS)
        for partition, group in groups.items()
    )
    return {
        lane.decode(): float(value) for reply in replies for lane, value in split_rows(reply, 2)
    }


async def get_lane(partitions: Partitions, name: str) -> LaneRecord | None:
    """Return a lane, or None if it does not exist."""
    reply = await partitions.run_for_lane(name, "lanes", "", "", 1, name)
    return decode_lane(reply[0][0]).to_record() if reply else None


async def list_lanes(
    partitions: Partitions, tenant: str | None, *, cursor: str | None = None, limit: int = 100
) -> RecordPage[LaneRecord]:
    """List the lanes of one tenant, or of all tenants (None), sorted by name."""
    pages = await gather(
        _read_lanes(partitions, partition, tenant, cursor or "", limit + 1)
        for partition in partitions.partitions_of(tenant)
    )
    lanes = sorted((lane for page in pages for lane, _ in page), key=lambda lane: lane.name)
    records = [lane.to_record() for lane in lanes[:limit]]
    return RecordPage(records, records[-1].name if len(lanes) > limit and records else None)


async def read_all_lanes(
    partitions: Partitions, tenant: str | None
) -> AsyncIterator[tuple[StoredLane, int]]:
    """Yield all lanes with their due times. Other scripts run between two pages."""
    for partition in partitions.partitions_of(tenant):
        after = ""
        while True:
            page = await _read_lanes(
                partitions, partition, tenant, after, _LANE_PAGE_SIZE, with_due_times=True
            )
            for entry in page:
                yield entry
            if len(page) < _LANE_PAGE_SIZE:
                break
            after = page[-1][0].name


async def _read_lanes(
    partitions: Partitions,
    partition: int,
    tenant: str | None,
    after: str,
    limit: int,
    *,
    with_due_times: bool = False,
) -> list[tuple[StoredLane, int]]:
    """Return lanes after a name, with the due time of their first pending task (0: none)."""
    prefix = b"" if tenant is None else f"{tenant}/".encode()
    position = after.encode()
    first = b"(" + position if position >= prefix else b"[" + prefix
    last = b"+" if tenant is None else b"(" + prefix + b"\xff"
    reply = await partitions.run(
        partition, "lanes", to_raw(first), to_raw(last), limit, None, with_due_times
    )
    return [(decode_lane(packed), due) for packed, due, _ in reply]
