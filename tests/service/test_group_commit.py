from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.group_commit import EARLY_START_WEIGHT, AsyncGroupCommit
from tarry.testing import VirtualClock


class DoublingCommit:
    """A commit function that returns the double of each item once `may_finish` is set."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.may_finish = asyncio.Event()
        self.error: BaseException | None = None

    async def __call__(self, items: Sequence[int]) -> Sequence[int]:
        """Commit a group, or raise `error`."""
        self.calls.append(list(items))
        await self.may_finish.wait()
        if self.error is not None:
            raise self.error
        return [item * 2 for item in items]


async def test_items_that_arrive_during_a_commit_share_the_next_commit() -> None:
    """The first item is committed alone, the others together; each caller gets its results."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=10, max_pending=100)
    first = group_commit.submit([1])
    await asyncio.sleep(0)
    others = [group_commit.submit([2, 3]), group_commit.submit([4])]
    assert [1, 2, 3, 4] == sorted(group_commit.pending_items())
    commit.may_finish.set()

    assert [2] == list(await first)
    assert [[4, 6], [8]] == [list(await other) for other in others]
    assert [[1], [2, 3, 4]] == commit.calls
    await group_commit.flush()
    assert 0 == group_commit.pending_count
    assert [] == group_commit.pending_items()


@pytest.mark.parametrize("error", [None, StoreUnavailable("the store is unavailable")])
async def test_wait_for_groups_in_flight_does_not_wait_for_later_groups(
    error: Exception | None,
) -> None:
    """The wait ends with the group in flight, also if it fails, although another group follows."""
    may_finish = {1: asyncio.Event(), 2: asyncio.Event()}

    async def commit(items: Sequence[int]) -> Sequence[int]:
        await may_finish[items[0]].wait()
        if error is not None:
            raise error
        return items

    group_commit = AsyncGroupCommit(commit, max_items=10, max_pending=100)
    await group_commit.wait_for_groups_in_flight()
    first = group_commit.submit([1])
    await asyncio.sleep(0)
    wait = asyncio.ensure_future(group_commit.wait_for_groups_in_flight())
    second = group_commit.submit([2])
    await asyncio.sleep(0)
    assert not wait.done()
    may_finish[1].set()
    await wait
    assert first.done()
    assert not second.done()
    may_finish[2].set()
    await asyncio.wait([second])
    assert error is first.exception() is second.exception()


async def test_second_group_starts_early_when_enough_items_wait() -> None:
    """Fewer items wait for the end of the first group, and no third group starts."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=100, max_pending=1000)
    sizes = (1, 31, 1, 50)
    futures: list[asyncio.Future[Sequence[int]]] = []
    group_sizes: list[list[int]] = []
    for size in sizes:
        futures.append(group_commit.submit([size] * size))
        await asyncio.sleep(0)
        group_sizes.append([len(call) for call in commit.calls])
    assert [[1], [1], [1, 32], [1, 32]] == group_sizes
    commit.may_finish.set()

    assert list(sizes) == [len(await future) for future in futures]
    assert [1, 32, 50] == [len(call) for call in commit.calls]
    await group_commit.flush()
    assert 0 == group_commit.pending_count


async def test_commit_works_after_a_stop_before_the_first_group() -> None:
    """The items that were waiting at the stop are committed with the next items."""
    commit = DoublingCommit()
    commit.may_finish.set()
    group_commit = AsyncGroupCommit(commit, max_items=10, max_pending=100)
    group_commit.post(1)
    await group_commit.stop()
    assert [] == commit.calls
    assert [4] == list(await group_commit.submit([2]))
    assert [[1, 2]] == commit.calls


async def test_cancelled_group_does_not_affect_the_other_in_flight() -> None:
    """The other group gets its results, and a failed group raises its error."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=40, max_pending=1000)
    first = group_commit.submit([1] * 40)
    await asyncio.sleep(0)
    second = group_commit.submit([2] * 40)
    await asyncio.sleep(0)
    assert [40, 40] == [len(call) for call in commit.calls]
    first.cancel()
    commit.may_finish.set()
    assert [4] * 40 == list(await second)
    commit.error = StoreUnavailable("disk full")
    failed = group_commit.submit([3])
    with pytest.raises(StoreUnavailable):
        await failed
    await group_commit.flush()
    assert 0 == group_commit.pending_count


