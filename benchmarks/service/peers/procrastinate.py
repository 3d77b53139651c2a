"""procrastinate (PostgreSQL, psycopg): one asyncio worker, and a custom retry strategy."""

from __future__ import annotations

import asyncio

from procrastinate import App, BaseRetryStrategy, PsycopgConnector, RetryDecision

from benchmarks.service.peers import common

CONCURRENCY = 64
POLL_INTERVAL_S = 0.1
app = App(connector=PsycopgConnector(conninfo=common.POSTGRES_URL, min_size=4, max_size=10))
sessions = []  # the HTTP session of a worker, opened by its first job


class Backoff(BaseRetryStrategy):
    def get_retry_decision(self, *, exception, job):  # noqa: ARG002 - called with keyword arguments
        wait_ms = int(1000 * common.retry_delay(job.attempts + 1))
        return RetryDecision(retry_in={"milliseconds": wait_ms}) if job.attempts < 10 else None


@app.task(name="deliver", retry=Backoff())
async def deliver(task_id, body):
    if not sessions:
        sessions.append(common.aiohttp_session())
    if not await common.post(sessions[0], task_id, body):
        raise RuntimeError


async def work():
    async with app.open_async():
        await app.run_worker_async(
            concurrency=CONCURRENCY,
            fetch_job_polling_interval=POLL_INTERVAL_S,
            delete_jobs="always",
            install_signal_handlers=False,
        )


async def set_up():
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


async def connect_enqueuer():
    await app.open_async()

    async def enqueue(ids):
        for batch in common.split_batches(ids):
            jobs = [{"task_id": task_id, "body": common.BODY} for task_id in batch]
            await app.configure_task("deliver").batch_defer_async(*jobs)

    return enqueue


if __name__ == "__main__":
    if common.role() == "work":
        common.run_worker(work())
    elif common.role() == "set-up":
        asyncio.run(set_up())
    else:
        common.run_async_enqueuer(connect_enqueuer)
