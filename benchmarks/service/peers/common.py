"""Functions that all peers share: the request, retry delays, and the enqueuing process.

The retry delay has full jitter and a base of 100 ms, if it can be configured in a peer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BODY = '{"event": "order.created", "data": "%s"}'
BODY %= "x" * (1024 - len(BODY) + 2)
HEADERS = {
    "Content-Type": "application/json",
    "X-Signature": "t=1731600000,v1=" + 32 * "5a",
}
TARGET_URL = os.environ.get("BENCH_TARGET", "")
REDIS_URL = os.environ.get("BENCH_REDIS", "redis://127.0.0.1")
POSTGRES_URL = os.environ.get("BENCH_POSTGRES", "")
FOLDER = os.environ.get("BENCH_FOLDER", "")
ENQUEUE_CONCURRENCY = 32
"""Number of enqueuing coroutines, for a peer that cannot enqueue many jobs with one call."""
BATCH_SIZE = 500

TaskIds = range


def task_url(task_id: int) -> str:
    """Return the target URL of a task."""
    return f"{TARGET_URL}/t/{task_id}"


def retry_delay(retry: int) -> float:
    """Return the seconds to wait before a retry; retries are counted from 1."""
    return random.random() * min(10.0, 0.1 * 2 ** (retry - 1))


def split_batches(ids: TaskIds) -> list[TaskIds]:
    """Split the ids into batches."""
    return [ids[start : start + BATCH_SIZE] for start in range(0, len(ids), BATCH_SIZE)]


async def enqueue_concurrently(
    ids: TaskIds,
    enqueue: Callable[[int], Awaitable[object]],
    concurrency: int = ENQUEUE_CONCURRENCY,
) -> None:
    """Enqueue single jobs, several at a time."""
    remaining = iter(ids)

    async def enqueue_next() -> None:
        for task_id in remaining:
            await enqueue(task_id)

    await asyncio.gather(*(enqueue_next() for _ in range(concurrency)))


def requests_session():
    """Return an HTTP session for blocking peers."""
    import requests
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    session.trust_env = False
    session.mount("http://", HTTPAdapter(pool_connections=4, pool_maxsize=256))
    return session


def aiohttp_session():
    """Return an HTTP session for peers on asyncio."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def post(session, task_id: int | str, body: str | bytes) -> bool:
    """Send the request of a task; return whether it succeeded."""
    async with session.post(f"{TARGET_URL}/t/{task_id}", data=body, headers=HEADERS) as response:
        await response.read()
        return response.status == 200


def run_worker(main: Awaitable[None]) -> None:
    """Run a worker on uvloop, without logging."""
    import uvloop

    logging.disable(logging.CRITICAL)
    uvloop.run(main)


def run_enqueuer(enqueue: Callable[[TaskIds], None]) -> None:
    """For each number read from standard input, enqueue this many tasks and print the time used."""
    print("ready", flush=True)
    for line in sys.stdin:
        cpu_before, started = time.process_time(), time.monotonic()
        enqueue(range(int(line)))
        cpu = time.process_time() - cpu_before
        print(json.dumps({"started": started, "cpu": cpu}), flush=True)


def run_async_enqueuer(
    connect_enqueuer: Callable[[], Awaitable[Callable[[TaskIds], Awaitable[None]]]],
) -> None:
    """Run the enqueuer that `connect_enqueuer` returns; the time to connect is not measured."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        enqueue = runner.run(connect_enqueuer())
        run_enqueuer(lambda ids: runner.run(enqueue(ids)))


def role() -> str:
    """Return the role of this process: the first argument, or an empty string."""
    return sys.argv[1] if len(sys.argv) > 1 else ""
