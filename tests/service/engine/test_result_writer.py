from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import pytest

from tarry.core.breaker import Breaker
from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.encryption import Codec
from tarry.service.engine.attempts import final_result
from tarry.service.engine.result_writer import build_callback_task
from tarry.service.model import AttemptRecord, Status, Task, TaskContent
from tarry.service.store import (
    ClaimResult,
    FinishStatus,
    LeaseTerms,
    Release,
    TaskResult,
)
from tests.service.engine.harness import (
    BUSY,
    EPOCH,
    OK,
    EngineHarness,
    FakeTarget,
    run,
)
from tests.service.stores.model_store import ModelStore

TASK = Task(
    id="i",
    tenant="t",
    lane="t/https:a:443",
    key="k",
    fingerprint=b"",
    packed_content=b"",
    attempts=2,
)
CONTENT = TaskContent(url="https://a/x?token=hush", callback_url="https://b/done")


def test_callback_has_the_result_of_the_task() -> None:
    """It has the fields of the API, the target URL without its query, and the right body size."""
    attempt = AttemptRecord(number=3, scheduled_at=1, started_at=1, status=410, outcome="permanent")
    finish = final_result(TASK, attempt, Status.EXHAUSTED, "permanent")

    callback = build_callback_task(TASK, CONTENT, finish, new_id=lambda: "j", pack=Codec().pack)

    content = Codec().unpack(callback.packed_content)
    assert {
        "taskId": "i",
        "idempotencyKey": "k",
        "targetUrl": "https://a/x",
        "status": "EXHAUSTED",
        "reason": "permanent",
        "attemptNumber": 3,
        "responseStatus": 410,
        "createdAt": 0,
    } == msgspec.json.decode(content.body)
    assert ("https://b/done", len(content.body)) == (content.url, content.body_size)


def test_callback_is_a_separate_task() -> None:
    """The result of a task is posted to its callbackUrl, and retried like any task."""

    async def main() -> None:
        async def by_url(request: DeliveryRequest) -> DeliveryResult:
            return OK if "a.example" in request.url or len(published.requests) > 2 else BUSY

        published = FakeTarget(by_url)
        harness = EngineHarness(published)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(callback_url="http://hook.example/done"))
        await asyncio.sleep(30)
        await harness.engine.stop(1)

        callback = published.requests[-1]
        assert "http://hook.example/done" == callback.url
        news = msgspec.json.decode(callback.body)
        assert (task.id, "SUCCEEDED", 200) == (
            news["taskId"],
            news["status"],
            news["responseStatus"],
        )
        assert 3 == len(published.requests)

    run(main)


class FaultyStore:
    """A store of which some methods fail."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.failing_methods: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if name not in self.failing_methods:
            return method

        async def fail(*_args: object, **_kwargs: object) -> None:
            msg = f"{name}: the disk is full"
            raise StoreUnavailable(msg)

        return fail


def test_store_outage_counts_no_attempt_and_recovers() -> None:
    """A result is kept until the store accepts it; health reports the store meanwhile."""

    async def main() -> None:
        target = FakeTarget()
        harness = EngineHarness(target)
        faulty = FaultyStore(harness.store)
        harness = EngineHarness(target, store=faulty)
        await harness.engine.start()
        faulty.failing_methods = {"finish", "claim", "sweep"}
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(20)
        assert "store" in harness.context.health.failing
        assert 1 == len(target.requests)

        faulty.failing_methods = set()
        await asyncio.sleep(5)
        assert {} == harness.context.health.failing
        assert Status.SUCCEEDED is (await harness.task(task)).status
        assert 1 == len(target.requests)
        await harness.engine.stop(1)

    run(main)


def test_result_after_a_lost_lease_is_discarded() -> None:
    """Another worker has the task: the result changes nothing, and is counted."""

    async def main() -> None:
        async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(200)  # past every timeout and the lease
            return OK

        first = EngineHarness(FakeTarget(respond_slowly))
        (task,) = await first.add(first.new_task())
        second = EngineHarness(
            FakeTarget(OK), store=first.store, seed=2, lease=LeaseTerms("second", 70_000, 1_000)
        )
        await second.engine.start()
        await asyncio.sleep(150)
        stored = await first.task(task)
        assert (Status.SUCCEEDED, 2) == (stored.status, stored.attempts)
        outcomes = [attempt.outcome for attempt in await first.attempts(task)]
        assert ["lost", "success"] == outcomes

        await asyncio.sleep(100)
        assert stored == await first.task(task)
        assert 1 == first.event_kinds().count("superseded")
        page, _ = first.metrics.render(await first.store.counters(), 0.0)
        assert b"retry_superseded_total 1.0" in page
        await second.engine.stop(1)

    run(main)


def test_rejected_result_does_not_affect_its_group() -> None:
    """Its lease expires by itself; the other results of the group are written."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        class Picky(ModelStore):
            async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
                if any(result.task.key == "odd" for result in results):
                    raise ValueError
                return await super().finish(results)

        harness = EngineHarness(
            FakeTarget(OK), store=Picky(lambda: int((EPOCH + loop.time()) * 1000))
        )
        await harness.engine.start()
        odd, *others = await harness.add(
            harness.new_task(key="odd"), *[harness.new_task() for _ in range(20)]
        )
        await asyncio.sleep(5)

        assert {Status.SUCCEEDED} == {(await harness.task(task)).status for task in others}
        assert Status.IN_FLIGHT is (await harness.task(odd)).status
        await harness.engine.stop(1)

    run(main)


