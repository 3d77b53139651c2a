"""Group commit: entries with a higher priority come first, and those of each make progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tarry.service.group_commit import (
    BACKGROUND,
    BATCH,
    URGENT,
    AsyncGroupCommit,
    priority_of_new_tasks,
)

MAX_ITEMS = 64
PRIORITIES = (URGENT, BATCH, BACKGROUND)

Item = tuple[int, int]
"""The priority of an item, and its number within those of this priority."""


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


async def test_urgent_entry_is_in_the_next_group() -> None:
    """An urgent item that is submitted after 1,000 other items is in the next group."""
    commit = RecordingCommit()
    group_commit: AsyncGroupCommit[Item, Item] = AsyncGroupCommit(commit, max_items=MAX_ITEMS)
    others = [
        group_commit.submit([(priority, number)], priority=priority)
        for number in range(500)
        for priority in (BATCH, BACKGROUND)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 2 == len(commit.groups)
    urgent = group_commit.submit([(URGENT, 0)], priority=URGENT)
    commit.may_finish.set()

    assert [(URGENT, 0)] == await urgent
    await asyncio.gather(*others)
    assert [2] == [n for n, group in enumerate(commit.groups) if (URGENT, 0) in group]


@given(
    st.lists(st.tuples(st.sampled_from(PRIORITIES), st.integers(1, 200)), max_size=60),
    st.integers(2, MAX_ITEMS),
)
def test_each_group_takes_entries_of_each_priority(
    entries: list[tuple[int, int]], max_items: int
) -> None:
    """A group has the next entry of each waiting priority, and ends when it is full."""

    async def main() -> None:
        commit = RecordingCommit()
        commit.may_finish.set()
        group_commit: AsyncGroupCommit[Item, Item] = AsyncGroupCommit(commit, max_items=max_items)
        waiting: dict[int, list[list[Item]]] = {priority: [] for priority in PRIORITIES}
        futures = []
        for priority, size in entries:
            first = sum(map(len, waiting[priority]))
            items = [(priority, number) for number in range(first, first + size)]
            waiting[priority].append(items)
            futures.append(group_commit.submit(items, priority=priority))
        await asyncio.gather(*futures)

        for group in commit.groups:
            for priority, rest in waiting.items():
                items = [item for item in group if item[0] == priority]
                assert bool(items) is bool(rest)
                taken: list[list[Item]] = []
                while rest and sum(map(len, taken)) < len(items):
                    taken.append(rest.pop(0))
                assert items == [item for entry in taken for item in entry]
                assert sum(map(len, taken[:-1])) < max_items
        assert not any(waiting.values())

    asyncio.run(main())


def test_tasks_of_a_small_request_are_urgent() -> None:
    """A request of up to 8 tasks does not wait for larger ones."""
    assert [URGENT, URGENT, BATCH] == list(map(priority_of_new_tasks, (1, 8, 9)))
