"""Lag of a tenant with a healthy target, alone and while the targets of another tenant fail.

The first tenant has tasks that fall due at a steady rate, for a target that responds at once. When
the service starts, the other tenant has overdue tasks for

* hanging: many hosts that accept connections and never respond;
* dead: one host that refuses connections;
* poison: one host that responds with 503 to all requests.

The lag of an attempt is its start minus its `nextAttemptAt`, both from the attempt log, and the
median over windows of five seconds is compared with the limits, as in `backlog`.

Then the first tenant sends 50 single tasks per second. The time of each POST is measured, alone and
while the other tenant has

* batches: one client that sends batches of 1,000 tasks for a dead host without a pause;
* time-outs: 900 attempts that start together and time out in the same second, again and again.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import uvloop
from uuid_utils import uuid7

from benchmarks.service import backlog, ingest, tarry_server
from benchmarks.service.client import Connections
from benchmarks.service.limits import LimitCheck, quantile
from benchmarks.service.processes import BenchmarkError, ProcessGroup, free_port
from benchmarks.service.target import Target, running_target
from tarry.service.api.auth import make_api_key
from tarry.service.app import make_store
from tarry.service.records.api_keys import put_api_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.service.model import Task

ATTEMPTS_PER_SECOND = 200
OTHER_TENANT = "other"
HANGING_HOSTS, TASKS_PER_HANGING_HOST = 1_000, 4
DEAD_TASKS = 200_000
POISON_TASKS = 10_000
MAX_P99_MS = 50.0
MAX_RATIO = 1.5
MIN_COMPARED_MS = 5.0
"""If the lag alone is shorter, the ratio is relative to this value: a ratio of shorter lags would
show the scheduler of the operating system."""
BATCH_TASKS = 1_000
TIMED_OUT_ATTEMPTS, ATTEMPT_TIMEOUT_MS = 900, 3_000
_ROUND_S = ATTEMPT_TIMEOUT_MS / 1000 + 1
_encode = msgspec.json.Encoder().encode
_WINDOW_ATTEMPTS = 5 * ATTEMPTS_PER_SECOND
_HOSTS_PER_NETWORK = 250


@dataclass(frozen=True, slots=True)
class NeighboursResult:
    """Results of a run."""

    neighbour: str
    """How the targets of the other tenant fail, or "alone"."""
    lags_ms: list[float]
    """Lags of the tenant with the healthy target."""
    steal_share: float
    """Share of processor time that the host gave to other machines meanwhile."""

    @property
    def p99_ms(self) -> float:
        return median(backlog.quantiles_by_window(self.lags_ms, _WINDOW_ATTEMPTS, 0.99))


@dataclass(frozen=True, slots=True)
class PostsResult:
    """Results of a run in which the first tenant sends single tasks."""

    neighbour: str
    """What the other tenant does, or "alone"."""
    times_ms: list[float]
    """The time of each POST of the first tenant."""


def run_posts(seconds: float, progress: backlog.Progress) -> list[PostsResult]:
    """Send single tasks of the first tenant, alone and next to each kind of work of the other."""
    return [_run_posts(name, seconds, progress) for name in ("alone", "batches", "time-outs")]


def _run_posts(neighbour: str, seconds: float, progress: backlog.Progress) -> PostsResult:
    with backlog.temporary_folder() as folder, running_target(folder) as target:
        port = free_port()
        variables = tarry_server.environ(folder, port) | {"TARRY_REQUIRE_KEYS": "true"}
        keys = asyncio.run(_create_keys(tarry_server.store_url(folder)))
        with ProcessGroup(variables, folder) as group, _silent_port() as silent_port:
            tarry_server.start(group, port)
            progress(f"neighbours, POSTs, {neighbour}: for {seconds:g} s")
            address = tarry_server.address(port)
            urls = {"batches": f"http://127.0.0.1:{free_port()}/"}
            url = urls.get(neighbour, f"http://127.0.0.1:{silent_port}/")
            measure = _measure_posts(neighbour, address, keys, target, url, seconds)
            return PostsResult(neighbour, uvloop.run(measure))


async def _create_keys(url: str) -> list[str]:
    """Create an API key of each tenant; return the keys."""
    store = make_store(url)
    await store.open()
    keys: list[str] = []
    for tenant in (backlog.TENANT, OTHER_TENANT):
        key, record = make_api_key(tenant, str(uuid7()))
        await put_api_key(store, record)
        keys.append(key)
    await store.close()
    return keys


async def _measure_posts(
    neighbour: str, address: str, keys: list[str], target: Target, url: str, seconds: float
) -> list[float]:
    own_headers, other_headers = (
        {"Content-Type": "application/json", "X-API-Key": key} for key in keys
    )
    connections = await Connections.open(address, ingest.SINGLE_TASKS_CONNECTIONS, own_headers)
    minimal = {**other_headers, "Prefer": "return=minimal"}
    other_connections = await Connections.open(address, 1, minimal)

    async def post_batches() -> None:
        for number in itertools.count():
            if neighbour == "time-outs":
                # Each task has a lane of its own, so that no breaker opens.
                policy = {"attemptTimeoutMs": ATTEMPT_TIMEOUT_MS, "maxAttempts": 1}
                tasks = [
                    {"targetUrl": url, "laneKey": f"{number}-{i}", "policy": policy}
                    for i in range(TIMED_OUT_ATTEMPTS)
                ]
            else:
                tasks = [{"targetUrl": url}] * BATCH_TASKS
            status = await other_connections.post("/retry-tasks/batch", _encode({"tasks": tasks}))
            if status != 200:
                raise BenchmarkError(f"the response to a batch has status {status}")
            if neighbour == "time-outs":
                await asyncio.sleep(_ROUND_S)

    rate = ingest.SINGLE_TASKS_PER_SECOND
    await ingest.post_tasks(connections, target.url, ingest.WARM_UP_S, rate)
    client = None if neighbour == "alone" else asyncio.create_task(post_batches())
    times = await ingest.post_tasks(connections, target.url, seconds, rate)
    if client is not None:
        if client.done():
            client.result()  # raises the error of the client
        client.cancel()
    connections.close()
    other_connections.close()
    return times


def run_all(seconds: float, progress: backlog.Progress, *, quick: bool) -> list[NeighboursResult]:
    """Run the first tenant alone, and with each kind of failing targets of the other tenant."""
    divisor = 10 if quick else 1
    counts = {
        "alone": 0,
        "hanging": HANGING_HOSTS * TASKS_PER_HANGING_HOST // divisor,
        "dead": DEAD_TASKS // divisor,
        "poison": POISON_TASKS // divisor,
    }
    return [_run(neighbour, count, seconds, progress) for neighbour, count in counts.items()]


def _run(
    neighbour: str, other_count: int, seconds: float, progress: backlog.Progress
) -> NeighboursResult:
    with (
        backlog.temporary_folder() as folder,
        running_target(folder) as target,
        _silent_port() as silent_port,
    ):
        url = tarry_server.store_url(folder)
        if other_count:
            tasks = _other_tasks(neighbour, other_count, target, silent_port)
            asyncio.run(backlog.fill_store(url, tasks, other_count, progress))
        count = int(ATTEMPTS_PER_SECOND * seconds)
        stream = backlog.add_stream(url, target, count, ATTEMPTS_PER_SECOND, progress)
        progress(f"neighbours, {neighbour}: {count:,} attempts at {ATTEMPTS_PER_SECOND}/s")
        service = backlog.serve_stream(folder, url, target, stream)
        lags = asyncio.run(backlog.read_lags(url, stream))
        return NeighboursResult(neighbour, lags, service.steal_share)


def _other_tasks(neighbour: str, count: int, target: Target, silent_port: int) -> Iterator[Task]:
    """Yield overdue tasks of the other tenant."""
    now = int(time.time() * 1000)
    dead_port = free_port()
    for i in range(count):
        if neighbour == "hanging":
            host = i // TASKS_PER_HANGING_HOST
            name = f"127.1.{host // _HOSTS_PER_NETWORK}.{host % _HOSTS_PER_NETWORK + 1}"
            url = f"http://{name}:{silent_port}/"
        elif neighbour == "dead":
            url = f"http://127.0.0.1:{dead_port}/"
        else:
            url = f"{target.url}/busy"
        yield backlog.build_task(url, now, OTHER_TENANT)


@contextmanager
def _silent_port() -> Iterator[int]:
    """Listen on a port of all loopback addresses, but never accept a connection.

    The kernel establishes the connections of clients, which then wait for a response. Once its
    queue of connections is full, clients wait for the connection itself.
    """
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))  # noqa: S104 - all addresses of 127.0.0.0/8
        listener.listen(4096)
        yield listener.getsockname()[1]


def table_lines(results: list[NeighboursResult]) -> Iterator[str]:
    """Yield the lines of the table."""
    attempts = len(results[0].lags_ms)
    yield f"\nneighbours, lag of {attempts:,} attempts at {ATTEMPTS_PER_SECOND}/s (ms)"
    for result in results:
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        cells = "".join(
            f"{head:>7} {quantile(result.lags_ms, share):.2f}" for head, share in shares.items()
        )
        yield f"{result.neighbour:16}{cells}   p99 of windows {result.p99_ms:g}"
    steal_share = max(result.steal_share for result in results)
    yield f"the host gave up to {steal_share:.1%} of processor time to other machines"


def posts_lines(results: list[PostsResult]) -> Iterator[str]:
    """Yield the lines of the table of POSTs."""
    rate = ingest.SINGLE_TASKS_PER_SECOND
    yield f"\nneighbours, {len(results[0].times_ms):,} POSTs at {rate}/s (ms)"
    for result in results:
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        cells = "".join(
            f"{head:>7} {quantile(result.times_ms, share):.2f}" for head, share in shares.items()
        )
        yield f"{result.neighbour:16}{cells}"


def check_posts(results: list[PostsResult]) -> list[LimitCheck]:
    """Return the checks of the p99 of a POST next to the work of another tenant."""
    return [
        LimitCheck(
            f"POST p99 ms, {result.neighbour}",
            quantile(result.times_ms, 0.99),
            maximum=MAX_P99_MS,
        )
        for result in results
        if result.neighbour != "alone"
    ]


def check_limits(results: list[NeighboursResult]) -> list[LimitCheck]:
    """Return the checks of the lag in each run with another tenant, and of its ratio to alone."""
    alone, *others = results
    base_ms = max(alone.p99_ms, MIN_COMPARED_MS)
    checks = []
    for result in others:
        name, p99_ms = result.neighbour, result.p99_ms
        checks += [
            LimitCheck(f"lag p99 ms, {name}", p99_ms, maximum=MAX_P99_MS),
            LimitCheck(f"x lag p99, {name}", p99_ms / base_ms, maximum=MAX_RATIO),
        ]
    return checks
