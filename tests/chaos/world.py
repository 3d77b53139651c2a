"""The world around the service in a simulation: time, processes that die, a store and a network
that fail. Everything is drawn from one seed, so that a run can be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from tarry.errors import StoreUnavailable
from tarry.service.delivery.messages import DeliveryRequest, DeliveryResult, Fault
from tarry.service.store import Store
from tests.chaos.oracle import Oracle, at_once
from tests.service.stores.model_store import ModelStore
from tests.service.stores.synchronous_store import SynchronousSqliteStore

_process: ContextVar[Process | None] = ContextVar("process", default=None)
EPOCH = 1_800_000_000.0


class Faults:
    """How often what goes wrong. `heal` ends it all."""

    def __init__(self, dice: Random) -> None:
        bad = dice.choice([0.0, 0.01, 0.05, 0.2])
        self.crash = dice.choice([0.0, 0.001, 0.005, 0.02])
        """The chance that the process dies at an await."""
        self.refused = bad
        """The chance that the store fails before it has done anything."""
        self.lost = bad / 2
        """The chance that the store has done it, and its answer is lost."""
        self.slow = dice.choice([0.0, 0.1, 0.5])
        self.network = dice.choice([0.0, 0.1, 0.3])
        self.jump = dice.choice([0.0, 0.0, 3.0, 200.0])
        """How far, at most, the clock jumps."""

    def heal(self) -> None:
        """Let nothing go wrong any more."""
        self.crash = self.refused = self.lost = self.slow = self.network = self.jump = 0.0


class Process:
    """One life of the service: every await on the outside is a place where it can end."""

    def __init__(self, world: World, name: str, skew: float) -> None:
        self.world = world
        self.name = name
        self.skew = skew
        self.alive = True
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tasks: set[asyncio.Task[Any]] = set()

    def monotonic(self) -> float:
        """Return this machine's time, which has nothing to do with the store's."""
        return asyncio.get_running_loop().time() + self.skew

    async def passes(self) -> None:
        """Come to a place where everything can happen: slowness, or the end."""
        faults, dice = self.world.faults, self.world.dice
        if self.alive and dice.random() < faults.slow:
            await asyncio.sleep(dice.random() * dice.choice([0.01, 1.0]))
        if self.alive and dice.random() < faults.crash:
            self.die()
        if not self.alive:
            await forever()

    def die(self) -> None:
        """End as by kill -9: nothing that this process does from now on has any effect."""
        if self.alive:
            self.alive = False
            self.dead.set_result(None)
            current = asyncio.current_task()
            for task in tuple(self.tasks):
                if task is not current:
                    task.cancel()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run work in this process, and all that it starts; None if the process ends before."""
        token = _process.set(self)
        try:
            task = asyncio.get_running_loop().create_task(work)
        finally:
            _process.reset(token)
        await asyncio.wait([task, self.dead], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        return None if task.cancelled() else task.result()


async def forever() -> NoReturn:
    """Never return."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


class FaultyStore:
    """A process's way to the store, which is beside it and outlives it."""

    def __init__(self, process: Process, store: Store) -> None:
        self._process = process
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        world = self._process.world

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._process.passes()
            if world.dice.random() < world.faults.refused:
                msg = f"{name}: refused"
                raise StoreUnavailable(msg)
            answer = await method(*args, **kwargs)
            world.oracle.wrote(name, args, answer)
            await self._process.passes()
            if world.dice.random() < world.faults.lost:
                msg = f"{name}: the answer was lost"
                raise StoreUnavailable(msg)
            return answer

        return call


class Host:
    """A target that has good times and bad ones."""

    def __init__(self, name: str, dice: Random) -> None:
        self.name = name
        self.mood = "well"
        self._dice = dice

    def turn(self) -> None:
        """Change its mood."""
        self.mood = self._dice.choice(["well", "well", "down", "busy", "slow", "odd"])

    def answer(self) -> tuple[DeliveryResult, float]:
        """Return what it says, and after how many seconds."""
        dice, mood = self._dice, self.mood
        if mood == "down":
            return DeliveryResult(fault=Fault.REFUSED, error="refused"), 0.001
        if mood == "busy" and dice.random() < 0.8:
            headers = [("retry-after", str(dice.randrange(8)))] if dice.random() < 0.3 else []
            return DeliveryResult(status=dice.choice([503, 429, 500]), headers=headers), 0.01
        if mood == "slow":
            return DeliveryResult(status=200), dice.random() * 8
        if mood == "odd" and dice.random() < 0.1:
            return DeliveryResult(status=dice.choice([404, 302, 410])), 0.01
        return DeliveryResult(status=dice.choice([200, 201, 204])), dice.random() * 0.05


class Network:
    """A process's way to the targets."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Make an attempt; it or its answer may get lost, or come late."""
        process, world = self._process, self._process.world
        if not process.alive:
            await forever()
        world.oracle.began(request, process.name)
        await process.passes()
        dice, faults = world.dice, world.faults
        if dice.random() < faults.network / 3:
            answer = DeliveryResult(fault=Fault.INTERNAL, error="egress proxy down")
            world.oracle.returned(request, answer)
            return answer
        if dice.random() < faults.network / 3:
            return DeliveryResult(fault=Fault.DNS, error="no such name")
        answer, seconds = world.hosts[request.url.split("/")[2]].answer()
        world.oracle.arrived(request, answer)
        lost = dice.random() < faults.network / 3
        if lost or seconds > request.timeout:
            await asyncio.sleep(request.timeout)
            answer = DeliveryResult(fault=Fault.TIMEOUT, error="timed out")
        else:
            await asyncio.sleep(seconds)
        await process.passes()
        world.oracle.returned(request, answer)
        return answer

    async def close(self) -> None:
        """Nothing is open."""


class World:
    """What is outside of the processes, and outlives them."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        self.dice = Random(seed)
        self.faults = Faults(self.dice)
        self.offset = 0.0
        self.jumped_at = float("-inf")
        self.store: Store = ModelStore(self._clock)
        if folder is not None:
            self.store = SynchronousSqliteStore(folder / "tasks.db", self._clock)
            at_once(self.store.open())
        self.oracle = Oracle(self.store, self)
        self.hosts = {name: Host(name, self.dice) for name in ("a.example", "b.example")}
        self.crashes = 0
        factory: Any = _in_process
        asyncio.get_running_loop().set_task_factory(factory)

    def _clock(self) -> int:
        return int(self.epoch() * 1000)

    def epoch(self) -> float:
        """Return the store's time."""
        return EPOCH + asyncio.get_running_loop().time() + self.offset

    def jump(self) -> None:
        """Set the clock of the machine to another time."""
        self.offset = (self.dice.random() - 0.5) * self.faults.jump
        self.jumped_at = asyncio.get_running_loop().time()


def _in_process(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    """Make a task that belongs to the process which starts it, and dies with it."""
    task = asyncio.Task(work, loop=loop, **options)
    process = _process.get()
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
        if not process.alive:
            task.cancel()
    return task
