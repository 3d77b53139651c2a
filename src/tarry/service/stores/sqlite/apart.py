"""The writer in a process of its own, so that the one that serves and delivers has its interpreter
for itself.

Calls go there in groups, and answers come back the same way, in frames over its standard input and
output. A second group may go before the first is answered, so that neither process waits for the
other. It ends when its input does, so it never outlives the process that has started it. One that
ends before is started again; what it had in hand is `StoreUnavailable`: it was done, or it was not.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, cast

from tarry.errors import StoreUnavailable
from tarry.service.stores.sqlite.frames import LENGTH, answers_of, frame_of
from tarry.service.stores.sqlite.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.stores.sqlite.database import Database
    from tarry.service.stores.sqlite.line import Item

_logger = logging.getLogger("tarry.service")
_WRITER = "tarry.service.stores.sqlite.writer"
_GROUP = 128
"""Tasks, about, that go into one group: while it is written, we go on with the one before."""
_GROUPS = 2
"""Groups that it may have in hand."""
_ENOUGH = 32
"""Tasks for which a second is worth a transaction."""
_PATIENCE = 10.0
"""Seconds for a writer that was told to end."""


class ProcessLine(Line):
    """Has calls carried out by another process.

    `database` makes the file, and holds the lock that says that we live.
    """

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database
        self._items: deque[Item] = deque()
        self._weight = 0
        """Tasks, about, in them."""
        self._groups: deque[list[Item]] = deque()
        """What the writer has in hand."""
        self.writer: Writer | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_woken = False
        self._is_closing = False

    def _take(self, item: Item) -> None:
        self._items.append(item)
        self._weight += item[2]
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken and self._may_send():
            self._is_woken = True
            self._loop.call_soon(self._send)  # others may have something in this round too

    def _may_send(self) -> bool:
        groups = len(self._groups)
        return bool(self._items) and (not groups or (groups < _GROUPS and self._weight >= _ENOUGH))

    async def close(self) -> None:
        """End the process when it has done what waits."""
        while waiting := [one[1] for group in (*self._groups, self._items) for one in group]:
            await asyncio.wait(waiting)
        self._is_closing = True
        if self.writer is not None:
            await self.writer.close()

    def _send(self) -> None:
        self._is_woken = False
        if not self._may_send():
            return
        if self.writer is None:
            if self._starting is None:
                self._starting = self._loop.create_task(self._start())
            return
        group: list[Item] = []
        weight = 0
        while self._items and weight < _GROUP:
            group.append(self._items.popleft())
            weight += group[-1][2]
        self._weight -= weight
        try:
            frame = frame_of([work for work, _, _ in group])
        except Exception as error:  # noqa: BLE001 - else everybody would wait for ever
            self._fail(group, error)
        else:
            self._groups.append(group)
            with suppress(OSError, RuntimeError):  # it has ended, and `_ended` tells them
                self.writer.send(frame)
        self._wake()

    def _answered(self, frame: bytes) -> None:
        group = self._groups.popleft()
        try:
            answers = answers_of([work for work, _, _ in group], frame)
        except Exception as error:  # noqa: BLE001 - else everybody would wait for ever
            self._fail(group, error)
        else:
            self._answer(group, answers)
        self._wake()

    def _ended(self) -> None:
        self.writer = None
        if not self._is_closing:
            _logger.warning("the writer of %s has ended, and is started again", self._database.path)
        groups, self._groups = self._groups, deque()
        for group in groups:
            msg = f"the writer of {self._database.path} has ended, and is started again"
            self._fail(group, StoreUnavailable(msg))
        self._wake()

    def _fail(self, group: list[Item], error: Exception) -> None:
        self._answer(group, [(None, error) for _ in group])

    async def _start(self) -> None:
        try:
            await asyncio.to_thread(self._database.prepare)
            worker_lock = self._database.worker_lock
            token = (worker_lock.token or "") if worker_lock is not None else ""
            _, self.writer = await self._loop.subprocess_exec(
                lambda: Writer(self._answered, self._ended),
                sys.executable, "-m", _WRITER, str(self._database.path), token, version("tarry"),
                stderr=None,
                start_new_session=True,  # who interrupts us means to end us, not what we began
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - whoever waits for it is told
            items, self._items, self._weight = list(self._items), deque(), 0
            self._fail(items, error)
        finally:
            self._starting = None
        self._wake()


class Writer(asyncio.SubprocessProtocol):
    """The other process, as we see it."""

    def __init__(self, answered: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        self._answered = answered
        self._told_ended = ended
        self._received = bytearray()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._transport.get_pid()

    def send(self, frame: bytes) -> None:
        """Send a frame."""
        self._input.write(LENGTH.pack(len(frame)) + frame)

    async def close(self) -> None:
        """Let it end, and see to it that it does."""
        self._input.close()
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._ended.wait()
        except TimeoutError:
            self._transport.kill()
            await self._ended.wait()

    # --- called by the loop -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Learn that it runs."""
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self._input = cast("asyncio.WriteTransport", self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take a part of an answer."""
        del fd
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            frame = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            self._answered(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """Learn that it has ended."""
        del exc
        self._transport.close()
        self._ended.set()
        self._told_ended()
