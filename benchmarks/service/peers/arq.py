"""arq (Redis): `Retry(defer=...)`, no results kept."""

from __future__ import annotations

import asyncio
import logging

import uvloop
from arq import Retry, Worker
from arq.connections import RedisSettings, create_pool

from benchmarks.service.peers import common

SERVER = RedisSettings.from_dsn(common.REDIS)
CONCURRENCY = 100


async def startup(ctx):
    ctx["pool"] = common.client_session()


async def deliver(ctx, task, body):
    if not await common.post(ctx["pool"], task, body):
        raise Retry(defer=common.delay(ctx["job_try"]))


def work():
    logging.disable(logging.CRITICAL)
    asyncio.set_event_loop(uvloop.new_event_loop())
    Worker(
        [deliver],
        redis_settings=SERVER,
        on_startup=startup,
        max_jobs=CONCURRENCY,
        queue_read_limit=5 * CONCURRENCY,
        poll_delay=0.02,
        max_tries=10,
        keep_result=0,
        handle_signals=False,
    ).run()


async def connect():
    pool = await create_pool(SERVER)

    async def enqueue(ids):
        await common.one_by_one(ids, lambda task: pool.enqueue_job("deliver", task, common.BODY))

    return enqueue


if __name__ == "__main__":
    work() if common.role() == "work" else common.serve_async(connect)
