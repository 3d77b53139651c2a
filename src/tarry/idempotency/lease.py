"""The lease of a claimed key while its request runs.

A lease begins when the key is claimed, is renewed (`extend` of the store) while the request runs,
and is then settled: the key is either finished, which stores the response, or released, which
frees the key.

Each store call may fail, hang, or be interrupted by the cancellation of its request. None of this
may lose a response or delay the client for long. So each store call has a timeout, and a response
that could not be stored at once is stored later by a background task.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.core.policy import Policy
from tarry.idempotency.store import MemoryStore, is_refusal
from tarry.runtime.downstream import internal_downstream
from tarry.runtime.effects import effects
from tarry.runtime.event_loops import in_trio
from tarry.runtime.forks import PerProcess
from tarry.runtime.retry import acall

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import TypeAlias

    import trio

    from tarry.idempotency.store import ExistingRecord, IdempotencyStore, StoredResponse
    from tarry.wire.http import Scope

    AsyncEvent: TypeAlias = asyncio.Event | trio.Event
    StoreCall: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("tarry.idempotency")

STORE_TIMEOUT_S = 5.0
_REFUSED_RETENTION_S = 600.0
"""How long the response of a refused request (4xx) is stored at most: long enough for retries, and
short enough to limit the records of callers that are not authenticated."""
_SETTLE_POLICY = Policy(max_attempts=20, initial_delay=0.2, max_delay=10.0, total_budget=120.0)
"""How the call that settles a lease is retried in the background."""
_STORE = internal_downstream("idempotency store")
_MAX_PENDING_SETTLEMENTS = 100
"""The limit of settlements in the background, because each may hold a response in memory."""

_process_token = PerProcess(lambda: os.urandom(16).hex())
"""A random string that identifies this process."""
_lease_numbers = count()


@dataclass
class LeaseContext:
    """The store and the settings that all requests of one middleware share."""

    store: IdempotencyStore
    lease_s: float
    retention_s: float
    max_response_bytes: int
    stores_error_responses: bool
    """Whether responses with a status of 500 and above are stored too."""
    skipped_headers: frozenset[bytes] = frozenset()
    """The headers that are not stored, in lower case."""
    pending_settlements: int = 0
    """Number of leases that are being settled in the background."""

    def __post_init__(self) -> None:
        store = self.store
        self.memory_store: MemoryStore | None = store if type(store) is MemoryStore else None
        """The store, if it is a `MemoryStore`. Its calls never wait, so they need no timeout and no
        task. Its leases do not expire until `KeyLease.abandon` sets an end, so they need no
        renewal. None for any other store, and for a subclass, whose calls may wait."""

    def retention_of(self, response: StoredResponse) -> float:
        """Return for how many seconds to store a response."""
        retention_s = self.retention_s
        return min(retention_s, _REFUSED_RETENTION_S) if is_refusal(response) else retention_s


class KeyLease:
    """The right of one request to run with a key.

    The store keeps the key's record under `record_name` (`key` in the store's methods). After the
    claim, errors of the store are logged and never raised, so that the client still gets the
    response of the application.
    """

    __slots__ = (
        "_caller", "_fingerprint", "_owner", "_record_name", "_renewal_done", "_scope", "context",
        "settlement_started",
    )  # fmt: skip

    def __init__(
        self,
        context: LeaseContext,
        record_name: str,
        fingerprint: str,
        scope: Scope,
        caller: str | None = None,
    ) -> None:
        self.context: LeaseContext = context
        self._record_name = record_name
        self._fingerprint = fingerprint
        self._owner = f"{_process_token.value} {next(_lease_numbers)}"
        self._scope = scope
        self._caller = None if caller is None else hash(caller)
        """Identifies the caller without its credentials, which must not stay in memory."""
        self._renewal_done: AsyncEvent | None = None
        """Set when the running renewal ends; None while no renewal runs."""
        self.settlement_started: bool = False
        """Whether the store call that finishes or releases the key has been started."""

    async def claim(self) -> ExistingRecord | None:
        """Claim the key. Return None, or the record of a key that is not free."""
        context = self.context
        if (memory := context.memory_store) is not None:
            return memory.claim_now(
                self._record_name,
                self._fingerprint,
                self._owner,
                context.lease_s,
                expires=False,
                caller=self._caller,
            )
        try:
            return await run_with_timeout(self._claim)
        except BaseException:  # the store may have claimed the key although the call failed
            start_background_task(self._undo_claim)
            raise

    async def _claim(self) -> ExistingRecord | None:
        context = self.context
        try:
            return await context.store.claim(
                self._record_name, self._fingerprint, self._owner, context.lease_s
            )
        except Exception:
            raise
        except BaseException:
            # Cancelled, also by the timeout. The release that `claim` starts may reach the store
            # before this claim, so the key is released again after the store call has ended.
            await self._undo_claim()
            raise

    async def _undo_claim(self) -> None:
        with suppress(Exception):  # the caller raises the error of the claim
            await run_with_timeout(self._release)

    async def renew(self) -> bool | None:
        """Renew the lease. Return False if it is lost or settled, and None if the store failed."""
        context = self.context
        if self.settlement_started:
            return False
        renewal_done = self._renewal_done = new_event()
        extend = partial(
            context.store.extend, self._record_name, self._fingerprint, self._owner, context.lease_s
        )
        try:
            renewed = await run_with_timeout(extend, min(STORE_TIMEOUT_S, context.lease_s / 6))
        except Exception:
            message = "lease not renewed because the store failed, request=%s"
            logger.exception(message, self._request_name)
            return None
        finally:
            renewal_done.set()
            self._renewal_done = None
        if not renewed and not self.settlement_started:
            message = "lease expired and another request claimed the key, request=%s"
            logger.warning(message, self._request_name)
        return renewed

    async def finish(self, response: StoredResponse) -> None:
        """Settle the lease by storing the response."""
        context = self.context
        if (memory := context.memory_store) is None:
            self.settlement_started = True
            await self._settle(partial(self._finish, response), "the response is not stored")
            return
        retention_s = context.retention_of(response)
        stored = memory.finish_now(
            self._record_name, self._fingerprint, self._owner, response, retention_s
        )
        self.settlement_started = True
        if not stored:
            self._warn_of_lost_lease()

    async def release(self) -> None:
        """Settle the lease by freeing the key; do nothing if the settlement has started."""
        if self.settlement_started:
            return
        if self.context.memory_store is not None:
            await self._release()
            self.settlement_started = True
        else:
            self.settlement_started = True
            await self._settle(self._release, "the key stays claimed until the lease expires")

    def abandon(self) -> None:
        """Leave the key of a cancelled request claimed until its lease expires.

        The key is not released, because a thread of the request's handler may still run. Does
        nothing if the settlement has started, or if the store lets leases expire anyway.
        """
        if not self.settlement_started and self.context.memory_store is not None:
            self.context.memory_store.expire_later(
                self._record_name, self._owner, self.context.lease_s
            )

    async def _finish(self, response: StoredResponse) -> None:
        retention_s = self.context.retention_of(response)
        if not await self.context.store.finish(
            self._record_name, self._fingerprint, self._owner, response, retention_s
        ):
            self._warn_of_lost_lease()

    def _warn_of_lost_lease(self) -> None:
        logger.warning(
            "response not stored because the lease expired and another request claimed the key; "
            "the handler may have run twice, request=%s",
            self._request_name,
        )

    async def _release(self) -> None:
        if self._renewal_done is not None:
            # A renewal that reaches the store after the release would claim the key again.
            await self._renewal_done.wait()
        await self.context.store.release(self._record_name, self._owner)

    async def _settle(self, store_call: StoreCall, consequence: str) -> None:
        """Make the store call that settles the lease; if it fails, retry it in the background.

        `consequence` says in the log message what a final failure means.
        """
        try:
            await run_with_timeout(store_call)
        except BaseException as error:
            is_cancelled = not isinstance(error, Exception)
            if self.context.pending_settlements >= _MAX_PENDING_SETTLEMENTS:
                message = "store failed, %s, not retried because too many retries run, request=%s"
                logger.critical(message, consequence, self._request_name, exc_info=True)
            else:
                start_background_task(partial(self._settle_later, store_call, consequence))
                if not is_cancelled:
                    message = "store failed, retrying in the background, request=%s"
                    logger.warning(message, self._request_name, exc_info=True)
            if is_cancelled:
                raise

    async def _settle_later(self, store_call: StoreCall, consequence: str) -> None:
        context = self.context
        context.pending_settlements += 1
        try:
            await acall(
                run_with_timeout,
                store_call,
                on=Exception,
                policy=_SETTLE_POLICY,
                downstream=_STORE,
                name=f"settle {self._request_name}",
            )
        except Exception:
            logger.exception("store failed, %s, request=%s", consequence, self._request_name)
        finally:
            context.pending_settlements -= 1

    @property
    def _request_name(self) -> str:
        """Method and path of the request, for logs."""
        return f"{self._scope['method']} {self._scope['path']}"


class LeaseRenewer:
    """Renews each lease whenever a third of its time has passed, while its request runs.

    Most requests end before the first renewal. A timer or task for each request would be wasted, so
    all leases of an event loop share one timer task, which runs only while there are leases.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._loop_leases: _LoopLeases | None = None

    def add(self, lease: KeyLease) -> dict[KeyLease, float]:
        """Renew a lease from now on, until the caller removes it from the returned dict.

        A renewal that runs at the time of the removal is completed.
        """
        loop = running_loop()
        leases = self._loop_leases
        if leases is None or leases.loop is not loop:
            leases = self._loop_leases = _LoopLeases(loop, self._lease_s)
        leases.next_renewals[lease] = effects.now() + leases.interval_s
        if not leases.is_timer_running:
            leases.is_timer_running = True
            start_background_task(leases.run_timer)
        return leases.next_renewals


