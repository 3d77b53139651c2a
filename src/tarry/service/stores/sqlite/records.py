"""Records by owner, kind and key: implements `tarry.service.store.RecordStore`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from tarry.service.store import (
    MAX_LISTED_RECORDS,
    MAX_PAGE_BYTES,
    PROCESS_KIND,
    RecordChange,
    StoredRecord,
)
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.transaction import WriteTransaction

if TYPE_CHECKING:
    from tarry.service.store import RecordAddress
    from tarry.service.stores.sqlite.transaction import ReadTransaction

_COLUMNS = "owner, kind, key, value, written_at, expires_at"
_READ = f"SELECT {_COLUMNS} FROM record WHERE owner = ? AND kind = ? AND key = ?"
_LIST = f"""
SELECT {_COLUMNS} FROM record
WHERE owner = ? AND kind = ? AND key > ? AND ifnull(expires_at > ?, 1) ORDER BY key LIMIT ?
"""
_LIST_ALL = f"""
SELECT {_COLUMNS} FROM record WHERE (owner, kind, key) > (?, ?, ?) AND expires_at IS NULL
ORDER BY owner, kind, key LIMIT ?
"""
_WRITE = f"INSERT OR REPLACE INTO record ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)"
_IMPORT = f"INSERT OR IGNORE INTO record ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)"
_DELETE = "DELETE FROM record WHERE owner = ? AND kind = ? AND key = ?"
_COUNT_PROCESSES = "SELECT count(*) FROM record WHERE owner = '' AND kind = ? AND expires_at > ?"


def read_records(
    tx: ReadTransaction, addresses: Sequence[RecordAddress]
) -> tuple[int, list[StoredRecord | None]]:
    """Return the time, and each record or None, in the order of the addresses."""
    return tx.now, [_read(tx, *address) for address in addresses]


def _read(tx: ReadTransaction, owner: str, kind: str, key: str) -> StoredRecord | None:
    row = tx.execute(_READ, (owner, kind, key)).fetchone()
    if row is None:
        return None
    record = StoredRecord(*row)
    return record if record.expires_at is None or record.expires_at > tx.now else None


def list_records(
    tx: ReadTransaction,
    owner: str,
    kind: str,
    *,
    after: str = "",
    limit: int = MAX_LISTED_RECORDS,
) -> tuple[int, list[StoredRecord]]:
    """Return the time, and records with keys greater than `after`, by key."""
    rows = tx.execute(_LIST, (owner, kind, after, tx.now, limit)).fetchall()
    return tx.now, _cut_page([StoredRecord(*row) for row in rows])


def export_records(tx: ReadTransaction, after: Sequence[str], limit: int) -> list[StoredRecord]:
    """Return the records of all owners that do not expire, after this address."""
    return _cut_page(
        [StoredRecord(*row) for row in tx.execute(_LIST_ALL, (*after, limit)).fetchall()]
    )


def _cut_page(records: list[StoredRecord]) -> list[StoredRecord]:
    """Return the first records, until their size reaches `MAX_PAGE_BYTES`."""
    size = 0
    for number, record in enumerate(records, 1):
        size += len(record.value)
        if size >= MAX_PAGE_BYTES:
            return records[:number]
    return records


@write_operation
def write_records(tx: WriteTransaction, changes: Sequence[RecordChange]) -> bool:
    """Apply all changes, or none if one of them conflicts; return whether they were applied."""
    for change in changes:
        if not change.is_unconditional:
            stored = _read(tx, change.owner, change.kind, change.key)
            if (None if stored is None else stored.value) != change.expected:
                return False
    for change in changes:
        address = (change.owner, change.kind, change.key)
        if change.value is None:
            tx.execute(_DELETE, address)
        elif "/" not in change.owner or _has_lane(tx, change.owner):
            lifetime_ms = change.lifetime_ms
            expires_at = None if lifetime_ms is None else tx.now + lifetime_ms
            tx.execute(_WRITE, (*address, bytearray(change.value), tx.now, expires_at))
    return True


def _has_lane(tx: WriteTransaction, name: str) -> bool:
    return tx.execute("SELECT 1 FROM lane WHERE name = ?", (name,)).fetchone() is not None


@write_operation
def import_records(tx: WriteTransaction, records: Sequence[StoredRecord]) -> None:
    """Store records, unless they are stored already."""
    for record in records:
        if "/" not in record.owner or _has_lane(tx, record.owner):
            tx.execute(_IMPORT, astuple(record))


def count_processes(tx: ReadTransaction) -> int:
    """Return the number of processes that lease tasks, from their heartbeats."""
    [(count,)] = tx.execute(_COUNT_PROCESSES, (PROCESS_KIND, tx.now))
    return int(count)


def remove_expired_records(tx: WriteTransaction) -> None:
    """Remove the records that have expired."""
    tx.execute("DELETE FROM record WHERE expires_at <= ?", (tx.now,))


def remove_records_of_lanes(tx: WriteTransaction, lanes: Sequence[str]) -> None:
    """Remove the records of lanes that were removed."""
    tx.executemany("DELETE FROM record WHERE owner = ?", [(name,) for name in lanes])
