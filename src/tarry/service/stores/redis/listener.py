"""Notifications from other processes that tasks may be claimable (PUBLISH and SUBSCRIBE)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tarry.service.shutdown import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.stores.redis.partitions import Partitions

_PING_INTERVAL_S = 15.0
"""An idle connection is pinged after this time, and closed if the ping gets no response in it."""
_RECONNECT_PAUSE_S = 1.0
_logger = logging.getLogger("tarry.service.store")


class WakeupListener:
    """Subscribes to the channels of all partitions, and reconnects when the connection ends."""

    def __init__(self, partitions: Partitions, callback: Callable[[], None]) -> None:
        self._connection = partitions.connection
        numbers = range(partitions.partition_count)
        self._channels = [f"{self._connection.partition_key(number)}:wake" for number in numbers]
        self._callback = callback
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Subscribe in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop, and close the connection."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait([task])

    async def _run(self) -> None:
        while True:
            try:
                await self._receive()
            except Exception as error:
                if self._connection.translate(error) is None:
                    _logger.exception("receiving notifications of other processes failed")
                else:
                    _logger.debug("connection for notifications failed, reconnecting: %s", error)
            await asyncio.sleep(_RECONNECT_PAUSE_S)

    async def _receive(self) -> None:
        """Receive notifications until the connection ends."""
        client = self._connection.build_subscriber()
        pubsub = client.pubsub()
        try:
            await pubsub.subscribe(*self._channels)
            is_pinged = False
            while True:
                message = await pubsub.get_message(timeout=_PING_INTERVAL_S)
                if message is not None:
                    is_pinged = False
                    self._handle(message)
                elif is_pinged:
                    return  # no response to the ping
                else:
                    await pubsub.ping()
                    is_pinged = True
        finally:
            # An error here would replace the cancellation by `close`, and `_run` would continue.
            for resource in (pubsub, client):
                with suppress(Exception):
                    await resource.aclose()

    def _handle(self, message: dict[str, Any]) -> None:
        # A subscription also calls the callback: notifications may have been lost before.
        if message["type"] == "subscribe" or (
            message["type"] == "message" and message["data"] != self._connection.token.encode()
        ):
            self._callback()
