"""The schema: migrations, and files that are rejected."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tarry.errors import StoreUnavailable
from tarry.service.model import (
    AttemptRecord,
    PolicyVersion,
    ReplayRecord,
    Status,
    WorkerRecord,
)
from tarry.service.store import (
    AddStatus,
    NewTask,
    PolicyWriteStatus,
    Retention,
    RetryNowStatus,
)
from tarry.service.stores.sqlite import SqliteStore, database, schema
from tests.service.stores.harness import (
    DAY_MS,
    LEASE,
    START_MS,
    success_result,
    task,
    task_id,
    task_numbers,
)
from tests.service.stores.sqlite.harness import open_error, run_on_store


def test_a_new_file_may_be_opened_by_two_processes_at_once(tmp_path: Path) -> None:
    """A new file is valid if another process creates the tables while its version is read."""
    path = tmp_path / "tasks.db"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
        closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other,
    ):

        def create_tables(statement: str) -> None:
            if "sqlite_schema" in statement:  # the last query of `read_version`
                with contextlib.suppress(sqlite3.OperationalError):  # "database is locked"
                    schema.upgrade(other, path, 0)

        connection.set_trace_callback(create_tables)
        assert 0 == schema.read_version(connection, path)
        connection.set_trace_callback(None)
        other.rollback()
        schema.upgrade(connection, path, 0)
        assert len(schema.MIGRATIONS) == schema.read_version(other, path)


def test_a_file_of_an_older_version_is_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening an older file runs the missing migrations, and the store works on it."""
    path = tmp_path / "tasks.db"
    database.connect(path).close()
    new_column = "ALTER TABLE policy_use ADD COLUMN added INTEGER NOT NULL DEFAULT 7"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, new_column))

    async def write_policies(store: SqliteStore) -> None:
        policy = PolicyVersion(tenant="acme", id="p", version=0, document=b"{}")
        await store.put_policy(policy, replace=False)
        await store.delete_policy("acme", "p")
        _, recreated = await store.put_policy(policy, replace=False)
        assert 2 == recreated.version

    run_on_store(path, write_policies)
    with closing(sqlite3.connect(path)) as connection:
        assert [(7,)] == connection.execute("SELECT added FROM policy_use").fetchall()


OLD_ROWS = """
INSERT INTO tenant (id, name, pending, in_flight, succeeded, exhausted, cancelled, due_check_at,
    expiry_check_at) VALUES (1, 'acme', 2, 1, 1, 1, 1, 1000, 2000);
INSERT INTO lane (id, tenant, name, pending, in_flight, dead, due_at, lease_end_at, due_check_at,
    expiry_check_at) VALUES (1, 1, 'acme/https:a.example:443', 2, 1, 1, 1000, 2000, 1000, 2000);
INSERT INTO lane (id, tenant, name, paused) VALUES (2, 1, 'acme/https:b.example:443', 1);
INSERT INTO worker (id, name, lock) VALUES (1, 'old', 'token');
INSERT INTO policy_use (id, tenant, policy, live_tasks) VALUES (1, 1, 'p', 3);
INSERT INTO policy (tenant, id, version, document, created_at)
    VALUES (1, 'p', 1, x'31', 0), (1, 'p', 2, x'32', 1);
INSERT INTO task (seq, id, tenant, key, created_at, policy_version, fingerprint, content)
    VALUES (1, {ids[1]}, 1, 'key 1', 0, 1, x'66', x'63'),
        (2, {ids[2]}, 1, 'key 2', 0, NULL, x'66', x'63'),
        (3, {ids[3]}, 1, 'key 3', 0, NULL, x'66', x'63'),
        (4, {ids[4]}, 1, 'key 4', 0, NULL, x'66', x'63'),
        (5, {ids[5]}, 1, 'key 5', 0, NULL, x'66', x'63'),
        (6, {ids[6]}, 1, 'key 6', 0, NULL, x'66', x'63');
INSERT INTO state (seq, tenant, lane, policy, status, wake_at, next_attempt_at, started_at,
    attempts, last_kind, worker, finished_at)
    VALUES (1, 1, 1, 1, 0, 1000, 1000, 1000, 0, NULL, NULL, NULL),
        (2, 1, 1, 1, 0, 1500, 1500, 1000, 1, 'transient', NULL, NULL),
        (3, 1, 1, 1, 1, 2000, 1000, 1000, 0, NULL, 1, NULL),
        (4, 1, 1, 1, 2, 0, 1000, 1000, 1, 'success', NULL, 1001),
        (5, 1, 1, 1, 3, 0, 1000, 1000, 1, 'permanent', NULL, 1001),
        (6, 1, 1, 1, 4, 0, 1000, 1000, 0, NULL, NULL, 1001);
INSERT INTO attempt VALUES ((2 << 24) + 1, {log}), ((4 << 24) + 1, {log}), ((5 << 24) + 1, {log});
INSERT INTO api_key (id, tenant, digest, name, created_at, revoked_at)
    VALUES ('id', 'acme', x'64', 'name', 0, NULL);
INSERT INTO replay VALUES ('replay', 'acme', 0, 0, 0, {replay});
INSERT INTO series VALUES (1, 0, 'success', 1), (0, 0, 'success', 1)
"""
"""Tasks in every status, an attempt log, policies, a key and a replay, in the first schema."""