class _LoopLeases:
    """The leases of one event loop, and their timer task."""

    def __init__(self, loop: object, lease_s: float) -> None:
        self.loop = loop
        self.interval_s = lease_s / 3
        self._retry_delay_s = min(1.0, lease_s / 30)
        self.next_renewals: dict[KeyLease, float] = {}
        """The time of the next renewal of each lease; infinity while a renewal runs."""
        self.is_timer_running = False

    async def run_timer(self) -> None:
        """Start the renewals that are due, as long as there are leases."""
        try:
            while self.next_renewals:
                # Twice per interval, so that a renewal is late by half an interval at most.
                await effects.async_sleep(self.interval_s / 2)
                now = effects.now()
                for lease, next_renewal in tuple(self.next_renewals.items()):
                    if next_renewal <= now:
                        self.next_renewals[lease] = inf
                        start_background_task(partial(self._renew, lease))
        finally:
            self.is_timer_running = False

    async def _renew(self, lease: KeyLease) -> None:
        """Renew a lease; retry while the store fails."""
        while lease in self.next_renewals:
            started_at = effects.now()
            renewed = await lease.renew()
            if renewed is None:
                await effects.async_sleep(self._retry_delay_s)
                continue
            if renewed and lease in self.next_renewals:
                self.next_renewals[lease] = started_at + self.interval_s
            return


