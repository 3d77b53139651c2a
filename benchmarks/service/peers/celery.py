"""Celery (Redis): gevent workers, late acknowledgement, no results, `self.retry(countdown=...)`.

gevent was faster than prefork and threads.
"""

from __future__ import annotations

from celery import Celery

from benchmarks.service.peers import common

app = Celery("benchmark", broker=common.REDIS_URL)
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_pool_limit=4,
    broker_transport_options={"max_connections": 256},  # enough for all acknowledgements
    task_acks_late=True,
    task_ignore_result=True,
    task_send_sent_event=False,
    task_store_errors_even_if_ignored=False,
    worker_disable_rate_limits=True,
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=4,
    worker_redirect_stdouts=False,
    worker_send_task_events=False,
)
session = common.requests_session()


@app.task(bind=True, max_retries=10, name="deliver")
def deliver(self, task_id, body):
    response = session.post(common.task_url(task_id), data=body, headers=common.HEADERS, timeout=30)
    if response.status_code != 200:
        raise self.retry(countdown=common.retry_delay(self.request.retries + 1))


def enqueue(ids):
    with app.producer_pool.acquire(block=True) as producer:
        for task_id in ids:
            deliver.apply_async((task_id, common.BODY), producer=producer)


if __name__ == "__main__":
    common.run_enqueuer(enqueue)
