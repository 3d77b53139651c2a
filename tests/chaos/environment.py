"""The simulated environment of a service: clocks, processes that crash, faulty store and network.

All random decisions come from one seed, so that a run can be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.store import Store
from tarry.service.stores.sqlite.clock import AnchoredClock
from tests.chaos.invariants import InvariantChecker, run_synchronously
from tests.core.limiter_model import SlidingWindowTarget
from tests.service.stores.reference_store import ReferenceStore
from tests.service.stores.synchronous_store import SynchronousSqliteStore

_process: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)
EPOCH_S = 1_800_000_000.0
FAULT_EFFECT_S = 20.0
"""How long most faults have effects: a lease lasts 15 s, an open breaker up to 16.5 s."""


class Faults:
    """The probability of each fault; `stop` sets all to 0."""

    def __init__(self, rng: Random) -> None:
        store_failure = rng.choice([0.0, 0.01, 0.05, 0.2])
        self.crash = rng.choice([0.0, 0.001, 0.005, 0.02])
        """The process crashes before or after it calls the store or the network."""
        self.store_rejection = store_failure
        """The store rejects a call without a change."""
        self.store_reply_loss = store_failure / 2
        """The store applies a call, but its reply is lost."""
        self.delay = rng.choice([0.0, 0.1, 0.5])
        self.network_fault = rng.choice([0.0, 0.1, 0.3])
        self.max_clock_jump_s = rng.choice([0.0, 0.0, 200.0, 7200.0])
        """An amplitude of the wall clock in seconds, not a probability."""
        if rng.random() < 0.3:  # so that waiting times can be checked from the start
            self.stop()

    @property
    def hosts_may_fail(self) -> bool:
        """Whether targets fail, too: only in a run with delays or lost calls, and until `stop`."""
        return bool(self.delay or self.network_fault or self.store_rejection)

    def stop(self) -> None:
        """Inject no more faults."""
        self.crash = self.store_rejection = self.store_reply_loss = 0.0
        self.delay = self.network_fault = self.max_clock_jump_s = 0.0


class SimulatedProcess:
    """One process of the service. It can crash whenever it calls the store or the network."""

    def __init__(self, environment: Environment, name: str, clock_skew_s: float) -> None:
        self.environment = environment
        self.name = name
        self.clock_skew_s = clock_skew_s
        self.is_alive = True
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tasks: set[asyncio.Task[Any]] = set()

    def monotonic(self) -> float:
        """Return the local monotonic time, which is unrelated to the store's clock."""
        return asyncio.get_running_loop().time() + self.clock_skew_s

    async def reach_fault_point(self) -> None:
        """Delay or crash the process, according to the faults."""
        faults, rng = self.environment.faults, self.environment.rng
        if self.is_alive and rng.random() < faults.delay:
            self.environment.disturb()
            await asyncio.sleep(rng.random() * rng.choice([0.01, 1.0]))
        if self.is_alive and rng.random() < faults.crash:
            self.kill()
        if not self.is_alive:
            await wait_forever()

    def kill(self) -> None:
        """Crash as by `kill -9`: from now on, no call of this process has an effect."""
        if self.is_alive:
            self.is_alive = False
            self.environment.disturb()
            self.crashed.set_result(None)
            current = asyncio.current_task()
            for task in tuple(self.tasks):
                if task is not current:
                    task.cancel()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in this process; return its result, or None if the process crashes."""
        token = _process.set(self)
        try:
            task = asyncio.get_running_loop().create_task(work)
        finally:
            _process.reset(token)
        await asyncio.wait([task, self.crashed], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        return None if task.cancelled() else task.result()


async def wait_forever() -> NoReturn:
    """Never return: the process that calls this has crashed."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


class FaultyStore:
    """The store as seen by one process; the real store survives a crash of the process."""

    def __init__(self, process: SimulatedProcess, store: Store) -> None:
        self._process = process
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        environment = self._process.environment

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._process.reach_fault_point()
            if environment.rng.random() < environment.faults.store_rejection:
                environment.disturb()
                msg = f"{name}: the call was rejected"
                raise StoreUnavailable(msg)
            returned = await method(*args, **kwargs)
            environment.invariants.record_store_call(name, args, returned)
            await self._process.reach_fault_point()
            if environment.rng.random() < environment.faults.store_reply_loss:
                environment.disturb()
                msg = f"{name}: the reply was lost"
                raise StoreUnavailable(msg)
            return returned

        return call


