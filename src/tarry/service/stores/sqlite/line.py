"""Work done in groups, elsewhere: what waits while a group is done goes into the next."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from tarry.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.stores.sqlite.database import Answer

    Item = tuple[Any, asyncio.Future[Any], int]

_GROUP = 2_000
"""Tasks, about, that go into one group."""
WAITING = 50_000
"""Tasks, about, that may wait for it."""


class Line(ABC):
    """Takes work on the event loop, and hands its answers back there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting = 0

    def put(self, work: Any, weight: int) -> asyncio.Future[Any]:
        """Let work wait for its turn; who awaits the future gets its answer."""
        if self._waiting > WAITING:
            msg = f"the store is slow: more than {WAITING:,} changes wait for the disk already"
            raise StoreUnavailable(msg)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting += weight
        self._take((work, future, weight))
        return future

    @abstractmethod
    def _take(self, item: Item) -> None:
        """Let an item wait."""

    @abstractmethod
    async def close(self) -> None:
        """Take no more, and return when all that waits is done."""

    def _answer(self, group: Sequence[Item], answers: Sequence[Answer]) -> None:
        for (_, future, weight), (value, error) in zip(group, answers, strict=True):
            self._waiting -= weight
            if future.done():
                continue  # who asked has gone
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)


class ThreadLine(Line):
    """Has work done by `run`, in a thread."""

    def __init__(self, name: str, run: Callable[[Sequence[Any]], list[Answer]]) -> None:
        super().__init__()
        self._run = run
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _take(self, item: Item) -> None:
        self._queue.put(item)

    async def close(self) -> None:
        """End the thread when it has done what waits."""
        self._queue.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    # --- in the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while group := self._group():
            answers: list[Answer]
            try:
                answers = self._run([work for work, _, _ in group])
            except Exception as error:  # noqa: BLE001 - else everybody would wait for ever
                answers = [(None, error) for _ in group]
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._answer, group, answers)

    def _group(self) -> list[Item]:
        """Wait for work, and take with it what else is there; nothing: this is the end."""
        group: list[Item] = []
        weight = 0
        while not self._ended and weight < _GROUP:
            try:
                item = self._queue.get(block=not group)
            except Empty:
                break
            if item is None:
                self._ended = True
            else:
                group.append(item)
                weight += item[2]
        return group
