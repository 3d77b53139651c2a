"""tarry: five ways to add tasks to `tarry serve`; each task has an idempotency key.

With the roles `single` and `batch`, the fast client of the benchmark sends a POST for each task or
batch: this shows the limit of the server. The second argument is the number of processes of the
service; single tasks get a fixed number of connections for each process. `client` calls
`AsyncClient.enqueue` in 64 coroutines, `client-threads` calls `Client.enqueue` in 8 threads, and
`client-batch` calls `AsyncClient.enqueue_many`.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import msgspec

import tarry
from benchmarks.service.client import Connections
from benchmarks.service.peers import common
from benchmarks.service.tarry_server import address, wait_until_ready

SINGLE_CONNECTIONS, BATCH_CONNECTIONS = 128, 8
"""Connections for single tasks, for each process of the service, and for batches. The warm-up must
use all of them (8 batches of 500 tasks): the service closes unused ones after ten seconds."""
CLIENT_COROUTINES, CLIENT_THREADS = 64, 8
JSON_HEADERS = {"Content-Type": "application/json"}
MINIMAL_RESPONSE_HEADERS = {"Prefer": "return=minimal"}
# The policy quick starts with a delay of 100 ms, as the policies of the other peers do.
POLICY = "quick"

encode = msgspec.json.Encoder().encode
key_numbers = count()


def build_task(task_id):
    return {
        "targetUrl": common.task_url(task_id),
        "headers": common.HEADERS,
        "body": common.BODY,
        "policyId": POLICY,
        "idempotencyKey": build_key(task_id),
    }


def build_key(task_id):
    """Return a new key: the ids of the warm-up are used again."""
    return f"order-{task_id}-{next(key_numbers)}"


def build_arguments(task_id):
    return {
        "url": common.task_url(task_id),
        "headers": common.HEADERS,
        "body": common.BODY,
        "policy": POLICY,
        "key": build_key(task_id),
    }


async def connect_enqueuer():
    is_batch = common.role() == "batch"
    processes = int(sys.argv[2])
    connection_count = BATCH_CONNECTIONS if is_batch else SINGLE_CONNECTIONS * processes
    headers = JSON_HEADERS | MINIMAL_RESPONSE_HEADERS if is_batch else JSON_HEADERS
    connections = await Connections.open(address(), connection_count, headers)
    path = "/retry-tasks/batch" if is_batch else "/retry-tasks"

    async def enqueue(ids):
        if is_batch:
            bodies = (
                {"tasks": [build_task(task_id) for task_id in batch]}
                for batch in common.split_batches(ids)
            )
        else:
            bodies = (build_task(task_id) for task_id in ids)

        async def work(connection):
            for body in bodies:
                status = await connection.post(path, encode(body))
                if status not in {200, 201}:
                    raise RuntimeError(status)

        await asyncio.gather(*(work(connection) for connection in connections.all))

    return enqueue


async def open_async_client():
    client = tarry.AsyncClient(address())

    async def enqueue_one(task_id):
        await client.enqueue(**build_arguments(task_id))

    async def enqueue(ids):
        await common.enqueue_concurrently(ids, enqueue_one, CLIENT_COROUTINES)

    async def enqueue_many(ids):
        results = await client.enqueue_many(map(build_arguments, ids))
        if any(result.task is None for result in results):
            raise RuntimeError("a task was rejected")

    return enqueue_many if common.role() == "client-batch" else enqueue


def open_threads():
    client = tarry.Client(address())

    def enqueue(ids):
        with ThreadPoolExecutor(CLIENT_THREADS) as threads:
            futures = [
                threads.submit(enqueue_all, ids[n::CLIENT_THREADS]) for n in range(CLIENT_THREADS)
            ]
        for future in futures:
            future.result()

    def enqueue_all(ids):
        for task_id in ids:
            client.enqueue(**build_arguments(task_id))

    return enqueue


if __name__ == "__main__":
    wait_until_ready()
    if common.role() == "client-threads":
        common.run_enqueuer(open_threads())
    else:
        uses_client = common.role().startswith("client")
        common.run_async_enqueuer(open_async_client if uses_client else connect_enqueuer)