@pytest.mark.parametrize("version", range(1, len(schema.MIGRATIONS)))
def test_every_older_schema_is_upgraded_with_its_rows(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of each older schema version, with tasks in every status, works after the upgrade."""
    path = tmp_path / "tasks.db"
    log = AttemptRecord(number=1, scheduled_at=1000, started_at=1001, outcome="transient")
    values = {
        "ids": [f"x'{task_id(number).replace('-', '')}'" for number in range(7)],
        "log": f"x'{msgspec.msgpack.encode(log).hex()}'",
        "replay": f"x'{msgspec.msgpack.encode(ReplayRecord(id='replay', tenant='acme')).hex()}'",
    }
    with monkeypatch.context() as context:
        context.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:version])
        with closing(database.connect(path)) as connection:
            connection.executescript(OLD_ROWS.format(**values))
            # Columns that a migration computed were kept up to date by the tarry of that time.
            for migration in schema.MIGRATIONS[:version]:
                for statement in migration.split(";"):
                    if statement.strip().startswith("UPDATE"):
                        connection.execute(statement)

    async def check(store: SqliteStore) -> None:
        counters = await store.counters()
        expected = {status: 2 if status is Status.PENDING else 1 for status in Status}
        assert expected == counters.task_counts
        result = await store.claim(LEASE, limit=10, per_lane=10)
        assert [1, 2, 3] == sorted(task_numbers(result.tasks))
        assert 1 == result.lost_attempts
        assert [log] == await store.list_attempts("acme", task_id(5))
        assert RetryNowStatus.DUE == await store.retry_now("acme", task_id(5))
        assert (
            AddStatus.EXISTING == (await store.add([NewTask(task(4, fingerprint=b"f"))]))[0].status
        )
        pinned = await store.get_policy("acme", "p", 1)
        assert pinned is not None
        assert b"1" == pinned.document
        assert PolicyWriteStatus.CONFLICT == await store.delete_policy("acme", "p")
        key = await store.find_api_key(b"d")
        assert key is not None
        assert "admin" == key.role
        assert ["replay"] == [found.id for found in await store.list_replays(running=False)]
        assert 2 == (await store.sweep(Retention(0, 0), 10)).removed_task_count
        lanes = (await store.list_lanes("acme")).items
        assert [(1, 3, 0), (0, 0, 0)] == [
            (lane.pending, lane.in_flight, lane.exhausted) for lane in lanes
        ]

    run_on_store(path, check)
    with closing(sqlite3.connect(path)) as connection:
        assert [(len(schema.MIGRATIONS),)] == connection.execute("PRAGMA user_version").fetchall()


def test_an_older_process_continues_after_an_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is open while a newer version upgrades the file can still use it."""
    path = tmp_path / "tasks.db"

    async def main(store: SqliteStore) -> None:
        await store.counters()  # opens the second connection
        columns = (
            "ALTER TABLE heartbeat ADD COLUMN added INTEGER;"
            "ALTER TABLE lane ADD COLUMN added INTEGER;"
            "ALTER TABLE state ADD COLUMN added INTEGER NOT NULL DEFAULT 7;"
            "ALTER TABLE task ADD COLUMN added INTEGER NOT NULL DEFAULT 7"
        )
        monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, columns))
        database.connect(path).close()
        await store.add([NewTask(task(1))])
        [leased] = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        await store.finish([success_result(leased)])
        await store.record_worker(WorkerRecord(name="worker", host="host", pid=1))
        assert 1 == len(await store.list_workers())
        await store.sweep(Retention(DAY_MS, DAY_MS), 10)
        found = await store.get_task("acme", leased.id)
        assert found is not None
        assert Status.SUCCEEDED is found.status

    run_on_store(path, main)


