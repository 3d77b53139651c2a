"""The limit: a bare client loop in one process, without a store, which retries from memory."""

from __future__ import annotations

import asyncio

from benchmarks.service.client import Connections
from benchmarks.service.peers import common

CONNECTIONS = 64


async def connect():
    connections = await Connections.open(common.TARGET, CONNECTIONS, common.HEADERS)
    body = common.BODY.encode()

    async def enqueue(ids):
        loop = asyncio.get_running_loop()
        due = asyncio.Queue()
        unfinished = len(ids)

        async def work(connection):
            nonlocal unfinished
            while True:
                task, attempt = await due.get()
                if task is None:
                    return
                if await connection.post(f"/t/{task}", body) != 200:
                    retry = task, attempt + 1
                    loop.call_later(common.delay(attempt), due.put_nowait, retry)
                    continue
                unfinished -= 1
                if not unfinished:
                    for _ in connections.all:
                        due.put_nowait((None, 0))

        for task in ids:
            due.put_nowait((task, 1))
        await asyncio.gather(*(work(connection) for connection in connections.all))

    return enqueue


if __name__ == "__main__":
    common.serve_async(connect)