class OutageStore(ModelStore):
    """A store with outages."""

    is_away = False

    async def claim(
        self, terms: LeaseTerms, *, limit: int, per_lane: int, skipped_lanes: Collection[str] = ()
    ) -> ClaimResult:
        """Claim, unless there is an outage."""
        self._check()
        return await super().claim(
            terms, limit=limit, per_lane=per_lane, skipped_lanes=skipped_lanes
        )

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Write, unless there is an outage."""
        self._check()
        return await super().finish(results)

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        """Release, unless there is an outage."""
        self._check()
        return await super().release(releases)

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailable("away")


@pytest.mark.parametrize("count", [20, 1900, 2900])
@pytest.mark.parametrize("outage", [60.0, 100.0, 101.3, 120.7])
def test_attempts_made_during_a_store_outage_are_not_repeated(outage: float, count: int) -> None:
    """Results are written before the next claim, even if their leases have expired."""

    async def main() -> None:
        async def slow(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(1)
            return OK

        target, loop = FakeTarget(slow), asyncio.get_running_loop()
        store = OutageStore(lambda: int((EPOCH + loop.time()) * 1000))
        harness = EngineHarness(target, store=store, lease=LeaseTerms("worker", 70_000, 1_000))
        await harness.engine.start()
        targets = [f"http://{number % 40}.example:80/" for number in range(count)]
        tasks = await harness.add(*[harness.new_task(target) for target in targets])
        await asyncio.sleep(0.5)
        store.is_away = True
        await asyncio.sleep(outage)
        store.is_away = False
        await asyncio.sleep(30)

        assert count == len(target.requests)
        logs = [[one.outcome for one in await harness.attempts(task)] for task in tasks]
        assert [["success"]] * count == logs
        assert 0 == harness.context.health.delayed_writes
        later = await harness.add(harness.new_task())
        await asyncio.sleep(5)
        assert Status.SUCCEEDED is (await harness.task(later[0])).status
        await harness.engine.stop(1)

    run(main)


def test_stop_during_a_store_outage_cancels_all_writes() -> None:
    """A closed store is not called any more."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = OutageStore(lambda: int((EPOCH + loop.time()) * 1000))
        harness = EngineHarness(FakeTarget(OK), store=store)
        await harness.engine.start()
        await harness.add(harness.new_task(), harness.new_task(delay=900))
        store.is_away = True

        await harness.engine.stop(5)

        assert {asyncio.current_task()} == asyncio.all_tasks()

    run(main)


def test_lane_is_parked_when_its_breaker_opens() -> None:
    """Its tasks return to the store, and none is sent."""

    async def main() -> None:
        target = FakeTarget(BUSY)
        harness = EngineHarness(
            target, breaker=lambda: Breaker(min_calls=5, open_for=30.0, spread=0.0)
        )
        await harness.engine.start()
        tasks = await harness.add(
            *[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)]
        )
        await asyncio.sleep(5)
        lane = await harness.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert lane.parked_until is not None
        assert 0 == len(harness.engine.worker.leased_tasks)
        sent = len(target.requests)

        await asyncio.sleep(20)
        assert sent == len(target.requests)
        assert "parked" in harness.event_kinds()
        await harness.engine.stop(1)

    run(main)


def test_parked_lane_is_probed_and_recovers() -> None:
    """After its time a few probes are sent; if they succeed, the other tasks follow."""

    async def main() -> None:
        target = FakeTarget(*[BUSY] * 20, OK)
        harness = EngineHarness(
            target, breaker=lambda: Breaker(min_calls=5, open_for=30.0, spread=0.0)
        )
        await harness.engine.start()
        tasks = await harness.add(
            *[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)]
        )
        await asyncio.sleep(300)

        assert {Status.SUCCEEDED} == {(await harness.task(task)).status for task in tasks}
        event_kinds = harness.event_kinds()
        assert (
            event_kinds.index("parked")
            < event_kinds.index("probing")
            < event_kinds.index("resumed")
        )
        lane = await harness.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert lane.parked_until is None
        await harness.engine.stop(1)

    run(main)


def test_failed_probe_parks_the_lane_for_longer() -> None:
    """Each opening doubles the time, and the store has the number of openings."""

    async def main() -> None:
        harness = EngineHarness(
            FakeTarget(BUSY), breaker=lambda: Breaker(min_calls=5, open_for=30.0, spread=0.0)
        )
        await harness.engine.start()
        tasks = await harness.add(
            *[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)]
        )
        await asyncio.sleep(40)
        lane = await harness.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert lane.parked_until is not None
        assert 2 == lane.consecutive_opens
        left = lane.parked_until - harness.context.clock.now_ms()
        assert 45_000 < left <= 60_000
        await harness.engine.stop(1)

    run(main)


def test_breaker_state_is_shared_through_the_store() -> None:
    """A second worker without failures gets probes only, and parks for the right time."""

    async def main() -> None:
        def breaker() -> Breaker:
            return Breaker(min_calls=5, open_for=30.0, spread=0.0)

        first = EngineHarness(FakeTarget(BUSY), breaker=breaker)
        tasks = await first.add(*[first.new_task(overrides={"maxAttempts": 50}) for _ in range(20)])
        await asyncio.sleep(5)
        await first.engine.stop(1)

        target = FakeTarget(BUSY)
        second = EngineHarness(
            target,
            store=first.store,
            seed=2,
            breaker=breaker,
            lease=LeaseTerms("second", 70_000, 1_000),
        )
        await second.engine.start()
        await asyncio.sleep(35)
        assert 1 <= len(target.requests) <= 3
        lane = await first.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert 2 == lane.consecutive_opens
        await second.engine.stop(1)

    run(main)
