"""The store in PostgreSQL: conformance, and comparison with the reference store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.store import FinishStatus, NewTask
from tarry.service.stores.postgres import PostgresTaskStore
from tests.integration.postgres import connected
from tests.integration.postgres_store import empty_tables, new_schema_url, run_case
from tests.service.stores.comparison import STORE_FACTORIES, StoreFactory
from tests.service.stores.conformance.suite import CASES, Case, case_name
from tests.service.stores.harness import (
    HOUR_MS,
    LEASE,
    StoreHarness,
    success_result,
    task,
)
from tests.service.stores.state_machine import StoreMachine


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case, shadowed_dsn: str) -> None:
    """The PostgreSQL store passes the conformance suite, and calls only built-in functions."""
    run_case(shadowed_dsn, case)


@pytest.mark.timeout(600)  # the `thorough` profile takes minutes
def test_the_store_has_the_results_and_contents_of_the_reference_store(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same random calls, the stores have the same results and contents."""

    def store_factory(_folder: Path) -> StoreFactory:
        asyncio.run(empty_tables(postgres_dsn))
        return lambda clock: PostgresTaskStore(f"{postgres_dsn}&pool_size=2", clock=clock)

    monkeypatch.delitem(STORE_FACTORIES, "sqlite")
    monkeypatch.setitem(STORE_FACTORIES, "postgres", store_factory)
    state_machine_settings = settings(
        max_examples=max(3, settings().max_examples // 30), stateful_step_count=30
    )
    run_state_machine_as_test(StoreMachine, settings=state_machine_settings)


def test_claims_find_the_tasks_of_many_tenants(postgres_dsn: str) -> None:
    """Above a number of tenants, claims use indexes: in fair order, and with the next due time."""

    async def case(harness: StoreHarness) -> None:
        store, now = harness.store, harness.clock.now
        tenants = [f"tenant-{number:02}" for number in range(40)]
        new = [NewTask(task(n, "a", tenant)) for n, tenant in enumerate(tenants)]
        later = [
            NewTask(task(100 + n, "b", tenant, next_attempt_at=now + HOUR_MS + n))
            for n, tenant in enumerate(tenants)
        ]
        await store.add([*new, *later])

        found = [(await store.claim(LEASE, limit=20, per_lane=1)).tasks for _ in range(2)]
        await store.finish([success_result(each) for tasks in found for each in tasks])
        for _ in range(2):  # each corrects the check times of some tenants
            await store.claim(LEASE, limit=20, per_lane=1)
        claimed = await store.claim(LEASE, limit=20, per_lane=1)

        assert sorted(tenants) == sorted(each.tenant for tasks in found for each in tasks)
        assert ([], now + HOUR_MS - LEASE.horizon_ms) == (claimed.tasks, claimed.next_at)

    run_case(postgres_dsn, case)


async def test_a_server_that_may_lose_tasks_is_refused(
    postgres_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings with which commits may be lost are logged, or refused with `strict_durability`."""
    store = PostgresTaskStore(postgres_dsn)
    await store.open()
    await store.close()
    strict_store = PostgresTaskStore(postgres_dsn, strict_durability=True)
    with pytest.raises(ConfigurationError, match="strict_durability is set; fsync is off"):
        await strict_store.open()
    await strict_store.close()
    assert "PostgreSQL may lose acknowledged tasks: fsync is off" in caplog.text


async def test_a_login_that_is_refused_later_is_temporary(postgres_dsn: str) -> None:
    """While the server refuses new connections, an open store is unavailable, then it continues."""
    url = new_schema_url(postgres_dsn).replace("postgres@", "rotated@", 1)
    async with connected(postgres_dsn) as operator:
        await operator.execute("CREATE ROLE rotated LOGIN SUPERUSER")
        store = PostgresTaskStore(url)
        await store.open()
        await store.add([NewTask(task(1))])
        [leased] = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        await operator.execute("ALTER ROLE rotated NOLOGIN")
        await operator.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = 'rotated'"
        )
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await store.finish([success_result(leased)])
        late_store = PostgresTaskStore(url)
        with pytest.raises(ConfigurationError, match="refused the connection"):
            await late_store.open()
        await late_store.close()
        await operator.execute("ALTER ROLE rotated LOGIN")
        assert [FinishStatus.APPLIED] == await store.finish([success_result(leased)])
        await store.close()


async def test_a_result_is_stored_after_a_permission_was_revoked(postgres_dsn: str) -> None:
    """While the user of the store must not write, calls raise StoreUnavailable."""
    url = new_schema_url(postgres_dsn).replace("postgres@", "limited@", 1)
    async with connected(postgres_dsn) as operator:
        await operator.execute(
            "CREATE ROLE limited LOGIN; GRANT ALL ON DATABASE postgres TO limited"
        )
        store = PostgresTaskStore(url)
        await store.open()
        await store.add([NewTask(task(1))])
        [leased] = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        tables = f"ALL TABLES IN SCHEMA {store.database.options.schema}"
        await operator.execute(f"REVOKE ALL ON {tables} FROM limited")
        with pytest.raises(StoreUnavailable, match="permission denied"):
            await store.finish([success_result(leased)])
        await operator.execute(f"GRANT ALL ON {tables} TO limited")
        assert [FinishStatus.APPLIED] == await store.finish([success_result(leased)])
        await store.close()
