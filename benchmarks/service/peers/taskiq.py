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
    state.session = common.aiohttp_session()


@broker.task(task_name="deliver")
async def deliver(
    task_id: int,
    body: str,
    context: Context = TaskiqDepends(),  # noqa: B008
) -> None:
    if not await common.post(context.state.session, task_id, body):
        raise RuntimeError


async def connect_enqueuer():
    await broker.startup()

    async def enqueue(ids):
        await common.enqueue_concurrently(ids, lambda task_id: deliver.kiq(task_id, common.BODY))

    return enqueue


if __name__ == "__main__":
    common.run_async_enqueuer(connect_enqueuer)
