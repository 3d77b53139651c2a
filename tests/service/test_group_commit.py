from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.group_commit import AsyncGroupCommit


class Sender:
    """Answers each item with its double, when it is let."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.gate = asyncio.Event()
        self.error: BaseException | None = None

    async def __call__(self, items: Sequence[int]) -> Sequence[int]:
        """Answer."""
        self.calls.append(list(items))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [item * 2 for item in items]


def test_what_comes_while_a_call_runs_goes_into_the_next() -> None:
    """The first goes alone, the others together, and each gets its own answer."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=10, max_pending=100)
        first = commits.submit([1])
        await asyncio.sleep(0)
        others = [commits.submit([2, 3]), commits.submit([4])]
        sender.gate.set()

        assert [2] == list(await first)
        assert [[4, 6], [8]] == [list(await other) for other in others]
        assert [[1], [2, 3, 4]] == sender.calls
        await commits.flush()
        assert 0 == commits.pending

    asyncio.run(main())


def test_a_second_call_is_made_when_enough_wait_for_it() -> None:
    """Few wait for the end of the first, and there is never a third."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=100, max_pending=1000)
        sizes = (1, 31, 1, 50)
        answers: list[asyncio.Future[Sequence[int]]] = []
        seen: list[list[int]] = []
        for size in sizes:
            answers.append(commits.submit([size] * size))
            await asyncio.sleep(0)
            seen.append([len(call) for call in sender.calls])
        assert [[1], [1], [1, 32], [1, 32]] == seen
        sender.gate.set()

        assert list(sizes) == [len(await answer) for answer in answers]
        assert [1, 32, 50] == [len(call) for call in sender.calls]
        await commits.flush()
        assert 0 == commits.pending

    asyncio.run(main())


def test_after_a_stop_before_anything_began_the_next_goes() -> None:
    """With what was left behind."""

    async def main() -> None:
        sender = Sender()
        sender.gate.set()
        commits = AsyncGroupCommit(sender, max_items=10, max_pending=100)
        commits.post(1)
        await commits.stop()
        assert [] == sender.calls
        assert [4] == list(await commits.submit([2]))
        assert [[1, 2]] == sender.calls

    asyncio.run(main())


def test_one_of_two_calls_that_fails_takes_nothing_of_the_other() -> None:
    """Each has its own answer."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=40, max_pending=1000)
        first = commits.submit([1] * 40)
        await asyncio.sleep(0)
        second = commits.submit([2] * 40)
        await asyncio.sleep(0)
        assert [40, 40] == [len(call) for call in sender.calls]
        first.cancel()
        sender.gate.set()
        assert [4] * 40 == list(await second)
        sender.error = StoreUnavailable("away")
        failed = commits.submit([3])
        with pytest.raises(StoreUnavailable):
            await failed
        await commits.flush()
        assert 0 == commits.pending

    asyncio.run(main())


def test_what_is_posted_counts_towards_a_second_call() -> None:
    """Nobody waits for it, and it goes as soon."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=100, max_pending=1000)
        for n in range(40):
            commits.post(n)
            if n in {0, 30}:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [1, 39] == [len(call) for call in sender.calls]
        commits.post(40)
        await asyncio.sleep(0)
        sender.gate.set()
        await commits.flush()
        assert [1, 39, 1] == [len(call) for call in sender.calls]

    asyncio.run(main())


def test_a_call_takes_no_more_than_it_may() -> None:
    """Parts stay together, but for those that no call can take; answers keep their order."""

    async def main() -> None:
        sender = Sender()
        sender.gate.set()
        commits = AsyncGroupCommit(sender, max_items=3, max_pending=100)
        answers = [commits.submit(part) for part in ([1, 2], [3, 4], [5], [6, 7, 8, 9, 10])]
        assert [12, 14, 16, 18, 20] == list((await asyncio.gather(*answers))[-1])

        assert [[1, 2], [3, 4, 5], [6, 7, 8], [9, 10]] == sender.calls

    asyncio.run(main())


def test_others_have_their_turn_between_the_calls_of_a_large_part() -> None:
    """Which is refused as a whole, before anything of it is sent."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=2, max_pending=6)
        large = commits.submit([1, 2, 3, 4, 5])
        with pytest.raises(Overloaded):
            commits.submit([6, 7, 8])
        small = commits.submit([9])
        sender.gate.set()

        assert [2, 4, 6, 8, 10] == list(await large)
        assert [18] == list(await small)
        assert [[1, 2], [3, 4], [5, 9]] == sender.calls

    asyncio.run(main())


