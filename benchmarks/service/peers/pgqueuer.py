"""pgqueuer (PostgreSQL, asyncpg): batches in and out, `RetryRequested(delay=...)`."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.errors import RetryRequested
from pgqueuer.queries import Queries

from benchmarks.service.peers import common

DEQUEUED = 25


async def work():
    queue = PgQueuer(
        AsyncpgPoolDriver(await asyncpg.create_pool(common.POSTGRES, min_size=4, max_size=8))
    )
    pool = common.client_session()

    @queue.entrypoint("deliver")
    async def deliver(job):
        task, _, body = job.payload.partition(b"|")
        if not await common.post(pool, task.decode(), body):
            raise RetryRequested(delay=timedelta(seconds=common.delay(1)))

    await queue.run(batch_size=DEQUEUED, dequeue_timeout=timedelta(seconds=0.1))


async def set_up():
    connection = await asyncpg.connect(common.POSTGRES)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


async def connect():
    queries = Queries(AsyncpgDriver(await asyncpg.connect(common.POSTGRES)))

    async def enqueue(ids):
        for some in common.batches(ids):
            bodies = [f"{task}|{common.BODY}".encode() for task in some]
            await queries.enqueue(["deliver"] * len(some), bodies, [0] * len(some))

    return enqueue


if __name__ == "__main__":
    if common.role() == "work":
        common.run(work())
    elif common.role() == "set-up":
        asyncio.run(set_up())
    else:
        common.serve_async(connect)