def test_lanes_of_an_older_file_count_towards_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migration that adds the number of lanes counts those of each tenant."""
    path = tmp_path / "tasks.db"
    with monkeypatch.context() as patch:
        patch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        with closing(database.connect(path)) as connection:
            connection.execute("INSERT INTO tenant (id, name) VALUES (1, 'acme'), (2, 'beta')")
            connection.execute(
                "INSERT INTO lane (tenant, name) VALUES (1, 'acme/https:a.example:443'),"
                " (1, 'acme/https:b.example:443'), (2, 'beta/https:a.example:443')"
            )

    async def add(store: SqliteStore) -> None:
        tasks = [NewTask(task(1, "c")), NewTask(task(2, "b")), NewTask(task(3, "c", "beta"))]
        statuses = [result.status for result in await store.add(tasks, lane_quota=2)]
        assert [AddStatus.TOO_MANY_LANES, AddStatus.ADDED, AddStatus.ADDED] == statuses

    run_on_store(path, add)


def test_lanes_of_an_older_file_are_removed_with_their_last_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migration counts the tasks of each lane."""
    path = tmp_path / "tasks.db"
    with monkeypatch.context() as context:
        context.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        with closing(database.connect(path)) as connection:
            connection.executescript("""
                INSERT INTO tenant (id, name) VALUES (1, 'acme');
                INSERT INTO lane (id, tenant, name) VALUES (1, 1, 'acme/a'), (2, 1, 'acme/b');
                INSERT INTO policy_use (id, tenant, policy) VALUES (1, 1, 'default');
                INSERT INTO task (seq, id, tenant, key, created_at, fingerprint, content)
                    VALUES (1, x'00', 1, 'key', 0, x'', x'');
                INSERT INTO state (seq, tenant, lane, policy, status, wake_at, next_attempt_at,
                    started_at, finished_at) VALUES (1, 1, 1, 1, 2, 0, 0, 0, 1000);
            """)

    async def sweep_and_list(store: SqliteStore) -> None:
        for max_age_ms, expected in ((START_MS, ["acme/a"]), (0, [])):
            await store.sweep(Retention(max_age_ms, max_age_ms), 10)
            assert expected == [lane.name for lane in (await store.list_lanes("acme")).items]

    run_on_store(path, sweep_and_list)


