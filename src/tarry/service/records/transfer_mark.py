"""The mark of a store whose records are moved to another store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.records.collection import RecordCollection
from tarry.service.store import RecordKind

if TYPE_CHECKING:
    from tarry.service.store import RecordStore

TRANSFER_MARK_KIND = "transfer mark"


class TransferMark(msgspec.Struct, frozen=True, kw_only=True):
    """Marks a store whose records are, or were, moved to another store; it must not be served."""

    id: str
    """The same in both stores."""
    is_source: bool
    """Whether the records are moved from this store; otherwise they are moved to this store."""
    other_store: str
    """The URL of the other store, without a password."""
    is_complete: bool = False
    """Whether all records were moved. Only a source is marked then."""
    kind: RecordKind = RecordKind.POLICY
    """In the target: the kind of records that is being imported."""
    cursor: str | None = None
    """In the target: the cursor of the next page of the source."""


_MARKS = RecordCollection[TransferMark](TRANSFER_MARK_KIND, TransferMark)


async def get_transfer(store: RecordStore) -> TransferMark | None:
    """Return the mark that `set_transfer` has stored, or None."""
    return await _MARKS.get(store)


async def set_transfer(store: RecordStore, mark: TransferMark | None) -> None:
    """Mark the store as the source or target of a transfer; None removes the mark."""
    if mark is None:
        await _MARKS.delete(store)
    else:
        await _MARKS.put(store, mark)
