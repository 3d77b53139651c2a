"""An upper bound for the throughput of a peer: a client loop with retries in memory, no store."""

from __future__ import annotations

import asyncio

from benchmarks.service.client import Connections
from benchmarks.service.peers import common

CONNECTIONS = 64


async def connect_enqueuer():
    connections = await Connections.open(common.TARGET_URL, CONNECTIONS, common.HEADERS)
    body = common.BODY.encode()

    # This peer has no queue: "enqueuing" the tasks delivers all of them, with their retries.
    async def deliver_all(ids):
        loop = asyncio.get_running_loop()
        due_attempts = asyncio.Queue()
        unfinished = len(ids)

        async def deliver_due(connection):
            nonlocal unfinished
            while True:
                task_id, attempt = await due_attempts.get()
                if task_id is None:
                    return
                if await connection.post(f"/t/{task_id}", body) != 200:
                    retry = task_id, attempt + 1
                    loop.call_later(common.retry_delay(attempt), due_attempts.put_nowait, retry)
                    continue
                unfinished -= 1
                if not unfinished:
                    for _ in connections.all:
                        due_attempts.put_nowait((None, 0))

        for task_id in ids:
            due_attempts.put_nowait((task_id, 1))
        await asyncio.gather(*(deliver_due(connection) for connection in connections.all))

    return deliver_all


if __name__ == "__main__":
    common.run_async_enqueuer(connect_enqueuer)
