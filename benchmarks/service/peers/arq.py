"""arq (Redis): asyncio workers, `Retry(defer=...)`, no stored results."""

from __future__ import annotations

import asyncio
import logging

import uvloop
from arq import Retry, Worker
from arq.connections import RedisSettings, create_pool

from benchmarks.service.peers import common

REDIS_SETTINGS = RedisSettings.from_dsn(common.REDIS_URL)
CONCURRENCY = 100


async def startup(ctx):
    ctx["session"] = common.aiohttp_session()


async def deliver(ctx, task_id, body):
    if not await common.post(ctx["session"], task_id, body):
        raise Retry(defer=common.retry_delay(ctx["job_try"]))


def work():
    logging.disable(logging.CRITICAL)
    asyncio.set_event_loop(uvloop.new_event_loop())
    Worker(
        [deliver],
        redis_settings=REDIS_SETTINGS,
        on_startup=startup,
        max_jobs=CONCURRENCY,
        queue_read_limit=5 * CONCURRENCY,
        poll_delay=0.02,
        max_tries=10,
        keep_result=0,
        handle_signals=False,
    ).run()


async def connect_enqueuer():
    pool = await create_pool(REDIS_SETTINGS)

    async def enqueue(ids):
        await common.enqueue_concurrently(
            ids, lambda task_id: pool.enqueue_job("deliver", task_id, common.BODY)
        )

    return enqueue


if __name__ == "__main__":
    work() if common.role() == "work" else common.run_async_enqueuer(connect_enqueuer)
