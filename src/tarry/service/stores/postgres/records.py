"""Records by owner, kind and key: implements `tarry.service.store.RecordStore`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.store import MAX_PAGE_BYTES, StoredRecord
from tarry.service.stores.postgres.rows import decode_text, encode_text, encode_texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.service.store import RecordAddress, RecordChange
    from tarry.service.stores.postgres.database import Database, Transaction

_COLUMNS = "r.owner, r.kind, r.key, r.value, r.written_at, r.expires_at"
_READ = f"""
SELECT n.now, {_COLUMNS} FROM (SELECT tarry.now_1($1) AS now) AS n
CROSS JOIN unnest($2::text[], $3::text[], $4::text[])
    WITH ORDINALITY AS i (owner, kind, key, number)
LEFT JOIN tarry.record AS r ON r.owner = i.owner AND r.kind = i.kind AND r.key = i.key
    AND (r.expires_at IS NULL OR r.expires_at > n.now)
ORDER BY i.number
"""
# The first row has only the time.
_LIST = f"""
SELECT n.now, {_COLUMNS} FROM (SELECT tarry.now_1($1) AS now) AS n
LEFT JOIN LATERAL (
    SELECT * FROM tarry.record AS r
    WHERE r.owner = $2 AND r.kind = $3 AND r.key > $4
        AND (r.expires_at IS NULL OR r.expires_at > n.now)
    ORDER BY r.key LIMIT $5) AS r ON true
ORDER BY r.key
"""
_EXPORT = f"""
SELECT {_COLUMNS} FROM tarry.record AS r
WHERE (r.owner, r.kind, r.key) > ($1, $2, $3) AND r.expires_at IS NULL
ORDER BY r.owner, r.kind, r.key LIMIT $4
"""
# Rows are locked in the order of the key, so that processes cannot deadlock.
_LOCK = """
SELECT i.number, r.value FROM (SELECT tarry.now_1($1) AS now) AS n
CROSS JOIN unnest($2::text[], $3::text[], $4::text[])
    WITH ORDINALITY AS i (owner, kind, key, number)
JOIN tarry.record AS r ON r.owner = i.owner AND r.kind = i.kind AND r.key = i.key
WHERE r.expires_at IS NULL OR r.expires_at > n.now
ORDER BY r.owner, r.kind, r.key FOR UPDATE OF r
"""
# A lane that `sweep` removes meanwhile is removed after this transaction, with the new record.
_LOCK_LANES = (
    "SELECT name FROM tarry.lane_name WHERE name = ANY($1::text[]) ORDER BY id FOR KEY SHARE"
)
_UPSERT = """
INSERT INTO tarry.record AS r (owner, kind, key, value, written_at, expires_at)
SELECT i.owner, i.kind, i.key, i.value, n.now, n.now + i.lifetime_ms
FROM (SELECT tarry.now_1($1) AS now) AS n
CROSS JOIN unnest($2::text[], $3::text[], $4::text[], $5::bytea[], $6::bigint[])
    AS i (owner, kind, key, value, lifetime_ms)
ORDER BY i.owner, i.kind, i.key
ON CONFLICT (owner, kind, key) DO UPDATE SET value = excluded.value,
    written_at = excluded.written_at, expires_at = excluded.expires_at
