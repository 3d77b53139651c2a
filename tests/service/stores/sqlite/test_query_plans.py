"""Query plans: every statement finds and orders its rows with an index."""

from __future__ import annotations

import re
from pathlib import Path

from tarry.service.model import PolicyVersion, ReplayRecord, SigningSecretRecord, Status
from tarry.service.records.api_keys import find_api_key
from tarry.service.records.lane_activity import read_lane_activity, record_latencies
from tarry.service.records.series import SeriesPoint, list_series, record_series
from tarry.service.records.signing_secrets import delete_signing_secret, put_signing_secret
from tarry.service.records.workers import list_workers
from tarry.service.store import (
    ConfiguredLimits,
    LaneLimits,
    NewTask,
    Release,
    Retention,
    StoredTaskFilter,
)
from tarry.service.stores.sqlite import SqliteTaskStore
from tarry.wire.tasks import DownstreamLimits
from tests.service.stores.harness import (
    HOUR_MS,
    LEASE,
    OTHER_LEASE,
    START_MS,
    ManualClock,
    exhausted_result,
    purge,
    retry_result,
    step_replay,
    success_result,
    task,
)
from tests.service.stores.sqlite.harness import open_store

SMALL_SCAN = re.compile(
    r"SCAN (CONSTANT ROW|\d+ CONSTANT ROWS|wanted|json_each|\(subquery-\d+\)"
    r"|(worker|orphan|meta|heartbeat)\b)"
)
"""Scans of constants, and of tables that are always small."""
LEASE_SCAN = re.compile(r"SCAN state USING INDEX state_leased\b")
"""Scan of all leases, made only when a worker process has died or a reply was lost."""
MERGE_SORT = re.compile(r"USE TEMP B-TREE FOR ORDER BY\b")
"""Sort of one page that is merged from the pages of several statuses."""
BUSIEST_LANES = "ORDER BY l.pending DESC"
"""The metrics sort the lanes by their tasks. An index would have to change with each task."""
DUE_LANES = "row_number() OVER (PARTITION BY waiting_for"
"""The metrics sort the lanes with due tasks, of which some wait for each reason."""
LIMITED_LANES = "INDEXED BY lane_limited"
"""The limits of lanes are sorted and read once, when the service starts."""


async def use_limits(store: SqliteTaskStore, lane: str) -> None:
    """Call the operations on the limits of lanes."""
    await store.record_lane_limits([LaneLimits(lane, 5.0, 8)])
    await store.list_lane_limits(10)
    await store.set_limits(lane, DownstreamLimits(concurrency=1), max_limited=9)
    await store.load_limits(ConfiguredLimits())
    await store.add_to_budgets({lane: 1.0})


