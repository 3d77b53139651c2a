"""`tarry migrate`: the tasks of a stopped service continue on another store."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteTaskStore
from tests.cli.harness import create_store, run_command
from tests.integration.service import service, target
from tests.service.stores.harness import task

LARGE_BODY = "x" * 20_000  # more than `inline_body_bytes`
TASK_COUNT = 6_000
KILL_COUNT = 3


@pytest.mark.long_run
def test_tasks_continue_on_the_new_store(tmp_path: Path) -> None:
    """Delivered tasks are not delivered again, others are; the old store cannot be served."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir(0o700)
    options = ("--from", old / "tarry.db", "--to", new / "tarry.db")
    is_failing = threading.Event()
    is_failing.set()

    def respond(path: str, _number: int) -> int:
        return 503 if path.startswith("/later") and is_failing.is_set() else 200

    with target(respond) as receiver:
        with service(old) as running_service:
            paths = [f"/{kind}/{number}" for number in range(4) for kind in ("now", "later")]
            created = [
                running_service.post(
                    targetUrl=receiver.url + path,
                    body=LARGE_BODY if path.endswith("3") else "small",
                    policy={"maxAttempts": 100, "maxDelayMs": 200},
                    laneKey=path.split("/")[1],
                )
                for path in paths
            ]
            running_service.wait_for(lambda: len(receiver.received_requests) == len(paths))
            now_tasks = [task for task in created if "/now/" in task["targetUrl"]]
            for created_task in now_tasks:
                running_service.wait_until_finished(created_task["taskId"])
            refused = run_command("migrate", *options)
        assert (2, "") == (refused.code, refused.out)  # the service was killed after that
        assert f"sqlite:{old / 'tarry.db'} is in use by" in refused.err

        moved = run_command("migrate", *options, "--json")
        again = run_command("migrate", *options)

        assert 0 == moved.code, moved.err
        assert (8, 4) == (moved.json["counts"]["tasks"], moved.json["counts"]["tasks SUCCEEDED"])
        assert 2 == moved.json["tasksWithBodies"]
        assert again.out.startswith("everything was moved by an earlier run")
        is_failing.clear()
        with pytest.raises(AssertionError, match=r"were moved to sqlite:.*tarry.db: serve that"):
            service(old).__enter__()
        with service(new, "--set", f"bodies={old / 'bodies'}") as running_service:
            for created_task in created:
                finished = running_service.wait_until_finished(created_task["taskId"])
                assert "SUCCEEDED" == finished["status"]
                attempts = running_service.attempts(created_task["taskId"])
                assert list(range(1, len(attempts) + 1)) == [
                    attempt["attemptNumber"] for attempt in attempts
                ]
    for path in paths:
        requests = receiver.received_requests[path]
        assert (1 == len(requests)) if path.startswith("/now") else (1 < len(requests))
        body = LARGE_BODY if path.endswith("3") else "small"
        assert {body.encode()} == set(receiver.bodies[path])


@pytest.mark.long_run
def test_a_killed_command_is_continued(tmp_path: Path) -> None:
    """After several kills in the middle, the same command moves the rest, and nothing twice."""
    old, new = tmp_path / "old.db", tmp_path / "new.db"

    async def add_tasks() -> None:
        store = SqliteTaskStore(old)
        await store.open()
        for begin in range(0, TASK_COUNT, 1000):
            numbers = range(begin, begin + 1000)
            await store.add([NewTask(task(number)) for number in numbers])
        await store.close()

    asyncio.run(add_tasks())
    command = [sys.executable, "-m", "tarry", "migrate", "--from", str(old), "--to", str(new)]
    for _ in range(KILL_COUNT):
        moved_count = _count_tasks(new)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and _count_tasks(new) == moved_count:
            time.sleep(0.002)
        process.kill()
        process.wait()
    is_interrupted = 0 < _count_tasks(new) < TASK_COUNT
    refused = run_command("keys", "list", "--store", new)

    result = run_command("migrate", "--from", old, "--to", new, "--json")

    if is_interrupted:
        assert 2 == refused.code
        assert f"tasks are being moved from sqlite:{old} to this store" in refused.err
    assert 0 == result.code, result.err
    assert result.json["wasComplete"] or TASK_COUNT == result.json["counts"]["tasks"]
    assert TASK_COUNT == _count_tasks(new)


def _count_tasks(path: Path) -> int:
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            count: int = connection.execute("SELECT count(*) FROM task").fetchone()[0]
            return count
    except sqlite3.OperationalError:  # the file or its table does not exist yet, or is locked
        return 0


def test_a_move_can_be_undone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With --undo, the old store can be used again, and the text warns of serving both."""
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    create_store(old)
    run_command("keys", "create", "--tenant", "shop", "--store", old)

    moved = run_command("migrate", "--from", old, "--to", new)
    moved_keys = run_command("keys", "list", "--store", old)
    undone = run_command("migrate", "--from", old, "--undo")
    undone_twice = run_command("migrate", "--from", old, "--undo")

    assert 0 == moved.code
    assert 1 == caplog.messages.count(f"created an empty store at sqlite:{new}")
    assert ["API", "keys", "1"] in [line.split() for line in moved.out.splitlines()]
    assert f"serve the new store: tarry serve --store sqlite:{new}" in moved.out
    assert 2 == moved_keys.code
    assert f"were moved to sqlite:{new}: serve that store" in moved_keys.err
    assert 0 == undone.code
    assert f"Delete sqlite:{new}, or at least never serve both" in undone.out
    assert 0 == run_command("keys", "list", "--store", old).code
    assert (2, "") == (undone_twice.code, undone_twice.out)
    assert "there is nothing to undo" in undone_twice.err


def test_encrypted_contents_are_moved_and_bodies_are_not(tmp_path: Path) -> None:
    """The command needs no encryption keys, and prints where the bodies of tasks are."""
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    content = b"\xc1encrypted"

    async def add_task() -> None:
        store = SqliteTaskStore(old)
        await store.open()
        new_task = task(1, packed_content=content, owned_body_ref=".tarry/x/acme/1")
        await store.add([NewTask(new_task)])
        await store.close()

    asyncio.run(add_task())

    result = run_command("migrate", "--from", old, "--to", new)

    assert 0 == result.code
    assert "1 tasks have bodies in the storage `bodies` of the old service" in result.out
    assert f"that is --set bodies={tmp_path / 'bodies'}" in result.out
    with closing(sqlite3.connect(new)) as connection:
        assert [(content,)] == connection.execute("SELECT packed_content FROM task").fetchall()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "memory:", "--to", "new.db"], "--from must not be memory:"),
        (["--from", "old.db", "--to", "memory:"], "--to must not be memory:"),
        (["--from", "none.db", "--to", "new.db"], "/none.db. Is this the store of your service?"),
        (["--from", "old.db", "--to", "./old.db"], "--from and --to name the same store"),
        (["--from", "none.db", "--undo"], "/none.db. Is this the store of your service?"),
        (["--from", "old.db"], "--to is missing"),
        (["--from", "old.db", "--to", "new.db", "--undo"], "--undo cannot be combined with --to"),
        (["--from", "mysql:x", "--to", "new.db"], "--from must be a path"),
    ],
)
def test_invalid_options_are_reported(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid options are reported, and no store is created."""
    monkeypatch.chdir(tmp_path)

    result = run_command("migrate", *arguments)

    assert (2, "") == (result.code, result.out)
    assert message in result.err
    assert [] == list(tmp_path.iterdir())
