"""The lease of a claimed key while its request runs: renewed, then finished or released.

Each store call may fail, hang, or be interrupted by the cancellation of its request. None of this
may lose a response or delay the client for long. So each store call has a timeout, and a response
that could not be stored at once is stored later by a background task.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from tarry.core.policy import Policy
from tarry.idempotency.async_backend import (
    new_event,
    run_with_timeout,
    running_loop,
    start_background_task,
)
from tarry.idempotency.stores.memory import MemoryStore
from tarry.runtime.clocks import system
from tarry.runtime.retry import acall

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any, TypeAlias

    from tarry.idempotency.async_backend import AsyncEvent
    from tarry.idempotency.store import ExistingRecord, IdempotencyStore, StoredResponse
    from tarry.wire.asgi import Scope

    StoreCall: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

logger: logging.Logger = logging.getLogger("tarry.idempotency")

STORE_TIMEOUT_S = 5.0
_SETTLE_POLICY = Policy(max_attempts=20, initial_delay=0.2, max_delay=10.0, total_budget=120.0)
"""Retries of the last store call of a lease, in the background."""
_MAX_PENDING_SETTLEMENTS = 100
"""Each pending background retry keeps a response in memory."""


class _ProcessName:
    """A random text that differs between processes, also after a fork."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.value = os.urandom(16).hex()


_process_name = _ProcessName()
_lease_numbers = count()


class LeaseContext:
    """The store and the settings that all requests of one middleware share."""

    def __init__(
        self,
        store: IdempotencyStore,
        *,
        lease: float,
        retention: float,
        max_response_bytes: int,
        store_errors: bool,
    ) -> None:
        self.store: IdempotencyStore = store
        self.lease: float = lease
        """Seconds."""
        self.retention: float = retention
        """Seconds."""
        self.max_response_bytes: int = max_response_bytes
        self.store_errors: bool = store_errors
        self.memory_store: MemoryStore | None = store if type(store) is MemoryStore else None
        """The store, if it is a `MemoryStore`. Its calls never wait, so they need no timeout and no
        task, and its keys need no renewal. None for a subclass, whose calls may wait."""
        self.pending_settlements: int = 0
        """Requests whose last store call is being retried in the background."""


