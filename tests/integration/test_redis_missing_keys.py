"""The Redis store after the server has evicted keys, or an operator has deleted them by mistake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from random import Random
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.model import (
    ApiKeyRecord,
    PolicyVersion,
    ReplayRecord,
    SigningSecretRecord,
    Status,
    Task,
    WorkerRecord,
)
from tarry.service.records.api_keys import find_api_key, list_api_keys, put_api_key
from tarry.service.records.signing_secrets import list_signing_secrets, put_signing_secret
from tarry.service.records.workers import list_workers, record_worker
from tarry.service.store import (
    AddStatus,
    FinishStatus,
    LaneLimits,
    RecordKind,
    Retention,
    RetryNowStatus,
    StoredTaskFilter,
)
from tarry.service.stores.redis import RedisTaskStore
from tarry.wire.tasks import DownstreamLimits
from tests.service.stores.harness import (
    DAY_MS,
    LANE,
    MINUTE_MS,
    OTHER_LEASE,
    StoreHarness,
    retry_result,
    success_result,
    task,
    task_id,
    task_numbers,
)

redis = import_module("redis")

KEEP_ALL = Retention(10 * DAY_MS, 10 * DAY_MS)
PENDING_NUMBERS = {1, 2, 3, 4, 5, 6}
"""The tasks of `fill` that have to be delivered."""
_numbers = count()


class Keys:
    """The keys of one store."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._prefix = f"{prefix}:{{0}}:".encode()

    def list(self) -> list[bytes]:
        """Return all keys without the prefix of the partition."""
        keys = self._client.scan_iter(match=self._prefix + b"*", count=10_000)
        return sorted(key.removeprefix(self._prefix) for key in keys)

    def delete(self, *names: bytes) -> None:
        """Delete keys that must exist."""
        assert len(names) == self._client.delete(*(self._prefix + name for name in names))

    def read_hash(self, name: bytes) -> dict[bytes, bytes]:
        """Return the fields of a hash."""
        fields: dict[bytes, bytes] = self._client.hgetall(self._prefix + name)
        return fields


@contextmanager
def open_keys(redis_url: str, prefix: str) -> Iterator[Keys]:
    """Return the keys of a store."""
    with redis.Redis.from_url(redis_url) as client:
        yield Keys(client, prefix)


def run_with_keys(redis_url: str, main: Callable[[StoreHarness, Keys], Awaitable[None]]) -> None:
    """Run a coroutine function with a new store and its keys."""
    prefix = f"missing-{next(_numbers)}"
    url = f"redis+unix://{redis_url.removeprefix('unix://')}?prefix={prefix}"
    harness = StoreHarness(lambda clock: RedisTaskStore(url, clock=clock))
    with open_keys(redis_url, prefix) as keys:
        asyncio.run(harness.run(lambda open_harness: main(open_harness, keys)))


def packed_id(number: int) -> bytes:
    """Return the id of a task as it is part of keys."""
    return bytes.fromhex(task_id(number).replace("-", ""))


async def sweep(harness: StoreHarness, retention: Retention = KEEP_ALL) -> None:
    """Sweep until all lanes were checked, and all tasks if something was missing."""
    for _ in range(3):
        async with asyncio.timeout(30):
            while (await harness.store.sweep(retention, 1000)).has_more:
                pass


