"""Group commit: what is asked for while a call runs goes into the next one.

That is made when the first has ended, or before, when there is enough for it: so whoever answers
need not wait for us, nor we for him.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from tarry.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")

_logger = logging.getLogger("tarry.service")
_AGAIN_AFTER = 1.0
_CALLS = 2
"""Calls at a time."""
_ENOUGH = 32
"""Items for which a second call is worth its price."""


class Batches(Generic[T, R]):
    """Collects items for `send`, which takes many at once and answers each.

    At most `most` go into one call, and at most `waiting` wait for one: more is `Overloaded`.
    """

    def __init__(
        self,
        send: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
        *,
        most: int,
        waiting: int,
    ) -> None:
        self._send = send
        self._most = most
        self._bound = waiting
        self._parts: deque[tuple[list[T], asyncio.Future[Sequence[R]] | None]] = deque()
        self._posted: list[T] = []
        """The items of the last part, while it is one that others may join."""
        self._queued = 0
        """Items that wait for a call."""
        self._senders: list[asyncio.Task[None]] = []
        self._is_called = False
        """Whether one of them is about to begin."""
        self.taken: int = 0
        """Items that have come so far."""
        self.waiting: int = 0
        """Those of them that wait or are on their way."""

    def put(self, items: list[T]) -> asyncio.Future[Sequence[R]]:
        """Send items, with others, and answer in their order: all of them, or with an error.

        More than go into one call go in several, and others' have their turn between them.
        """
        if self.waiting + len(items) > self._bound and self.waiting:
            msg = f"{self.waiting} tasks wait to be written"
            raise Overloaded(msg, retry_after=_AGAIN_AFTER)
        most = self._most
        if len(items) <= most:
            return self._put(items)
        parts = [self._put(items[i : i + most]) for i in range(0, len(items), most)]
        return asyncio.ensure_future(_joined(parts))

    def _put(self, items: list[T]) -> asyncio.Future[Sequence[R]]:
        answer: asyncio.Future[Sequence[R]] = asyncio.get_running_loop().create_future()
        self.taken += len(items)
        self.waiting += len(items)
        self._posted = []
        self._append(items, answer)
        return answer

    def post(self, item: T) -> None:
        """Send an item whose answer `send` sees to by itself; an error of it is logged."""
        self.taken += 1
        self.waiting += 1
        if self._posted and len(self._posted) < self._most:
            self._posted.append(item)
            self._queued += 1
            self._go()
        else:
            self._posted = [item]
            self._append(self._posted, None)

    def _append(self, items: list[T], answer: asyncio.Future[Sequence[R]] | None) -> None:
        self._parts.append((items, answer))
        self._queued += len(items)
        self._go()

    def _go(self) -> None:
        """Make a call in the next round of the loop, with all that has come till then."""
        if not self._is_called and self._may_call(len(self._senders)):
            self._is_called = True
            sender = asyncio.get_running_loop().create_task(self._run())
            self._senders.append(sender)
            sender.add_done_callback(self._sent)

    def _may_call(self, others: int) -> bool:
        return not others or (others < _CALLS and self._queued >= _ENOUGH)

    async def _run(self) -> None:
        self._is_called = False
        while self._parts and self._may_call(len(self._senders) - 1):
            await self._send_some()

    def _sent(self, sender: asyncio.Task[None]) -> None:
        self._senders.remove(sender)
        if self._parts and not sender.cancelled():
            self._go()

    async def flushed(self) -> None:
        """Return when nothing waits any more."""
        while self._senders:
            await asyncio.wait(self._senders)

    async def stop(self) -> None:
        """Send nothing more; what is on its way may arrive or not."""
        senders, self._senders = self._senders, []
        for sender in senders:
            sender.remove_done_callback(self._sent)
            sender.cancel()
        if senders:
            await asyncio.wait(senders)
        self._is_called = False

    async def _send_some(self) -> None:
        parts: list[tuple[list[T], asyncio.Future[Sequence[R]] | None]] = []
        items: list[T] = []
        while self._parts and (not items or len(items) + len(self._parts[0][0]) <= self._most):
            parts.append(self._parts.popleft())
            items += parts[-1][0]
        self._queued -= len(items)
        if self._parts:
            self._go()
        else:
            self._posted = []  # it goes now
        try:
            answers = await self._send(items)
        except BaseException as error:
            for _, answer in parts:
                if answer is not None and not answer.done():  # its caller may have left
                    answer.set_exception(error) if isinstance(error, Exception) else answer.cancel()
            if not isinstance(error, Exception):
                raise
            if any(answer is None for _, answer in parts):
                _logger.exception("what nobody waits for could not be sent")
            parts.clear()  # the error knows this frame, and they know the error
            answer = None
        else:
            begin = 0
            for part, answer in parts:
                end = begin + len(part)
                if answer is not None and not answer.done():
                    answer.set_result(answers[begin:end])
                begin = end
        finally:
            self.waiting -= len(items)


async def _joined(parts: list[asyncio.Future[Sequence[R]]]) -> Sequence[R]:
    return [answer for answers in await asyncio.gather(*parts) for answer in answers]
