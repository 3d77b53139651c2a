"""Wake-ups between processes with NOTIFY and LISTEN; polling remains the fallback.

A notification is sent in the background after its tasks were stored, and at most every
`_MIN_INTERVAL_S` by each process. Commits that notify wait for each other in PostgreSQL, so the hot
statements do not notify.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.shutdown import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.stores.postgres.database import Database

_CHANNEL = "tarry_wakeup"
_MIN_INTERVAL_S = 0.05
_MIN_RECONNECT_PAUSE_S, _MAX_RECONNECT_PAUSE_S = 0.5, 15.0
_CHECK_INTERVAL_S = 30.0
"""How often a listening connection is tested: a broken one may look idle."""
_CHECK_TIMEOUT_S = 5.0
_NOTIFY = "SELECT pg_notify($1, $2)"
_logger = logging.getLogger("tarry.service")


class Notifications:
    """Sends and receives wake-ups for one store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._prefix = f"{database.options.schema}:"
        self._payload = self._prefix + secrets.token_hex(8)
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._is_due = False
        self._is_closed = False

    def notify(self) -> None:
        """Wake other processes soon. Best effort."""
        self._is_due = True
        if self._sender is None and not self._is_closed:
            self._sender = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._is_due:
                self._is_due = False
                await self._database.fetch(_NOTIFY, _CHANNEL, self._payload)
                await asyncio.sleep(_MIN_INTERVAL_S)
        except StoreUnavailable:
            pass  # other processes poll
        finally:
            self._sender = None

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback` when another process has sent a wake-up."""
        if self._listener is None and not self._is_closed:
            self._listener = asyncio.get_running_loop().create_task(self._listen(callback))

    async def _listen(self, callback: Callable[[], None]) -> None:
        """Listen on a connection of its own, and reconnect when it breaks."""
        pause = _MIN_RECONNECT_PAUSE_S
        while True:
            connection: Any = None
            try:
                connection = await self._database.connect()
                await self._receive(connection, callback)
            except (StoreUnavailable, ConfigurationError, OSError, TimeoutError) as error:
                _logger.debug("listening to PostgreSQL failed: %s", error)
            except Exception as error:  # noqa: BLE001 - an error of the driver
                _logger.warning("listening to PostgreSQL failed: %s", error)
            finally:
                if connection is not None:
                    pause = _MIN_RECONNECT_PAUSE_S
                    connection.terminate()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_RECONNECT_PAUSE_S)

    async def _receive(self, connection: Any, callback: Callable[[], None]) -> None:
        """Receive wake-ups until the connection breaks."""
        closed = asyncio.Event()

        def receive(_connection: object, _pid: int, _channel: str, payload: str) -> None:
            if payload.startswith(self._prefix) and payload != self._payload:
                callback()

        def end(_connection: object) -> None:
            closed.set()

        connection.add_termination_listener(end)
        await connection.add_listener(_CHANNEL, receive)
        callback()  # wake-ups may have been lost while there was no connection
        while not closed.is_set():
            try:
                # Not `wait_for`: in Python 3.11, it ignores a cancellation if the connection is
                # closed at the same time.
                async with asyncio.timeout(_CHECK_INTERVAL_S):
                    await closed.wait()
            except TimeoutError:
                await connection.execute("SELECT 1", timeout=_CHECK_TIMEOUT_S)

    async def close(self) -> None:
        """Stop sending and listening."""
        self._is_closed = True
        await cancel_and_wait(task for task in (self._sender, self._listener) if task is not None)
        self._sender = self._listener = None
