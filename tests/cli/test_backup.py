"""`tarry backup`: a backup of a running service can be restored, and no task is lost."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from tests.cli.harness import create_store, run_command
from tests.integration.service import TERMINAL_STATUSES, service, target

LARGE_BODY = "x" * 20_000  # more than `inline_body_bytes`


@pytest.mark.long_run
def test_restored_backup_has_all_acknowledged_tasks(tmp_path: Path) -> None:
    """Tasks are added and delivered during the backup; a service on the copy delivers the rest."""
    folder, restored = tmp_path / "old", tmp_path / "new"
    folder.mkdir()
    restored.mkdir(0o700)
    backup = tmp_path / "backup.db"
    fails_deliveries = threading.Event()
    fails_deliveries.set()

    def respond(path: str, _number: int) -> int:
        return 503 if path.startswith("/later") and fails_deliveries.is_set() else 200

    with target(respond) as receiver:
        accepted: list[str] = []
        stopping = threading.Event()

        def post(name: str) -> None:
            number = 0
            while not stopping.is_set():
                number += 1
                path = f"/{'later' if number % 4 == 0 else 'now'}/{name}/{number}"
                body = LARGE_BODY if number % 5 == 0 else "small"
                policy = {"maxAttempts": 100, "maxDelayMs": 200}
                task = running_service.post(targetUrl=receiver.url + path, body=body, policy=policy)
                accepted.append(task["taskId"])

        with service(folder) as running_service:
            threads = [threading.Thread(target=post, args=(name,)) for name in "ab"]
            for thread in threads:
                thread.start()
            running_service.wait_for(lambda: len(accepted) > 30)
            acknowledged = set(accepted)

            result = run_command("backup", backup, "--store", folder / "tarry.db", "--json")

            running_service.wait_for(lambda: len(accepted) > len(acknowledged) + 4)
            stopping.set()
            for thread in threads:
                thread.join()
        assert 0 == result.code, result.err
        assert len(acknowledged) <= result.json["tasks"] <= len(accepted)
        assert result.json["bodies"] > 4
        assert 0o600 == backup.stat().st_mode & 0o777

        shutil.move(backup, restored / "tarry.db")
        shutil.move(f"{backup}.bodies", restored / "bodies")
        fails_deliveries.clear()
        with service(restored) as running_service:
            running_service.wait_for(
                lambda: all(
                    task["status"] in TERMINAL_STATUSES for task in running_service.all_tasks()
                )
            )
            tasks = running_service.all_tasks()

    assert {"SUCCEEDED"} == {task["status"] for task in tasks}
    assert acknowledged <= {task["taskId"] for task in tasks}
    assert result.json["tasks"] == len(tasks)
    for task in tasks:
        bodies = receiver.bodies[task["targetUrl"].removeprefix(receiver.url)]
        assert {b"small", LARGE_BODY.encode()} >= {*bodies} != set()


def test_backup_refuses_to_overwrite(tmp_path: Path) -> None:
    """An existing file is replaced only with --force; the text names both files and the size."""
    store, backup = tmp_path / "tarry.db", tmp_path / "copy.db"
    create_store(store)
    run_command("keys", "create", "--tenant", "shop", "--store", store)

    first = run_command("backup", backup, "--store", store)
    second = run_command("backup", backup, "--store", store)
    forced = run_command("backup", backup, "--store", store, "--force")

    assert (0, "") == (first.code, first.err)
    assert first.out.startswith(f"0 tasks of sqlite:{store} in {backup} (0.")
    assert (2, "") == (second.code, second.out)
    assert f"{backup} exists: name another file, or replace it with --force" in second.err
    assert first == forced
    assert 1 == len(run_command("keys", "list", "--store", backup, "--json").json["items"])


def test_bodies_in_object_storage_are_not_copied(tmp_path: Path) -> None:
    """If bodies are in a bucket, the command reports that the backup does not have them."""
    store, backup = tmp_path / "tarry.db", tmp_path / "copy.db"
    create_store(store)

    result = run_command("backup", backup, "--store", store, "--set", "bodies=memory:///")

    assert (0, "bodies in memory:/// are not part of the backup\n") == (result.code, result.err)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory:", "--store must be a file"),
        ("nowhere/none.db", "/nowhere/none.db. Is this the store of your service?"),
        ("postgresql://host/db", "PostgreSQL's own tool: pg_dump"),
        ("postgres://user:secret@host/db", "PostgreSQL's own tool: pg_dump"),
        ("redis://host", "redis-cli --rdb FILE, or a copy of its AOF"),
        ("rediss://host", "redis-cli --rdb FILE, or a copy of its AOF"),
        ("redis+cluster://host", "redis-cli --rdb FILE, or a copy of its AOF"),
        ("valkey://host", "valkey-cli --rdb FILE, or a copy of its AOF"),
    ],
)
def test_a_store_that_is_no_file_is_rejected(url: str, message: str, tmp_path: Path) -> None:
    """For other stores, the error names the tool of the database; no file is written."""
    backup = tmp_path / "copy.db"

    result = run_command("backup", backup, "--store", url)

    assert (2, "") == (result.code, result.out)
    assert message in result.err
    assert "secret" not in result.err
    assert not backup.exists()
