from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.group_commit import AsyncGroupCommit


class DoublingCommit:
    """Returns the double of each item, once `may_finish` is set."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.may_finish = asyncio.Event()
        self.error: BaseException | None = None

    async def __call__(self, items: Sequence[int]) -> Sequence[int]:
        """Commit a group."""
        self.calls.append(list(items))
        await self.may_finish.wait()
        if self.error is not None:
            raise self.error
        return [item * 2 for item in items]


def test_items_that_arrive_during_a_commit_share_the_next() -> None:
    """The first is committed alone, the others together; each gets its own result."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=10, max_pending=100)
        first = commits.submit([1])
        await asyncio.sleep(0)
        others = [commits.submit([2, 3]), commits.submit([4])]
        commit.may_finish.set()

        assert [2] == list(await first)
        assert [[4, 6], [8]] == [list(await other) for other in others]
        assert [[1], [2, 3, 4]] == commit.calls
        await commits.flush()
        assert 0 == commits.pending_count

    asyncio.run(main())


def test_second_group_starts_early_when_enough_items_wait() -> None:
    """Few items wait for the end of the first group, and there is never a third."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=100, max_pending=1000)
        sizes = (1, 31, 1, 50)
        answers: list[asyncio.Future[Sequence[int]]] = []
        seen: list[list[int]] = []
        for size in sizes:
            answers.append(commits.submit([size] * size))
            await asyncio.sleep(0)
            seen.append([len(call) for call in commit.calls])
        assert [[1], [1], [1, 32], [1, 32]] == seen
        commit.may_finish.set()

        assert list(sizes) == [len(await answer) for answer in answers]
        assert [1, 32, 50] == [len(call) for call in commit.calls]
        await commits.flush()
        assert 0 == commits.pending_count

    asyncio.run(main())


def test_commit_works_after_a_stop_before_the_first_group() -> None:
    """The items that were waiting are committed too."""

    async def main() -> None:
        commit = DoublingCommit()
        commit.may_finish.set()
        commits = AsyncGroupCommit(commit, max_items=10, max_pending=100)
        commits.post(1)
        await commits.stop()
        assert [] == commit.calls
        assert [4] == list(await commits.submit([2]))
        assert [[1, 2]] == commit.calls

    asyncio.run(main())


def test_failed_group_does_not_affect_the_other_in_flight() -> None:
    """Each group has its own result."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=40, max_pending=1000)
        first = commits.submit([1] * 40)
        await asyncio.sleep(0)
        second = commits.submit([2] * 40)
        await asyncio.sleep(0)
        assert [40, 40] == [len(call) for call in commit.calls]
        first.cancel()
        commit.may_finish.set()
        assert [4] * 40 == list(await second)
        commit.error = StoreUnavailable("away")
        failed = commits.submit([3])
        with pytest.raises(StoreUnavailable):
            await failed
        await commits.flush()
        assert 0 == commits.pending_count

    asyncio.run(main())


def test_posted_items_count_towards_an_early_start() -> None:
    """They start a second group like submitted items."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=100, max_pending=1000)
        for n in range(40):
            commits.post(n)
            if n in {0, 30}:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [1, 39] == [len(call) for call in commit.calls]
        commits.post(40)
        await asyncio.sleep(0)
        commit.may_finish.set()
        await commits.flush()
        assert [1, 39, 1] == [len(call) for call in commit.calls]

    asyncio.run(main())


def test_group_has_at_most_max_items() -> None:
    """Entries stay together unless they are larger than a group; results keep their order."""

    async def main() -> None:
        commit = DoublingCommit()
        commit.may_finish.set()
        commits = AsyncGroupCommit(commit, max_items=3, max_pending=100)
        answers = [commits.submit(part) for part in ([1, 2], [3, 4], [5], [6, 7, 8, 9, 10])]
        assert [12, 14, 16, 18, 20] == list((await asyncio.gather(*answers))[-1])

        assert [[1, 2], [3, 4, 5], [6, 7, 8], [9, 10]] == commit.calls

    asyncio.run(main())


def test_other_entries_are_committed_between_parts_of_a_large_one() -> None:
    """A large entry is refused as a whole, before any of it is committed."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=2, max_pending=6)
        large = commits.submit([1, 2, 3, 4, 5])
        with pytest.raises(Overloaded):
            commits.submit([6, 7, 8])
        small = commits.submit([9])
        commit.may_finish.set()

        assert [2, 4, 6, 8, 10] == list(await large)
        assert [18] == list(await small)
        assert [[1, 2], [3, 4], [5, 9]] == commit.calls

    asyncio.run(main())


