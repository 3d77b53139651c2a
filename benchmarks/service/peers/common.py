"""Shared by all peers: the job, the addresses of the servers, and the protocol of the enqueuer.

The delay has full jitter and a base of 100 ms, if a peer lets its user choose the delay.
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
TARGET = os.environ.get("BENCH_TARGET", "")
REDIS = os.environ.get("BENCH_REDIS", "redis://127.0.0.1")
POSTGRES = os.environ.get("BENCH_POSTGRES", "")
FOLDER = os.environ.get("BENCH_FOLDER", "")
ENQUEUE_CONCURRENCY = 32
"""Number of enqueuing coroutines, for a peer that cannot enqueue many jobs with one call."""
BATCH = 500

Ids = range


def url(task: int) -> str:
    """Return the target URL of a task."""
    return f"{TARGET}/t/{task}"


def delay(retry: int) -> float:
    """Return the seconds to wait before a retry; retries are counted from 1."""
    return random.random() * min(10.0, 0.1 * 2 ** (retry - 1))


def batches(ids: Ids) -> list[Ids]:
    """Split the ids into batches."""
    return [ids[begin : begin + BATCH] for begin in range(0, len(ids), BATCH)]


async def one_by_one(ids: Ids, enqueue: Callable[[int], Awaitable[object]]) -> None:
    """Enqueue single jobs, several at a time."""
    rest = iter(ids)

    async def enqueue_next() -> None:
        for task in rest:
            await enqueue(task)

    await asyncio.gather(*(enqueue_next() for _ in range(ENQUEUE_CONCURRENCY)))


def session():
    """Return a pool of connections for blocking peers."""
    import requests
    from requests.adapters import HTTPAdapter

    pool = requests.Session()
    pool.trust_env = False
    pool.mount("http://", HTTPAdapter(pool_connections=4, pool_maxsize=256))
    return pool


def client_session():
    """Return a pool of connections for peers on asyncio."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def post(pool, task: int | str, body: str | bytes) -> bool:
    """Send the call of a task; return whether it succeeded."""
    async with pool.post(f"{TARGET}/t/{task}", data=body, headers=HEADERS) as response:
        await response.read()
        return response.status == 200


def run(main: Awaitable[None]) -> None:
    """Run a worker on uvloop, without logging."""
    import uvloop

    logging.disable(logging.CRITICAL)
    uvloop.run(main)


def serve(enqueue: Callable[[Ids], None]) -> None:
    """For each number read from standard input, enqueue so many tasks and print the time used."""
    print("ready", flush=True)
    for line in sys.stdin:
        cpu, began = time.process_time(), time.monotonic()
        enqueue(range(int(line)))
        spent = time.process_time() - cpu
        print(json.dumps({"began": began, "cpu": spent}), flush=True)


def serve_async(connect: Callable[[], Awaitable[Callable[[Ids], Awaitable[None]]]]) -> None:
    """Do the same as `serve` with coroutines; the time of `connect` is not measured."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        enqueue = runner.run(connect())
        serve(lambda ids: runner.run(enqueue(ids)))


def role() -> str:
    """Return the role of this process: the first argument, or an empty string."""
    return sys.argv[1] if len(sys.argv) > 1 else ""
