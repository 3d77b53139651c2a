"""pgqueuer (PostgreSQL, asyncpg): batches of jobs, `RetryRequested(delay=...)`."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.errors import RetryRequested
from pgqueuer.queries import Queries

from benchmarks.service.peers import common

DEQUEUE_BATCH_SIZE = 25


async def work():
    queue = PgQueuer(
        AsyncpgPoolDriver(await asyncpg.create_pool(common.POSTGRES_URL, min_size=4, max_size=8))
    )
    session = common.aiohttp_session()

    @queue.entrypoint("deliver")
    async def deliver(job):
        task_id, _, body = job.payload.partition(b"|")
        if not await common.post(session, task_id.decode(), body):
            raise RetryRequested(delay=timedelta(seconds=common.retry_delay(1)))

    await queue.run(batch_size=DEQUEUE_BATCH_SIZE, dequeue_timeout=timedelta(seconds=0.1))


async def set_up():
    connection = await asyncpg.connect(common.POSTGRES_URL)
    await Queries(AsyncpgDriver(connection)).install()
    await connection.close()


async def connect_enqueuer():
    queries = Queries(AsyncpgDriver(await asyncpg.connect(common.POSTGRES_URL)))

    async def enqueue(ids):
        for batch in common.split_batches(ids):
            bodies = [f"{task_id}|{common.BODY}".encode() for task_id in batch]
            await queries.enqueue(["deliver"] * len(batch), bodies, [0] * len(batch))

    return enqueue


if __name__ == "__main__":
    if common.role() == "work":
        common.run_worker(work())
    elif common.role() == "set-up":
        asyncio.run(set_up())
    else:
        common.run_async_enqueuer(connect_enqueuer)
