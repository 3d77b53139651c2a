"""Group commit: calls that wait are committed together, each with its own results and errors."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.group_commit import MAX_FAILURE_S, AsyncGroupCommit, exceeds_limit
from tarry.testing import VirtualClock


class DoublingCommit:
    """A commit function that returns the double of each item once `may_finish` is set."""

    def __init__(self, *, may_finish: bool = False) -> None:
        self.calls: list[list[int]] = []
        self.may_finish = asyncio.Event()
        if may_finish:
            self.may_finish.set()
        self.error: BaseException | None = None

    async def __call__(self, items: Sequence[int], *_: object) -> Sequence[int]:
        """Commit a group, or raise `error`."""
        self.calls.append(list(items))
        await self.may_finish.wait()
        if self.error is not None:
            raise self.error
        return [item * 2 for item in items]


async def test_items_that_arrive_during_a_commit_share_the_next_commit() -> None:
    """The first item is committed alone, the others together; each caller gets its results."""
    commit = DoublingCommit()
    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=10)
    first = group_commit.submit([1])
    await asyncio.sleep(0)
    others = [group_commit.submit([2, 3]), group_commit.submit([4])]
    assert 4 == group_commit.pending_count
    commit.may_finish.set()

    assert [2] == await first
    assert [[4, 6], [8]] == [await other for other in others]
    assert [[1], [2, 3, 4]] == commit.calls
    assert 0 == group_commit.pending_count


async def test_calls_with_different_arguments_are_not_merged() -> None:
    """A call has the items of all entries with the same arguments, and no others."""
    calls: list[tuple[list[int], str]] = []

    async def commit(items: Sequence[int], name: str) -> Sequence[int]:
        calls.append((list(items), name))
        return items

    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=10)
    futures = [group_commit.submit([n], "even" if n % 2 == 0 else "odd") for n in range(5)]
    assert [[n] for n in range(5)] == [await future for future in futures]
    assert [([0, 2, 4], "even"), ([1, 3], "odd")] == calls


async def test_empty_entry_has_no_results() -> None:
    """An entry without items returns nothing, also if it shares a group."""
    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(
        DoublingCommit(may_finish=True), max_items=10
    )
    futures = [group_commit.submit([]), group_commit.submit([1])]
    assert [[], [2]] == [await future for future in futures]


async def test_second_group_starts_early_when_enough_items_wait() -> None:
    """Fewer items wait for the end of the first group, and no third group starts."""
    commit = DoublingCommit()
    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=100)
    sizes = (1, 31, 1, 50)
    futures: list[asyncio.Future[list[int]]] = []
    group_sizes: list[list[int]] = []
    for size in sizes:
        futures.append(group_commit.submit([size] * size))
        await asyncio.sleep(0)
        group_sizes.append([len(call) for call in commit.calls])
    assert [[1], [1], [1, 32], [1, 32]] == group_sizes
    commit.may_finish.set()

    assert list(sizes) == [len(await future) for future in futures]
    assert [1, 32, 50] == [len(call) for call in commit.calls]
    assert 0 == group_commit.pending_count


async def test_entry_is_never_divided() -> None:
    """A group ends with the entry that reaches its size, and a large entry has one commit."""
    commit = DoublingCommit(may_finish=True)
    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=4)
    parts = ([1, 2], [3], [4, 5], [6, 7, 8, 9, 10], [11])
    futures = [group_commit.submit(part) for part in parts]
    assert [12, 14, 16, 18, 20] == (await asyncio.gather(*futures))[3]

    assert [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11]] == commit.calls


async def test_error_of_one_entry_does_not_affect_others() -> None:
    """If a call of several entries fails, each is committed alone, and gets its own error."""
    calls: list[list[int]] = []

    async def commit(items: Sequence[int]) -> Sequence[int]:
        calls.append(list(items))
        if min(items) < 0:
            msg = f"{min(items)} is negative"
            raise ValueError(msg)
        return items

    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=10)
    entries = [[1], [2, -3], [4], [-5], [6]]
    results = await asyncio.gather(*map(group_commit.submit, entries), return_exceptions=True)
    assert ["[1]", "-3 is negative", "[4]", "-5 is negative", "[6]"] == list(map(str, results))
    assert [[1, 2, -3, 4, -5, 6], *entries] == calls
    assert 0 == group_commit.pending_count


async def test_outage_reaches_all_callers_of_the_group_only() -> None:
    """Callers of the failed group get the error, and the next group is committed."""
    commit = DoublingCommit(may_finish=True)
    commit.error = StoreUnavailable("disk full")
    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=10)
    failed = [group_commit.submit([1]), group_commit.submit([2])]
    for future in failed:
        with pytest.raises(StoreUnavailable):
            await future
    assert [[1, 2]] == commit.calls
    commit.error = None
    assert [6] == await group_commit.submit([3])


@pytest.mark.parametrize("duration_s", [MAX_FAILURE_S / 2, MAX_FAILURE_S * 2])
def test_entries_that_wait_fail_with_a_slow_group(duration_s: float) -> None:
    """If a store needs long to fail, callers do not also wait for the failure of the next group."""

    async def main() -> None:
        calls: list[list[int]] = []

        async def commit(items: Sequence[int]) -> Sequence[int]:
            calls.append(list(items))
            await asyncio.sleep(duration_s)
            raise StoreUnavailable("no reply in time")

        group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=10)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        first = group_commit.submit([1])
        await asyncio.sleep(0)
        second = group_commit.submit([2])
        await asyncio.wait([first, second])
        is_slow = duration_s > MAX_FAILURE_S
        assert duration_s * (1 if is_slow else 2) == loop.time() - begin
        assert ([[1]] if is_slow else [[1], [2]]) == calls
        for future in (first, second):
            with pytest.raises(StoreUnavailable):
                await future

    with VirtualClock() as clock:
        clock.run(main)


async def test_cancelled_caller_does_not_affect_others() -> None:
    """Items of a cancelled caller are committed, and other callers get their results."""
    commit = DoublingCommit(may_finish=True)
    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=10)
    cancelled, other = group_commit.submit([1]), group_commit.submit([2])
    cancelled.cancel()

    assert [4] == await other
    assert [[1, 2]] == commit.calls


async def test_close_waits_for_callers() -> None:
    """The callers of the group in flight and those that wait get their results."""
    commit = DoublingCommit()
    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=1)
    futures = [group_commit.submit([1])]
    await asyncio.sleep(0)
    futures.append(group_commit.submit([2]))
    closing = asyncio.ensure_future(group_commit.close())
    await asyncio.sleep(0)
    assert not closing.done()
    commit.may_finish.set()
    await closing
    assert [[2], [4]] == [future.result() for future in futures]


async def test_close_cancels_calls_without_a_caller() -> None:
    """The call in flight is cancelled, and the one that waits does not start."""
    commit = DoublingCommit()
    group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=1)
    for number in (1, 2):
        group_commit.submit([number]).cancel()
        await asyncio.sleep(0)
    await group_commit.close()
    assert [[1]] == commit.calls
    assert 0 == group_commit.pending_count


def test_error_is_freed_without_the_garbage_collector() -> None:
    """The error and the future of an entry do not refer to each other through a traceback."""

    async def main() -> None:
        commit = DoublingCommit(may_finish=True)
        commit.error = StoreUnavailable("disk full")
        reference = weakref.ref(commit.error)
        group_commit: AsyncGroupCommit[int, int] = AsyncGroupCommit(commit, max_items=10)
        failed = group_commit.submit([1])
        await asyncio.wait([failed])
        assert reference() is failed.exception()
        commit.error = None
        del failed
        await group_commit.submit([2])
        assert reference() is None

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_pending_items_are_limited() -> None:
    """An empty queue accepts any entry, and a tenth of the limit is reserved for urgent ones."""
    cases = {
        (0, 200, False): False,
        (80, 10, False): False,
        (80, 11, False): True,
        (80, 20, True): False,
        (80, 21, True): True,
    }
    assert cases == {case: exceeds_limit(100, case[0], case[1], urgent=case[2]) for case in cases}
