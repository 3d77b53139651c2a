"""Group commit: urgent entries are committed before bulk entries, and both make progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.errors import Overloaded
from tarry.service.group_commit import AsyncGroupCommit

MAX_ITEMS = 64

Item = tuple[str, int]
"""The class of an item, `urgent` or `bulk`, and its number within the class."""


class RecordingCommit:
    """A commit function that records its groups and waits until `may_finish` is set."""

    def __init__(self) -> None:
        self.groups: list[list[Item]] = []
        self.may_finish = asyncio.Event()

    async def __call__(self, items: Sequence[Item]) -> Sequence[Item]:
        """Commit a group."""
        self.groups.append(list(items))
        await self.may_finish.wait()
        return items


def bulk_items(count: int) -> list[Item]:
    """Return this number of bulk items."""
    return [("bulk", number) for number in range(count)]


async def test_urgent_entry_is_in_the_next_group() -> None:
    """An urgent item that is submitted after 1,000 bulk items is in the next group."""
    commit = RecordingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=MAX_ITEMS, max_pending=10_000)
    bulk = group_commit.submit(bulk_items(1000))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 2 == len(commit.groups)
    urgent = group_commit.submit([("urgent", 0)], urgent=True)
    commit.may_finish.set()

    assert [("urgent", 0)] == list(await urgent)
    assert bulk_items(1000) == list(await bulk)
    assert [2] == [n for n, group in enumerate(commit.groups) if ("urgent", 0) in group]


@given(
    st.lists(st.tuples(st.sampled_from(["urgent", "bulk"]), st.integers(1, 200)), max_size=60),
    st.integers(2, MAX_ITEMS),
)
def test_each_group_takes_entries_of_both_classes(
    entries: list[tuple[str, int]], max_items: int
) -> None:
    """A group has items of each waiting class, in order, and never more than its maximum."""

    async def main() -> None:
        commit = RecordingCommit()
        commit.may_finish.set()
        group_commit = AsyncGroupCommit(commit, max_items=max_items, max_pending=None)
        waiting: dict[str, list[Item]] = {"urgent": [], "bulk": []}
        for name, size in entries:
            first = len(waiting[name])
            items = [(name, number) for number in range(first, first + size)]
            waiting[name] += items
            group_commit.submit(items, urgent=name == "urgent")
        await group_commit.flush()

        for group in commit.groups:
            assert len(group) <= max_items
            for items in waiting.values():
                committed = [item for item in group if item in items[:max_items]]
                assert items[: len(committed)] == committed
                assert committed or not items
                del items[: len(committed)]
        assert {"urgent": [], "bulk": []} == waiting

    asyncio.run(main())


async def test_capacity_is_reserved_for_urgent_entries() -> None:
    """A queue that is full of bulk items still accepts urgent items, up to `max_pending`."""
    commit = RecordingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=MAX_ITEMS, max_pending=100)
    accepted = group_commit.submit(bulk_items(90))
    with pytest.raises(Overloaded):
        group_commit.submit([("bulk", 90)])
    urgent = [group_commit.submit([("urgent", number)], urgent=True) for number in range(10)]
    with pytest.raises(Overloaded):
        group_commit.submit([("urgent", 10)], urgent=True)
    commit.may_finish.set()
    await asyncio.gather(accepted, *urgent)