def test_error_of_one_part_fails_the_whole_entry() -> None:
    """The caller may submit it again: commits are idempotent."""

    async def main() -> None:
        commit = DoublingCommit()
        commit.error = StoreUnavailable("away")
        commit.may_finish.set()
        commits = AsyncGroupCommit(commit, max_items=2, max_pending=100)
        with pytest.raises(StoreUnavailable):
            await commits.submit([1, 2, 3])
        await commits.flush()
        assert 0 == commits.pending_count

    asyncio.run(main())


def test_items_above_max_pending_are_refused() -> None:
    """Memory is bounded, and the caller learns when to retry."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=10, max_pending=3)
        accepted = commits.submit([1, 2])
        with pytest.raises(Overloaded, match="2 tasks wait") as caught:
            commits.submit([3, 4])
        assert 1.0 == caught.value.retry_after
        commit.may_finish.set()
        await accepted
        await commits.submit([3, 4, 5, 6])  # nothing is pending: a large entry is accepted

    asyncio.run(main())


def test_error_reaches_all_callers_of_the_group_only() -> None:
    """The next group is committed normally."""

    async def main() -> None:
        commit = DoublingCommit()
        commit.error = StoreUnavailable("away")
        commits = AsyncGroupCommit(commit, max_items=10, max_pending=100)
        failed = [commits.submit([1]), commits.submit([2])]
        commit.may_finish.set()
        for answer in failed:
            with pytest.raises(StoreUnavailable):
                await answer
        commit.error = None
        assert [6] == list(await commits.submit([3]))

    asyncio.run(main())


def test_cancelled_caller_does_not_affect_others() -> None:
    """Its items are committed, and the others get their results."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=10, max_pending=100)
        cancelled, other = commits.submit([1]), commits.submit([2])
        cancelled.cancel()
        commit.may_finish.set()

        assert [4] == list(await other)
        assert [[1, 2]] == commit.calls

    asyncio.run(main())


def test_posted_items_are_committed_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """An error is logged, and the next group is committed."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=10, max_pending=100)
        commits.post(1)
        second = commits.submit([2])
        commit.may_finish.set()
        assert [4] == list(await second)
        assert [[1, 2]] == commit.calls

        commit.error = StoreUnavailable("away")
        commits.post(3)
        await commits.flush()
        commit.error = None
        assert [8] == list(await commits.submit([4]))
        assert 0 == commits.pending_count

    asyncio.run(main())
    assert ["group commit failed, and no caller waits for its result"] == [
        each.message for each in caplog.records
    ]


def test_posted_items_respect_max_items() -> None:
    """They keep their order, also with submitted items between them."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=3, max_pending=100)
        for item in range(1, 5):
            commits.post(item)
        between = commits.submit([5, 6])
        commits.post(7)
        assert 7 == commits.pending_count
        await asyncio.sleep(0)
        commits.post(8)  # the first group is in flight
        commit.may_finish.set()
        assert [10, 12] == list(await between)
        await commits.flush()

        assert [[1, 2, 3], [4, 5, 6], [7, 8]] == commit.calls
        assert 0 == commits.pending_count

    asyncio.run(main())


def test_waiting_items_are_committed_after_a_stop() -> None:
    """The next post starts the queue again."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=1, max_pending=100)
        commits.post(1)
        await asyncio.sleep(0)
        commits.post(2)
        await commits.stop()
        commit.may_finish.set()
        commits.post(3)
        await commits.flush()

        assert [[1], [2], [3]] == commit.calls

    asyncio.run(main())


def test_stop_cancels_the_commit_in_flight() -> None:
    """Waiting items are not committed."""

    async def main() -> None:
        commit = DoublingCommit()
        commits = AsyncGroupCommit(commit, max_items=1, max_pending=100)
        first = commits.submit([1])
        await asyncio.sleep(0)
        commits.post(2)
        await commits.stop()

        assert first.cancelled()
        assert [[1]] == commit.calls

    asyncio.run(main())


def test_stop_right_after_a_commit_raises_nothing() -> None:
    """The callback of a commit that has ended may run after `stop`, and starts nothing."""

    async def main() -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        commit = DoublingCommit()
        commit.may_finish.set()
        commits = AsyncGroupCommit(commit, max_items=10, max_pending=100)
        commits.post(1)
        await asyncio.sleep(0)
        await commits.stop()
        await asyncio.sleep(0)

        assert [] == errors
        assert [[1]] == commit.calls

    asyncio.run(main())
