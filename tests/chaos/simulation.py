"""One run of the whole service on virtual time, from one seed.

    python -m tests.chaos.simulation SEED          # one run, with its story
    python -m tests.chaos.simulation --seeds 1000  # many, from 0 on; stops at the first that fails

Callers post, cancel, hurry and replay; one or two processes work on one store; targets have moods.
Processes die at any await, the store refuses or loses answers, clocks jump. Then everything heals,
and what must hold is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from tarry.core.breaker import Breaker
from tarry.errors import StoreUnavailable
from tarry.service.api.application import Api
from tarry.service.engine.context import EngineLimits
from tarry.service.store import Lease
from tarry.testing.clock import VirtualClock
from tests.chaos.api import api_of, ask
from tests.chaos.oracle import Broken
from tests.chaos.world import FaultyStore, Network, Process, World
from tests.service.engine.rig import Rig

TROUBLE = 60.0
"""Seconds in which things go wrong."""
HEALING = 400.0
"""Seconds after which everything must be over."""
LOOK = 5.0
LEASE = 15_000
HORIZON = 2_000


class Simulation:
    """A run."""

    def __init__(self, seed: int, folder: Path | None = None) -> None:
        self.world = World(seed, folder)
        self.dice = self.world.dice
        self.rigs: list[Rig | None] = []
        self.apis: list[Api | None] = []
        self.processes: list[Process] = []
        self.names = iter(range(10_000))
        self.lives = 0

    async def run(self) -> None:
        """Run until everything is over, and check what must hold."""
        workers = self.dice.choice([1, 1, 2])
        self.rigs, self.apis = [None] * workers, [None] * workers
        jobs = [asyncio.ensure_future(self._live(place)) for place in range(workers)]
        jobs += [asyncio.ensure_future(self._moods()), asyncio.ensure_future(self._clock())]
        callers = [asyncio.ensure_future(self._caller()) for _ in range(self.dice.randint(1, 4))]
        done, _ = await asyncio.wait([*callers, *jobs], timeout=TROUBLE)
        self._raise(done)
        self.world.faults.heal()
        for host in self.world.hosts.values():
            host.mood = "well"
        for _ in range(int(HEALING / LOOK)):
            done, _ = await asyncio.wait([*callers, *jobs], timeout=LOOK)
            self._raise(done)
            if all(caller.done() for caller in callers) and self.world.oracle.all_is_over():
                break
        for process in self.processes:
            process.die()
        for job in [*callers, *jobs]:
            job.cancel()
        await asyncio.wait([*callers, *jobs])
        self._raise(jobs)
        if self.world.oracle.broken is not None:
            raise self.world.oracle.broken
        await self.world.oracle.check_end()

    def _raise(self, jobs: Any) -> None:
        for job in jobs:
            if job.done() and not job.cancelled() and job.exception() is not None:
                raise job.exception()

    # --- processes --------------------------------------------------------------------------------

    async def _live(self, place: int) -> None:
        """Let one process live, die, and come back, again and again."""
        while True:
            self.lives += 1
            name = f"p{self.lives}"
            process = Process(self.world, name, skew=self.dice.random() * 1e6)
            self.processes.append(process)
            await process.run(self._serve(place, process))
            if process.alive:  # it was stopped in order
                process.alive = False
            self.rigs[place] = self.apis[place] = None
            self.world.crashes += 1
            await asyncio.sleep(self.dice.random() * 20)

    async def _serve(self, place: int, process: Process) -> None:
        dice = self.dice
        rig = Rig(
            Network(process),
            store=FaultyStore(process, self.world.store),
            limits=EngineLimits(
                in_flight=dice.choice([2, 50]),
                lane_in_flight=dice.choice([1, 20]),
                leased=dice.choice([3, 100]),
                lane_leased=dice.choice([2, 50]),
                claim=dice.choice([2, 50]),
                lane_claim=dice.choice([1, 50]),
                ingest=10,
            ),
            seed=int(process.name[1:]),
            lease=Lease(process.name, LEASE, HORIZON),
            breaker=lambda: Breaker(min_calls=dice.choice([3, 50]), open_for=3.0, max_open=15.0),
            monotonic=process.monotonic,
        )
        try:
            await rig.engine.start()
        except StoreUnavailable:
            return
        self.rigs[place], self.apis[place] = rig, api_of(rig)
        if dice.random() < 0.3:
            await asyncio.sleep(dice.random() * TROUBLE)
            self.rigs[place] = self.apis[place] = None
            await rig.engine.stop(dice.choice([0.0, 20.0]))  # SIGTERM
            return
        await process.dead

    async def _moods(self) -> None:
        while True:
            await asyncio.sleep(self.dice.random() * 15)
            if self.world.faults.slow or self.world.faults.network or self.world.faults.refused:
                self.dice.choice(list(self.world.hosts.values())).turn()

    async def _clock(self) -> None:
        while True:
            await asyncio.sleep(self.dice.random() * 40)
            if self.world.faults.jump:
                self.world.jump()

    # --- callers ----------------------------------------------------------------------------------

    async def _caller(self) -> None:
        dice = self.dice
        for _ in range(dice.randint(1, 10)):
            await asyncio.sleep(dice.random() * dice.choice([0.01, 8]))
            action = dice.random()
            if action < 0.7:
                await self._post()
            elif action < 0.8:
                await self._on_one("cancel")
            elif action < 0.9:
                await self._on_one("retry")
            else:
                await self._replay()

    async def _ask(self, method: str, path: str, document: object = None) -> tuple[int, Any]:
        """Ask one of the processes; 0 stands for a process that is not there, or dies meanwhile."""
        place = self.dice.randrange(len(self.apis))
        api, process = self.apis[place], self._process(place)
        if api is None or process is None:
            return 0, None
        answer: tuple[int, Any] | None = await process.run(ask(api, method, path, document))
        return answer or (0, None)

    async def _post(self) -> None:
        """Post one task, or a few, until somebody says that they are kept."""
        dice = self.dice
        names = [f"t{next(self.names)}" for _ in range(dice.choice([1, 1, 5]))]
        policy = {
            "maxAttempts": dice.randint(1, 6),
            "initialDelayMs": dice.choice([10, 500, 3000]),
            "maxDelayMs": 10_000,
            "attemptTimeoutMs": 5_000,
            **({"totalBudgetMs": 30_000} if dice.random() < 0.2 else {}),
        }
        host, delay = dice.choice(list(self.world.hosts)), dice.choice([0, 0, 500, 5000])
        tasks: list[dict[str, Any]] = [
            {
                "targetUrl": f"http://{host}/{name}",
                "idempotencyKey": f"key-{name}",
                "delayMs": delay,
                "policy": policy,
            }
            for name in names
        ]
        if len(names) == 1:
            if dice.random() < 0.1:
                tasks[0]["callbackUrl"] = f"http://b.example/callback-{names[0]}"
            path, document = "/retry-tasks", tasks[0]
        else:
            path, document = "/retry-tasks/batch", {"tasks": tasks}
        while True:
            status, answer = await self._ask("POST", path, document)
            if status in {200, 201}:
                one = {"status": status, "task": answer}
                results = answer["results"] if len(names) > 1 else [one]
                for name, one in zip(names, results, strict=True):
                    if one["status"] in {200, 201}:
                        task = one["task"]
                        self.world.oracle.promise(name, task["taskId"], task["idempotencyKey"])
                status = max(one["status"] for one in results)
                if status in {200, 201}:
                    return
            if status not in {0, 429, 503}:
                raise Broken(f"{names}: {status} {answer}")
            await asyncio.sleep(dice.random())

    async def _on_one(self, action: str) -> None:
        promised = list(self.world.oracle.promised.values())
        if not promised:
            return
        task_id, _ = self.dice.choice(promised)
        if action == "retry":
            self.world.oracle.hurried.add(task_id)
            await self._ask("POST", f"/retry-tasks/{task_id}/retry")
        else:
            await self._ask("DELETE", f"/retry-tasks/{task_id}")

    async def _replay(self) -> None:
        await self._ask("POST", "/dead-letters/replays", {})

    def _process(self, place: int) -> Process | None:
        rig = self.rigs[place]
        for process in self.processes:
            if rig is not None and process.alive and process.name == rig.context.lease.worker:
                return process
        return None


def simulate(seed: int, folder: Path | None = None) -> Simulation:
    """Make one run, on a SQLite file in `folder` or in memory; raises what an invariant says."""
    made: list[Simulation] = []

    async def main() -> None:
        made.append(Simulation(seed, folder))
        await made[0].run()

    logger = logging.getLogger("tarry.service")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with VirtualClock(start=1000.0) as clock:
            clock.run(main)
    finally:
        logger.setLevel(level)
    return made[0]


def main() -> int:
    """Run one seed, or many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--sqlite", action="store_true", help="on a SQLite file, not in memory")
    given = parser.parse_args()
    seeds = (
        [given.seed] if given.seed is not None else range(given.first, given.first + given.seeds)
    )
    for seed in seeds:
        try:
            with tempfile.TemporaryDirectory() as folder:
                run = simulate(seed, Path(folder) if given.sqlite else None)
        except BaseException:
            sys.stderr.write(f"seed {seed} fails: python -m tests.chaos.simulation {seed}\n")
            raise
        if seed and not seed % 1000:
            sys.stdout.write(f"{seed} runs\n")
            sys.stdout.flush()
        if given.seed is not None:
            sys.stdout.write("\n".join(run.world.oracle.history) + "\n")
    sys.stdout.write(f"{len(seeds)} runs, all invariants hold\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
