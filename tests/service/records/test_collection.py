"""Updates of records that other processes change at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.records.collection import RecordCollection
from tarry.service.store import RecordChange
from tests.service.stores.reference_store import ReferenceStore

COLLECTION = RecordCollection[int]("numbers", int)


class ContendedStore(ReferenceStore):
    """A store in which another process writes the record before each of the first writes."""

    def __init__(self, other_writes: int) -> None:
        super().__init__()
        self.other_writes = other_writes

    async def write_records(self, changes: Sequence[RecordChange]) -> bool:
        """Write records, after a write of the other process."""
        if self.other_writes:
            self.other_writes -= 1
            await COLLECTION.put(self._other(), 100 + self.other_writes)
        return await super().write_records(changes)

    def _other(self) -> ReferenceStore:
        return ReferenceStore(state=self.state)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pause after a conflict."""
    monkeypatch.setattr("tarry.service.records.collection._MAX_RETRY_PAUSE_S", 0.0)


async def test_an_update_is_computed_again_after_each_conflict() -> None:
    seen: list[int | None] = []

    def add_one(value: int | None, _now: int) -> int:
        seen.append(value)
        return (value or 0) + 1

    store = ContendedStore(other_writes=3)
    assert 101 == await COLLECTION.update(store, add_one)
    assert [None, 102, 101, 100] == seen
    assert 101 == await COLLECTION.get(store)


async def test_an_update_gives_up_after_many_conflicts() -> None:
    store = ContendedStore(other_writes=1_000)
    with pytest.raises(StoreUnavailable, match="too many processes change the same numbers"):
        await COLLECTION.update(store, lambda value, _now: (value or 0) + 1)
    assert 980 == store.other_writes
