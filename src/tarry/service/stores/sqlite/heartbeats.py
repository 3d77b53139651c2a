"""Heartbeats of the processes that use the file, see `Store.record_worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import WorkerRecord
from tarry.service.store import MAX_LISTED_WORKERS, WORKER_EXPIRY_MS
from tarry.service.stores.records import decode_worker, encode
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.transaction import WriteTransaction

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import ReadTransaction


@write_operation
def record_worker(tx: WriteTransaction, worker: WorkerRecord) -> None:
    """Store the heartbeat of a process in place of its last one."""
    tx.execute(
        "INSERT OR REPLACE INTO heartbeat (name, seen_at, record) VALUES (?, ?, ?)",
        (worker.name, tx.now, bytearray(encode(worker))),
    )


@write_operation
def remove_worker(tx: WriteTransaction, name: str) -> None:
    """Remove a process."""
    tx.execute("DELETE FROM heartbeat WHERE name = ?", (name,))


def list_workers(tx: ReadTransaction) -> list[WorkerRecord]:
    """Return the processes with a recent heartbeat, sorted by name."""
    rows = tx.execute(
        "SELECT seen_at, record FROM heartbeat WHERE seen_at > ? ORDER BY name LIMIT ?",
        (tx.now - WORKER_EXPIRY_MS, MAX_LISTED_WORKERS),
    ).fetchall()
    return [
        msgspec.structs.replace(decode_worker(record), seen_at=seen_at) for seen_at, record in rows
    ]


def remove_expired(tx: WriteTransaction) -> None:
    """Remove the processes without a recent heartbeat."""
    tx.execute("DELETE FROM heartbeat WHERE seen_at <= ?", (tx.now - WORKER_EXPIRY_MS,))