def test_policy_versions_of_an_older_file_are_removed_if_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migration counts the tasks of each version, and finds out when it was replaced."""
    path = tmp_path / "tasks.db"
    with monkeypatch.context() as context:
        context.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        with closing(database.connect(path)) as connection:
            connection.executescript("""
                INSERT INTO tenant (id, name) VALUES (1, 'acme');
                INSERT INTO lane (id, tenant, name) VALUES (1, 1, 'acme/a');
                INSERT INTO policy_use (id, tenant, policy, deleted_version)
                    VALUES (1, 1, 'p', 1), (2, 1, 'q', 7);
                INSERT INTO policy (tenant, id, version, document, created_at)
                    VALUES (1, 'p', 2, x'', 0), (1, 'p', 3, x'', 0), (1, 'p', 4, x'', 0);
                INSERT INTO task (seq, id, tenant, key, created_at, policy_version, fingerprint,
                    content) VALUES (1, x'00', 1, 'key', 0, 2, x'', x'');
                INSERT INTO state (seq, tenant, lane, policy, status, wake_at, next_attempt_at,
                    started_at, finished_at) VALUES (1, 1, 1, 1, 2, 0, 0, 0, 1000);
            """)

    async def sweep_and_list(store: SqliteStore) -> None:
        for max_age_ms, expected in ((START_MS, [2, 4]), (0, [4])):
            while (await store.sweep(Retention(max_age_ms, max_age_ms), 10)).removed_task_count:
                pass
            found = [await store.get_policy("acme", "p", version) for version in range(5)]
            assert expected == [policy.version for policy in found if policy is not None]
        policy = PolicyVersion(tenant="acme", id="q", version=0, document=b"")
        _, recreated = await store.put_policy(policy, replace=False)
        assert 1 == recreated.version

    run_on_store(path, sweep_and_list)


def test_a_newer_schema_is_rejected(tmp_path: Path) -> None:
    """The error for a file with a newer schema names the file and its schema version."""
    path = tmp_path / "tasks.db"

    async def fill(store: SqliteStore) -> None:
        await store.add([NewTask(task(1))])

    run_on_store(path, fill)
    newer = len(schema.MIGRATIONS) + 1
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {newer}")

    message = open_error(path)

    assert f"{path} has schema version {newer}" in message
    assert "use the newer tarry" in message


def test_a_file_of_an_unreleased_version_is_rejected(tmp_path: Path) -> None:
    """The error for a file of an unreleased version asks for a new file."""
    path = tmp_path / "tasks.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE task (old)")
        connection.execute("PRAGMA application_id = 0x74617272")
        connection.execute("PRAGMA user_version = 3")

    message = open_error(path)

    assert f"{path} was written by an unreleased version of tarry" in message
    assert "move the file away" in message


def test_a_file_of_another_program_is_rejected(tmp_path: Path) -> None:
    """A database of another program, or a text file, is rejected and not changed."""
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE task (other)")
    assert f"{path} belongs to another program" in open_error(path)
    with closing(sqlite3.connect(path)) as connection:
        assert [("task",)] == connection.execute("SELECT name FROM sqlite_schema").fetchall()

    text = tmp_path / "text.db"
    text.write_text("this is a text file, not a database " * 100)
    assert f"{text} is not a SQLite file" in open_error(text)


def test_a_failed_migration_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed migration changes nothing, and is applied again at the next open."""
    path = tmp_path / "tasks.db"

    async def fill(store: SqliteStore) -> None:
        await store.add([NewTask(task(1))])

    run_on_store(path, fill)
    migration = "CREATE TABLE extra (a); INSERT INTO extra VALUES (1)"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, f"{migration}; nonsense"))

    async def fail_to_open() -> None:
        store = SqliteStore(path)
        with pytest.raises(StoreUnavailable, match="nonsense"):
            await store.open()
        await store.close()

    asyncio.run(fail_to_open())
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS[:-1], migration))

    async def check(store: SqliteStore) -> None:
        assert 1 == (await store.counters()).task_counts[Status.PENDING]

    run_on_store(path, check)
    with closing(sqlite3.connect(path)) as connection:
        assert [(1,)] == connection.execute("SELECT a FROM extra").fetchall()
        assert [(len(schema.MIGRATIONS),)] == connection.execute("PRAGMA user_version").fetchall()
