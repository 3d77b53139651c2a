"""dramatiq (Redis): processes with threads, and its own retries with a `min_backoff` of 100 ms."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries, ShutdownNotifications

from benchmarks.service.peers import common

retries = Retries(min_backoff=100, max_backoff=10_000, max_retries=10)
broker = RedisBroker(url=common.REDIS_URL, middleware=[retries, ShutdownNotifications()])
dramatiq.set_broker(broker)
session = common.requests_session()


@dramatiq.actor
def deliver(task_id, body):
    response = session.post(common.task_url(task_id), data=body, headers=common.HEADERS, timeout=30)
    if response.status_code != 200:
        raise RuntimeError(response.status_code)


def enqueue(ids):
    for task_id in ids:
        deliver.send(task_id, common.BODY)


if __name__ == "__main__":
    common.run_enqueuer(enqueue)
