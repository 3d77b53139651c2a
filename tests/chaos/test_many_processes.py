"""Processes of the service and servers of each engine are killed, suspended and disconnected."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.chaos.load import (
    fail_first_deliveries,
    fail_half_of_deliveries,
    fail_some_first_deliveries,
    load,
)
from tests.chaos.processes import SHORT_LEASES, ServiceProcesses, service_processes
from tests.chaos.stores import (
    ChaosStore,
    SingleServer,
    StoreFactory,
    cluster,
    postgres,
    redis,
    sqlite_file,
)
from tests.chaos.tcp_proxy import Disturbance
from tests.chaos.test_store_faults import child_pids
from tests.integration.service import Service, target

_logger = logging.getLogger(__name__)
ROUNDS = int(os.environ.get("ROUNDS", "0"))
"""Number of rounds for each engine; 0: one short round, as in `make test-all`."""
FIRST_SEED = int(os.environ.get("SEED") or (random.randrange(10**6) if ROUNDS else 7))
"""Determines the faults of the first round, their order and times. Round n has the seed
`FIRST_SEED + n`: with `SEED` set to the seed of a round, its faults are repeated."""
API_COUNT = 2 if ROUNDS else 1
OUTAGE_S = 30.0 if ROUNDS else 3.0
RUNNING_COUNT, DELAYED_COUNT = 8, 20  # a new lane starts 8 attempts at a time
MAX_BUSY_SHARE = 0.2
"""Processor time as a share of the outage. Without a pause between retries, it is near 1."""
MAX_LOG_LINES = 30
ENGINES = [sqlite_file, postgres, redis, cluster]

Fault: TypeAlias = Callable[[ServiceProcesses, random.Random], None]


def kill_worker(processes: ServiceProcesses, rng: random.Random) -> None:
    """Kill a worker and start it again, or kill one process of a supervisor."""
    worker = rng.choice(processes.workers)
    if rng.random() < 0.5 or not processes.kill_supervised(worker):
        processes.restart_by_kill(worker)


def scale_worker(processes: ServiceProcesses, rng: random.Random) -> None:
    """Stop a worker gracefully, and start it with one or two processes."""
    processes.scale(rng.choice(processes.workers), rng.choice((1, 2)))


def kill_api(processes: ServiceProcesses, rng: random.Random) -> None:
    """Kill a process that accepts tasks, and start it again."""
    processes.restart_by_kill(rng.choice(processes.apis))


def crash_store(processes: ServiceProcesses, _rng: random.Random) -> None:
    """Kill the server of the store and start it again, or let a replica take over."""
    processes.store.crash()


def disturb_connections(processes: ServiceProcesses, rng: random.Random) -> None:
    """Disturb the connections of a worker in each way, in random order."""
    if not processes.store.socket_paths:
        return
    disturbances = list(Disturbance)
    rng.shuffle(disturbances)
    for disturbance in disturbances:
        processes.disturb(disturbance)
        time.sleep(rng.random())
        processes.disturb(Disturbance.NONE)


def suspend_worker(processes: ServiceProcesses, rng: random.Random) -> None:
    """Suspend a worker beyond its leases, while other faults happen."""
    suspended, other = rng.sample(processes.workers, 2)
    with processes.suspended(suspended):
        processes.restart_by_kill(other)
        if suspended is not processes.workers[0]:
            disturb_connections(processes, rng)
        processes.store.crash()
        kill_api(processes, rng)


FAULTS: list[Fault] = [
    kill_worker,
    scale_worker,
    kill_api,
    crash_store,
    disturb_connections,
    suspend_worker,
]


@pytest.mark.timeout(180 + 120 * ROUNDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_accepted_task_is_lost_or_delivered_twice(engine: StoreFactory, tmp_path: Path) -> None:
    """The invariants hold, and each second delivery of a task is explained by a lost lease."""
    with (
        engine(tmp_path) as store,
        service_processes(tmp_path, store, *SHORT_LEASES, api_count=API_COUNT) as processes,
    ):
        for seed in range(FIRST_SEED, FIRST_SEED + max(1, ROUNDS)):
            rng = random.Random(seed)
            faults = rng.sample(FAULTS, len(FAULTS)) if ROUNDS else [suspend_worker]
            names = ", ".join(fault.__name__ for fault in faults)
            _logger.info("%s, SEED=%d: %s", engine.__name__, seed, names)
            with load(processes.apis, f"round-{seed}") as running:
                for fault in faults:
                    time.sleep(rng.random())
                    fault(processes, rng)
                running.stop()
                running.wait_until_finished(processes.apis[0])
                totals = running.check(processes.apis[0])
            _logger.info("%s, SEED=%d: %s", engine.__name__, seed, totals)
            assert totals.accepted > 10


KILLS: list[Fault] = [kill_worker, kill_api, crash_store]
FAILURE_RULES = (fail_some_first_deliveries, fail_first_deliveries, fail_half_of_deliveries)
BURST_SIZE = 311
MAX_DRAIN_S = 60.0
"""After the load, no task may wait longer: the longest backoff is half a second."""


@pytest.mark.timeout(180 + 60 * ROUNDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_task_waits_for_ever_behind_failures(engine: StoreFactory, tmp_path: Path) -> None:
    """After kills, all tasks are delivered, also to targets that fail many deliveries."""
    with (
        engine(tmp_path) as store,
        service_processes(tmp_path, store, *SHORT_LEASES, api_count=API_COUNT) as processes,
        ExitStack() as stack,
    ):
        loads = [
            stack.enter_context(load(processes.apis, rule.__name__, rule, thread_count=1))
            for rule in FAILURE_RULES
        ]
        with ThreadPoolExecutor() as executor:
            executor.map(lambda running: running.create_burst(BURST_SIZE), loads)
        for seed in range(FIRST_SEED, FIRST_SEED + max(1, ROUNDS)):
            rng = random.Random(seed)
            fault = rng.choice(KILLS)
            _logger.info("%s, SEED=%d: %s", engine.__name__, seed, fault.__name__)
            time.sleep(rng.random())
            fault(processes, rng)
        for running in loads:
            running.stop()
        api, deadline = processes.apis[0], time.monotonic() + MAX_DRAIN_S
        for running in loads:
            while (waiting := running.unfinished_tasks(api)) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not waiting, f"{len(waiting)} tasks wait, for example {waiting[0]}"
            _logger.info("%s: %s", engine.__name__, running.check(api))


def _processor_time_s(process: Service) -> float:
    """Return the processor time of a process and its child processes, on Linux."""
    pids = [process.process.pid, *child_pids(process.process.pid)]
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def _log_lines(process: Service) -> int:
    return (process.folder / "log").read_text().count("\n")


OUTAGES = [
    *((engine, ChaosStore.stopped) for engine in (ENGINES if ROUNDS else [postgres, redis])),
    *((engine, SingleServer.hanging) for engine in ([postgres, redis] if ROUNDS else [])),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("engine", "outage"), OUTAGES)
def test_processes_wait_for_an_unavailable_store(
    engine: StoreFactory,
    outage: Callable[[ChaosStore], AbstractContextManager[None]],
    tmp_path: Path,
) -> None:
    """No process needs a restart or is busy meanwhile, and each task needs one attempt."""
    can_respond = threading.Event()

    def respond_late(_path: str, _number: int) -> int:
        can_respond.wait(60)
        return 200

    with (
        engine(tmp_path) as store,
        target(respond_late) as receiver,
        service_processes(tmp_path, store, api_count=API_COUNT) as processes,
    ):
        api = processes.apis[0]
        urls = [f"{receiver.url}/{n}" for n in range(RUNNING_COUNT + DELAYED_COUNT)]
        task_ids = [
            api.post(targetUrl=url, delayMs=0 if n < RUNNING_COUNT else 2000)["taskId"]
            for n, url in enumerate(urls)
        ]
        api.wait_for(lambda: len(receiver.received_requests) >= RUNNING_COUNT)
        with outage(store):
            can_respond.set()  # attempts end, but their results cannot be written
            before = [(_processor_time_s(each), _log_lines(each)) for each in processes.all]
            time.sleep(OUTAGE_S)
            after = [(_processor_time_s(each), _log_lines(each)) for each in processes.all]
            status, _ = api.request("POST", "/retry-tasks", {"targetUrl": receiver.url})

        finished = [api.wait_until_finished(task_id) for task_id in task_ids]

        used = [
            (end[0] - start[0], end[1] - start[1]) for start, end in zip(before, after, strict=True)
        ]
        _logger.info("%s: processor time and log lines in the outage: %s", engine.__name__, used)
        assert 503 == status
        assert {("SUCCEEDED", 1)} == {(task["status"], task["attemptNumber"]) for task in finished}
        assert {1} == {len(requests) for requests in receiver.received_requests.values()}
        for processor_time_s, log_lines in used:
            assert processor_time_s < MAX_BUSY_SHARE * OUTAGE_S
            assert log_lines < MAX_LOG_LINES
