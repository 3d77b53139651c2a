"""tarry: a client of `tarry serve`, with one POST per task or one POST per batch."""

from __future__ import annotations

import asyncio

import msgspec

from benchmarks.service.client import Connections
from benchmarks.service.peers import common
from benchmarks.service.served import address, await_ready

SINGLE_CONNECTIONS, BATCH_CONNECTIONS = 128, 4
JSON = {"Content-Type": "application/json"}
MINIMAL_RESPONSE = {"Prefer": "return=minimal"}

encode = msgspec.json.Encoder().encode


def task_of(task):
    return {"targetUrl": common.url(task), "headers": common.HEADERS, "body": common.BODY}


async def connect():
    is_batch = common.role() == "batch"
    await_ready()
    count = BATCH_CONNECTIONS if is_batch else SINGLE_CONNECTIONS
    headers = JSON | MINIMAL_RESPONSE if is_batch else JSON
    connections = await Connections.open(address(), count, headers)
    path = "/retry-tasks/batch" if is_batch else "/retry-tasks"

    async def enqueue(ids):
        if is_batch:
            bodies = ({"tasks": [task_of(task) for task in batch]} for batch in common.batches(ids))
        else:
            bodies = (task_of(task) for task in ids)

        async def work(connection):
            for body in bodies:
                status = await connection.post(path, encode(body))
                if status not in {200, 201}:
                    raise RuntimeError(status)

        await asyncio.gather(*(work(connection) for connection in connections.all))

    return enqueue


if __name__ == "__main__":
    common.serve_async(connect)
