"""`RecordCollection`: the records of one kind, decoded."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from tarry.errors import StoreUnavailable
from tarry.runtime.effects import effects
from tarry.service.store import RecordAddress, RecordChange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tarry.service.store import RecordStore

T = TypeVar("T")

_MAX_TRIES = 20
_MAX_RETRY_PAUSE_S = 0.05
"""The maximum pause after the first conflict. After the n-th one it is n times as long: with a
constant pause, 55 of 100 concurrent updates in PostgreSQL failed, and none with this one."""
_MAX_CHANGES_PER_WRITE = 100
_encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


class DecodedRecord(NamedTuple, Generic[T]):
    """A decoded record."""

    key: str
    value: T
    written_at: int


class RecordCollection(Generic[T]):
    """The records of one kind. `kind` is stored with each of them; `type` is that of their values.

    With `lifetime_ms`, a record expires this time after it was written.
    """

    def __init__(self, kind: str, type: Any, *, lifetime_ms: int | None = None) -> None:  # noqa: A002 - as of a msgspec decoder
        self.kind = kind
        self._decode: Callable[[bytes], T] = msgspec.msgpack.Decoder(type).decode
        self._lifetime_ms = lifetime_ms

    async def get(self, store: RecordStore, owner: str = "", key: str = "") -> T | None:
        """Return the value of a record, or None if there is no such record."""
        return (await self.get_with_time(store, owner, key))[1]

    async def get_with_time(
        self, store: RecordStore, owner: str = "", key: str = ""
    ) -> tuple[int, T | None]:
        """Return the time of the store, and the value of a record or None."""
        now, [record] = await store.read_records([RecordAddress(owner, self.kind, key)])
        return now, None if record is None else self._decode(record.value)

    async def get_many(
        self, store: RecordStore, names: Iterable[tuple[str, str]]
    ) -> dict[tuple[str, str], T]:
        """Return the values of several records by owner and key, without those that are missing."""
        addresses = [RecordAddress(owner, self.kind, key) for owner, key in names]
        _, records = await store.read_records(addresses)
        return {
            (record.owner, record.key): self._decode(record.value)
            for record in records
            if record is not None
        }

    async def list_all(self, store: RecordStore, owner: str = "") -> list[DecodedRecord[T]]:
        """Return all records of an owner, by key."""
        return (await self.list_with_time(store, owner))[1]

    async def list_with_time(
        self, store: RecordStore, owner: str = "", *, after: str = ""
    ) -> tuple[int, list[DecodedRecord[T]]]:
        """Return the time of the store, and the records with keys greater than `after`, by key."""
        entries: list[DecodedRecord[T]] = []
        while True:
            now, records = await store.list_records(owner, self.kind, after=after)
            if not records:
                return now, entries
            entries += [
                DecodedRecord(record.key, self._decode(record.value), record.written_at)
                for record in records
            ]
            after = records[-1].key

    async def put(self, store: RecordStore, value: T, owner: str = "", key: str = "") -> None:
        """Write a record, whether it exists or not."""
        await store.write_records([self._change(owner, key, value, is_unconditional=True)])

    async def delete(self, store: RecordStore, owner: str = "", key: str = "") -> None:
        """Delete a record. Does nothing if it does not exist."""
        await store.write_records([self._change(owner, key, None, is_unconditional=True)])

    def _change(
        self,
        owner: str,
        key: str,
        value: T | None,
        *,
        expected: bytes | None = None,
        is_unconditional: bool = False,
    ) -> RecordChange:
        encoded = None if value is None else _encode(value)
        return RecordChange(
            owner, self.kind, key, encoded, expected, is_unconditional, self._lifetime_ms
        )

    async def update(
        self,
        store: RecordStore,
        change: Callable[[T | None, int], T | None],
        owner: str = "",
        key: str = "",
    ) -> T | None:
        """Replace the value of a record by `change(value, now)`, and return the new value.

        `value` is None if there is no record; if the new value is None, the record is deleted.
        `change` must be pure: it is called again if another process changes the record meanwhile.
        """
        values = await self.update_many(store, {(owner, key): change})
        return values[owner, key]

    async def update_many(
        self,
        store: RecordStore,
        changes: Mapping[tuple[str, str], Callable[[T | None, int], T | None]],
    ) -> dict[tuple[str, str], T | None]:
        """Update several records by owner and key, see `update`; return their new values.

        If an error is raised, some of the records may have been updated.
        """
        results: dict[tuple[str, str], T | None] = {}
        pending = dict(changes)
        for number in range(_MAX_TRIES):
            if number:
                await asyncio.sleep(effects.draw_random() * _MAX_RETRY_PAUSE_S * number)
            written = await self._try_update(store, pending)
            results |= written
            for name in written:
                del pending[name]
            if not pending:
                return results
        raise StoreUnavailable(f"too many processes change the same {self.kind}; try again")

    async def _try_update(
        self,
        store: RecordStore,
        changes: Mapping[tuple[str, str], Callable[[T | None, int], T | None]],
    ) -> dict[tuple[str, str], T | None]:
        """Update records, except those that another process changes meanwhile."""
        addresses = [RecordAddress(owner, self.kind, key) for owner, key in changes]
        now, records = await store.read_records(addresses)
        results: dict[tuple[str, str], T | None] = {}
        writes: defaultdict[str, list[RecordChange]] = defaultdict(list)
        for (name, change), record in zip(changes.items(), records, strict=True):
            old = None if record is None else record.value
            value = results[name] = change(None if old is None else self._decode(old), now)
            write = self._change(*name, value, expected=old)
            if write.value != old:
                writes[name[0].partition("/")[0]].append(write)
        for batch in writes.values():
            for start in range(0, len(batch), _MAX_CHANGES_PER_WRITE):
                chunk = batch[start : start + _MAX_CHANGES_PER_WRITE]
                if not await store.write_records(chunk):
                    for write in chunk:
                        del results[write.owner, write.key]
        return results