async def test_posted_items_count_towards_an_early_start() -> None:
    """Enough posted items start a second group, like submitted items."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=100, max_pending=1000)
    for n in range(40):
        group_commit.post(n)
        if n in {0, 30}:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [1, 39] == [len(call) for call in commit.calls]
    group_commit.post(40)
    await asyncio.sleep(0)
    commit.may_finish.set()
    await group_commit.flush()
    assert [1, 39, 1] == [len(call) for call in commit.calls]


async def test_group_has_at_most_max_items() -> None:
    """An entry is split only if it exceeds half of a group; its results keep their order."""
    commit = DoublingCommit()
    commit.may_finish.set()
    group_commit = AsyncGroupCommit(commit, max_items=4, max_pending=100)
    futures = [group_commit.submit(part) for part in ([1, 2], [3], [4, 5], [6, 7, 8, 9, 10])]
    assert [12, 14, 16, 18, 20] == list((await asyncio.gather(*futures))[-1])

    assert [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10]] == commit.calls


async def test_small_entry_shares_a_group_with_the_last_part_of_a_large_entry() -> None:
    """Of an entry that exceeds `max_pending`, no item is committed; a smaller entry is accepted."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=2, max_pending=6)
    large = group_commit.submit([1, 2, 3, 4, 5])
    with pytest.raises(Overloaded):
        group_commit.submit([6, 7, 8])
    small = group_commit.submit([9])
    commit.may_finish.set()

    assert [2, 4, 6, 8, 10] == list(await large)
    assert [18] == list(await small)
    assert [[1, 2], [3, 4], [5, 9]] == commit.calls


async def test_error_of_one_part_fails_the_entry() -> None:
    """The caller gets the error of a group that contains a part of its entry."""
    commit = DoublingCommit()
    commit.error = StoreUnavailable("disk full")
    commit.may_finish.set()
    group_commit = AsyncGroupCommit(commit, max_items=2, max_pending=100)
    with pytest.raises(StoreUnavailable):
        await group_commit.submit([1, 2, 3])
    await group_commit.flush()
    assert 0 == group_commit.pending_count


async def test_items_above_max_pending_are_rejected() -> None:
    """`Overloaded` has the seconds until a retry; an empty queue accepts any entry."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=10, max_pending=3)
    accepted = group_commit.submit([1, 2])
    with pytest.raises(Overloaded, match="2 tasks wait") as raised:
        group_commit.submit([3, 4])
    assert 1.0 == raised.value.retry_after
    commit.may_finish.set()
    await accepted
    await group_commit.submit([3, 4, 5, 6])  # nothing is pending: a large entry is accepted


async def test_error_reaches_all_callers_of_the_group_only() -> None:
    """Callers of the failed group get the error, and the next group is committed."""
    commit = DoublingCommit()
    commit.error = StoreUnavailable("disk full")
    group_commit = AsyncGroupCommit(commit, max_items=10, max_pending=100)
    failed = [group_commit.submit([1]), group_commit.submit([2])]
    commit.may_finish.set()
    for future in failed:
        with pytest.raises(StoreUnavailable):
            await future
    commit.error = None
    assert [6] == list(await group_commit.submit([3]))


async def test_cancelled_caller_does_not_affect_others() -> None:
    """Items of a cancelled caller are committed, and other callers get their results."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=10, max_pending=100)
    cancelled, other = group_commit.submit([1]), group_commit.submit([2])
    cancelled.cancel()
    commit.may_finish.set()

    assert [4] == list(await other)
    assert [[1, 2]] == commit.calls


