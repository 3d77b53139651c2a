"""The engine when clocks jump, stores are slow, people intervene, and it has to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import msgspec
import pytest

from tarry.core.breaker import Breaker
from tarry.errors import StoreUnavailable
from tarry.service.delivery.messages import DeliveryRequest, DeliveryResult
from tarry.service.engine.context import EngineLimits
from tarry.service.model import PolicyVersion, Status, TaskContent
from tarry.service.store import CancelStatus, ClaimResult, FinishStatus, Lease, Release, TaskResult
from tests.service.engine.harness import BUSY, EPOCH, OK, EngineHarness, FakeTarget, run
from tests.service.stores.model_store import ModelStore

QUICK = {"maxAttempts": 2, "initialDelayMs": 500, "jitterType": "NONE"}


class SlowClaimStore(ModelStore):
    """A store that replies to a claim one second after it has leased the tasks."""

    async def claim(
        self, lease: Lease, *, limit: int, per_lane: int, skip: Collection[str] = ()
    ) -> ClaimResult:
        """Claim, and reply after a second."""
        claimed = await super().claim(lease, limit=limit, per_lane=per_lane, skip=skip)
        await asyncio.sleep(1)
        return claimed


def test_clock_jump_does_not_delay_a_retry() -> None:
    """A task that was added during the jump does not set a timer for an hour."""

    async def main() -> None:
        loop, jump = asyncio.get_running_loop(), 0
        store = ModelStore(lambda: int((EPOCH + loop.time() + jump) * 1000))
        harness = EngineHarness(FakeTarget(OK, BUSY, OK), store=store)
        await harness.engine.start()
        await asyncio.sleep(5.1)

        jump = 3600
        await harness.engine.submit([harness.new_task()])
        await asyncio.sleep(5)
        (task,) = await harness.engine.submit([harness.new_task(overrides=QUICK)])
        await asyncio.sleep(5)

        assert Status.SUCCEEDED is (await harness.task(task.task)).status
        assert ["transient", "success"] == [
            one.outcome for one in await harness.attempts(task.task)
        ]
        await harness.engine.stop(1)

    run(main)


def test_stop_releases_the_tasks_of_a_running_claim() -> None:
    """Otherwise no worker would have them until their leases expire."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = SlowClaimStore(lambda: int((EPOCH + loop.time()) * 1000))
        harness = EngineHarness(FakeTarget(OK), store=store)
        new_task = harness.new_task()
        await store.add([new_task])
        await harness.engine.start()
        await asyncio.sleep(0.5)

        await harness.engine.stop(30)

        task = await harness.task(new_task.task)
        assert (Status.PENDING, None, 0) == (task.status, task.worker, task.attempts)

    run(main)


def test_stop_waits_for_a_claim_with_a_timeout() -> None:
    """A store that hangs gets half of the time; the rest is for attempts in flight."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = SlowClaimStore(lambda: int((EPOCH + loop.time()) * 1000))
        harness = EngineHarness(FakeTarget(OK), store=store)
        await harness.engine.start()
        await asyncio.sleep(0.1)
        began = loop.time()

        await harness.engine.stop(0.5)

        assert loop.time() - began <= 0.5

    run(main)


def test_attempt_that_fails_during_stop_keeps_no_lease() -> None:
    """Its retry is due soon, but this process will not be there to run it."""

    async def main() -> None:
        async def busy(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(0.3)
            return BUSY

        harness = EngineHarness(FakeTarget(busy))
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(overrides=QUICK))
        await asyncio.sleep(0.1)

        await harness.engine.stop(30)

        task = await harness.task(task)
        assert (Status.PENDING, None, 1) == (task.status, task.worker, task.attempts)

    run(main)


def test_lease_kept_during_stop_is_released() -> None:
    """The result that keeps it was submitted before the stop, and written after it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        class SlowFinishes(ModelStore):
            async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
                await asyncio.sleep(1)
                return await super().finish(results)

        store = SlowFinishes(lambda: int((EPOCH + loop.time()) * 1000))
        harness = EngineHarness(FakeTarget(BUSY), store=store)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(overrides=QUICK))
        await asyncio.sleep(0.5)

        await harness.engine.stop(30)

        task = await harness.task(task)
        assert (Status.PENDING, None, 1) == (task.status, task.worker, task.attempts)

    run(main)


def test_paused_lane_gets_no_retry() -> None:
    """The attempt in flight finishes; its retry waits until the lane is resumed."""

    async def main() -> None:
        async def busy(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(0.1)
            return BUSY

        target = FakeTarget(busy)
        harness = EngineHarness(target)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(overrides=QUICK))
        await asyncio.sleep(0.05)

        await harness.engine.pause(task.lane)
        await asyncio.sleep(60)
        paused = len(target.requests)
        await harness.engine.resume(task.lane)
        await asyncio.sleep(5)

        assert (1, 2) == (paused, len(target.requests))
        await harness.engine.stop(1)

    run(main)


