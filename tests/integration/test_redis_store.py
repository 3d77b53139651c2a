"""The Redis store with real servers: Redis on a single server, and Valkey as a Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace as copy_with

from tarry.service.model import PolicyVersion, ReplayRecord, Status
from tarry.service.store import FinishStatus, LeaseTerms, Release, Retention, StoredTaskFilter
from tarry.service.stores.redis import RedisTaskStore
from tarry.service.stores.redis.partitions import find_partition
from tests.integration.redis_cluster import redis_cluster
from tests.integration.servers import valkey_program
from tests.service.stores.comparison import STORE_FACTORIES, StoreFactory
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness, case_name
from tests.service.stores.harness import (
    DAY_MS,
    LEASE,
    MINUTE_MS,
    OTHER_LEASE,
    exhausted_result,
    step_replay,
    success_result,
    task,
    task_id,
    task_numbers,
)
from tests.service.stores.state_machine import StoreMachine

redis = import_module("redis")

IGNORED_COMMANDS = {"cmdstat_info", "cmdstat_config", "cmdstat_evalsha"}
_numbers = count()


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    """Run a Cluster of three nodes of Valkey, and return a store URL of one node.

    The other tests use the oldest supported version of Redis.
    """
    with redis_cluster(3, valkey_program()) as address:
        yield address.replace("redis://", "valkey+cluster://")


def store_url(redis_url: str, **parameters: object) -> str:
    """Return the URL of a store that no other test uses, on a server with a Unix socket."""
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    path = redis_url.removeprefix("unix://")
    return f"redis+unix://{path}?prefix=test-{next(_numbers)}&{query}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case, redis_url: str) -> None:
    """The store passes the conformance suite with one partition."""
    url = store_url(redis_url)
    asyncio.run(StoreHarness(lambda clock: RedisTaskStore(url, clock=clock)).run(case))


@pytest.mark.programs
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance_in_a_cluster(case: Case, cluster_url: str) -> None:
    """The store passes the conformance suite with several partitions on the nodes of a Cluster."""
    url = f"{cluster_url}?prefix=test-{next(_numbers)}&partitions=4"
    asyncio.run(StoreHarness(lambda clock: RedisTaskStore(url, clock=clock)).run(case))


def test_redis_and_the_reference_store_have_equal_results(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same random calls, the Redis store has the results and contents of the model."""

    def redis_store_factory(_: Path) -> StoreFactory:
        url = store_url(redis_url, partitions=2)
        return lambda clock: RedisTaskStore(url, clock=clock)

    monkeypatch.delitem(STORE_FACTORIES, "sqlite")
    monkeypatch.setitem(STORE_FACTORIES, "redis", redis_store_factory)
    state_machine_settings = settings(
        max_examples=max(5, settings().max_examples // 40), stateful_step_count=25
    )
    run_state_machine_as_test(StoreMachine, settings=state_machine_settings)


@contextmanager
def open_client(redis_url: str) -> Iterator[Any]:
    """Return a client of the server, for tests of what is stored."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


def run_on_store(url: str, main: Callable[[StoreHarness], Awaitable[None]]) -> None:
    """Run a coroutine function with a store that uses the clock of a harness."""
    asyncio.run(StoreHarness(lambda clock: RedisTaskStore(url, clock=clock)).run(main))


def test_the_cost_of_a_claim_does_not_depend_on_waiting_tasks(redis_url: str) -> None:
    """A claim executes the same commands with ten tasks in a queue and with a thousand."""
    url = store_url(redis_url)

    async def main(harness: StoreHarness) -> None:
        async def count_commands_of_claim() -> int:
            await harness.claim(limit=4, per_lane=4)  # makes lanes ready whose time has come
            with open_client(redis_url) as client:
                client.config_resetstat()
                claimed = await harness.claim(limit=4, per_lane=4)
                stats = client.info("commandstats")
            assert 4 == len(claimed.tasks)
            return sum(
                stat["calls"] for name, stat in stats.items() if name not in IGNORED_COMMANDS
            )

        later = harness.clock.now + DAY_MS
        await harness.add(*(task(number) for number in range(20)))
        few = await count_commands_of_claim()
        await harness.add(*(task(number) for number in range(20, 520)))
        # Lanes without due tasks are not visited.
        lanes = [task(n, f"h{n}", next_attempt_at=later) for n in range(600, 1100)]
        await harness.add(*lanes)
        assert few == await count_commands_of_claim()

    run_on_store(url, main)


def test_a_tenant_with_many_due_lanes_does_not_block_the_server(redis_url: str) -> None:
    """A claim that skips a tenant makes few of its lanes ready, and the next claims others."""
    url = store_url(redis_url)

    async def main(harness: StoreHarness) -> None:
        for start in range(0, 4000, 500):
            lanes = [task(n, f"h{n}", tenant="many") for n in range(start, start + 500)]
            await harness.add(*lanes)
        await harness.add(task(5000, tenant="other"))
        with open_client(redis_url) as client:
            client.config_resetstat()
            claimed = await harness.claim(limit=10, lane_limits={"many": 0})
            stats = client.info("commandstats")
        assert [5000] == task_numbers(claimed.tasks)
        assert stats["cmdstat_get"]["calls"] < 1500
        claimed_count = 0
        for _ in range(40):
            claimed_count += len((await harness.claim(limit=100)).tasks)
        assert 4000 == claimed_count

    run_on_store(url, main)


def test_a_lane_with_many_leases_does_not_block_the_server(redis_url: str) -> None:
    """Unknown leases are found by scripts that each read few leases, however many a lane has."""
    url, lease_count = store_url(redis_url), 3000

    async def main(harness: StoreHarness) -> None:
        for start in range(0, lease_count, 500):
            await harness.add(*(task(number) for number in range(start, start + 500)))
        await harness.claim(limit=lease_count // 2, per_lane=lease_count)
        others = await harness.claim(OTHER_LEASE, limit=lease_count, per_lane=lease_count)
        known_ids = [task_id(number) for number in range(10)]
        with open_client(redis_url) as client:
            client.config_resetstat()
            await harness.store.release_unknown_leases(
                copy_with(LEASE, worker="unknown worker"), []
            )
            stats = client.info("commandstats")
        assert stats["cmdstat_get"]["calls"] / stats["cmdstat_evalsha"]["calls"] < 1000
        released = await harness.store.release_unknown_leases(LEASE, known_ids)
        assert lease_count // 2 - len(known_ids) == released
        assert lease_count // 2 == len(others.tasks)
        assert released == (await harness.counts())[Status.PENDING]

    run_on_store(url, main)


def test_nothing_is_left_of_deleted_tasks(redis_url: str) -> None:
    """After a sweep of all tasks, only records of tenants and counters are stored."""
    url = store_url(redis_url)
    prefix = url.partition("prefix=")[2].partition("&")[0]

    async def main(harness: StoreHarness) -> None:
        store = harness.store
        for number in range(4):
            leased = await harness.lease_new_task(number, host=f"h{number}", owned_body_ref="ref")
            result = success_result(leased) if number % 2 else exhausted_result(leased)
            await store.finish([result])
        await harness.add(task(9, key=task_id(9)))
        await store.cancel("acme", task_id(9))
        await store.start_replay(ReplayRecord(id=task_id(50), tenant="acme"))
        await step_replay(store, task_id(50))
        for leased in (await harness.claim()).tasks:
            await store.finish([exhausted_result(leased)])
        harness.clock.advance(MINUTE_MS)
        await step_replay(store, task_id(50))
        harness.clock.advance(DAY_MS)
        while (await store.sweep(Retention(0, 0), 2)).has_more:
            pass
        await store.forget_orphaned_bodies(["ref"])

        with open_client(redis_url) as client:
            keys = {key.decode().split(":")[2] for key in client.scan_iter(f"{prefix}:*")}
        assert {"meta", "counters", "tenant", "tenant_names", "attempts", "attempts_of"} == keys

    run_on_store(url, main)


def test_all_partitions_are_swept_in_turn(redis_url: str) -> None:
    """Tasks are removed although another partition always has as many as the limit allows."""
    url = store_url(redis_url, partitions=2)
    tenants = {find_partition(f"t{n}", 2): f"t{n}" for n in range(9)}

    async def main(harness: StoreHarness) -> None:
        tasks = [task(n, tenant=tenants[0]) for n in range(8)]
        await harness.add(*tasks, task(8, tenant=tenants[1]))
        for leased in (await harness.claim(limit=9, per_lane=9)).tasks:
            await harness.store.finish([success_result(leased)])
        harness.clock.advance(DAY_MS)
        for _ in range(2):
            assert 2 == (await harness.store.sweep(Retention(0, 0), 2)).removed_task_count
        assert [] == (await harness.store.list_tasks(tenants[1], StoredTaskFilter())).items

    run_on_store(url, main)


def test_memory_of_a_task(redis_url: str) -> None:
    """A pending task needs at most 1.5 KiB besides its content, and likewise a finished one."""
    url, content, task_count = store_url(redis_url), bytes(300), 2000

    async def main(harness: StoreHarness) -> None:
        with open_client(redis_url) as client:

            def used_bytes_per_task() -> float:
                return (used_bytes() - before) / task_count - len(content)

            def used_bytes() -> int:
                return int(client.info("memory")["used_memory"])

            before = used_bytes()
            tasks = [
                task(number, key=f"{number:036}", fingerprint=bytes(32), packed_content=content)
                for number in range(task_count)
            ]
            for begin in range(0, task_count, 500):
                await harness.add(*tasks[begin : begin + 500])
            assert used_bytes_per_task() < 1024
            claimed = (await harness.claim(limit=task_count, per_lane=task_count)).tasks
            for begin in range(0, task_count, 500):
                batch = claimed[begin : begin + 500]
                await harness.store.finish([success_result(leased) for leased in batch])
            assert used_bytes_per_task() < 1536

    run_on_store(url, main)


def test_any_text_can_be_stored(redis_url: str) -> None:
    """Texts with NUL and other unusual characters are stored, found and deleted like others."""
    text = "a\0b\n{0}:*\U0001f600"

    async def main(harness: StoreHarness) -> None:
        store, lane = harness.store, f"acme/{text}"
        policy = PolicyVersion(tenant="acme", id=text, version=0, document=text.encode())
        for document in (b"1", b"2"):
            await store.put_policy(copy_with(policy, document=document), replace=True)
        new_task = task(1, lane=lane, key=text, policy_id=text, policy_version=1)
        await harness.add(copy_with(new_task, owned_body_ref=text))
        [leased] = (await harness.claim(LeaseTerms(text, 30_000, 1000))).tasks
        assert (lane, text, text, text) == (
            leased.lane,
            leased.key,
            leased.policy_id,
            leased.worker,
        )
        await store.finish([exhausted_result(leased, text)])
        for task_filter in (
            StoredTaskFilter(key=text),
            StoredTaskFilter(lane=lane),
            StoredTaskFilter(reason=text),
        ):
            assert 1 == await store.count_tasks("acme", task_filter)
        harness.clock.advance(2 * DAY_MS)
        while (await store.sweep(Retention(0, 0), 10)).has_more:
            pass
        assert await store.get_lane(lane) is None
        assert await store.get_policy("acme", text, 1) is None
        assert [text] == await store.list_orphaned_bodies(10)

    run_on_store(store_url(redis_url), main)


def test_results_of_malformed_ids_are_superseded(redis_url: str) -> None:
    """A malformed id is treated like that of an unknown task."""

    async def main(harness: StoreHarness) -> None:
        leased = copy_with(await harness.lease_new_task(1), id="unknown")
        superseded = [FinishStatus.SUPERSEDED]
        assert superseded == await harness.store.finish([success_result(leased)])
        assert superseded == await harness.store.release([Release(leased)])

    run_on_store(store_url(redis_url), main)
