"""huey (SQLite, fsync): threads, and a scheduler that polls for retries every second."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from huey import SqliteHuey

from benchmarks.service.peers import common

queue = SqliteHuey(filename=str(Path(common.FOLDER) / "huey.db"), fsync=True, results=False)
session = common.requests_session()


@queue.task(retries=10, retry_delay=0.1, retry_backoff=2)
def deliver(task_id, body):
    response = session.post(common.task_url(task_id), data=body, headers=common.HEADERS, timeout=30)
    if response.status_code != 200:
        raise RuntimeError(response.status_code)


def enqueue(ids):
    for task_id in ids:
        deliver(task_id, common.BODY)


if __name__ == "__main__":
    # The consumer finds a task by its module name, which would be `__main__` here.
    common.run_enqueuer(import_module("benchmarks.service.peers.huey").enqueue)