class KeyLease:
    """The right of one request to run with a key.

    After the claim, errors of the store are logged and never raised: the client still gets the
    response of the application.
    """

    __slots__ = (
        "_fingerprint",
        "_key",
        "_owner",
        "_renewal_done",
        "_scope",
        "context",
        "is_settled",
    )

    def __init__(self, context: LeaseContext, key: str, fingerprint: str, scope: Scope) -> None:
        self.context: LeaseContext = context
        self._key = key
        self._fingerprint = fingerprint
        self._owner = f"{_process_name.value} {next(_lease_numbers)}"
        self._scope = scope
        self._renewal_done: AsyncEvent | None = None
        """Set when the running renewal ends; None while none runs."""
        self.is_settled: bool = False
        """The key was finished or released, or at least the store was asked to."""

    async def claim(self) -> ExistingRecord | None:
        """Claim the key; return its record if it is not free."""
        context = self.context
        memory = context.memory_store
        if memory is not None:
            return memory.claim_without_expiry(
                self._key, self._fingerprint, self._owner, context.lease
            )
        try:
            return await run_with_timeout(self._claim, STORE_TIMEOUT_S)
        except BaseException:
            start_background_task(self._undo_claim)  # the store may have made the claim
            raise

    async def _claim(self) -> ExistingRecord | None:
        context = self.context
        try:
            return await context.store.claim(
                self._key, self._fingerprint, self._owner, context.lease
            )
        except Exception:
            raise
        except BaseException:  # timeout or cancellation; the store may have made the claim
            await self._undo_claim()
            raise

    async def _undo_claim(self) -> None:
        with suppress(Exception):  # the error of the claim itself is reported
            await run_with_timeout(self._release, STORE_TIMEOUT_S)

    async def extend(self) -> bool | None:
        """Renew the lease.

        Return False if there is nothing to renew any more, None if the store failed.
        """
        context = self.context
        if self.is_settled:
            return False
        done = self._renewal_done = new_event()
        extend = partial(
            context.store.extend, self._key, self._fingerprint, self._owner, context.lease
        )
        try:
            extended = await run_with_timeout(extend, min(STORE_TIMEOUT_S, context.lease / 6))
        except Exception:
            logger.exception("lease not renewed because the store failed, request=%s", self._name)
            return None
        finally:
            done.set()
            self._renewal_done = None
        if not extended and not self.is_settled:
            logger.warning(
                "lease expired and another request claimed the key, request=%s", self._name
            )
        return extended

    async def finish(self, response: StoredResponse) -> None:
        """Store the response."""
        context = self.context
        memory = context.memory_store
        if memory is None:
            self.is_settled = True
            await self._settle(partial(self._finish, response), "its response is not stored")
            return
        stored = memory.finish_now(
            self._key, self._fingerprint, self._owner, response, context.retention
        )
        self.is_settled = True
        if not stored:
            self._warn_of_lost_lease()

    async def release(self) -> None:
        """Free the key."""
        if self.is_settled:
            return
        if self.context.memory_store is not None:
            await self._release()
            self.is_settled = True
        else:
            self.is_settled = True
            await self._settle(self._release, "its key stays claimed until the lease expires")

    def abandon(self) -> None:
        """Leave the key of a cancelled request claimed until its lease expires.

        A thread of its handler may still run.
        """
        if not self.is_settled and self.context.memory_store is not None:
            self.context.memory_store.expire_later(self._key, self._owner, self.context.lease)

    async def _finish(self, response: StoredResponse) -> None:
        context = self.context
        if not await context.store.finish(
            self._key, self._fingerprint, self._owner, response, context.retention
        ):
            self._warn_of_lost_lease()

    def _warn_of_lost_lease(self) -> None:
        logger.warning(
            "response not stored because the lease expired and another request claimed the key; "
            "the handler may have run twice, request=%s",
            self._name,
        )

    async def _release(self) -> None:
        if self._renewal_done is not None:  # a running renewal would claim the released key again
            await self._renewal_done.wait()
        await self.context.store.release(self._key, self._owner)

    async def _settle(self, store_call: StoreCall, consequence: str) -> None:
        """Make the last store call of the lease: now, or in the background if the store fails."""
        context = self.context
        try:
            await run_with_timeout(store_call, STORE_TIMEOUT_S)
        except BaseException as error:
            if context.pending_settlements < _MAX_PENDING_SETTLEMENTS:
                start_background_task(partial(self._settle_later, store_call, consequence))
            else:
                logger.critical("store failed, %s, request=%s", consequence, self._name)
            if not isinstance(error, Exception):
                raise
            logger.warning("store failed, will retry, request=%s", self._name, exc_info=True)

    async def _settle_later(self, store_call: StoreCall, consequence: str) -> None:
        context = self.context
        context.pending_settlements += 1
        try:
            attempt = partial(run_with_timeout, store_call, STORE_TIMEOUT_S)
            await acall(attempt, on=Exception, policy=_SETTLE_POLICY, name=f"settle {self._name}")
        except Exception:
            logger.exception("store failed, %s, request=%s", consequence, self._name)
        finally:
            context.pending_settlements -= 1

    @property
    def _name(self) -> str:
        """Method and path of the request, for logs."""
        return f"{self._scope['method']} {self._scope['path']}"


class LeaseRenewer:
    """Renews each lease whenever a third of it has passed, while its request runs.

    Most requests end before the first renewal. So all leases of an event loop share one timer task,
    which runs only while there are leases: a request costs neither a timer nor a task of its own.
    """

    def __init__(self, lease: float) -> None:
        self._interval = lease / 3
        self._retry_delay = min(1.0, lease / 30)
        self._loop_leases: _LoopLeases | None = None

    def add(self, lease: KeyLease) -> dict[KeyLease, float]:
        """Renew a lease from now on, until the caller removes it from the returned dict.

        A renewal that is running then completes.
        """
        loop = running_loop()
        leases = self._loop_leases
        if leases is None or leases.loop is not loop:
            leases = self._loop_leases = _LoopLeases(loop, self._interval, self._retry_delay)
        clock = system.now
        leases.due[lease] = clock() + self._interval
        if not leases.is_timer_running:
            leases.is_timer_running = True
            start_background_task(leases.run_timer)
        return leases.due


class _LoopLeases:
    """The leases of one event loop, and their timer task."""

    def __init__(self, loop: object, interval: float, retry_delay: float) -> None:
        self.loop: object = loop
        self._interval = interval
        self._retry_delay = retry_delay
        self.due: dict[KeyLease, float] = {}
        """The time of the next renewal of each lease."""
        self.is_timer_running: bool = False

    async def run_timer(self) -> None:
        """Start the renewals that are due, as long as there are leases.

        The timer wakes twice per interval, so that a renewal is late by half an interval at most.
        """
        try:
            while self.due:
                await system.async_sleep(self._interval / 2)
                now = system.now()
                for lease, due in tuple(self.due.items()):
                    if due <= now:
                        self.due[lease] = float("inf")
                        start_background_task(partial(self._renew, lease))
        finally:
            self.is_timer_running = False

    async def _renew(self, lease: KeyLease) -> None:
        """Renew a lease; retry while the store fails."""
        while lease in self.due:
            started = system.now()
            extended = await lease.extend()
            if extended is None:
                await system.async_sleep(self._retry_delay)
                continue
            if extended and lease in self.due:
                self.due[lease] = started + self._interval
            return
