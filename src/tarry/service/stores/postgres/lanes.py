"""Lanes: parking, pauses, limits, retry budgets and lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import LaneRecord
from tarry.service.store import (
    BUDGET_DECAY_MS,
    PROCESS_KIND,
    ConfiguredLimits,
    LaneLimits,
    LaneWriteStatus,
    RecordPage,
)
from tarry.service.stores.postgres.rows import (
    decode_row,
    decode_text,
    encode_optional,
    encode_text,
    encode_texts,
)
from tarry.service.stores.records import decode_limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.stores.postgres.database import Database, Transaction
    from tarry.wire.tasks import DownstreamLimits

# The columns are in the order of the fields of `LaneRecord`.
SELECT_LANE = """
SELECT l.name, n.name, l.parked_until, l.probes, l.consecutive_opens, l.paused, l.pending,
    l.in_flight, l.exhausted, l.last_claim_at
FROM tarry.lane AS l JOIN tarry.tenant AS n ON n.id = l.tenant
"""
_LIST_LANES = f"{SELECT_LANE} WHERE l.name > $1 ORDER BY l.name LIMIT $2"
_LIST_LANES_OF_TENANT = f"""
{SELECT_LANE} WHERE l.tenant = (SELECT id FROM tarry.tenant WHERE name = $3) AND l.name > $1
ORDER BY l.name LIMIT $2
"""
_CREATE_LANE = "SELECT tarry.lane_1($1, $2)"
# The arguments: name, whether the parking is changed, `parked_until`, `probes`,
# `consecutive_opens`, `paused` (NULL: not changed).
_PARK = "SELECT tarry.change_lane_1($1, true, $2, $3, $4, NULL)"
_PAUSE = "SELECT tarry.change_lane_1($1, false, NULL, 0, 0, true)"
_UNPARK = "SELECT tarry.change_lane_1($1, true, NULL, 0, 0, NULL)"
_RESUME = "SELECT tarry.change_lane_1($1, true, NULL, 0, 0, false)"
_INCREMENT_LIMITS_VERSION = "UPDATE tarry.meta SET value = value + 1 WHERE name = 'limits_version'"
# The inner query locks the lanes in the order that all functions use.
_RECORD_LIMITS = """
UPDATE tarry.lane AS l SET rate = locked.rate, concurrency = locked.concurrency
FROM (SELECT l.id, i.rate, i.concurrency
    FROM unnest($1::text[], $2::double precision[], $3::integer[]) AS i (name, rate, concurrency)
    JOIN tarry.lane AS l ON l.name = i.name ORDER BY l.id FOR NO KEY UPDATE OF l) AS locked
WHERE l.id = locked.id
"""
_LANE_LIMITS = """
SELECT name, rate, concurrency FROM tarry.lane WHERE rate IS NOT NULL
ORDER BY greatest(coalesce(last_claim_at, 0), budget_at) DESC, name LIMIT $1
"""
_COUNT_CONFIGURED = """
SELECT count(*) FROM tarry.lane WHERE limits IS NOT NULL AND name <> $2
    AND tenant = (SELECT id FROM tarry.tenant WHERE name = $1)
"""
# Locked before lanes, so that two processes neither exceed `max_limited` together nor deadlock.
_LOCK_LIMITS = "SELECT 1 FROM tarry.meta WHERE name = 'limits_version' FOR UPDATE"
_LIMITS_VERSION_AND_PROCESSES = """
SELECT (SELECT value FROM tarry.meta WHERE name = 'limits_version'),
    (SELECT count(*) FROM tarry.record
        WHERE owner = '' AND kind = $2 AND expires_at > tarry.now_1($1))
"""
# Two queries, because each reads an index of few lanes: `lane_configured` and `lane_paused`.
_CONFIGURED_LIMITS = """
SELECT name, limits, paused FROM tarry.lane WHERE limits IS NOT NULL
UNION ALL SELECT name, NULL, paused FROM tarry.lane WHERE paused AND limits IS NULL
"""
# The cast of $4: without it, the quotient of two integers would be 0 until `BUDGET_DECAY_MS` have
# passed. The 700: PostgreSQL raises an error if a result of exp() is too small for a float.
_ADD_TO_BUDGETS = """
UPDATE tarry.lane AS l
SET budget = i.change + l.budget
        * exp(-least(700, greatest(0, i.now - l.budget_at) / $4::double precision)),
    budget_at = i.now
FROM (SELECT l.id, i.change, i.now
    FROM (SELECT *, tarry.now_1($3::bigint) AS now
        FROM unnest($1::text[], $2::double precision[]) AS i (name, change)) AS i
    JOIN tarry.lane AS l ON l.name = i.name ORDER BY l.id FOR NO KEY UPDATE OF l) AS i
