"""Heartbeats of the processes of the service, which expire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tarry.service.model import WorkerRecord
from tarry.service.records.collection import RecordCollection
from tarry.service.store import PROCESS_KIND

if TYPE_CHECKING:
    from tarry.service.store import RecordStore, Store

WORKER_EXPIRY_MS = 30_000
"""A process without a heartbeat for this time is not listed any more."""
MAX_LISTED_WORKERS = 1_000
"""Maximum number of processes that `list_workers` returns."""
_LEASING = RecordCollection[WorkerRecord](PROCESS_KIND, WorkerRecord, lifetime_ms=WORKER_EXPIRY_MS)
_OTHERS = RecordCollection[WorkerRecord](
    "processes without leases", WorkerRecord, lifetime_ms=WORKER_EXPIRY_MS
)


async def record_worker(store: RecordStore, worker: WorkerRecord) -> None:
    """Record a heartbeat of a process, which replaces its last one."""
    await (_OTHERS if worker.role == "api" else _LEASING).put(store, worker, key=worker.name)


async def list_workers(store: RecordStore) -> list[WorkerRecord]:
    """Return the processes, sorted by name, at most `MAX_LISTED_WORKERS`.

    A process whose last heartbeat is `WORKER_EXPIRY_MS` old is left out.
    """
    workers = [
        replace(entry.value, seen_at=entry.written_at)
        for collection in (_LEASING, _OTHERS)
        for entry in await collection.list_all(store)
    ]
    return sorted(workers, key=lambda worker: worker.name)[:MAX_LISTED_WORKERS]


async def remove_worker(store: RecordStore, name: str) -> None:
    """Remove a process that stops. Does nothing if the process is not recorded."""
    await _LEASING.delete(store, key=name)
    await _OTHERS.delete(store, key=name)


async def is_in_use(store: Store) -> bool:
    """Return whether another process uses the store."""
    has_others = await store.has_other_processes()
    return bool(await list_workers(store)) if has_others is None else has_others