def test_an_error_of_one_call_is_that_of_the_whole_part() -> None:
    """Who put it may put it again: nothing is done twice."""

    async def main() -> None:
        sender = Sender()
        sender.error = StoreUnavailable("away")
        sender.gate.set()
        commits = AsyncGroupCommit(sender, max_items=2, max_pending=100)
        with pytest.raises(StoreUnavailable):
            await commits.submit([1, 2, 3])
        await commits.flush()
        assert 0 == commits.pending

    asyncio.run(main())


def test_more_than_may_wait_is_refused() -> None:
    """Memory is bounded: who comes too many is told when to come again."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=10, max_pending=3)
        taken = commits.submit([1, 2])
        with pytest.raises(Overloaded, match="2 tasks wait") as caught:
            commits.submit([3, 4])
        assert 1.0 == caught.value.retry_after
        sender.gate.set()
        await taken
        await commits.submit([3, 4, 5, 6])  # nobody waits: a large one is taken all the same

    asyncio.run(main())


def test_an_error_reaches_everybody_in_the_call_and_nobody_else() -> None:
    """The next call is made as if nothing had been."""

    async def main() -> None:
        sender = Sender()
        sender.error = StoreUnavailable("away")
        commits = AsyncGroupCommit(sender, max_items=10, max_pending=100)
        failed = [commits.submit([1]), commits.submit([2])]
        sender.gate.set()
        for answer in failed:
            with pytest.raises(StoreUnavailable):
                await answer
        sender.error = None
        assert [6] == list(await commits.submit([3]))

    asyncio.run(main())


def test_a_caller_who_left_disturbs_nobody() -> None:
    """His items are sent, and the others get their answers."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=10, max_pending=100)
        gone, stays = commits.submit([1]), commits.submit([2])
        gone.cancel()
        sender.gate.set()

        assert [4] == list(await stays)
        assert [[1, 2]] == sender.calls

    asyncio.run(main())


def test_what_nobody_waits_for_goes_with_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """In its order; an error of it is at least logged, and the next call is made."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=10, max_pending=100)
        commits.post(1)
        second = commits.submit([2])
        sender.gate.set()
        assert [4] == list(await second)
        assert [[1, 2]] == sender.calls

        sender.error = StoreUnavailable("away")
        commits.post(3)
        await commits.flush()
        sender.error = None
        assert [8] == list(await commits.submit([4]))
        assert 0 == commits.pending

    asyncio.run(main())
    assert ["group commit failed, and no caller waits for its result"] == [
        each.message for each in caplog.records
    ]


def test_what_nobody_waits_for_is_no_more_than_a_call_takes() -> None:
    """It goes in parts, in its order, and what is put between stays between."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=3, max_pending=100)
        for item in range(1, 5):
            commits.post(item)
        between = commits.submit([5, 6])
        commits.post(7)
        assert 7 == commits.pending
        await asyncio.sleep(0)
        commits.post(8)  # the first are on their way
        sender.gate.set()
        assert [10, 12] == list(await between)
        await commits.flush()

        assert [[1, 2, 3], [4, 5, 6], [7, 8]] == sender.calls
        assert 0 == commits.pending

    asyncio.run(main())


def test_what_was_left_behind_goes_with_what_comes_next() -> None:
    """A sender that was stopped is made anew."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=1, max_pending=100)
        commits.post(1)
        await asyncio.sleep(0)
        commits.post(2)
        await commits.stop()
        sender.gate.set()
        commits.post(3)
        await commits.flush()

        assert [[1], [2], [3]] == sender.calls

    asyncio.run(main())


def test_stop_breaks_off() -> None:
    """What is on its way is cancelled, what waits is not sent."""

    async def main() -> None:
        sender = Sender()
        commits = AsyncGroupCommit(sender, max_items=1, max_pending=100)
        first = commits.submit([1])
        await asyncio.sleep(0)
        commits.post(2)
        await commits.stop()

        assert first.cancelled()
        assert [[1]] == sender.calls

    asyncio.run(main())


def test_stop_right_after_a_commit_has_ended_is_quiet() -> None:
    """The callback of a commit that has ended may run after `stop`, and starts nothing."""

    async def main() -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        sender = Sender()
        sender.gate.set()
        commits = AsyncGroupCommit(sender, max_items=10, max_pending=100)
        commits.post(1)
        await asyncio.sleep(0)
        await commits.stop()
        await asyncio.sleep(0)

        assert [] == errors
        assert [[1]] == sender.calls

    asyncio.run(main())
