"""Simulates the service with faults, on virtual time. One seed determines a run.

    python -m tests.chaos.simulation SEED          # one run; prints its history
    python -m tests.chaos.simulation --seeds 1000  # many runs; stops at the first failure
    python -m tests.chaos.simulation --sqlite SEED  # one run on a SQLite file

Callers post, cancel, retry and replay tasks; one or two processes share one store. A process may
crash whenever it calls the store or the network, the store rejects calls or loses replies, the
network and the targets fail, and the clock of the machine jumps. Targets have a capacity, and never
accept some of the tasks. Then the faults stop, and invariants are checked.
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
"""Faults are injected for this long."""
RECOVERY_TIMEOUT_S = 400.0
"""All tasks must be finished this long after the faults have stopped."""
CHECK_INTERVAL_S = 5.0
LEASE_MS = 15_000
HORIZON_MS = 2_000
"""A task is leased at most this long before it is due."""


class Simulation:
    """One run of the simulation."""

    def __init__(self, seed: int, folder: Path | None = None) -> None:
        self.environment = Environment(seed, folder)
        self.rng = self.environment.rng
        self.harnesses: list[EngineHarness | None] = []
        self.apis: list[Api | None] = []
        self.processes: list[SimulatedProcess] = []
        self.task_numbers = iter(range(10_000))
        self.started_process_count = 0

    async def run(self) -> None:
        """Run until all tasks are finished, and check the invariants."""
        process_count = self.rng.choice([1, 1, 2])
        self.harnesses, self.apis = [None] * process_count, [None] * process_count
        background = [
            asyncio.ensure_future(self._keep_process_running(slot)) for slot in range(process_count)
        ]
        background += [
            asyncio.ensure_future(self._change_host_states()),
            asyncio.ensure_future(self._make_clock_jumps()),
        ]
        callers = [asyncio.ensure_future(self._run_caller()) for _ in range(self.rng.randint(1, 4))]
        done, _ = await asyncio.wait([*callers, *background], timeout=FAULT_PHASE_S)
        self._raise_first_error(done)
        self.environment.faults.stop()
        for host in self.environment.hosts.values():
            host.state = "healthy"
        self.environment.disturb()
        for _ in range(int(RECOVERY_TIMEOUT_S / CHECK_INTERVAL_S)):
            done, _ = await asyncio.wait([*callers, *background], timeout=CHECK_INTERVAL_S)
            self._raise_first_error(done)
            self._check_leases()
            if (
                all(caller.done() for caller in callers)
                and self.environment.invariants.all_tasks_finished()
            ):
                break
        for process in self.processes:
            process.kill()
        for future in [*callers, *background]:
            future.cancel()
        await asyncio.wait([*callers, *background])
        self._raise_first_error(background)
        if self.environment.invariants.violation is not None:
            raise self.environment.invariants.violation
        await self.environment.invariants.check_final_state()

    def _check_leases(self) -> None:
        for slot, harness in enumerate(self.harnesses):
            if harness is not None and self._running_process(slot) is not None:
                self.environment.invariants.check_leases(
                    harness.context.lease_terms.worker, harness.engine._known_lease_ids()
                )

    def _raise_first_error(self, futures: Any) -> None:
        for future in futures:
            if future.done() and not future.cancelled() and future.exception() is not None:
                raise future.exception()

    # --- processes --------------------------------------------------------------------------------

    async def _keep_process_running(self, slot: int) -> None:
        """Run a process in this slot, and another process after each crash or shutdown."""
        while True:
            self.started_process_count += 1
            name = f"p{self.started_process_count}"
            process = SimulatedProcess(self.environment, name, clock_skew_s=self.rng.random() * 1e6)
            self.processes.append(process)
            self.environment.disturb(seconds=0.0)  # tasks may have waited for a process
            await process.run(self._serve(slot, process))
            self.environment.disturb()
            if process.is_alive:  # after a graceful shutdown
                process.is_alive = False
            self.harnesses[slot] = self.apis[slot] = None
            await asyncio.sleep(self.rng.random() * 20)

    async def _serve(self, slot: int, process: SimulatedProcess) -> None:
        rng = self.rng
        harness = EngineHarness(
            FaultyNetwork(process),
            store=FaultyStore(process, self.environment.store),
            limits=EngineLimits(
                max_running_attempts=rng.choice([2, 50]),
                max_lane_running_attempts=rng.choice([1, 20]),
                # `max_leased` limits all leased tasks, `max_claimed` the tasks of one claim.
                max_leased=rng.choice([3, 100]),
                max_lane_leased=rng.choice([2, 50]),
                max_claimed=rng.choice([2, 50]),
                max_lane_claimed=rng.choice([1, 50]),
                max_unwritten=10,  # new tasks that wait to be written
            ),
            seed=int(process.name[1:]),
            lease=LeaseTerms(process.name, LEASE_MS, HORIZON_MS),
            build_breaker=lambda: Breaker(
                failure_rate=0.9,
                min_calls=rng.choice([3, 50]),
                timeouts=3,
                open_for=1.0,
                growth=1.1,
                max_open=15.0,
                close_after=1,
            ),
            monotonic=process.monotonic,
        )
        try:
            await harness.engine.start()
        except StoreUnavailable:
            return
        self.harnesses[slot], self.apis[slot] = harness, build_api(harness)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * FAULT_PHASE_S)
            self.harnesses[slot] = self.apis[slot] = None
            await harness.engine.stop(rng.choice([0.0, 20.0]))  # SIGTERM
            return
        await process.crashed

    async def _change_host_states(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random() * 15)
            if self.environment.faults.hosts_may_fail:
                self.rng.choice(list(self.environment.hosts.values())).change_state()
                self.environment.disturb()

    async def _make_clock_jumps(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random() * 40)
            if self.environment.faults.max_clock_jump_s:
                self.environment.jump_clock()

    # --- callers ----------------------------------------------------------------------------------

    async def _run_caller(self) -> None:
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
        """Send a request to a random process; return the status and the document of the response.

        The status is 0 if the process is not running or crashes during the request.
        """
        slot = self.rng.randrange(len(self.apis))
        api, process = self.apis[slot], self._running_process(slot)
        if api is None or process is None:
            return 0, None
        response: tuple[int, Any] | None = await process.run(
            send_request(api, method, path, document)
        )
        return response or (0, None)

    async def _post(self) -> None:
        """Post one task or a batch again and again until all tasks are accepted."""
        rng = self.rng
        host = rng.choice(list(self.environment.hosts.values()))
        names = [
            f"{'poison' if rng.random() < host.poison_share else 't'}{next(self.task_numbers)}"
            for _ in range(rng.choice([1, 1, 5, 10]))
        ]
        policy = {
            "maxAttempts": rng.randint(1, 6),
            "initialDelayMs": rng.choice([10, 500, 3000]),
            "maxDelayMs": 10_000,
            "attemptTimeoutMs": 5_000,
            **({"totalBudgetMs": 30_000} if rng.random() < 0.2 else {}),
        }
        delay = rng.choice([0, 0, 500, 5000])
        lane_key = rng.choice([None, None, None, "customer-1", "customer-2"])
        tasks: list[dict[str, Any]] = [
            {
                "targetUrl": f"http://{host.name}/{name}",
                "idempotencyKey": f"key-{name}",
                "laneKey": lane_key,
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
            status, body = await self._send("POST", path, document)
            worst_status = status
            if status in {200, 201}:
                single = {"status": status, "task": body}
                results = body["results"] if len(names) > 1 else [single]
                for name, result in zip(names, results, strict=True):
                    if result["status"] in {200, 201}:
                        task = result["task"]
                        self.environment.invariants.record_accepted(
                            name, task["taskId"], task["idempotencyKey"]
                        )
                # One rejected task of a batch is enough to post the batch again.
                worst_status = max(result["status"] for result in results)
                if worst_status in {200, 201}:
                    return
            if worst_status not in {0, 429, 503}:
                raise InvariantViolation(f"{names}: {worst_status} {body}")
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

    def _running_process(self, slot: int) -> SimulatedProcess | None:
        harness = self.harnesses[slot]
        for process in self.processes:
            if (
                harness is not None
                and process.is_alive
                and process.name == harness.context.lease_terms.worker
            ):
                return process
        return None


def simulate(seed: int, folder: Path | None = None) -> Simulation:
    """Run one seed, on a SQLite file in `folder` or on the in-memory reference store.

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
    """Run the simulation for one or many seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--sqlite", action="store_true", help="use a SQLite file instead of the in-memory store"
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
            command = f"python -m tests.chaos.simulation {seed}"
            if options.sqlite:
                command += " --sqlite"
            sys.stderr.write(f"seed {seed} failed; repeat it with: {command}\n")
            raise
        if seed and not seed % 1000:
            sys.stdout.write(f"seed {seed} is done\n")
            sys.stdout.flush()
        if options.seed is not None:
            sys.stdout.write("\n".join(run.environment.invariants.history) + "\n")
    sys.stdout.write(f"{len(seeds)} runs, all invariants hold\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
