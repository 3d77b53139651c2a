"""The upper limit: a client loop in one process, with retries in memory and without a store."""

from __future__ import annotations

import asyncio

from benchmarks.service.client import Connections
from benchmarks.service.peers import common

CONNECTIONS = 64


async def connect():
    connections = await Connections.open(common.TARGET_URL, CONNECTIONS, common.HEADERS)
    body = common.BODY.encode()

    async def enqueue(ids):
        loop = asyncio.get_running_loop()
        due_attempts = asyncio.Queue()
        unfinished = len(ids)

        async def work(connection):
            nonlocal unfinished
            while True:
                task, attempt = await due_attempts.get()
                if task is None:
                    return
                if await connection.post(f"/t/{task}", body) != 200:
                    retry = task, attempt + 1
                    loop.call_later(common.retry_delay(attempt), due_attempts.put_nowait, retry)
                    continue
                unfinished -= 1
                if not unfinished:
                    for _ in connections.all:
                        due_attempts.put_nowait((None, 0))

        for task in ids:
            due_attempts.put_nowait((task, 1))
        await asyncio.gather(*(work(connection) for connection in connections.all))

    return enqueue


if __name__ == "__main__":
    common.run_async_enqueuer(connect)
