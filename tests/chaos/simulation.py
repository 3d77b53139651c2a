"""Simulates the whole service with faults, on virtual time, from one seed.

    python -m tests.chaos.simulation SEED          # one run, prints its history
    python -m tests.chaos.simulation --seeds 1000  # many, from seed 0; stops at the first failure

Callers post, cancel, retry and replay tasks; one or two processes share one store. Processes crash
at any await, the store refuses calls or loses replies, the network and the targets fail, clocks
jump. Then the faults stop, and the invariants are checked.
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
from tarry.service.store import LeaseTerms
from tarry.testing import VirtualClock
from tests.chaos.api_client import build_api, send_request
from tests.chaos.environment import Environment, FaultyNetwork, FaultyStore, SimulatedProcess
from tests.chaos.invariants import InvariantViolation
from tests.service.engine.harness import EngineHarness

FAULT_PHASE_S = 60.0
"""How long faults occur."""
RECOVERY_TIMEOUT_S = 400.0
"""How long after the faults all tasks must have ended."""
CHECK_INTERVAL_S = 5.0
LEASE_MS = 15_000
HORIZON_MS = 2_000


class Simulation:
    """One run."""

    def __init__(self, seed: int, folder: Path | None = None) -> None:
        self.environment = Environment(seed, folder)
        self.rng = self.environment.rng
        self.harnesses: list[EngineHarness | None] = []
        self.apis: list[Api | None] = []
        self.processes: list[SimulatedProcess] = []
        self.names = iter(range(10_000))
        self.process_count = 0

    async def run(self) -> None:
        """Run until all tasks have ended, and check the invariants."""
        workers = self.rng.choice([1, 1, 2])
        self.harnesses, self.apis = [None] * workers, [None] * workers
        jobs = [asyncio.ensure_future(self._run_processes(index)) for index in range(workers)]
        jobs += [
            asyncio.ensure_future(self._change_hosts()),
            asyncio.ensure_future(self._jump_clock()),
        ]
        callers = [asyncio.ensure_future(self._caller()) for _ in range(self.rng.randint(1, 4))]
        done, _ = await asyncio.wait([*callers, *jobs], timeout=FAULT_PHASE_S)
        self._raise(done)
        self.environment.faults.stop()
        for host in self.environment.hosts.values():
            host.state = "healthy"
        for _ in range(int(RECOVERY_TIMEOUT_S / CHECK_INTERVAL_S)):
            done, _ = await asyncio.wait([*callers, *jobs], timeout=CHECK_INTERVAL_S)
            self._raise(done)
            if (
                all(caller.done() for caller in callers)
                and self.environment.invariants.all_tasks_ended()
            ):
                break
        for process in self.processes:
            process.kill()
        for job in [*callers, *jobs]:
            job.cancel()
        await asyncio.wait([*callers, *jobs])
        self._raise(jobs)
        if self.environment.invariants.violation is not None:
            raise self.environment.invariants.violation
        await self.environment.invariants.check_end()

    def _raise(self, jobs: Any) -> None:
        for job in jobs:
            if job.done() and not job.cancelled() and job.exception() is not None:
                raise job.exception()

    # --- processes --------------------------------------------------------------------------------

    async def _run_processes(self, index: int) -> None:
        """Start a process, and another one after each crash or shutdown."""
        while True:
            self.process_count += 1
            name = f"p{self.process_count}"
            process = SimulatedProcess(self.environment, name, skew=self.rng.random() * 1e6)
            self.processes.append(process)
            await process.run(self._serve(index, process))
            if process.is_alive:  # an orderly shutdown
                process.is_alive = False
            self.harnesses[index] = self.apis[index] = None
            self.environment.crashes += 1
            await asyncio.sleep(self.rng.random() * 20)

    async def _serve(self, index: int, process: SimulatedProcess) -> None:
        rng = self.rng
        harness = EngineHarness(
            FaultyNetwork(process),
            store=FaultyStore(process, self.environment.store),
            limits=EngineLimits(
                max_running_attempts=rng.choice([2, 50]),
                max_lane_running_attempts=rng.choice([1, 20]),
                max_leased=rng.choice([3, 100]),
                max_lane_leased=rng.choice([2, 50]),
                max_claimed=rng.choice([2, 50]),
                max_lane_claimed=rng.choice([1, 50]),
                max_unwritten=10,
            ),
            seed=int(process.name[1:]),
            lease=LeaseTerms(process.name, LEASE_MS, HORIZON_MS),
            breaker=lambda: Breaker(min_calls=rng.choice([3, 50]), open_for=3.0, max_open=15.0),
            monotonic=process.monotonic,
        )
        try:
            await harness.engine.start()
        except StoreUnavailable:
            return
        self.harnesses[index], self.apis[index] = harness, build_api(harness)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * FAULT_PHASE_S)
            self.harnesses[index] = self.apis[index] = None
            await harness.engine.stop(rng.choice([0.0, 20.0]))  # SIGTERM
            return
        await process.crashed

    async def _change_hosts(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random() * 15)
            if (
                self.environment.faults.slow
                or self.environment.faults.network_fault
                or self.environment.faults.store_refusal
            ):
                self.rng.choice(list(self.environment.hosts.values())).change_state()

    async def _jump_clock(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random() * 40)
            if self.environment.faults.max_clock_jump_s:
                self.environment.jump_clock()

    # --- callers ----------------------------------------------------------------------------------

    async def _caller(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(1, 10)):
            await asyncio.sleep(rng.random() * rng.choice([0.01, 8]))
            action = rng.random()
            if action < 0.7:
                await self._post()
            elif action < 0.8:
                await self._act_on_task("cancel")
            elif action < 0.9:
                await self._act_on_task("retry")
            else:
                await self._replay()

    async def _send(self, method: str, path: str, document: object = None) -> tuple[int, Any]:
        """Send a request to a random process; status 0: it is not running, or crashes meanwhile."""
        index = self.rng.randrange(len(self.apis))
        api, process = self.apis[index], self._process(index)
        if api is None or process is None:
            return 0, None
        answer: tuple[int, Any] | None = await process.run(
            send_request(api, method, path, document)
        )
        return answer or (0, None)

    async def _post(self) -> None:
        """Post one task or a batch, until a process has accepted all of them."""
        rng = self.rng
        names = [f"t{next(self.names)}" for _ in range(rng.choice([1, 1, 5]))]
        policy = {
            "maxAttempts": rng.randint(1, 6),
            "initialDelayMs": rng.choice([10, 500, 3000]),
            "maxDelayMs": 10_000,
            "attemptTimeoutMs": 5_000,
            **({"totalBudgetMs": 30_000} if rng.random() < 0.2 else {}),
        }
        host, delay = rng.choice(list(self.environment.hosts)), rng.choice([0, 0, 500, 5000])
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
            if rng.random() < 0.1:
                tasks[0]["callbackUrl"] = f"http://b.example/callback-{names[0]}"
            path, document = "/retry-tasks", tasks[0]
        else:
            path, document = "/retry-tasks/batch", {"tasks": tasks}
        while True:
            status, answer = await self._send("POST", path, document)
            if status in {200, 201}:
                single = {"status": status, "task": answer}
                results = answer["results"] if len(names) > 1 else [single]
                for name, result in zip(names, results, strict=True):
                    if result["status"] in {200, 201}:
                        task = result["task"]
                        self.environment.invariants.record_accepted(
                            name, task["taskId"], task["idempotencyKey"]
                        )
                status = max(result["status"] for result in results)
                if status in {200, 201}:
                    return
            if status not in {0, 429, 503}:
                raise InvariantViolation(f"{names}: {status} {answer}")
            await asyncio.sleep(rng.random())

    async def _act_on_task(self, action: str) -> None:
        accepted_tasks = list(self.environment.invariants.accepted_tasks.values())
        if not accepted_tasks:
            return
        task_id, _ = self.rng.choice(accepted_tasks)
        if action == "retry":
            self.environment.invariants.retried_now.add(task_id)
            await self._send("POST", f"/retry-tasks/{task_id}/retry")
        else:
            await self._send("DELETE", f"/retry-tasks/{task_id}")

    async def _replay(self) -> None:
        await self._send("POST", "/dead-letters/replays", {})

    def _process(self, index: int) -> SimulatedProcess | None:
        harness = self.harnesses[index]
        for process in self.processes:
            if (
                harness is not None
                and process.is_alive
                and process.name == harness.context.lease_terms.worker
            ):
                return process
        return None


def simulate(seed: int, folder: Path | None = None) -> Simulation:
    """Run one seed, on a SQLite file in `folder` or on the model store.

    Raises `InvariantViolation`.
    """
    simulations: list[Simulation] = []

    async def main() -> None:
        simulations.append(Simulation(seed, folder))
        await simulations[0].run()

    logger = logging.getLogger("tarry.service")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with VirtualClock(start=1000.0) as clock:
            clock.run(main)
    finally:
        logger.setLevel(level)
    return simulations[0]


def main() -> int:
    """Run one or many seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--sqlite", action="store_true", help="use a SQLite file instead of the model store"
    )
    options = parser.parse_args()
    seeds = (
        [options.seed]
        if options.seed is not None
        else range(options.first, options.first + options.seeds)
    )
    for seed in seeds:
        try:
            with tempfile.TemporaryDirectory() as folder:
                run = simulate(seed, Path(folder) if options.sqlite else None)
        except BaseException:
            sys.stderr.write(f"seed {seed} fails: python -m tests.chaos.simulation {seed}\n")
            raise
        if seed and not seed % 1000:
            sys.stdout.write(f"{seed} runs\n")
            sys.stdout.flush()
        if options.seed is not None:
            sys.stdout.write("\n".join(run.environment.invariants.history) + "\n")
    sys.stdout.write(f"{len(seeds)} runs, all invariants hold\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
