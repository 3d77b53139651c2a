"""SAQ (Redis): asyncio workers, which poll for retries every second, the shortest interval."""

from __future__ import annotations

from saq import Queue, Worker

from benchmarks.service.peers import common

CONCURRENCY = 25


async def startup(ctx):
    ctx["pool"] = common.aiohttp_session()


async def deliver(ctx, *, task, body):
    if not await common.post(ctx["pool"], task, body):
        raise RuntimeError


async def work():
    queue = Queue.from_url(common.REDIS_URL)
    await queue.connect()
    timers = {"schedule": 1, "sweep": 60}
    await Worker(queue, [deliver], startup=startup, concurrency=CONCURRENCY, timers=timers).start()


async def connect():
    queue = Queue.from_url(common.REDIS_URL)
    await queue.connect()
    options = {"retries": 10, "retry_delay": 0.1, "retry_backoff": True, "ttl": -1}

    async def enqueue(ids):
        await common.enqueue_concurrently(
            ids, lambda task: queue.enqueue("deliver", task=task, body=common.BODY, **options)
        )

    return enqueue


if __name__ == "__main__":
    common.run_worker(work()) if common.role() == "work" else common.run_async_enqueuer(connect)