class SlowResultStore(ModelStore):
    """A store that is slow to write results and to release leases."""

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Wait, then write."""
        await asyncio.sleep(0.3)
        return await super().finish(results)

    async def release(self, leases: Sequence[Release]) -> list[FinishStatus]:
        """Wait, then release."""
        await asyncio.sleep(0.3)
        return await super().release(leases)


def slow_harness(target: FakeTarget) -> EngineHarness:
    """Return an engine with a slow store."""
    loop = asyncio.get_running_loop()
    return EngineHarness(target, store=SlowResultStore(lambda: int((EPOCH + loop.time()) * 1000)))


def test_pause_applies_to_a_result_being_written() -> None:
    """Its retry was decided before the pause and kept its lease: it is released."""

    async def main() -> None:
        target = FakeTarget(BUSY, OK)
        harness = slow_harness(target)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(overrides=QUICK))
        await asyncio.sleep(0.1)

        await harness.engine.pause(task.lane)
        await asyncio.sleep(60)

        assert 1 == len(target.requests)
        assert (Status.PENDING, None) == (
            (await harness.task(task)).status,
            (await harness.task(task)).worker,
        )
        await harness.store.resume(task.lane)  # by another process
        await asyncio.sleep(5)
        assert 2 == len(target.requests)
        assert not harness.lanes[task.lane].is_paused
        await harness.engine.stop(1)

    run(main)


def test_task_cancelled_during_its_release_is_reported() -> None:
    """Listeners get the event, and a waiting caller gets the completion."""

    async def main() -> None:
        harness = slow_harness(FakeTarget(OK))
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(delay=900))
        settled = asyncio.create_task(harness.engine.wait_for_completion(task.id, 30))
        await harness.engine.pause(task.lane)
        await asyncio.sleep(0.1)

        assert CancelStatus.REQUESTED is await harness.engine.cancel("default", task.id)

        published = await settled
        assert published is not None
        assert Status.CANCELLED is published.status
        assert "cancelled" in harness.event_kinds()
        await harness.engine.stop(1)

    run(main)


class OutageStore(ModelStore):
    """A store with outages."""

    is_away = False

    async def claim(
        self, lease: Lease, *, limit: int, per_lane: int, skip: Collection[str] = ()
    ) -> ClaimResult:
        """Claim, unless there is an outage."""
        self._check()
        return await super().claim(lease, limit=limit, per_lane=per_lane, skip=skip)

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Write, unless there is an outage."""
        self._check()
        return await super().finish(results)

    async def release(self, leases: Sequence[Release]) -> list[FinishStatus]:
        """Release, unless there is an outage."""
        self._check()
        return await super().release(leases)

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
        harness = EngineHarness(target, store=store, lease=Lease("worker", 70_000, 1_000))
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


def test_slow_body_read_counts_no_attempt() -> None:
    """The attempt timeout includes reading the body, so that the lease lasts longer."""

    async def main() -> None:
        waits = [100.0, 10.0]

        async def read(_content: TaskContent) -> bytes:
            await asyncio.sleep(waits.pop(0))
            return b"large"

        target = FakeTarget(OK)
        harness = EngineHarness(target, read_body=read)
        await harness.engine.start()
        (task,) = await harness.add(
            harness.new_task(body_ref="x", overrides={"attemptTimeoutMs": 60_000})
        )
        await asyncio.sleep(90)

        (request,) = target.requests
        assert (b"large", 50.0) == (request.body, round(request.timeout))
        ended = await harness.task(task)
        assert (Status.SUCCEEDED, 1) == (ended.status, ended.attempts)
        await harness.engine.stop(1)

    run(main)


def test_overrides_invalid_with_a_new_policy_are_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The task uses the policy without them, and no other task is affected."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(OK))
        await harness.engine.start()
        document = msgspec.json.encode({"initialDelayMs": 5000, "maxDelayMs": 30_000})
        policy = PolicyVersion(tenant="default", id="p", version=1, document=document)
        await harness.store.put_policy(policy, replace=False)
        odd = harness.new_task(overrides={"maxDelayMs": 1000}, policy_id="p")

        tasks = await harness.add(odd, harness.new_task("http://b.example:80/"))
        await asyncio.sleep(5)

        assert [Status.SUCCEEDED] * 2 == [(await harness.task(task)).status for task in tasks]
        await harness.engine.stop(1)

    run(main)
    assert "policy overrides ignored" in caplog.text


def test_task_that_cannot_be_started_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is logged, and the task is released."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(OK), limits=EngineLimits(in_flight=1))
        get_cached = harness.context.policies.get_cached

        def broken(task, overrides):  # type: ignore[no-untyped-def]
            if task.key == "broken":
                raise ZeroDivisionError
            return get_cached(task, overrides)

        monkeypatch.setattr(harness.context.policies, "get_cached", broken)
        await harness.engine.start()
        bad, good = await harness.add(harness.new_task(key="broken"), harness.new_task())
        await asyncio.sleep(5)

        assert Status.SUCCEEDED is (await harness.task(good)).status
        bad = await harness.task(bad)
        assert (Status.PENDING, 0) == (bad.status, bad.attempts)
        await harness.engine.stop(1)

    run(main)


def test_deferred_retries_return_at_the_rate_of_the_budget() -> None:
    """They come back one after the other, about as fast as the budget admits them."""

    async def main() -> None:
        target = FakeTarget(BUSY)
        harness = EngineHarness(target, breaker=lambda: Breaker(min_calls=10**6))
        await harness.engine.start()
        overrides = {"maxAttempts": 50, "initialDelayMs": 100, "maxDelayMs": 100}
        await harness.add(*[harness.new_task(overrides=overrides) for _ in range(500)])
        await asyncio.sleep(60)

        deferred = harness.event_kinds().count("deferred")
        retries = len(target.requests) - 500
        assert deferred < 3 * retries
        await harness.engine.stop(1)

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
