"""taskiq (Redis streams): workers, and a scheduler that polls for retries every second."""

from __future__ import annotations

from taskiq import Context, SmartRetryMiddleware, TaskiqDepends, TaskiqEvents, TaskiqScheduler
from taskiq_redis import ListRedisScheduleSource, RedisStreamBroker

from benchmarks.service.peers import common

source = ListRedisScheduleSource(common.REDIS_URL)
retries = SmartRetryMiddleware(
    default_retry_count=10,
    default_retry_label=True,
    default_delay=0.1,
    use_jitter=False,
    use_delay_exponent=True,
    schedule_source=source,
)
broker = RedisStreamBroker(common.REDIS_URL, maxlen=None).with_middlewares(retries)
scheduler = TaskiqScheduler(broker, [source])


@broker.on_event(TaskiqEvents.WORKER_STARTUP)
async def startup(state):
    state.pool = common.aiohttp_session()


@broker.task(task_name="deliver")
async def deliver(task: int, body: str, context: Context = TaskiqDepends()) -> None:  # noqa: B008
    if not await common.post(context.state.pool, task, body):
        raise RuntimeError


async def connect():
    await broker.startup()

    async def enqueue(ids):
        await common.enqueue_concurrently(ids, lambda task: deliver.kiq(task, common.BODY))

    return enqueue


if __name__ == "__main__":
    common.run_async_enqueuer(connect)