class FakeHost:
    """A target that is healthy, down, overloaded, slow, or rejects some requests permanently.

    Or no DNS server answers for its name. It may have a capacity, and a share of its tasks are
    poison tasks, which it never accepts.
    """

    def __init__(self, name: str, rng: Random) -> None:
        self.name = name
        self.state = "healthy"
        self.poison_share = rng.choice([0.0, 0.0, 0.25, 0.4, 0.75])
        self._rng = rng
        capacity = rng.choice([inf, inf, 5, 20])  # calls per second
        self._window = SlidingWindowTarget(lambda _: capacity)
        throttled = DeliveryResult(status=429, headers=[("retry-after", "1")])
        self._refusal = rng.choice([DeliveryResult(status=503), throttled])

    def change_state(self) -> None:
        """Change to a random state."""
        self.state = self._rng.choice(
            ["healthy", "healthy", "down", "overloaded", "slow", "rejecting", "unresolved"]
        )

    def next_response(self, name: str) -> tuple[DeliveryResult, float]:
        """Return the response to a task, and the seconds until it is sent."""
        rng, state = self._rng, self.state
        if state == "unresolved":
            error = "no DNS server has answered"
            return DeliveryResult(fault=Fault.DNS, error=error, pause_s=5.0), rng.random() * 5
        if state == "down":
            return DeliveryResult(fault=Fault.REFUSED, error="refused"), 0.001
        if not self._window.accept(asyncio.get_running_loop().time()):
            return self._refusal, 0.01
        if name.startswith("poison"):
            return DeliveryResult(status=503), 0.01
        if state == "overloaded" and rng.random() < 0.8:
            headers = [("retry-after", str(rng.randrange(8)))] if rng.random() < 0.3 else []
            return DeliveryResult(status=rng.choice([503, 429, 500]), headers=headers), 0.01
        if state == "slow":
            return DeliveryResult(status=200), rng.random() * 8
        if state == "rejecting" and rng.random() < 0.1:
            return DeliveryResult(status=rng.choice([404, 302, 410])), 0.01
        return DeliveryResult(status=rng.choice([200, 201, 204])), rng.random() * 0.05


class FaultyNetwork:
    """The network as seen by one process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Make an attempt; the request or its response may be lost or late."""
        process, environment = self._process, self._process.environment
        if not process.is_alive:
            await wait_forever()
        environment.invariants.record_attempt(request, process.name)
        await process.reach_fault_point()
        rng, faults = environment.rng, environment.faults
        if rng.random() < faults.network_fault / 3:
            environment.disturb()
            result = DeliveryResult(fault=Fault.INTERNAL, error="egress proxy down")
            environment.invariants.record_received_result(request, result)
            return result
        if rng.random() < faults.network_fault / 3:
            environment.disturb()
            return DeliveryResult(fault=Fault.DNS, error="no such name")
        host, name = request.url.split("/")[2:]
        result, seconds = environment.hosts[host].next_response(name)
        environment.invariants.log_target_response(request, result)
        is_lost = rng.random() < faults.network_fault / 3
        if is_lost or seconds > request.timeout:
            environment.disturb()
            await asyncio.sleep(request.timeout)
            result = DeliveryResult(fault=Fault.TIMEOUT, error="timed out")
        else:
            await asyncio.sleep(seconds)
        await process.reach_fault_point()
        environment.invariants.record_received_result(request, result)
        return result

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class Environment:
    """The store, targets, clock and faults, which survive the crashes of processes."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        self.rng = Random(seed)
        self.faults = Faults(self.rng)
        self.clock_offset_s = 0.0
        self._calm_at = -inf
        loop = asyncio.get_running_loop()
        clock = AnchoredClock(
            unix_time=lambda: self.now_s() + self.clock_offset_s,
            boot_ms=lambda: int(loop.time() * 1000),
            boot_id=lambda: 1,
        )
        self.store: Store = ReferenceStore(clock)
        if folder is not None:
            self.store = SynchronousSqliteStore(folder / "tasks.db", clock)
            run_synchronously(self.store.open())
        self.invariants = InvariantChecker(self.store, self)
        self.hosts = {name: FakeHost(name, self.rng) for name in ("a.example", "b.example")}
        task_factory: Any = _create_task
        loop.set_task_factory(task_factory)

    def now_s(self) -> float:
        """Return the time in epoch seconds, which jumps of the wall clock do not change."""
        return EPOCH_S + asyncio.get_running_loop().time()

    def jump_clock(self) -> None:
        """Set the wall clock of the machine to another time."""
        self.clock_offset_s = (self.rng.random() - 0.5) * self.faults.max_clock_jump_s

    def disturb(self, seconds: float = FAULT_EFFECT_S) -> None:
        """Record that a fault has effects for some seconds."""
        self._calm_at = max(self._calm_at, asyncio.get_running_loop().time() + seconds)

    @property
    def calm_at(self) -> float:
        """The time at which the effects of all faults have ended, as far as it is known."""
        if any(host.state != "healthy" for host in self.hosts.values()):
            self.disturb()
        return self._calm_at


def _create_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    """Create a task that is cancelled when the process that creates it crashes."""
    task = asyncio.Task(work, loop=loop, **options)
    process = _process.get()
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
        if not process.is_alive:
            task.cancel()
    return task
