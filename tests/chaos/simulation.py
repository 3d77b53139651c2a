"""Simulates the service with faults, on virtual time. One seed determines a run.

    python -m tests.chaos.simulation SEED          # one run; prints its history
    python -m tests.chaos.simulation --seeds 1000  # many runs; stops at the first failure
    python -m tests.chaos.simulation --store sqlite SEED  # on SQLite, postgres or redis

Callers post, cancel, retry and replay tasks; up to three processes share one store. A process may
crash or be suspended whenever it calls the store or the network, calls of the store fail (see
`faulty_store`), the network and the targets fail, and the clock of the machine jumps. Targets have
a capacity, and never accept some of the tasks. In some runs, targets of a tenant hang, or their
names are not resolved in time. Then the faults stop, and the invariants are checked.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from tarry.core.breaker import Breaker
from tarry.errors import StoreUnavailable
from tarry.service.api.application import Api
from tarry.service.api.auth import DEFAULT_TENANT
from tarry.service.delivery import dns
from tarry.service.store import LeaseTerms
from tarry.testing import VirtualClock
from tests.chaos.api_client import build_api, send_request
from tests.chaos.environment import (
    ATTEMPT_TIMEOUT_MS,
    HORIZON_MS,
    STEADY_HOST,
    STEADY_TENANT,
    Environment,
    FaultyNetwork,
    SimulatedProcess,
    run_unless_suspended,
)
from tests.chaos.faulty_store import FaultyStore
from tests.chaos.invariants import AcceptedTask, InvariantViolation
from tests.chaos.simulated_stores import ENGINES, ReferenceStores, SimulatedStores, run_engine
from tests.service.engine.harness import EngineHarness

FAULT_PHASE_S = 60.0
"""Faults are injected for this long."""
RECOVERY_TIMEOUT_S = 400.0
"""All tasks except poison tasks must be finished this long after the faults have stopped."""
POISON_TIMEOUT_S = 2_000.0
"""The same for poison tasks. A lane with no other tasks is parked after every third attempt."""
CHECK_INTERVAL_S = 5.0
LEASE_MS = 15_000
MAX_HANGING_TASKS = 75  # of one tenant
MAX_STEADY_HANGING_TASKS = 30  # of the steady tenant; fewer than the tenant can lease
DNS_TTL_S = 5.0
MAX_DNS_LOOKUPS = 8
"""In one process at a time; so few that names without an answer could occupy all of them."""


class Simulation:
    """One run of the simulation."""

    def __init__(self, seed: int, stores: SimulatedStores) -> None:
        self.environment = Environment(seed, stores)
        self.rng = self.environment.rng
        self.harnesses: list[EngineHarness | None] = []
        self.apis: list[Api | None] = []
        self.task_numbers = iter(range(10_000))
        self.started_process_count = 0

    async def run(self) -> None:
        """Run until all tasks are finished, and check the invariants."""
        process_count = self.rng.choice([1, 1, 2, 3])
        self.harnesses, self.apis = [None] * process_count, [None] * process_count
        background = [
            asyncio.ensure_future(self._keep_process_running(slot)) for slot in range(process_count)
        ]
        background += [
            asyncio.ensure_future(self._change_host_states()),
            asyncio.ensure_future(self._make_clock_jumps()),
        ]
        callers = [asyncio.ensure_future(self._run_caller()) for _ in range(self.rng.randint(1, 4))]
        if self.environment.world.has_neighbours:
            callers.append(asyncio.ensure_future(self._run_steady_tenant()))
            callers += [
                asyncio.ensure_future(self._run_hanging_tenant(tenant))
                for tenant in self.environment.world.hanging_hosts
            ]
        for _ in range(int(FAULT_PHASE_S / CHECK_INTERVAL_S)):
            done, _ = await asyncio.wait([*callers, *background], timeout=CHECK_INTERVAL_S)
            self._raise_first_error(done)
        self.environment.faults.stop()
        self.environment.world.make_targets_healthy()
        self.environment.record_fault(only_targets=True)
        for check in range(int(POISON_TIMEOUT_S / CHECK_INTERVAL_S)):
            done, _ = await asyncio.wait([*callers, *background], timeout=CHECK_INTERVAL_S)
            self._raise_first_error(done)
            self._check_leases()
            if (
                all(caller.done() for caller in callers)
                and self.environment.invariants.all_tasks_finished()
            ):
                break
            if check * CHECK_INTERVAL_S >= RECOVERY_TIMEOUT_S and not all(
                key.startswith("key-poison")
                for key in self.environment.invariants.unfinished_keys()
            ):
                break
        for process in self.environment.processes:
            process.kill()
        for future in [*callers, *background]:
            future.cancel()
        await asyncio.wait([*callers, *background])
        self._raise_first_error(background)
        await self.environment.invariants.check_final_state()

    def _check_leases(self) -> None:
        for slot, harness in enumerate(self.harnesses):
            process = self._running_process(slot)
            if harness is not None and process is not None and not process.is_suspended:
                self.environment.invariants.check_leases(
                    harness.context.lease_terms.worker, harness.engine._known_lease_ids()
                )

    def _raise_first_error(self, futures: Any) -> None:
        if self.environment.invariants.violation is not None:
            raise self.environment.invariants.violation
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
            self.environment.record_fault(seconds=0.0)  # tasks may have waited for a process
            await process.run(self._serve(slot, process))
            self.environment.record_fault()
            # After a graceful shutdown, attempts may have been interrupted.
            process.is_alive, process.may_lose_leases = False, True
            self.harnesses[slot] = self.apis[slot] = None
            await asyncio.sleep(self.rng.random() * 20)

    async def _serve(self, slot: int, process: SimulatedProcess) -> None:
        rng = self.rng
        harness = EngineHarness(
            FaultyNetwork(process),
            store=FaultyStore(process, self.environment.open_store()),
            limits=self.environment.world.draw_limits(),
            seed=int(process.name[1:]),
            lease=LeaseTerms(process.name, LEASE_MS, HORIZON_MS),
            build_breaker=lambda: Breaker(
                failure_rate=0.9,
                min_calls=rng.choice([3, 50]),
                min_span=0.0,
                count_retries=True,
                timeouts=3,
                open_for=1.0,
                growth=1.1,
                max_open=15.0,
                close_after=1,
            ),
            monotonic=process.monotonic,
        )
        process.lanes = harness.lanes
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
                self.environment.world.change_target_state()
                self.environment.record_fault(only_targets=True)

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

    async def _run_steady_tenant(self) -> None:
        """Post tasks for a target that is always healthy, until the faults stop."""
        while not self.environment.faults.are_stopped:
            await self._post_tasks(STEADY_TENANT, [(STEADY_HOST, self._next_name())])
            await asyncio.sleep(self.rng.random() * 4)

    async def _run_hanging_tenant(self, tenant: str) -> None:
        """Post tasks for targets that hang, or begin to hang, until the faults stop."""
        world, batch_size = self.environment.world, self.rng.choice([15, 25])
        max_tasks = MAX_STEADY_HANGING_TASKS if tenant == STEADY_TENANT else MAX_HANGING_TASKS
        for _ in range(max_tasks // batch_size):
            hosts = self.rng.choices(world.hanging_hosts[tenant], k=batch_size)
            await self._post_tasks(tenant, [(host, self._next_name()) for host in hosts])
            await asyncio.sleep(self.rng.random() * 10)
            if self.environment.faults.are_stopped:
                return
            world.hang(tenant)

    async def _send(
        self, tenant: str, method: str, path: str, document: object = None
    ) -> tuple[int, Any]:
        """Send a request to a random process; return the status and the document of the response.

        The status is 0 if the process is not running or crashes during the request.
        """
        slot = self.rng.randrange(len(self.apis))
        api, process = self.apis[slot], self._running_process(slot)
        if api is None or process is None:
            return 0, None
        response: tuple[int, Any] | None = await process.run(
            send_request(api, tenant, method, path, document)
        )
        return response or (0, None)

    def _next_name(self, prefix: str = "t") -> str:
        return f"{prefix}{next(self.task_numbers)}"

    async def _post(self) -> None:
        """Post one task or a batch for a target that changes its state."""
        rng = self.rng
        host = rng.choice(self.environment.world.changing_hosts)
        tasks = [
            (host.name, self._next_name("poison" if rng.random() < host.poison_share else "t"))
            for _ in range(rng.choice([1, 1, 5, 10]))
        ]
        options: dict[str, Any] = {
            "delayMs": rng.choice([0, 0, 500, 5000]),
            "laneKey": rng.choice([None, None, None, "customer-1", "customer-2"]),
        }
        if len(tasks) == 1 and rng.random() < 0.1:
            options["callbackUrl"] = f"http://b.example/callback-{tasks[0][1]}"
        await self._post_tasks(DEFAULT_TENANT, tasks, **options)

    async def _post_tasks(
        self, tenant: str, hosts_and_names: list[tuple[str, str]], **options: Any
    ) -> None:
        """Post one task or a batch, and repeat the request until all tasks are accepted."""
        rng = self.rng
        names = [name for _, name in hosts_and_names]
        max_attempts = rng.randint(1, 6)
        policy = {
            "maxAttempts": max_attempts,
            "initialDelayMs": rng.choice([10, 500, 3000]),
            "maxDelayMs": 10_000,
            "attemptTimeoutMs": ATTEMPT_TIMEOUT_MS,
            **({"totalBudgetMs": 30_000} if rng.random() < 0.2 else {}),
        }
        tasks = [
            {
                "targetUrl": f"http://{host}/{name}",
                "idempotencyKey": f"key-{name}",
                "policy": policy,
                **options,
            }
            for host, name in hosts_and_names
        ]
        if len(names) == 1:
            path, document = "/retry-tasks", tasks[0]
        else:
            path, document = "/retry-tasks/batch", {"tasks": tasks}
        while True:
            status, body = await self._send(tenant, "POST", path, document)
            worst_status = status
            if status in {200, 201}:
                single = {"status": status, "task": body}
                results = body["results"] if len(names) > 1 else [single]
                for name, result in zip(names, results, strict=True):
                    if result["status"] in {200, 201}:
                        task = result["task"]
                        self.environment.invariants.record_accepted(
                            name,
                            AcceptedTask(
                                tenant, task["taskId"], task["idempotencyKey"], max_attempts
                            ),
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
        tenant, task_id, *_ = self.rng.choice(accepted_tasks)
        if action == "retry":
            self.environment.invariants.retried_now.add(task_id)
            await self._send(tenant, "POST", f"/retry-tasks/{task_id}/retry")
        else:
            await self._send(tenant, "DELETE", f"/retry-tasks/{task_id}")

    async def _replay(self) -> None:
        tenant = self.rng.choice(self.environment.world.tenants)
        await self._send(tenant, "POST", "/dead-letters/replays", {"all": True})

    def _running_process(self, slot: int) -> SimulatedProcess | None:
        harness = self.harnesses[slot]
        for process in self.environment.processes:
            if (
                harness is not None
                and process.is_alive
                and process.name == harness.context.lease_terms.worker
            ):
                return process
        return None


def simulate(seed: int, stores: SimulatedStores | None = None) -> Simulation:
    """Run one seed, by default on the in-memory reference store. Raises `InvariantViolation`."""
    simulations: list[Simulation] = []

    async def main() -> None:
        simulations.append(Simulation(seed, stores or ReferenceStores()))
        await simulations[0].run()

    logger = logging.getLogger("tarry.service")
    level = logger.level
    logger.setLevel(logging.CRITICAL)

    def start_lookup(host: str, on_answer: Callable[[str, Any], None]) -> None:
        simulations[0].environment.world.start_lookup(host, on_answer)

    run_handle = asyncio.Handle._run

    def run(handle: asyncio.Handle) -> None:
        run_unless_suspended(handle, run_handle)

    try:
        with (
            patch.object(asyncio.Handle, "_run", run),
            patch.object(dns, "start_lookup_thread", start_lookup),
            patch.object(dns, "_MAX_LOOKUPS", MAX_DNS_LOOKUPS),
            patch.object(dns, "_TTL_S", DNS_TTL_S),
            patch.object(dns, "_MAX_STALE_S", 0.0),  # expired addresses would hide slow lookups
            VirtualClock(start=1000.0) as clock,
        ):
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
    parser.add_argument("--store", choices=ENGINES, default="reference")
    options = parser.parse_args()
    seeds = (
        [options.seed]
        if options.seed is not None
        else range(options.first, options.first + options.seeds)
    )
    with run_engine(options.store) as open_stores:
        for seed in seeds:
            try:
                with open_stores() as stores:
                    run = simulate(seed, stores)
            except BaseException:
                command = f"python -m tests.chaos.simulation --store {options.store} {seed}"
                sys.stderr.write(f"seed {seed} failed; repeat it with: {command}\n")
                raise
            if seed and not seed % 1000:
                sys.stdout.write(f"seed {seed} is done\n")
                sys.stdout.flush()
            if options.seed is not None:
                sys.stdout.write("\n".join(run.environment.invariants.history) + "\n")
    sys.stdout.write(f"{len(seeds)} runs on {options.store}, all invariants hold\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
