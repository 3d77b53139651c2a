"""The Redis store while servers stop, hang, are full, or move data to another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.model import Status, WorkerRecord
from tarry.service.records.api_keys import find_api_key
from tarry.service.records.workers import record_worker
from tarry.service.store import (
    AddStatus,
    CancelStatus,
    FinishStatus,
    LaneLimits,
    LeaseTerms,
    NewTask,
    Retention,
    StoredTaskFilter,
    StoreLost,
)
from tarry.service.stores.redis import RedisTaskStore, connection, opening, server_client
from tarry.service.stores.redis.opening import SCHEMA_VERSION
from tarry.service.stores.redis.partitions import find_partition
from tests.chaos.tcp_proxy import Disturbance, tcp_proxy
from tests.integration.redis_cluster import ClusterNode, redis_cluster_nodes
from tests.integration.servers import Server, redis_server
from tests.service.stores.harness import LEASE, success_result, task, task_numbers

redis = import_module("redis")

OTHER_LEASE = LeaseTerms("another worker", 20, 0)
WORKER = WorkerRecord(name="w", host="h", pid=1, role="all", version="1")
_numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Run a server that writes each change to its file, and that a test may stop."""
    with redis_server("--appendonly", "yes", "--appendfsync", "always") as running_server:
        yield running_server


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[ClusterNode]]:
    """Run a Cluster of three primaries and three replicas, whose primaries a test may stop."""
    with redis_cluster_nodes(3, has_replicas=True) as running_nodes:
        yield running_nodes


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[RedisTaskStore]:
    """Open and close a new store, which uses the clock of the server."""
    separator = "&" if "?" in url else "?"
    store = RedisTaskStore(f"{url}{separator}prefix=failures-{next(_numbers)}")
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def run_on(url: str, main: Callable[[RedisTaskStore], Awaitable[None]]) -> None:
    """Run a coroutine function with a new store."""

    async def run() -> None:
        async with open_store(url) as store:
            await main(store)

    asyncio.run(run())


def single_url(server: Server) -> str:
    """Return the URL of a store on a single server."""
    return server.address.replace("unix://", "redis+unix://")