"""
# A record that another transaction has inserted meanwhile is not overwritten.
_INSERT = f"{_UPSERT} WHERE r.expires_at <= excluded.written_at RETURNING 1"
_DELETE = """
DELETE FROM tarry.record AS r
USING unnest($1::text[], $2::text[], $3::text[]) AS i (owner, kind, key)
WHERE r.owner = i.owner AND r.kind = i.kind AND r.key = i.key
"""
_IMPORT = """
INSERT INTO tarry.record
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::bigint[])
ON CONFLICT DO NOTHING
"""


async def read_records(
    database: Database, addresses: Sequence[RecordAddress], now: int | None
) -> tuple[int, list[StoredRecord | None]]:
    """Return the time, and each record or None, in the order of the addresses."""
    rows = await database.fetch(_READ, now, *_encode_addresses(addresses))
    if not rows:
        return await database.fetch_value("SELECT tarry.now_1($1)", now), []
    return rows[0][0], [None if row[1] is None else _decode(row[1:]) for row in map(tuple, rows)]


async def list_records(
    database: Database, owner: str, kind: str, after: str, limit: int, now: int | None
) -> tuple[int, list[StoredRecord]]:
    """Return the time, and records with keys greater than `after`, by key."""
    position = encode_texts((owner, kind, after))
    rows = [tuple(row) for row in await database.fetch(_LIST, now, *position, limit)]
    return rows[0][0], _cut_page(_decode(row[1:]) for row in rows if row[1] is not None)


async def export_records(
    database: Database, after: Sequence[str], limit: int
) -> list[StoredRecord]:
    """Return the records of all owners that do not expire, after this address."""
    rows = await database.fetch(_EXPORT, *encode_texts(after), limit)
    return _cut_page(_decode(tuple(row)) for row in rows)


def _cut_page(records: Iterable[StoredRecord]) -> list[StoredRecord]:
    """Return the first records, until their size reaches `MAX_PAGE_BYTES`."""
    page: list[StoredRecord] = []
    size = 0
    for record in records:
        page.append(record)
        size += len(record.value)
        if size >= MAX_PAGE_BYTES:
            break
    return page


def _decode(row: Sequence[Any]) -> StoredRecord:
    owner, kind, key, *others = row
    return StoredRecord(decode_text(owner), decode_text(kind), decode_text(key), *others)


def _encode_addresses(
    records: Iterable[RecordAddress | RecordChange | StoredRecord],
) -> tuple[list[str], list[str], list[str]]:
    """Return the owners, kinds and keys of records as parameters of a statement."""
    owners: list[str] = []
    kinds: list[str] = []
    keys: list[str] = []
    for record in records:
        owners.append(encode_text(record.owner))
        kinds.append(encode_text(record.kind))
        keys.append(encode_text(record.key))
    return owners, kinds, keys


class _Conflict(Exception):
    """Rolls back a transaction: a record has another value than a change expects."""


async def write_records(
    database: Database, changes: Sequence[RecordChange], now: int | None
) -> bool:
    """Apply all changes, or none if one of them conflicts; return whether they were applied."""
    try:
        await database.transact(lambda tx: _write(tx, changes, now))
    except _Conflict:
        return False
    return True


async def _write(tx: Transaction, changes: Sequence[RecordChange], now: int | None) -> None:
    missing = await _find_missing_lanes(tx, changes)
    compared = [change for change in changes if not change.is_unconditional]
    if compared:
        rows = await tx.fetch(_LOCK, now, *_encode_addresses(compared))
        stored = dict(map(tuple, rows))
        for number, change in enumerate(compared, 1):
            if stored.get(number) != change.expected:
                raise _Conflict
    written = [each for each in changes if each.value is not None and each.owner not in missing]
    new = [each for each in written if each.expected is None and not each.is_unconditional]
    replaced = [each for each in written if each.expected is not None or each.is_unconditional]
    if new and len(await tx.fetch(_INSERT, now, *_encode_values(new))) != len(new):
        raise _Conflict
    if replaced:
        await tx.fetch(_UPSERT, now, *_encode_values(replaced))
    if deleted := [change for change in changes if change.value is None]:
        await tx.fetch(_DELETE, *_encode_addresses(deleted))


async def _find_missing_lanes(
    tx: Transaction, records: Iterable[RecordChange | StoredRecord]
) -> set[str]:
    """Return the lanes among the owners that do not exist, and lock the others."""
    lanes = {record.owner for record in records if "/" in record.owner}
    if not lanes:
        return lanes
    rows = await tx.fetch(_LOCK_LANES, encode_texts(lanes))
    return lanes - {decode_text(row[0]) for row in rows}


def _encode_values(changes: Sequence[RecordChange]) -> tuple[Any, ...]:
    values = [change.value for change in changes]
    return *_encode_addresses(changes), values, [change.lifetime_ms for change in changes]


async def import_records(tx: Transaction, records: Sequence[StoredRecord]) -> None:
    """Store records, unless they are stored already."""
    missing = await _find_missing_lanes(tx, records)
    found = [record for record in records if record.owner not in missing]
    values = [record.value for record in found]
    times = [record.written_at for record in found]
    await tx.fetch(_IMPORT, *_encode_addresses(found), values, times)


async def remove_expired_records(database: Database, now: int) -> None:
    """Remove the records that have expired."""
    await database.fetch("DELETE FROM tarry.record WHERE expires_at <= $1", now)
