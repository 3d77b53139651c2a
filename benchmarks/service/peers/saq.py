"""SAQ (Redis): asyncio workers, which poll for retries every second, the shortest interval."""

from __future__ import annotations

from saq import Queue, Worker

from benchmarks.service.peers import common

CONCURRENCY = 25


async def startup(ctx):
    ctx["session"] = common.aiohttp_session()


async def deliver(ctx, *, task_id, body):
    if not await common.post(ctx["session"], task_id, body):
        raise RuntimeError


async def work():
    queue = Queue.from_url(common.REDIS_URL)
    await queue.connect()
    timers = {"schedule": 1, "sweep": 60}
    await Worker(queue, [deliver], startup=startup, concurrency=CONCURRENCY, timers=timers).start()


async def connect_enqueuer():
    queue = Queue.from_url(common.REDIS_URL)
    await queue.connect()
    options = {"retries": 10, "retry_delay": 0.1, "retry_backoff": True, "ttl": -1}

    async def enqueue(ids):
        await common.enqueue_concurrently(
            ids,
            lambda task_id: queue.enqueue("deliver", task_id=task_id, body=common.BODY, **options),
        )

    return enqueue


if __name__ == "__main__":
    if common.role() == "work":
        common.run_worker(work())
    else:
        common.run_async_enqueuer(connect_enqueuer)