def test_a_task_without_a_state_becomes_a_dead_letter(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other tasks are claimed, and the task can be replayed; the log names key and remedy."""

    async def main(harness: StoreHarness, keys: Keys) -> None:
        await harness.add(task(1), task(2, policy_id="patient"), task(3))
        keys.delete(b"state:" + packed_id(2))

        claimed = await harness.claim()

        assert [1, 3] == task_numbers(claimed.tasks)
        dead_letter = await harness.get_task(2)
        assert (Status.EXHAUSTED, "state-lost") == (dead_letter.status, dead_letter.reason)
        assert (b"content 2", LANE, "key 2") == (
            dead_letter.packed_content,
            dead_letter.lane,
            dead_letter.key,
        )
        assert {Status.IN_FLIGHT: 2, Status.EXHAUSTED: 1} == await harness.counts("acme")
        await sweep(harness)
        assert f":{{0}}:state:{task_id(2)} is missing" in caplog.text
        assert "maxmemory-policy to noeviction" in caplog.text
        assert RetryNowStatus.DUE is await harness.store.retry_now("acme", task_id(2))
        assert [2] == task_numbers((await harness.claim()).tasks)

    run_with_keys(redis_url, main)


def test_a_leased_task_without_a_state_becomes_a_dead_letter(redis_url: str) -> None:
    """When its lease expires, the task is a dead letter, with the attempts of its log."""

    async def main(harness: StoreHarness, keys: Keys) -> None:
        leased = await harness.lease_new_task(1)
        await harness.store.finish([retry_result(leased, harness.clock.now)])
        [leased] = (await harness.claim()).tasks
        keys.delete(b"state:" + packed_id(1))
        assert [FinishStatus.SUPERSEDED] == await harness.store.finish([success_result(leased)])
        harness.clock.advance(MINUTE_MS)
        assert [] == (await harness.claim(OTHER_LEASE)).tasks
        dead_letter = await harness.get_task(1)
        assert (Status.EXHAUSTED, 1) == (dead_letter.status, dead_letter.attempts)
        assert {Status.EXHAUSTED: 1} == await harness.counts()

    run_with_keys(redis_url, main)


def test_a_task_without_content_is_removed(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the task can be delivered; the log has its id, and its key can be used again."""

    async def main(harness: StoreHarness, keys: Keys) -> None:
        await harness.add(task(1), task(2), task(3))
        keys.delete(b"task:" + packed_id(2), b"task:" + packed_id(3))
        assert [1] == task_numbers(
            (await harness.store.list_tasks("acme", StoredTaskFilter())).items
        )
        [added] = await harness.add(task(4, key="key 3", fingerprint=b"fingerprint 3"))
        assert AddStatus.ADDED is added.status

        claimed = await harness.claim()

        assert [1, 4] == task_numbers(claimed.tasks)
        assert {Status.IN_FLIGHT: 2} == await harness.counts("acme")
        assert await harness.store.get_task("acme", task_id(2)) is None
        await sweep(harness)
        assert f":{{0}}:task:{task_id(2)} is missing" in caplog.text
        assert f"task {task_id(2)} of lane {LANE} is lost" in caplog.text
        assert b"state:" + packed_id(2) not in keys.list()

    run_with_keys(redis_url, main)


def test_a_task_can_be_added_again_after_its_state_was_lost(redis_url: str) -> None:
    """A client that repeats its request adds the task with the same id, which is leased once."""

    async def main(harness: StoreHarness, keys: Keys) -> None:
        await harness.add(task(1))
        keys.delete(b"state:" + packed_id(1))
        [added] = await harness.add(task(1))
        assert AddStatus.ADDED is added.status
        assert [1] == task_numbers((await harness.claim()).tasks)
        assert [] == (await harness.claim(OTHER_LEASE)).tasks
        await sweep(harness)
        assert {Status.IN_FLIGHT: 1} == await harness.counts("acme")

    run_with_keys(redis_url, main)


async def fill(harness: StoreHarness) -> Task:
    """Store records of all kinds; return a leased task, whose result is not written yet."""
    store, now = harness.store, harness.clock.now
    policy = PolicyVersion(tenant="acme", id="careful", version=0, document=b"{}")
    await store.put_policy(policy, replace=True)
    await put_api_key(store, ApiKeyRecord(id="key", tenant="acme", name="n", digest=b"digest"))
    secret = SigningSecretRecord(id="secret", tenant="acme", secret=b"secret")
    await put_signing_secret(store, secret, expire_previous_ms=0)
    await record_worker(store, WorkerRecord(name="w", host="h", pid=1, role="all", version="1"))
    await store.try_lead()
    await harness.add_dead_letter(21)
    await harness.add_dead_letter(22, tenant="beta", host="b")
    await store.finish([success_result(await harness.lease_new_task(23, owned_body_ref="ref"))])
    retried = await harness.lease_new_task(1)
    await store.finish([retry_result(retried, now + MINUTE_MS)])
    leased = await harness.lease_new_task(2, policy_id="careful", policy_version=1)
    await harness.add(task(3), task(4, tenant="beta", host="b"))
    await harness.add(task(5, host="later", next_attempt_at=now + MINUTE_MS))
    await harness.add(task(6, host="limited", key=task_id(6)))
    lane = "acme/https:limited.example:443"
    await store.set_limits(lane, DownstreamLimits(rate_per_second=5.0), max_limited=9)
    await store.record_lane_limits([LaneLimits(lane, 1.0, 1)])
    await store.add_to_budgets({lane: 1.0})
    await store.pause("acme/https:paused.example:443")
    await store.start_replay(ReplayRecord(id="replay", tenant="acme", rate=1.0))
    await store.start_replay(ReplayRecord(id="cancelled", tenant="beta", rate=1.0))
    await store.cancel_replay("beta", "cancelled")
    return leased


async def read_everything(harness: StoreHarness) -> None:
    """Call the methods that read records of a tenant."""
    store, now = harness.store, harness.clock.now
    await store.list_lanes(None)
    await store.list_lane_limits(10)
    await store.counters()
    await store.count_tasks("acme", StoredTaskFilter())
    await store.list_tasks("acme", StoredTaskFilter(created_from=now - 1, created_until=now + 1))
    await store.list_attempts_of_tasks("acme", StoredTaskFilter())
    await store.list_policies("acme")
    heartbeat = WorkerRecord(name="w", host="h", pid=1, role="all", version="1")
    await record_worker(store, heartbeat)  # writes the list of processes again if it is missing
    assert ["w"] == [worker.name for worker in await list_workers(store)]
    await list_api_keys(store)
    await store.list_replays(running=True)
    await store.list_replays(running=False)
    await store.attempts_per_minute(None, since=0)
    await store.release_unknown_leases(OTHER_LEASE, [])
    await store.replay_step("replay", None, [task_id(21)], None)


async def deliver_all(harness: StoreHarness, leased: Task) -> set[int]:
    """Finish the leased task, and all other tasks that become due; return their numbers."""
    store, delivered = harness.store, set[int]()
    if [FinishStatus.APPLIED] == await store.finish([success_result(leased)]):
        delivered.add(2)
    for _ in range(3):
        while tasks := (await harness.claim()).tasks:
            statuses = await store.finish([success_result(each) for each in tasks])
            assert [FinishStatus.APPLIED] * len(tasks) == statuses
            assert not delivered & set(task_numbers(tasks))
            delivered.update(task_numbers(tasks))
        await sweep(harness)
        harness.clock.advance(MINUTE_MS)
    return delivered


CREDENTIALS = {b"keyed:signing secrets:acme", b"keyed:API keys:"}
"""Keys that cannot be rebuilt. Without them, the methods that read them raise StoreUnavailable."""
KEY_PARTS = 5
"""How many tests share the keys, because all of them take several seconds."""


@pytest.mark.parametrize("part", range(KEY_PARTS))
def test_any_key_can_be_missing(redis_url: str, part: int) -> None:
    """Without any one key, each task is delivered once, unless the key was that of the task."""
    all_keys: list[bytes] = []

    async def list_keys(harness: StoreHarness, keys: Keys) -> None:
        await fill(harness)
        all_keys.extend(keys.list())

    run_with_keys(redis_url, list_keys)
    assert len(all_keys) > 60
    for deleted in all_keys[part::KEY_PARTS]:

        async def main(harness: StoreHarness, keys: Keys, deleted: bytes = deleted) -> None:
            leased = await fill(harness)
            keys.delete(deleted)
            if deleted not in CREDENTIALS:
                await read_everything(harness)
                assert await list_signing_secrets(harness.store, "acme")
            delivered = await deliver_all(harness, leased)
            lost = {
                number
                for number in PENDING_NUMBERS
                if deleted in {b"state:" + packed_id(number), b"task:" + packed_id(number)}
            }
            if deleted == b"task:" + packed_id(2):
                lost = set()  # the task was leased, so its worker has the content
            assert PENDING_NUMBERS - lost == delivered & PENDING_NUMBERS
            [added] = await harness.add(task(50))
            assert AddStatus.ADDED is added.status
            assert [50] == task_numbers((await harness.claim()).tasks)
            for tenant in (None, "acme"):
                counts = await harness.counts(tenant)
                assert 1 == counts.pop(Status.IN_FLIGHT)
                assert Status.PENDING not in counts
                assert min(counts.values()) > 0
            harness.clock.advance(20 * DAY_MS)
            await sweep(harness, Retention(0, 0))
            if deleted not in CREDENTIALS:
                await read_everything(harness)

        try:
            run_with_keys(redis_url, main)
        except Exception as error:
            error.add_note(f"the missing key is {deleted!r}")
            raise


@pytest.mark.parametrize("seed", range(10))
def test_many_keys_can_be_missing(
    redis_url: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After the eviction of a third of the keys, no call fails, and each lost task is reported."""
    draw = Random(seed)

    async def main(harness: StoreHarness, keys: Keys) -> None:
        leased = await fill(harness)
        evicted = [key for key in keys.list() if draw.random() < 1 / 3 and key not in CREDENTIALS]
        keys.delete(*evicted)
        await read_everything(harness)
        delivered = await deliver_all(harness, leased)
        for number in PENDING_NUMBERS - delivered:
            reports = (f"task {task_id(number)} of lane", "are lost", "are not delivered")
            assert any(report in caplog.text for report in reports)
        [added] = await harness.add(task(50))
        assert AddStatus.ADDED is added.status
        assert 50 in task_numbers((await harness.claim()).tasks)

    run_with_keys(redis_url, main)


def test_complete_keys_are_not_reported(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Sweeps of a store without missing keys log no error, and report no further work."""

    async def main(harness: StoreHarness, _: Keys) -> None:
        leased = await fill(harness)
        for _number in range(3):
            assert not (await harness.store.sweep(KEEP_ALL, 1000)).has_more
        assert PENDING_NUMBERS <= await deliver_all(harness, leased)

    run_with_keys(redis_url, main)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_missing_credentials_are_an_error(redis_url: str) -> None:
    """Without their keys, no attempt is sent without a signature, and no API key is rejected."""

    async def main(harness: StoreHarness, keys: Keys) -> None:
        await fill(harness)
        keys.delete(b"keyed:signing secrets:acme")
        missing = r"key \S+:keyed:signing secrets:acme is missing.* a backup"
        with pytest.raises(StoreUnavailable, match=missing):
            await list_signing_secrets(harness.store, "acme")
        keys.delete(b"keyed:API keys:")
        for read in (find_api_key(harness.store, b"digest"), list_api_keys(harness.store)):
            with pytest.raises(StoreUnavailable, match=r"key \S+:keyed:API keys: is missing"):
                await read
        new = ApiKeyRecord(id="2", tenant="acme", digest=b"digest")
        with pytest.raises(StoreUnavailable, match=r"key \S+:keyed:API keys: is missing"):
            await put_api_key(harness.store, new)
        keys.delete(b"keyed_owners")
        with pytest.raises(StoreUnavailable, match=r"key \S+:keyed_owners is missing"):
            await harness.store.export_records(RecordKind.RECORD)

    run_with_keys(redis_url, main)


def test_a_store_does_not_open_without_the_number_of_partitions(redis_url: str) -> None:
    """It would look for tenants in other partitions; a running process restores the number."""

    async def main(harness: StoreHarness, keys: Keys) -> None:
        running, _ = harness.store, await fill(harness)
        keys.delete(b"meta")
        second = harness.new_store(harness.clock)
        with pytest.raises(StoreUnavailable, match=r"key \S+:meta is missing"):
            await second.open()
        await second.close()
        await running.sweep(KEEP_ALL, 1000)
        await harness.reopen()
        assert b"1" == keys.read_hash(b"meta")[b"partitions"]

    run_with_keys(redis_url, main)
