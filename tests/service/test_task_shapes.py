"""A task from the request to the attempt log has the shapes that docs/architecture.md lists."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tarry.service.api.task_validation import TaskBuilder
from tarry.service.app import Service
from tarry.service.delivery import DeliveryResult
from tarry.service.engine import attempts
from tarry.service.engine.leased_tasks import LeasedTasks
from tarry.service.engine.worker import Worker
from tarry.service.settings import Settings
from tarry.service.stores.sqlite import SqliteTaskStore
from tests.service.engine.harness import FakeTarget

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


class Recorder:
    """Records the objects with which functions are called, and what they return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.objects: list[Any] = []

    def watch(self, owner: Any, name: str, select: Callable[..., list[Any]]) -> None:
        """Record what `select` returns for the result and the arguments of each call."""
        function = getattr(owner, name)

        def record(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            self.objects += select(result, *arguments)
            return result

        self._monkeypatch.setattr(owner, name, record)


async def test_a_task_has_the_shapes_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same task and content go through all of them, in the order of the page."""
    recorder, target = Recorder(monkeypatch), FakeTarget(DeliveryResult(status=200))
    recorder.watch(
        TaskBuilder,
        "build_task",
        lambda ingest, _, __, request, *___: [request, ingest.content, ingest.task, ingest],
    )
    recorder.watch(Worker, "_on_attempt_done", lambda _, __, attempt, result: [result])
    recorder.watch(attempts, "build_request", lambda request, attempt, *_: [attempt, request])
    unpack = SqliteTaskStore._unpack_added

    def record_added(self: Any, *arguments: Any) -> Any:
        results = unpack(self, *arguments)
        recorder.objects += results
        return results

    monkeypatch.setattr(SqliteTaskStore, "_unpack_added", record_added)
    recorder.watch(
        LeasedTasks, "add", lambda _, leased_tasks, tasks, *__: [leased_tasks[tasks[0].id]]
    )
    recorder.watch(
        SqliteTaskStore, "finish", lambda _, __, results: [results[0], results[0].attempt]
    )
    service = Service(Settings(store="memory:", dev=True), delivery=target)
    await service.open()
    transport = httpx.ASGITransport(app=service)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        request = {"targetUrl": "http://127.0.0.1/"}
        response = await client.post("/retry-tasks", json=request, headers={"Prefer": "wait=5"})
        log = await service.store.list_attempts("default", response.json()["taskId"])
    await service.close()

    rows = re.findall(r"^\| `(\w+)` \| `[\w/.]+` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    objects = {type(each).__name__: each for each in recorder.objects}
    assert sorted(rows) == sorted(objects)
    assert len(recorder.objects) == len(rows)
    task, content = objects["Task"], objects["TaskContent"]
    leased_task, attempt = objects["LeasedTask"], objects["RunningAttempt"]
    assert task is objects["Ingest"].task is objects["AddResult"].task is leased_task.task
    assert task is objects["TaskResult"].task
    assert content is objects["Ingest"].content is leased_task.content is attempt.content
    assert leased_task is attempt.leased_task
    assert [objects["DeliveryRequest"]] == target.requests
    assert [objects["AttemptRecord"]] == log
