"""The simulated environment of the service: clocks, processes that crash, faulty store and network.

All random decisions come from one seed, so that a run can be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.store import Store
from tests.chaos.invariants import InvariantChecker, run_synchronously
from tests.service.stores.model_store import ModelStore
from tests.service.stores.synchronous_store import SynchronousSqliteStore

_process: ContextVar[SimulatedProcess | None] = ContextVar("process", default=None)
EPOCH = 1_800_000_000.0


class Faults:
    """The probability of each fault, until `stop`."""

    def __init__(self, rng: Random) -> None:
        store_failure = rng.choice([0.0, 0.01, 0.05, 0.2])
        self.crash = rng.choice([0.0, 0.001, 0.005, 0.02])
        """The process crashes at an await."""
        self.store_refusal = store_failure
        """The store fails before it has changed anything."""
        self.store_reply_loss = store_failure / 2
        """The store has applied a call, and its reply is lost."""
        self.slow = rng.choice([0.0, 0.1, 0.5])
        self.network_fault = rng.choice([0.0, 0.1, 0.3])
        self.max_clock_jump_s = rng.choice([0.0, 0.0, 3.0, 200.0])
        """Seconds, not a probability."""

    def stop(self) -> None:
        """Cause no more faults."""
        self.crash = self.store_refusal = self.store_reply_loss = self.slow = self.network_fault = (
            self.max_clock_jump_s
        ) = 0.0


class SimulatedProcess:
    """One process of the service; it can crash at every call of the store or the network."""

    def __init__(self, environment: Environment, name: str, skew: float) -> None:
        self.environment = environment
        self.name = name
        self.skew = skew
        self.is_alive = True
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tasks: set[asyncio.Task[Any]] = set()

    def monotonic(self) -> float:
        """Return the local monotonic time, which is unrelated to the store's clock."""
        return asyncio.get_running_loop().time() + self.skew

    async def reach_fault_point(self) -> None:
        """Delay or crash the process, according to the faults."""
        faults, rng = self.environment.faults, self.environment.rng
        if self.is_alive and rng.random() < faults.slow:
            await asyncio.sleep(rng.random() * rng.choice([0.01, 1.0]))
        if self.is_alive and rng.random() < faults.crash:
            self.kill()
        if not self.is_alive:
            await wait_forever()

    def kill(self) -> None:
        """Crash, as by kill -9: nothing that this process does from now on has any effect."""
        if self.is_alive:
            self.is_alive = False
            self.crashed.set_result(None)
            current = asyncio.current_task()
            for task in tuple(self.tasks):
                if task is not current:
                    task.cancel()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and the tasks it starts in this process; None if the process crashes."""
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
    """Wait for a future that is never done: the process has crashed."""
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
            if environment.rng.random() < environment.faults.store_refusal:
                msg = f"{name}: refused"
                raise StoreUnavailable(msg)
            answer = await method(*args, **kwargs)
            environment.invariants.record_store_call(name, args, answer)
            await self._process.reach_fault_point()
            if environment.rng.random() < environment.faults.store_reply_loss:
                msg = f"{name}: the reply was lost"
                raise StoreUnavailable(msg)
            return answer

        return call


class FakeHost:
    """A target that is healthy, down, overloaded, slow or odd."""

    def __init__(self, name: str, rng: Random) -> None:
        self.name = name
        self.state = "healthy"
        self._dice = rng

    def change_state(self) -> None:
        """Change to a random state."""
        self.state = self._dice.choice(["healthy", "healthy", "down", "busy", "slow", "odd"])

    def answer(self) -> tuple[DeliveryResult, float]:
        """Return the response, and the seconds until it is sent."""
        rng, state = self._dice, self.state
        if state == "down":
            return DeliveryResult(fault=Fault.REFUSED, error="refused"), 0.001
        if state == "busy" and rng.random() < 0.8:
            headers = [("retry-after", str(rng.randrange(8)))] if rng.random() < 0.3 else []
            return DeliveryResult(status=rng.choice([503, 429, 500]), headers=headers), 0.01
        if state == "slow":
            return DeliveryResult(status=200), rng.random() * 8
        if state == "odd" and rng.random() < 0.1:
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
            answer = DeliveryResult(fault=Fault.INTERNAL, error="egress proxy down")
            environment.invariants.record_delivery(request, answer)
            return answer
        if rng.random() < faults.network_fault / 3:
            return DeliveryResult(fault=Fault.DNS, error="no such name")
        answer, seconds = environment.hosts[request.url.split("/")[2]].answer()
        environment.invariants.record_response(request, answer)
        is_lost = rng.random() < faults.network_fault / 3
        if is_lost or seconds > request.timeout:
            await asyncio.sleep(request.timeout)
            answer = DeliveryResult(fault=Fault.TIMEOUT, error="timed out")
        else:
            await asyncio.sleep(seconds)
        await process.reach_fault_point()
        environment.invariants.record_delivery(request, answer)
        return answer

    async def close(self) -> None:
        """Nothing is open."""


class Environment:
    """Everything outside of the processes: it survives their crashes."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        self.rng = Random(seed)
        self.faults = Faults(self.rng)
        self.offset = 0.0
        self.jumped_at = float("-inf")
        self.store: Store = ModelStore(self._jump_clock)
        if folder is not None:
            self.store = SynchronousSqliteStore(folder / "tasks.db", self._jump_clock)
            run_synchronously(self.store.open())
        self.invariants = InvariantChecker(self.store, self)
        self.hosts = {name: FakeHost(name, self.rng) for name in ("a.example", "b.example")}
        self.crashes = 0
        factory: Any = _in_process
        asyncio.get_running_loop().set_task_factory(factory)

    def _jump_clock(self) -> int:
        return int(self.epoch() * 1000)

    def epoch(self) -> float:
        """Return the store's time."""
        return EPOCH + asyncio.get_running_loop().time() + self.offset

    def jump_clock(self) -> None:
        """Set the clock of the store to another time."""
        self.offset = (self.rng.random() - 0.5) * self.faults.max_clock_jump_s
        self.jumped_at = asyncio.get_running_loop().time()


def _in_process(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    """Create a task that belongs to the process that starts it, and is cancelled with it."""
    task = asyncio.Task(work, loop=loop, **options)
    process = _process.get()
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
        if not process.is_alive:
            task.cancel()
    return task