async def test_posted_items_share_groups_with_submitted_items(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error of a group without a caller is logged, and the next group is committed."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=10, max_pending=100)
    group_commit.post(1)
    second = group_commit.submit([2])
    commit.may_finish.set()
    assert [4] == list(await second)
    assert [[1, 2]] == commit.calls

    commit.error = StoreUnavailable("disk full")
    group_commit.post(3)
    await group_commit.flush()
    commit.error = None
    assert [8] == list(await group_commit.submit([4]))
    assert 0 == group_commit.pending_count
    assert ["group commit failed, and no caller waits for its result"] == [
        each.message for each in caplog.records
    ]


async def test_posted_items_respect_max_items() -> None:
    """Groups have at most `max_items`, and posted and submitted items keep their order."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=3, max_pending=100)
    for item in range(1, 5):
        group_commit.post(item)
    between = group_commit.submit([5, 6])
    group_commit.post(7)
    assert 7 == group_commit.pending_count
    await asyncio.sleep(0)
    group_commit.post(8)  # the first group is in flight
    commit.may_finish.set()
    assert [10, 12] == list(await between)
    await group_commit.flush()

    assert [[1, 2, 3], [4, 5, 6], [7, 8]] == commit.calls
    assert 0 == group_commit.pending_count


async def test_waiting_items_are_committed_after_a_stop() -> None:
    """The next post after a stop starts the commits again."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=1, max_pending=100)
    group_commit.post(1)
    await asyncio.sleep(0)
    group_commit.post(2)
    await group_commit.stop()
    commit.may_finish.set()
    group_commit.post(3)
    await group_commit.flush()

    assert [[1], [2], [3]] == commit.calls


async def test_stop_cancels_the_commit_in_flight() -> None:
    """The caller's future is cancelled, and waiting items are not committed."""
    commit = DoublingCommit()
    group_commit = AsyncGroupCommit(commit, max_items=1, max_pending=100)
    first = group_commit.submit([1])
    await asyncio.sleep(0)
    group_commit.post(2)
    await group_commit.stop()

    assert first.cancelled()
    assert [[1]] == commit.calls


async def test_stop_right_after_a_commit_raises_nothing() -> None:
    """The callback of a finished commit runs after `stop` without an error."""
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    commit = DoublingCommit()
    commit.may_finish.set()
    group_commit = AsyncGroupCommit(commit, max_items=10, max_pending=100)
    group_commit.post(1)
    await asyncio.sleep(0)
    await group_commit.stop()
    await asyncio.sleep(0)

    assert [] == errors
    assert [[1]] == commit.calls


def new_lingering_group_commit(commit: DoublingCommit) -> AsyncGroupCommit[int, int]:
    """Return a queue whose posted items linger for longer than a test takes."""
    return AsyncGroupCommit(commit, max_items=100, max_pending=None, linger_s=3600)


def test_posted_items_linger() -> None:
    """Posted items start together, when the linger time has passed."""

    async def main() -> None:
        commit = DoublingCommit()
        commit.may_finish.set()
        group_commit = AsyncGroupCommit(commit, max_items=100, max_pending=None, linger_s=5)
        group_commit.post(1)
        await asyncio.sleep(4)
        group_commit.post(2)
        assert [] == commit.calls
        await asyncio.sleep(2)
        assert [[1, 2]] == commit.calls
        group_commit.post(3)
        await asyncio.sleep(4)
        assert [[1, 2]] == commit.calls
        await asyncio.sleep(2)
        assert [[1, 2], [3]] == commit.calls

    with VirtualClock() as clock:
        clock.run(main)


async def test_end_linger_starts_the_group() -> None:
    """The group starts in the next iteration of the event loop; without items, nothing starts."""
    commit = DoublingCommit()
    group_commit = new_lingering_group_commit(commit)
    group_commit.end_linger()
    group_commit.post(1)
    group_commit.end_linger()
    await asyncio.sleep(0)
    assert [[1]] == commit.calls
    group_commit.post(2)
    commit.may_finish.set()
    await group_commit.wait_for_groups_in_flight()
    await asyncio.sleep(0)
    assert [[1]] == commit.calls  # the second item lingers


def test_end_linger_with_a_delay_shortens_it() -> None:
    """The shortest of several delays applies, and a delay never extends the linger."""

    async def main() -> None:
        commit = DoublingCommit()
        commit.may_finish.set()
        group_commit = AsyncGroupCommit(commit, max_items=100, max_pending=None, linger_s=10)
        group_commit.end_linger(1)
        group_commit.post(1)
        for delay_s in (20, 6, 8):
            group_commit.end_linger(delay_s)
        await asyncio.sleep(5)
        assert [] == commit.calls
        group_commit.post(2)
        group_commit.end_linger(5)
        await asyncio.sleep(2)
        assert [[1, 2]] == commit.calls
        group_commit.post(3)
        await asyncio.sleep(9)
        assert [[1, 2]] == commit.calls
        group_commit.end_linger(-1)
        await asyncio.sleep(0)
        assert [[1, 2], [3]] == commit.calls

    with VirtualClock() as clock:
        clock.run(main)


async def test_many_posted_items_do_not_linger() -> None:
    """A group starts at once when enough items wait."""
    commit = DoublingCommit()
    group_commit = new_lingering_group_commit(commit)
    for item in range(EARLY_START_WEIGHT):
        assert not commit.calls
        group_commit.post(item)
    await asyncio.sleep(0)
    assert [list(range(EARLY_START_WEIGHT))] == commit.calls


async def test_submitted_items_do_not_linger() -> None:
    """An item whose result a caller awaits starts at once, together with the posted items."""
    commit = DoublingCommit()
    commit.may_finish.set()
    group_commit = new_lingering_group_commit(commit)
    group_commit.post(1)
    assert [4] == list(await group_commit.submit([2]))
    assert [[1, 2]] == commit.calls


async def test_flush_does_not_linger() -> None:
    """A flush commits lingering items, and those that are posted during the flush."""
    commit = DoublingCommit()
    group_commit = new_lingering_group_commit(commit)
    group_commit.post(1)
    flush = asyncio.ensure_future(group_commit.flush())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    group_commit.post(2)
    commit.may_finish.set()
    await flush
    assert [[1], [2]] == commit.calls
    assert 0 == group_commit.pending_count


async def test_stop_ends_the_linger() -> None:
    """Lingering items keep waiting after a stop, and start with the next item."""
    commit = DoublingCommit()
    commit.may_finish.set()
    group_commit = new_lingering_group_commit(commit)
    group_commit.post(1)
    await group_commit.stop()
    await group_commit.flush()
    assert [] == commit.calls
    group_commit.post(2)
    await asyncio.sleep(0)
    assert [[1, 2]] == commit.calls
