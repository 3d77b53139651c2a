"""A claimed key while its request runs: kept alive, then finished or given back.

Every call of a store may fail, hang, or be cut off by a request that is cancelled. None of them may
lose an answer, nor keep its client waiting for long: each has a time limit, and an answer that
could not be written is written later, beside the requests that follow.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from tarry.core.policy import Policy
from tarry.idempotency.loops import apart, in_background, new_event
from tarry.idempotency.stores.memory import MemoryStore
from tarry.runtime.retry import acall

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any, TypeAlias

    from tarry.idempotency.loops import Event
    from tarry.idempotency.record import StoredResponse
    from tarry.idempotency.store import Store, Taken
    from tarry.wire.asgi import Scope

    Step: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

logger: logging.Logger = logging.getLogger("tarry.idempotency")

PATIENCE = 5.0
"""Seconds for a call of the store."""
_LATER = Policy(max_attempts=20, initial_delay=0.2, max_delay=10.0, total_budget=120.0)
"""For the last step of a lease, when the store could not take it at once."""
_MOST_LATER = 100
"""So many requests wait for that at most: their answers are in memory until then."""


class _Process:
    """A name that no other process has; a fork gets another."""

    def __init__(self) -> None:
        self.rename()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.rename)

    def rename(self) -> None:
        self.name = os.urandom(16).hex()


_process = _Process()
_numbers = count()


class Terms:
    """What all requests of a middleware share."""

    def __init__(
        self, store: Store, *, lease: float, keep: float, max_response: int, store_errors: bool
    ) -> None:
        self.store: Store = store
        self.lease: float = lease
        self.keep: float = keep
        self.max_response: int = max_response
        self.store_errors: bool = store_errors
        self.memory: MemoryStore | None = store if type(store) is MemoryStore else None
        """The store, if its calls never wait: they can neither hang nor be cut off, and a key is
        held without a lease. A subclass's might."""
        self.unsettled: int = 0
        """Requests whose last step the store has not taken yet."""


class Lease:
    """The right of one request to run under a key.

    The application's answer goes before the store's troubles: after the claim, these are logged and
    never raised.
    """

    __slots__ = ("_fingerprint", "_key", "_owner", "_renewing", "_scope", "over", "terms")

    def __init__(self, terms: Terms, key: str, fingerprint: str, scope: Scope) -> None:
        self.terms: Terms = terms
        self._key = key
        self._fingerprint = fingerprint
        self._owner = f"{_process.name} {next(_numbers)}"
        self._scope = scope
        self._renewing: Event | None = None
        self.over: bool = False
        """The key was finished or given back, as far as that could be."""

    async def claim(self) -> Taken | None:
        """Take the key, or say by what it is taken."""
        terms = self.terms
        memory = terms.memory
        if memory is not None:
            return memory.hold(self._key, self._fingerprint, self._owner, terms.lease)
        try:
            return await apart(self._claim, PATIENCE)
        except BaseException:
            in_background(self._undo)  # it may have been made
            raise

    async def _claim(self) -> Taken | None:
        terms = self.terms
        try:
            return await terms.store.claim(self._key, self._fingerprint, self._owner, terms.lease)
        except Exception:
            raise
        except BaseException:  # too late, or not wanted any more; and made after all, perhaps
            await self._undo()
            raise

    async def _undo(self) -> None:
        with suppress(Exception):  # the claim's own is told
            await apart(self._release, PATIENCE)

    async def extend(self) -> bool | None:
        """Renew the lease; False: there is nothing more to renew; None: the store failed."""
        terms = self.terms
        if self.over:
            return False
        ended = self._renewing = new_event()
        call = partial(terms.store.extend, self._key, self._fingerprint, self._owner, terms.lease)
        try:
            held = await apart(call, min(PATIENCE, terms.lease / 6))
        except Exception:
            logger.exception("%s: the store failed, so the lease is not renewed yet", self._name)
            return None
        finally:
            ended.set()
            self._renewing = None
        if not held and not self.over:
            logger.warning("%s: its lease ran out and another request took the key", self._name)
        return held

    async def finish(self, response: StoredResponse) -> None:
        """Keep the response."""
        terms = self.terms
        memory = terms.memory
        if memory is None:
            self.over = True
            await self._settle(partial(self._finish, response), "its response is not kept")
            return
        kept = memory.finish_now(self._key, self._fingerprint, self._owner, response, terms.keep)
        self.over = True
        if not kept:
            self._warn()

    async def release(self) -> None:
        """Give the key back."""
        if self.over:
            return
        if self.terms.memory is not None:
            await self._release()
            self.over = True
        else:
            self.over = True
            await self._settle(self._release, "its key is held until the lease ends")

    def abandon(self) -> None:
        """Leave the key of a request that was cut off to its lease: its handler may still run."""
        if not self.over and self.terms.memory is not None:
            self.terms.memory.let_run_out(self._key, self._owner, self.terms.lease)

    async def _finish(self, response: StoredResponse) -> None:
        terms = self.terms
        if not await terms.store.finish(
            self._key, self._fingerprint, self._owner, response, terms.keep
        ):
            self._warn()

    def _warn(self) -> None:
        logger.warning(
            "%s: its lease ran out and another request took the key, so its response is not kept; "
            "its handler may have run twice",
            self._name,
        )

    async def _release(self) -> None:
        if self._renewing is not None:  # it would take what is given back
            await self._renewing.wait()
        await self.terms.store.release(self._key, self._owner)

    async def _settle(self, step: Step, loss: str) -> None:
        """Take the last step: now, or as soon as the store can; until then the lease holds."""
        terms = self.terms
        try:
            await apart(step, PATIENCE)
        except BaseException as error:
            if terms.unsettled < _MOST_LATER:
                in_background(partial(self._settle_later, step, loss))
            else:
                logger.critical("%s: the store failed, and so %s", self._name, loss)
            if not isinstance(error, Exception):
                raise
            logger.warning("%s: the store failed, and is tried again", self._name, exc_info=True)

    async def _settle_later(self, step: Step, loss: str) -> None:
        terms = self.terms
        terms.unsettled += 1
        try:
            again = partial(apart, step, PATIENCE)
            await acall(again, on=Exception, policy=_LATER, name=f"settle {self._name}")
        except Exception:
            logger.exception("%s: the store failed, and so %s", self._name, loss)
        finally:
            terms.unsettled -= 1

    @property
    def _name(self) -> str:
        """The request, for people."""
        return f"{self._scope['method']} {self._scope['path']}"