WHERE l.id = i.id RETURNING l.name, l.budget
"""


async def park(
    database: Database, lane: str, until: int, *, probes: int, consecutive_opens: int
) -> None:
    """Keep claims from leasing tasks of a lane until this time, then allow `probes` at a time."""
    name = encode_text(lane)

    async def change(tx: Transaction) -> None:
        await tx.fetch(_CREATE_LANE, name, None)
        await tx.fetch(_PARK, name, until, probes, consecutive_opens)

    await database.transact(change)


async def pause(database: Database, lane: str, *, lane_quota: int | None = None) -> LaneWriteStatus:
    """Keep claims from leasing tasks of a lane until `resume`."""
    name = encode_text(lane)

    async def change(tx: Transaction) -> LaneWriteStatus:
        await tx.fetch(_LOCK_LIMITS)
        if await tx.fetch_value(_CREATE_LANE, name, lane_quota) is None:
            return LaneWriteStatus.TOO_MANY_LANES
        await tx.fetch(_PAUSE, name)
        await tx.fetch(_INCREMENT_LIMITS_VERSION)
        return LaneWriteStatus.CHANGED

    return await database.transact(change)


async def unpark(database: Database, lane: str) -> None:
    """End the parking of a lane whose downstream has recovered; a paused lane stays paused."""
    await database.fetch(_UNPARK, encode_text(lane))


async def resume(database: Database, lane: str) -> None:
    """End the parking and the pause of a lane."""

    async def change(tx: Transaction) -> None:
        await tx.fetch(_INCREMENT_LIMITS_VERSION)
        await tx.fetch(_RESUME, encode_text(lane))

    await database.transact(change)


async def record_lane_limits(database: Database, limits: Sequence[LaneLimits]) -> None:
    """Store the limits that were found for lanes; see `set_limits` for those of operators."""
    by_lane = {each.lane: each for each in limits}
    await database.fetch(
        _RECORD_LIMITS,
        encode_texts(by_lane),
        [each.rate for each in by_lane.values()],
        [each.concurrency for each in by_lane.values()],
    )


async def list_lane_limits(database: Database, limit: int) -> list[LaneLimits]:
    """Return the limits of up to `limit` lanes whose rate is limited, last used lanes first."""
    rows = await database.fetch(_LANE_LIMITS, limit)
    return [LaneLimits(decode_text(name), rate, concurrency) for name, rate, concurrency in rows]


async def set_limits(
    database: Database,
    lane: str,
    limits: DownstreamLimits | None,
    *,
    max_limited: int,
    lane_quota: int | None = None,
) -> LaneWriteStatus:
    """Set the limits of a lane by an operator, or remove them (None); see `Store.set_limits`."""
    name = encode_text(lane)
    tenant = encode_text(lane.partition("/")[0])

    async def change(tx: Transaction) -> LaneWriteStatus:
        await tx.fetch(_LOCK_LIMITS)
        text = None
        if limits is not None:
            if await tx.fetch_value(_COUNT_CONFIGURED, tenant, name) >= max_limited:
                return LaneWriteStatus.TOO_MANY_LIMITED
            if await tx.fetch_value(_CREATE_LANE, name, lane_quota) is None:
                return LaneWriteStatus.TOO_MANY_LANES
            text = msgspec.json.encode(limits).decode()
        await tx.fetch("UPDATE tarry.lane SET limits = $1 WHERE name = $2", text, name)
        await tx.fetch(_INCREMENT_LIMITS_VERSION)
        return LaneWriteStatus.CHANGED

    return await database.transact(change)


async def load_limits(database: Database, known: ConfiguredLimits) -> ConfiguredLimits | None:
    """Return the limits and pauses of lanes; None if nothing has changed since `known`."""
    version, count = await database.fetch_row(
        _LIMITS_VERSION_AND_PROCESSES, database.now(), PROCESS_KIND
    )
    process_count = max(1, count)
    if (version, process_count) == (known.version, known.process_count):
        return None
    rows = await database.fetch(_CONFIGURED_LIMITS)
    names = [decode_text(row[0]) for row in rows]
    return ConfiguredLimits(
        version,
        process_count,
        {name: decode_limits(row[1]) for name, row in zip(names, rows, strict=True) if row[1]},
        frozenset(name for name, row in zip(names, rows, strict=True) if row[2]),
    )


async def add_to_budgets(database: Database, changes: dict[str, float]) -> dict[str, float]:
    """Add to the values of retry budgets, and return the new values."""
    names, values = encode_texts(changes), list(changes.values())
    decay_ms = float(BUDGET_DECAY_MS)
    rows = await database.fetch(_ADD_TO_BUDGETS, names, values, database.now(), decay_ms)
    return {decode_text(name): value for name, value in rows}


async def list_lanes(
    database: Database, tenant: str | None, *, cursor: str | None = None, limit: int = 100
) -> RecordPage[LaneRecord]:
    """List lanes, sorted by name; the cursor is the last name of the previous page."""
    after = encode_text(cursor or "")
    if tenant is None:
        rows = await database.fetch(_LIST_LANES, after, limit + 1)
    else:
        name = encode_optional(tenant)
        rows = await database.fetch(_LIST_LANES_OF_TENANT, after, limit + 1, name)
    lanes = [decode_row(tuple(row), LaneRecord) for row in rows[:limit]]
    return RecordPage(lanes, lanes[-1].name if len(rows) > limit and lanes else None)


async def get_lane(database: Database, name: str) -> LaneRecord | None:
    """Return a lane, or None if it does not exist."""
    row = await database.fetch_row(f"{SELECT_LANE} WHERE l.name = $1", encode_text(name))
    return None if row is None else decode_row(tuple(row), LaneRecord)
