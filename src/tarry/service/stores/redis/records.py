"""Records by owner, kind and key: implements `tarry.service.store.RecordStore`.

The records of a tenant and its lanes are in the partition of the tenant. Those of the service have
no owner; the partition of the empty name is always `GLOBAL_PARTITION`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.store import MAX_LISTED_RECORDS, MAX_PAGE_BYTES, StoredRecord
from tarry.service.stores.redis.codec import split_rows, to_raw
from tarry.service.stores.redis.partitions import GLOBAL_PARTITION, tenant_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.store import RecordAddress, RecordChange
    from tarry.service.stores.redis.partitions import Partitions


def _partition_of(partitions: Partitions, owner: str) -> int:
    return partitions.partition_of(tenant_of(owner))


async def read_records(
    partitions: Partitions, addresses: Sequence[RecordAddress]
) -> tuple[int, list[StoredRecord | None]]:
    """Return the time, and each record or None, in the order of the addresses."""
    times: list[int] = []

    async def read_on(partition: int, group: list[RecordAddress]) -> list[StoredRecord | None]:
        now, *fields = await _run(partitions, partition, "read", group)
        times.append(now)
        rows = split_rows(fields, 4)
        return [
            _to_record(each.owner, each.kind, row) for each, row in zip(group, rows, strict=True)
        ]

    if not addresses:  # only the time is read
        return (await _run(partitions, GLOBAL_PARTITION, "read", []))[0], []
    records = await partitions.map_in_groups(addresses, lambda each: tenant_of(each.owner), read_on)
    return max(times), records


async def list_records(
    partitions: Partitions,
    owner: str,
    kind: str,
    *,
    after: str = "",
    limit: int = MAX_LISTED_RECORDS,
) -> tuple[int, list[StoredRecord]]:
    """Return the time, and records with keys greater than `after`, by key."""
    position = (owner, kind, after, limit, MAX_PAGE_BYTES)
    partition = _partition_of(partitions, owner)
    now, *fields = await _run(partitions, partition, "list", *position)
    records = (_to_record(owner, kind, values) for values in split_rows(fields, 4))
    return now, [record for record in records if record is not None]


async def write_records(partitions: Partitions, changes: Sequence[RecordChange]) -> bool:
    """Apply all changes, or none if one of them conflicts; return whether they were applied."""
    if not changes:
        return True
    packed = [
        (
            change.owner,
            change.kind,
            change.key,
            None if change.value is None else to_raw(change.value),
            None if change.expected is None else to_raw(change.expected),
            change.is_unconditional,
            change.lifetime_ms,
        )
        for change in changes
    ]
    partition = _partition_of(partitions, changes[0].owner)
    return bool(await _run(partitions, partition, "write", packed))


async def export_records(
    partitions: Partitions, partition: int, position: Sequence[str] | None, limit: int
) -> tuple[list[StoredRecord], tuple[str, str, str] | None]:
    """Return records of a partition that do not expire, and the position of the next page."""
    after = ("", "", "") if position is None else position
    fields = await _run(partitions, partition, "export", *after, limit, MAX_PAGE_BYTES)
    records = [
        StoredRecord(owner.decode(), kind.decode(), key.decode(), value, written_at)
        for owner, kind, key, value, written_at in split_rows(fields, 5)
    ]
    if not records:
        return records, None
    return records, (records[-1].owner, records[-1].kind, records[-1].key)


async def _run(partitions: Partitions, partition: int, *arguments: Any) -> Any:
    return await partitions.run(partition, "keyed_records", *arguments)


def _to_record(owner: str, kind: str, values: Sequence[Any]) -> StoredRecord | None:
    """Convert the values of a record in a reply of `keyed_records.lua`."""
    key, value, written_at, expires_at = values
    if value is None:
        return None
    return StoredRecord(owner, kind, key.decode(), value, written_at, expires_at or None)
