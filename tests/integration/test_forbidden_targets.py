"""Processes that do not allow the targets of the tasks in their store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.servers import store_url
from tests.integration.service import Service, service, target


def post_all(running_service: Service, url: str, **fields: object) -> list[str]:
    """Create 10 tasks; return their ids."""
    return [running_service.post(targetUrl=f"{url}/{n}", **fields)["taskId"] for n in range(10)]


def log_lines(running_service: Service, event: str) -> list[str]:
    """Return the lines of the log with this event."""
    return [
        each for each in (running_service.folder / "log").read_text().splitlines() if event in each
    ]


def test_waiting_tasks_survive_a_start_without_the_flag(tmp_path: Path) -> None:
    """They wait without an attempt, and go on after a start with `--dev`; the log says it once."""
    with target() as started_target:
        with service(tmp_path) as running_service:
            ids = post_all(running_service, started_target.url, delayMs=1000)
            running_service.stop()
        lane = started_target.url.replace("//", "")
        with service(tmp_path, dev=False) as running_service:
            downstream = f"/downstreams/{lane}"
            running_service.wait_for(
                lambda: running_service.request("GET", downstream)[1]["state"] == "PARKED"
            )
            explain = f"/retry-tasks/{ids[0]}/explain"  # its lease is released a little later
            text = "waits until its target is allowed: 127.0.0.1 is a"
            running_service.wait_for(
                lambda: text in running_service.request("GET", explain)[1]["text"]
            )
            tasks = [running_service.task(task_id) for task_id in ids]
            assert {("PENDING", 0)} == {(each["status"], each["attemptNumber"]) for each in tasks}
            assert 1 == len(log_lines(running_service, "lane waits, its target is not allowed"))
            assert 200 == running_service.request("GET", "/readyz")[0]
            running_service.stop()
        assert not started_target.received_requests
        with service(tmp_path) as running_service:
            tasks = [running_service.wait_until_finished(task_id) for task_id in ids]
            assert {("SUCCEEDED", 1)} == {(each["status"], each["attemptNumber"]) for each in tasks}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
def test_one_of_two_processes_allows_the_target(tmp_path: Path, kind: str) -> None:
    """It delivers all tasks with one attempt each, and the log names both lists."""
    folders = [tmp_path / name for name in ("without", "with")]
    for folder in folders:
        folder.mkdir()
    with (
        store_url(kind) as url,
        target() as started_target,
    ):
        store = url or f"sqlite:{tmp_path / 'shared.db'}"
        with (
            service(folders[0], dev=False, store=store) as without,
            service(folders[1], store=store) as allowing,
        ):
            ids = [task_id for _ in range(3) for task_id in post_all(allowing, started_target.url)]
            tasks = [allowing.wait_until_finished(task_id) for task_id in ids]
            assert {("SUCCEEDED", 1)} == {(each["status"], each["attemptNumber"]) for each in tasks}
            event = "processes of one store allow different targets"
            allowing.wait_for(lambda: all(log_lines(each, event) for each in (without, allowing)))
            [line] = log_lines(without, event)
            assert "allow_target=none" in line
            assert "allow_target=--dev" in line