async def test_no_statement_scans_a_table(tmp_path: Path) -> None:
    """No operation scans tasks, lanes or tenants, or sorts them."""
    statements: set[str] = set()

    async with open_store(tmp_path / "tasks.db") as store:
        clock = store.database._clock
        assert isinstance(clock, ManualClock)
        for database in (store.database, store._read_database):
            database.open()[0].set_trace_callback(statements.add)
        await store.add(
            [NewTask(task(n, f"h{n % 3}"), lease_on_add=n > 8) for n in range(12)],
            LEASE,
            quota=99,
            lane_quota=99,
        )
        await store.add([NewTask(task(1, "h1"))])
        await store.park("acme/https:h1.example:443", START_MS, probes=2, consecutive_opens=1)
        leased = (await store.claim(LEASE, limit=5, per_lane=2)).tasks
        results = [
            success_result(leased[0]),
            exhausted_result(leased[1]),
            retry_result(leased[2], START_MS + 5, renewed_lease=LEASE),
        ]
        await store.finish([*results, retry_result(leased[3], START_MS + HOUR_MS)])
        await store.release([Release(leased[4])])
        clock.advance(HOUR_MS)
        await store.claim(
            OTHER_LEASE, limit=100, per_lane=100, lane_limits={"acme/https:h2.example:443": 0}
        )
        await store.cancel("acme", leased[3].id)
        await store.retry_now("acme", leased[1].id)
        for query in (
            StoredTaskFilter(),
            StoredTaskFilter(status=Status.PENDING),
            StoredTaskFilter(status=Status.EXHAUSTED, reason="attempts"),
            StoredTaskFilter(lane=leased[0].lane, policy_id="default"),
            StoredTaskFilter(lane_prefix=leased[0].lane, key=leased[0].key),
            StoredTaskFilter(created_from=START_MS, created_until=START_MS + 1),
            StoredTaskFilter(matches_attempt=lambda _: True, matches_content=lambda _: True),
        ):
            for oldest_first in (True, False):
                await store.list_tasks("acme", query, limit=2, oldest_first=oldest_first)
        await store.get_task("acme", leased[0].id)
        await store.list_attempts("acme", leased[0].id, after=1)
        await use_limits(store, leased[0].lane)
        await store.last_attempts("acme", [leased[0].id])
        await store.list_attempts_of_tasks("acme", StoredTaskFilter(), limit=1)
        await store.count_tasks("acme", StoredTaskFilter(status=Status.EXHAUSTED))
        await store.start_replay(ReplayRecord(id="r", tenant="acme"))
        await step_replay(store, "r", 5)
        for tenant in ("acme", None):
            await store.list_lanes(tenant, limit=2)
            for running in (True, False):
                await store.list_replays(running=running, tenant=tenant)
        await purge(store, "acme", StoredTaskFilter(), 5)
        for document in (b"", b"{}"):
            await store.put_policy(
                PolicyVersion(tenant="acme", id="p", version=0, document=document),
                replace=True,
                quota=9,
            )
        await store.list_policies("acme")
        await store.delete_policy("acme", "p")
        await store.attempts_per_minute("acme", since=0)
        await store.counters("acme")
        await _use_keys_and_secrets(store)
        await _use_workers_and_series(store)
        await store.sweep(Retention(1, 1), 10)
        await store.release_unknown_leases(LEASE, [])
        for database in (store.database, store._read_database):
            database.open()[0].set_trace_callback(None)

        connection, _ = store.database.open()
        plans: dict[str, list[str]] = {}
        for statement in statements:
            if statement.split()[0] in {"SELECT", "UPDATE", "DELETE", "WITH"}:
                rows = connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
                plans[" ".join(statement.split())] = [row[3] for row in rows]
        assert len(plans) > 60
        assert {} == {
            statement: bad_steps
            for statement, plan in plans.items()
            if (bad_steps := [step for step in plan if _scans_or_sorts(step, statement)])
        }
        indexes = "SELECT name FROM sqlite_schema WHERE type = 'index' AND sql IS NOT NULL"
        steps = " ".join(step for plan in plans.values() for step in plan)
        # An unused index makes every write slower.
        assert [] == [name for (name,) in connection.execute(indexes) if f" {name} " not in steps]


async def _use_keys_and_secrets(store: SqliteTaskStore) -> None:
    await find_api_key(store, b"digest")
    secret = SigningSecretRecord(tenant="acme", id="s", secret=b"")
    await put_signing_secret(store, secret, expire_previous_ms=0)
    await delete_signing_secret(store, "acme", "s")


async def _use_workers_and_series(store: SqliteTaskStore) -> None:
    await list_workers(store)
    await record_series(store, [SeriesPoint(10_000, 0, {"a": 1})])
    await list_series(store, 10_000, since=0)
    await record_latencies(store, {"acme/https:a.example:443": {"1": 1}})
    await read_lane_activity(store, ["acme/https:a.example:443"])


def _scans_or_sorts(step: str, statement: str) -> bool:
    """Return whether a step scans a large table or sorts its rows."""
    if step.startswith("SCAN"):
        return not (
            SMALL_SCAN.match(step) or LEASE_SCAN.match(step) or _stops_early(step, statement)
        )
    sorted_parts = ("UNION ALL", BUSIEST_LANES, DUE_LANES, LIMITED_LANES)
    is_allowed = any(part in statement for part in sorted_parts)
    return "TEMP B-TREE" in step and not (is_allowed and MERGE_SORT.match(step))


def _stops_early(step: str, statement: str) -> bool:
    """Return whether a step reads an index in order and stops at a LIMIT."""
    return "USING" in step and "INDEX" in step and "LIMIT" in statement
