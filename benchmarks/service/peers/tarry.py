"""tarry: a client of `tarry serve`, with one POST per task or one POST per batch."""

from __future__ import annotations

import asyncio

import msgspec

from benchmarks.service.client import Connections
from benchmarks.service.peers import common
from benchmarks.service.tarry_server import address, wait_until_ready

SINGLE_CONNECTIONS, BATCH_CONNECTIONS = 128, 4
JSON_HEADERS = {"Content-Type": "application/json"}
MINIMAL_RESPONSE_HEADERS = {"Prefer": "return=minimal"}

encode = msgspec.json.Encoder().encode


def build_task(task_id):
    url = common.task_url(task_id)
    # The policy quick starts with a delay of 100 ms, as the policies of the other peers do.
    return {"targetUrl": url, "headers": common.HEADERS, "body": common.BODY, "policyId": "quick"}


async def connect_enqueuer():
    is_batch = common.role() == "batch"
    wait_until_ready()
    count = BATCH_CONNECTIONS if is_batch else SINGLE_CONNECTIONS
    headers = JSON_HEADERS | MINIMAL_RESPONSE_HEADERS if is_batch else JSON_HEADERS
    connections = await Connections.open(address(), count, headers)
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


if __name__ == "__main__":
    common.run_async_enqueuer(connect_enqueuer)
