"""A claimed key while its request runs: kept alive, then finished or given back."""

from __future__ import annotations

import logging
from secrets import token_hex
from typing import TYPE_CHECKING

from tarry.idempotency.loops import Every, shielded

if TYPE_CHECKING:
    from tarry.idempotency.record import StoredResponse
    from tarry.idempotency.store import Store, Taken
    from tarry.wire.asgi import Scope

logger: logging.Logger = logging.getLogger("tarry.idempotency")


class Lease:
    """The right of one request to run under a key.

    The application's answer goes before the store's troubles: after the claim, these are logged and
    never raised.
    """

    def __init__(self, store: Store, key: str, seconds: float, scope: Scope) -> None:
        self._store = store
        self._key = key
        self._owner = token_hex(16)
        self._seconds = seconds
        self._scope = scope
        self.over: bool = False
        """The key was finished or given back, as far as that could be."""

    async def claim(self, fingerprint: str) -> Taken | None:
        """Take the key, or say by what it is taken; here the store may raise."""
        try:
            return await self._store.claim(self._key, fingerprint, self._owner, self._seconds)
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled: the claim may have been made
                await self.release()
            raise

    def kept(self) -> Every:
        """Renew the lease while the block runs."""
        return Every(self._seconds / 3, self._extend)

    async def finish(self, response: StoredResponse, keep: float) -> None:
        """Keep the response."""
        self.over = True
        try:
            if not await self._store.finish(self._key, self._owner, response, keep):
                logger.warning(
                    "%s: its lease ran out and another request took the key, so its response is "
                    "not kept; its handler may have run twice",
                    self._name,
                )
        except Exception:
            # The lease is not given back: the handler has run, and until the lease ends a retry
            # waits instead of running it again.
            logger.exception("%s: the store failed, so the response is not kept", self._name)

    async def release(self) -> None:
        """Give the key back, also when the task is being cancelled."""
        if not self.over:
            self.over = True
            await shielded(self._release)

    async def _release(self) -> None:
        try:
            await self._store.release(self._key, self._owner)
        except Exception:
            logger.exception("%s: the store failed, so the key is held for a while", self._name)

    @property
    def _name(self) -> str:
        """The request, for people."""
        return f"{self._scope['method']} {self._scope['path']}"

    async def _extend(self) -> bool:
        try:
            held = await self._store.extend(self._key, self._owner, self._seconds)
        except Exception:
            logger.exception("%s: the store failed, so the lease is not renewed", self._name)
            return True  # it may be back before the lease ends
        if not held and not self.over:
            logger.warning("%s: its lease ran out and another request took the key", self._name)
        return held