_running_tasks: set[asyncio.Task[Any]] = set()
"""Keeps tasks alive, because asyncio itself has only weak references to them."""


def new_event() -> AsyncEvent:
    """Return an event of the running event loop."""
    if in_trio():
        import trio

        return trio.Event()
    return asyncio.Event()


def running_loop() -> object:
    """Return an object that identifies the running event loop."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token()


def start_background_task(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start a task that outlives the request, without its context variables (the deadline etc.)."""
    if in_trio():
        import trio

        trio.lowlevel.spawn_system_task(function)
    else:
        _create_task(function(), Context())


async def run_with_timeout(
    function: Callable[[], Coroutine[Any, Any, T]], seconds: float | None = None
) -> T:
    """Run a coroutine function; after `seconds` (5 by default) cancel it and raise TimeoutError.

    On asyncio the function runs in its own task, so that it does not delay the caller if it ignores
    its cancellation or takes long to handle it.
    """
    seconds = STORE_TIMEOUT_S if seconds is None else seconds
    if in_trio():
        import trio

        with trio.CancelScope(deadline=trio.current_time() + seconds):
            return await function()
    else:
        task = _create_task(function())
        try:
            done, _ = await asyncio.wait((task,), timeout=seconds)
            if done:
                return task.result()
        finally:
            task.cancel()  # does nothing if the task is done
    raise TimeoutError(f"no result within {seconds:g} s")


def _create_task(
    coroutine: Coroutine[Any, Any, T], context_variables: Context | None = None
) -> asyncio.Task[T]:
    def on_done(task: asyncio.Task[T]) -> None:
        _running_tasks.discard(task)
        if not task.cancelled():
            # Marks the error as retrieved. Otherwise asyncio would log it as "never retrieved" when
            # the caller was cancelled before the task ended.
            task.exception()

    task = asyncio.get_running_loop().create_task(coroutine, context=context_variables)
    _running_tasks.add(task)
    task.add_done_callback(on_done)
    return task
