"""A wrapper of the store port that injects faults between one process and the store.

Each call of the process may fail in one of these ways:

* rejected: it raises `StoreUnavailable`, and has no effect;
* lost reply: it has its effect, and then raises `StoreUnavailable`;
* late effect: it raises `StoreUnavailable` at once, and has its effect some seconds later. By then
  the process may have repeated the call, made other calls, or crashed. This happens to a request
  that waits in a network buffer or at a busy server after the client has given up;
* delayed, before or after its effect.

Before and after the effect, the process may also crash, or be suspended for longer than its leases
(see `SimulatedProcess`). Wake-ups from other processes are lost, delayed, repeated, and delivered
in another order; some of them are needless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from copy import deepcopy
from typing import Any, NoReturn

from tarry.errors import StoreUnavailable
from tarry.service.model import Task
from tarry.service.store import Release, Store
from tests.chaos.environment import FAULT_EFFECT_S, SimulatedProcess
from tests.chaos.simulated_stores import run_synchronously

_NOTIFYING_METHODS = {
    "add",
    "finish",
    "release",
    "release_unknown_leases",
    "replay_step",
    "resume",
    "retry_now",
    "unpark",
}
"""Methods that may make tasks claimable, see `Store.listen`."""
_WAKEUP_COUNTS = (0, 0, 1, 2)
"""How often a wake-up reaches a process."""
_WAKEUP_DELAYS_S = (0.01, 1.0, 10.0)
_LATE_EFFECT_DELAYS_S = (0.1, 5.0, 20.0)
"""Maximum delays, one of which is drawn; a lease lasts 15 s."""


class FaultyStore:
    """The store as seen by one process; the real store survives a crash of the process."""

    def __init__(self, process: SimulatedProcess, store: Store) -> None:
        self._process = process
        self._environment = process.environment
        self._store = store

    def record_start(self, slot: int, task: Task) -> None:
        """Do nothing: in the simulation, the leases of a process that crashes expire."""

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback` for wake-ups from other processes."""
        self._process.on_wakeup = callback

    @property
    def partition_count(self) -> int:
        """The number of partitions."""
        return self._store.partition_count

    def partition_of(self, tenant: str) -> int:
        """Return the partition of a tenant."""
        return self._store.partition_of(tenant)

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(name, args, kwargs)

        return call

    async def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        environment = self._environment
        rng, faults = environment.rng, environment.faults
        await self._process.reach_fault_point()
        if rng.random() < faults.store_rejection:
            environment.record_fault()
            self._fail(name, "the call was rejected")
        if rng.random() < faults.store_late_effect:
            self._apply_later(name, args, kwargs)
            self._fail(name, "the call timed out")
        returned = await getattr(self._store, name)(*args, **kwargs)
        self._record_effect(name, args, returned)
        await self._process.reach_fault_point()
        if rng.random() < faults.store_reply_loss:
            environment.record_fault()
            self._fail(name, "the reply was lost")
        return returned

    def _fail(self, name: str, cause: str) -> NoReturn:
        msg = f"{name}: {cause}"
        raise StoreUnavailable(msg)

    def _apply_later(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "release_unknown_leases":
            # Stores on servers find the leases first. Only their release can have a late effect.
            terms, known_ids, *_ = args
            leased = self._environment.invariants.list_leases(terms.worker)
            releases = [
                Release(task, task.wake_at - terms.length_ms)
                for task in leased
                if task.id not in known_ids
            ]
            name, args = "release", (releases,)
        rng = self._environment.rng
        delay_s = rng.random() * rng.choice(_LATE_EFFECT_DELAYS_S)
        self._environment.record_fault(delay_s + FAULT_EFFECT_S)
        # Copied, because the process may change the arguments; a server receives them encoded.
        call = (name, deepcopy(args), deepcopy(kwargs))
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, self._apply_late, *call, context=Context())

    def _apply_late(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        returned = run_synchronously(getattr(self._store, name)(*args, **kwargs))
        self._record_effect(name, args, returned, is_late=True)

    def _record_effect(
        self, name: str, args: tuple[Any, ...], returned: Any, *, is_late: bool = False
    ) -> None:
        invariants = self._environment.invariants
        invariants.record_store_call(self._process, name, args, returned, is_late=is_late)
        if name in _NOTIFYING_METHODS:
            rng = self._environment.rng
            for process in self._environment.live_processes():
                if process is not self._process:
                    for _ in range(rng.choice(_WAKEUP_COUNTS)):
                        process.wake_after(rng.random() * rng.choice(_WAKEUP_DELAYS_S))