async def retry_until_available(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call while the store is unavailable, and return its result."""
    while True:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(0.05)


async def test_a_store_works_again_after_a_restart(server: Server) -> None:
    """Calls raise StoreUnavailable while the server is down; acknowledged tasks are still there."""
    async with open_store(single_url(server)) as store:
        await store.add([NewTask(task(1))])
        server.stop()
        for call in (store.ping, store.counters, lambda: store.add([NewTask(task(2))])):
            with pytest.raises(StoreUnavailable, match="is unavailable: "):
                await call()
        server.start()
        await retry_until_available(store.ping)
        claimed = await store.claim(LEASE, limit=5, per_lane=5)
        assert [1] == task_numbers(claimed.tasks)


async def test_wakeups_continue_after_a_restart(server: Server) -> None:
    """A store that listens subscribes again, and can be closed while the server is down."""
    async with open_store(single_url(server)) as store:
        woken = asyncio.Event()
        store.listen(woken.set)
        await woken.wait()  # the subscription
        server.restart()
        woken.clear()
        async with asyncio.timeout(20):
            await woken.wait()
        server.stop()
        try:
            async with asyncio.timeout(20):
                await store.close()
        finally:
            server.start()


async def test_closing_waits_for_running_calls(server: Server) -> None:
    """A call that was made before `close` has its result, and a later one is refused."""
    async with open_store(single_url(server)) as store:
        calls = [asyncio.ensure_future(store.add([NewTask(task(n))])) for n in range(40)]
        await asyncio.sleep(0)
        await store.close()
        results = [result for call in calls for result in await call]
        assert {AddStatus.ADDED} == {result.status for result in results}
        with pytest.raises(StoreUnavailable, match="not open"):
            await store.ping()


async def test_a_server_that_hangs_is_unavailable(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call ends with StoreUnavailable after the timeout, and the next one reconnects."""
    monkeypatch.setattr(server_client, "_REPLY_TIMEOUT_S", 0.2)

    async with open_store(single_url(server)) as store:
        with server.suspended(), pytest.raises(StoreUnavailable, match="no reply in time"):
            await store.ping()
        await retry_until_available(store.ping)


def test_all_connections_are_replaced_after_one_was_reset(server: Server) -> None:
    """When a call has failed because the network was interrupted, the next calls succeed."""

    async def main(store: RedisTaskStore) -> None:
        await asyncio.gather(*(store.ping() for _ in range(8)))  # opens 8 connections
        proxy.disturb(Disturbance.RESET)
        proxy.disturb(Disturbance.NONE)
        with pytest.raises(StoreUnavailable):
            await store.ping()
        await asyncio.gather(*(store.ping() for _ in range(8)))

    with tcp_proxy(server.address.removeprefix("unix://")) as proxy:
        run_on(f"redis://127.0.0.1:{proxy.port}", main)


async def test_a_full_server_changes_nothing(server: Server) -> None:
    """Without memory, a batch raises StoreUnavailable and none of its tasks is stored."""
    async with open_store(single_url(server)) as store:
        await store.add([NewTask(task(1))])
        with redis.Redis.from_url(server.address) as client:
            client.config_set("maxmemory", 1)
            try:
                with pytest.raises(StoreUnavailable, match=r"OOM|memory"):
                    await store.add([NewTask(task(number)) for number in (2, 3)])
            finally:
                client.config_set("maxmemory", 0)
        assert {Status.PENDING: 1} == await counts(store)
        [added] = await store.add([NewTask(task(2))])
        assert AddStatus.ADDED is added.status


async def test_a_full_server_still_finishes_tasks(server: Server) -> None:
    """Without memory, stored tasks are leased, finished and removed, which frees memory."""
    async with open_store(single_url(server)) as store:
        await store.add([NewTask(task(number)) for number in range(3)])
        [lost] = (await store.claim(OTHER_LEASE, limit=1, per_lane=1)).tasks
        with redis.Redis.from_url(server.address) as client:
            client.config_set("maxmemory", 1)
            try:
                await asyncio.sleep(2 * OTHER_LEASE.length_ms / 1000)  # the lease expires
                claimed = await store.claim(LEASE, limit=3, per_lane=3)
                assert 1 == claimed.lost_attempts
                assert lost.id in {leased.id for leased in claimed.tasks}
                results = [success_result(leased) for leased in claimed.tasks]
                assert [FinishStatus.APPLIED] * 3 == await store.finish(results)
                await store.park(lost.lane, 1, probes=1, consecutive_opens=1)
                await store.unpark(lost.lane)
                await record_worker(store, WORKER)
                assert await store.try_lead()
                await store.add_to_budgets({lost.lane: 1.0})
                await store.record_lane_limits([LaneLimits(lost.lane, 1.0, 1)])
                assert 3 == (await store.sweep(Retention(0, 0), 10)).removed_task_count
            finally:
                client.config_set("maxmemory", 0)


async def test_a_task_is_cancelled_on_a_full_server(server: Server) -> None:
    """Without memory, the cancellation of a leased task can be requested."""
    async with open_store(single_url(server)) as store:
        await store.add([NewTask(task(1))])
        [leased] = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        with redis.Redis.from_url(server.address) as client:
            client.config_set("maxmemory", 1)
            try:
                assert CancelStatus.REQUESTED is await store.cancel(leased.tenant, leased.id)
            finally:
                client.config_set("maxmemory", 0)


async def test_a_replica_is_unavailable(server: Server) -> None:
    """A server that has become a replica refuses writes, until it is a primary again."""
    async with open_store(single_url(server)) as store:
        with redis.Redis.from_url(server.address) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", 1)
            try:
                with pytest.raises(StoreUnavailable, match=r"(?i)read ?only"):
                    await store.add([NewTask(task(1))])
            finally:
                client.execute_command("REPLICAOF", "NO", "ONE")
        [added] = await store.add([NewTask(task(1))])
        assert AddStatus.ADDED is added.status


def test_a_store_reconnects_when_its_address_has_a_new_primary(
    server: Server, tmp_path: Path
) -> None:
    """After a failover, connections to the old primary, which is a replica now, are replaced."""
    address = tmp_path / "primary.sock"
    address.symlink_to(server.address.removeprefix("unix://"))

    async def main(store: RedisTaskStore) -> None:
        await asyncio.gather(*(store.ping() for _ in range(8)))  # opens 8 connections
        address.unlink()
        address.symlink_to(new_primary.address.removeprefix("unix://"))
        with (
            redis.Redis.from_url(server.address) as client,
            redis.Redis.from_url(new_primary.address) as promoted,
        ):
            for key in client.scan_iter():  # as replication does
                promoted.restore(key, 0, client.dump(key))
            client.execute_command("REPLICAOF", "127.0.0.1", 1)
            try:
                with pytest.raises(StoreUnavailable, match=r"(?i)read ?only"):
                    await store.add([NewTask(task(1))])
                results = await asyncio.gather(*(store.add([NewTask(task(n))]) for n in range(8)))
            finally:
                client.execute_command("REPLICAOF", "NO", "ONE")
        assert {AddStatus.ADDED} == {result.status for [result] in results}

    with redis_server() as new_primary:
        run_on(f"redis+unix://{address}", main)


@pytest.mark.parametrize(
    "message",
    [
        "BUSY Redis is busy running a script. You can only call SCRIPT KILL.",
        "CLUSTERDOWN The cluster is down",
        "ERR max number of clients reached",
        "ERR unknown command 'EVALSHA'",
        "EXECABORT Transaction discarded because of previous errors.",
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "MISCONF Redis is configured to save RDB snapshots, but it is not able to persist on disk.",
        "NOAUTH Authentication required.",
        "NOPERM this user has no permissions to run the 'evalsha' command",
        "NOREPLICAS Not enough good replicas to write.",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "READONLY You can't write against a read only replica.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "UNKILLABLE Sorry the script already executed write commands against the dataset.",
        "WRONGPASS invalid username-password pair or user is disabled.",
    ],
)
@pytest.mark.parametrize("is_in_script", [False, True])
def test_errors_of_the_state_of_a_server_are_temporary(
    server: Server, message: str, is_in_script: bool
) -> None:
    """A result that such an error has refused is written again, also if a script has raised it."""
    statement = ""
    if is_in_script and not message.startswith("ERR"):
        message += " script: 7b, on @user_script:7."  # as in Redis 7
        statement = "error('@user_script: 7: -' .. ARGV[1])"
    with redis.Redis.from_url(server.address) as client, pytest.raises(redis.RedisError) as raised:
        client.eval("return redis.error_reply(ARGV[1])", 0, message)
    store_connection = connection.RedisConnection(single_url(server), None)
    assert isinstance(store_connection.translate(raised.value), StoreUnavailable)
    with redis.Redis.from_url(server.address) as client, pytest.raises(redis.RedisError) as raised:
        client.eval(f"{statement} return redis.error_reply(ARGV[1])", 0, message)
    assert isinstance(store_connection.translate(raised.value), StoreUnavailable)


def test_a_defect_of_a_script_is_not_temporary(server: Server) -> None:
    """A script that fails because of its arguments is not repeated."""
    with redis.Redis.from_url(server.address) as client:
        client.set("text", "value")
        store_connection = connection.RedisConnection(single_url(server), None)
        for script in ("local missing; return missing.field", "return redis.call('LLEN', 'text')"):
            with pytest.raises(redis.ResponseError) as raised:
                client.eval(script, 0)
            assert store_connection.translate(raised.value) is None


def test_a_script_that_was_killed_is_repeated(server: Server) -> None:
    """SCRIPT KILL, and the calls that waited for the script, are temporary errors."""
    with (
        redis.Redis.from_url(server.address) as client,
        redis.Redis.from_url(server.address) as operator,
        ThreadPoolExecutor() as executor,
    ):
        operator.config_set("lua-time-limit", 1)
        endless_script = executor.submit(client.eval, "while true do end", 0)
        errors: list[Exception] = []
        while not endless_script.done():
            with suppress(redis.ResponseError):  # it has not started, or was killed already
                operator.script_kill()
            try:
                operator.get("any key")
            except redis.ResponseError as error:
                errors.append(error)
        operator.config_set("lua-time-limit", 5000)
        killed = endless_script.exception()
    assert isinstance(killed, redis.ResponseError)
    store_connection = connection.RedisConnection(single_url(server), None)
    for each in (killed, *errors):
        assert isinstance(store_connection.translate(each), StoreUnavailable)


@pytest.mark.parametrize("command", ["evalsha", "del"])
async def test_results_are_stored_after_permissions_were_revoked(
    server: Server, command: str
) -> None:
    """Without the permission to run scripts, or commands in them, results are written later."""
    user = f"worker-{command}"

    with redis.Redis.from_url(server.address) as client:
        permissions = ("on", ">secret", "~*", "&*", "+@all")
        client.execute_command("ACL", "SETUSER", user, *permissions)
    async with open_store(single_url(server).replace("://", f"://{user}:secret@")) as store:
        await store.add([NewTask(task(1))])
        [leased] = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        with redis.Redis.from_url(server.address) as client:
            client.execute_command("ACL", "SETUSER", user, f"-{command}")
            with pytest.raises(StoreUnavailable):
                await store.finish([success_result(leased)])
            client.execute_command("ACL", "SETUSER", user, f"+{command}")
        assert [FinishStatus.APPLIED] == await store.finish([success_result(leased)])


async def test_the_number_of_partitions_cannot_be_changed(server: Server) -> None:
    """A store with another number of partitions would not find its tenants, so it does not open."""
    url = f"{single_url(server)}?prefix=failures-{next(_numbers)}"
    first = RedisTaskStore(f"{url}&partitions=3")
    await first.open()
    await first.close()
    second = RedisTaskStore(f"{url}&partitions=4")
    with pytest.raises(ConfigurationError, match="has 3 partitions"):
        await second.open()
    await second.close()
    third = RedisTaskStore(url)
    await third.open()
    await third.add([NewTask(task(1))])
    await third.close()


async def test_a_late_release_keeps_newer_leases(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that Redis executes after the client has given up changes only older leases."""
    async with open_store(single_url(server)) as store:
        await store.add([NewTask(task(1))])
        await store.claim(LEASE, limit=1, per_lane=1)  # its reply was lost
        run, late_calls = store.connection.run, []

        async def run_writes_late(
            partition: int, name: str, *arguments: Any, **_options: Any
        ) -> Any:
            if name == "unknown_leases":
                return await run(partition, name, *arguments)
            late_calls.append((partition, name, *arguments))
            raise StoreUnavailable("timeout")

        with monkeypatch.context() as patched:
            patched.setattr(store.connection, "run", run_writes_late)
            with pytest.raises(StoreUnavailable):
                await store.release_unknown_leases(LEASE, [])
        assert 1 == await store.release_unknown_leases(LEASE, [])
        [leased] = (await store.claim(LEASE, limit=1, per_lane=1)).tasks
        for late_call in late_calls:
            await run(*late_call)

        assert [FinishStatus.APPLIED] == await store.finish([success_result(leased)])


async def test_a_newer_schema_is_rejected(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tarry does not start on a store that is not compatible; a running process continues."""
    url = f"{single_url(server)}?prefix=failures-{next(_numbers)}"
    with monkeypatch.context() as newer:
        newer.setattr(opening, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        newer.setattr(opening, "COMPATIBLE_VERSION", SCHEMA_VERSION + 1)
        running = RedisTaskStore(url)
        await running.open()
    older = RedisTaskStore(url)
    message = (
        f"has schema version {SCHEMA_VERSION + 1}, but this tarry supports up to version "
        f"{SCHEMA_VERSION}: use the newer tarry that created the store"
    )
    with pytest.raises(ConfigurationError, match=message):
        await older.open()
    await older.close()
    await running.add([NewTask(task(1))])
    assert {Status.PENDING: 1} == await counts(running)
    await running.close()


async def test_data_of_an_unreleased_version_is_rejected(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format has changed since; the error says what to do, and nothing is changed."""
    url = f"{single_url(server)}?prefix=failures-{next(_numbers)}"
    with monkeypatch.context() as older:
        for name in ("SCHEMA_VERSION", "COMPATIBLE_VERSION", "_FIRST_VERSION"):
            older.setattr(opening, name, 1)
        old = RedisTaskStore(url)
        await old.open()
        await old.add([NewTask(task(1))])
    new = RedisTaskStore(url)
    with pytest.raises(ConfigurationError, match="unreleased version of tarry, whose data cannot"):
        await new.open()
    await new.close()
    assert {Status.PENDING: 1} == await counts(old)
    await old.close()


async def counts(store: RedisTaskStore) -> dict[Status, int]:
    """Return the number of tasks by status, without zeros."""
    task_counts = (await store.counters()).task_counts
    return {status: number for status, number in task_counts.items() if number}


def cluster_url(nodes: list[ClusterNode], number: int = 0) -> str:
    """Return the URL of a store in the Cluster, by one of its nodes."""
    address = nodes[number].server.address.replace("redis://", "redis+cluster://")
    return f"{address}?partitions=1"


def find_primary(nodes: list[ClusterNode], slot: int) -> int:
    """Return the number of the node that has a slot."""
    return next(n for n in range(3) if slot < 16_384 * (n + 1) // 3)


async def test_a_slot_is_moved_to_another_node(nodes: list[ClusterNode]) -> None:
    """While keys are moved one by one, calls fail and change nothing; then all data is there."""
    async with open_store(cluster_url(nodes)) as store:
        await store.add([NewTask(task(number)) for number in range(20)])
        claimed = await store.claim(LEASE, limit=10, per_lane=10)
        slot = nodes[0].client.execute_command("CLUSTER KEYSLOT", "{0}")
        source_number = find_primary(nodes, slot)
        source, destination = nodes[source_number], nodes[(source_number + 1) % 3]
        ids = [node.client.execute_command("CLUSTER MYID") for node in (source, destination)]
        destination.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        # As two words: otherwise the client decodes the keys, which are bytes.
        keys = source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
        moved_count = 0
        for position, key in enumerate(keys):
            if position % 40 == 0:
                with pytest.raises(StoreUnavailable):
                    await store.add([NewTask(task(100 + position))])
            migrate = ("MIGRATE", "127.0.0.1", destination.port, key, 0, 5000)
            moved_count += source.client.execute_command(*migrate) == b"OK"
        assert len(keys) == moved_count > 40
        for node in (destination, source, *nodes[:3]):
            node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])

        statuses = await retry_until_available(
            lambda: store.finish([success_result(leased) for leased in claimed.tasks])
        )

        assert [FinishStatus.APPLIED] * 10 == statuses
        assert {Status.PENDING: 10, Status.SUCCEEDED: 10} == await counts(store)
        assert 20 == len((await store.list_tasks("acme", StoredTaskFilter())).items)


async def test_a_replica_takes_over(nodes: list[ClusterNode]) -> None:
    """After a primary was killed, the store continues with its replica, without a restart."""
    slot = nodes[0].client.execute_command("CLUSTER KEYSLOT", "{1}")
    primary = find_primary(nodes, slot)
    other = (primary + 1) % 3

    url = cluster_url(nodes, other).replace("partitions=1", "partitions=2")
    async with open_store(url) as store:
        # Find a tenant in partition 1, whose primary is killed.
        tenant = next(f"t{n}" for n in range(99) if find_partition(f"t{n}", 2) == 1)
        new_tasks = [NewTask(task(number, tenant=tenant)) for number in range(5)]
        await store.add(new_tasks)
        nodes[primary].client.execute_command("WAIT", 1, 5000)
        nodes[primary].server.stop()
        with suppress(StoreUnavailable):  # it may take a while until the replica takes over
            await store.add([NewTask(task(10, tenant=tenant))])

        [added] = await retry_until_available(lambda: store.add([NewTask(task(11, tenant=tenant))]))

        assert added.status in {AddStatus.ADDED, AddStatus.EXISTING}
        found = (await store.list_tasks(tenant, StoredTaskFilter())).items
        assert {0, 1, 2, 3, 4, 11} <= set(task_numbers(found))


def test_other_partitions_are_served_while_a_node_is_down() -> None:
    """Claims return the tasks of the partitions that are available; other calls fail."""

    async def main(store: RedisTaskStore) -> None:
        tenants = {find_partition(f"t{n}", 16): f"t{n}" for n in range(200)}
        slots = {
            partition: cluster[0].client.execute_command("CLUSTER KEYSLOT", f"{{{partition}}}")
            for partition in tenants
        }
        # The node of partition 0 stays, because the next call of `open` needs it.
        stopped = next(n for n in range(3) if n != find_primary(cluster, slots[0]))
        lost = {p for p in tenants if find_primary(cluster, slots[p]) == stopped}
        assert 0 < len(lost) < 16
        new_tasks = [NewTask(task(p, tenant=tenant)) for p, tenant in tenants.items()]
        await store.add(new_tasks)
        cluster[stopped].server.stop()

        claimed = await store.claim(LEASE, limit=100, per_lane=100)

        assert sorted(set(tenants) - lost) == task_numbers(
            sorted(claimed.tasks, key=lambda t: t.id)
        )
        assert lost == set(claimed.errors)
        with pytest.raises(StoreUnavailable):
            await store.add([NewTask(task(99, tenant=tenants[min(lost)]))])
        cluster[stopped].server.start()
        await retry_until_available(store.ping)

    with redis_cluster_nodes(3, "--appendonly", "yes") as cluster:
        run_on(cluster_url(cluster).replace("partitions=1", "partitions=16"), main)


def test_a_node_that_hangs_does_not_delay_the_tasks_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A claim returns what other nodes have leased; the next claims can skip the partitions."""

    async def main(store: RedisTaskStore) -> None:
        tenants = {find_partition(f"t{n}", 16): f"t{n}" for n in range(200)}
        await store.add([NewTask(task(p, tenant=tenant)) for p, tenant in tenants.items()])
        first_slot = cluster[0].client.execute_command("CLUSTER KEYSLOT", "{0}")
        hanging = next(n for n in range(3) if n != find_primary(cluster, first_slot))
        with cluster[hanging].server.suspended():
            with monkeypatch.context() as impatient:
                impatient.setattr(connection, "_STRAGGLER_TIMEOUT_S", 0.2)
                first = await store.claim(LEASE, limit=100, per_lane=100)
            claimed, hung = first.tasks, set(first.errors)
            assert (16, True) == (len(claimed) + len(hung), bool(hung))
            second = await store.claim(LEASE, limit=100, per_lane=100, skip=hung)
            assert ([], {}) == (second.tasks, second.errors)
        while len(claimed) < 16:
            known = [each.id for each in claimed]
            for partition in hung:
                await store.release_unknown_leases(LEASE, known, partition)
            claimed += (await store.claim(LEASE, limit=100, per_lane=100)).tasks
            await asyncio.sleep(0.02)

    monkeypatch.setattr(connection, "_STRAGGLER_TIMEOUT_S", 1000)
    monkeypatch.setattr(server_client, "_REPLY_TIMEOUT_S", 1000)
    monkeypatch.setattr(connection, "_CALL_TIMEOUT_S", 1000)
    with redis_cluster_nodes(3) as cluster:
        run_on(cluster_url(cluster).replace("partitions=1", "partitions=16"), main)


async def test_a_flushed_server_is_not_used_until_it_is_restored(server: Server) -> None:
    """All calls fail, also for API keys, and nothing is written to the empty server."""
    async with open_store(single_url(server)) as store:
        await store.add([NewTask(task(1))])
        with redis.Redis.from_url(server.address) as client:
            backup = {key: client.dump(key) for key in client.scan_iter()}
            client.flushall()
            for call in (
                store.ping,
                lambda: store.add([NewTask(task(2))]),
                lambda: store.claim(LEASE, limit=5, per_lane=5),
                lambda: find_api_key(store, b"digest"),
                lambda: store.sweep(Retention(0, 0), 10),
                lambda: record_worker(store, WORKER),
            ):
                with pytest.raises(StoreLost, match=r":\{0\} on .* is empty"):
                    await call()
            assert 0 == client.dbsize()
            for key, value in backup.items():
                client.restore(key, 0, value)
        assert [1] == task_numbers((await store.claim(LEASE, limit=5, per_lane=5)).tasks)


async def test_a_process_does_not_use_the_store_that_has_replaced_its_own(server: Server) -> None:
    """A process that starts on a flushed server creates a new store, which others do not use."""
    url = f"{single_url(server)}?prefix=replaced"

    old, new = RedisTaskStore(url), RedisTaskStore(url)
    await old.open()
    with redis.Redis.from_url(server.address) as client:
        client.flushall()
    await new.open()
    await new.add([NewTask(task(1))])
    with pytest.raises(StoreLost, match="replaced by the data of another store"):
        await old.add([NewTask(task(2))])
    await old.close()
    await old.open()
    assert 1 == (await counts(old))[Status.PENDING]
    await old.close()
    await new.close()


async def test_a_store_without_all_of_its_partitions_does_not_open(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty partition beside others is lost, until an operator writes its identity."""
    url = f"{single_url(server)}?prefix=partial&partitions=4"

    with redis.Redis.from_url(server.address) as client:
        store = RedisTaskStore(url)
        await store.open()
        assert 1 == caplog.text.count("created an empty store at redis")
        identity = client.hget("partial:{0}:meta", "identity")
        versions = {"schema": SCHEMA_VERSION, "compatible": SCHEMA_VERSION}
        for partition, fields in (
            (3, {"identity": identity}),
            (0, {"identity": identity, "partitions": 4} | versions),
        ):
            client.delete(*client.keys(f"partial:{{{partition}}}:*"))
            with pytest.raises(StoreLost, match=rf"partial:\{{{partition}\}} on .* is empty"):
                await RedisTaskStore(url).open()
            with pytest.raises(StoreLost, match=identity.decode()):
                await store.ping()
            client.hset(f"partial:{{{partition}}}:meta", mapping=fields)
            await store.ping()
            await store.close()
            await store.open()
            await store.ping()
        await store.close()
        assert 1 == caplog.text.count("created an empty store")


async def test_a_creation_that_was_interrupted_is_continued(server: Server) -> None:
    """A process that was killed before it had marked all partitions does not look like a loss."""
    url = f"{single_url(server)}?prefix=interrupted&partitions=4"

    with redis.Redis.from_url(server.address) as client:
        store = RedisTaskStore(url)
        await store.open()
        await store.close()
        client.hdel("interrupted:{0}:meta", "complete")
        client.delete("interrupted:{2}:meta", "interrupted:{3}:meta")
        await store.open()
        await store.ping()
        await store.close()
        identities = {client.hget(f"interrupted:{{{n}}}:meta", "identity") for n in range(4)}
        assert 1 == len(identities - {None})


async def test_stores_that_are_opened_at_the_same_time_create_one_store(server: Server) -> None:
    """All processes that start on an empty server get the same identity."""
    url = f"{single_url(server)}?prefix=together&partitions=8"

    stores = [RedisTaskStore(url) for _ in range(8)]
    await asyncio.gather(*(store.open() for store in stores))
    for store in stores:
        await store.ping()
        await store.close()


def test_a_flushed_node_does_not_stop_the_tasks_of_other_nodes() -> None:
    """Claims name the lost partitions, and lease the tasks of the others."""

    async def main(store: RedisTaskStore) -> None:
        flushed = cluster[1]
        await store.add([NewTask(task(n, tenant=f"tenant-{n}")) for n in range(40)])
        live = flushed.client.keys("*:live:*")
        lost_count = sum(flushed.client.zcard(key) for key in live)
        assert lost_count
        flushed.client.flushall()
        tasks: set[str] = set()
        errors: set[type[StoreUnavailable]] = set()
        async with asyncio.timeout(20):
            while len(tasks) < 40 - lost_count or not errors:
                claimed = await store.claim(LEASE, limit=40, per_lane=40)
                tasks |= {each.id for each in claimed.tasks}
                errors |= {type(error) for error in claimed.errors.values()}
        assert {StoreLost} == errors

    with redis_cluster_nodes(3) as cluster:
        run_on(f"redis+cluster://127.0.0.1:{cluster[0].port}", main)


def test_a_store_is_not_created_while_a_node_is_unavailable() -> None:
    """A partition that does not respond may have the data of a store, so it is not empty."""

    async def main() -> None:
        url = f"{cluster_url(cluster)}&prefix=new".replace("partitions=1", "partitions=16")
        slot = cluster[0].client.execute_command("CLUSTER KEYSLOT", "{0}")
        stopped = next(n for n in range(3) if n != find_primary(cluster, slot))
        cluster[stopped].server.stop()
        with pytest.raises(StoreUnavailable, match=f":{cluster[stopped].port}"):
            await RedisTaskStore(url).open()
        others = [node for node in cluster if node is not cluster[stopped]]
        assert [0, 0] == [node.client.dbsize() for node in others]
        cluster[stopped].server.start()

    with redis_cluster_nodes(3) as cluster:
        asyncio.run(main())


def test_a_node_that_was_unavailable_at_the_start_is_checked_before_it_is_used() -> None:
    """Nothing is written to it before it keeps tasks durably, and has the data of this store."""

    async def main() -> None:
        slots = {
            partition: cluster[0].client.execute_command("CLUSTER KEYSLOT", f"{{{partition}}}")
            for partition in range(16)
        }
        number = next(n for n in range(3) if n != find_primary(cluster, slots[0]))
        partitions = [p for p, slot in slots.items() if find_primary(cluster, slot) == number]
        node = cluster[number]
        url = cluster_url(cluster, find_primary(cluster, slots[0]))
        url = url.replace("partitions=1", "partitions=16")
        creator = RedisTaskStore(url)
        await creator.open()
        await creator.close()
        node.client.config_set("appendfsync", "everysec")
        store = RedisTaskStore(url, strict_durability=True)
        with node.server.suspended():
            await store.open()
            await store.ping()
            with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{node.port}"):
                await store.ping(partitions[0])
        tenant = next(t for n in range(200) if store.partition_of(t := f"t{n}") == partitions[0])
        calls = [store.add([NewTask(task(each, tenant=tenant))]) for each in range(20)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, StoreUnavailable)
            assert partitions[0] == error.partition
        with pytest.raises(StoreUnavailable, match="appendfsync is everysec"):
            await store.ping(partitions[0])
        node.client.config_set("appendfsync", "always")
        await store.add([NewTask(task(1, tenant=tenant))])
        node.client.flushall()
        with pytest.raises(StoreLost):
            await store.ping(partitions[1])
        await store.close()

    with redis_cluster_nodes(3, "--appendonly", "yes", "--appendfsync", "always") as cluster:
        asyncio.run(main())
