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
from tests.service.engine.rig import BUSY, EPOCH, OK, Rig, Target, run
from tests.service.stores.model_store import ModelStore

QUICK = {"maxAttempts": 2, "initialDelayMs": 500, "jitterType": "NONE"}


class SlowClaims(ModelStore):
    """A store that has claimed long before it answers."""

    async def claim(
        self, lease: Lease, *, limit: int, per_lane: int, skip: Collection[str] = ()
    ) -> ClaimResult:
        """Claim, and take a second to say so."""
        claimed = await super().claim(lease, limit=limit, per_lane=per_lane, skip=skip)
        await asyncio.sleep(1)
        return claimed


def test_clock_that_jumps_ahead_delays_no_retry() -> None:
    """A task that was added at the moment of the jump sets no timer for an hour."""

    async def main() -> None:
        loop, jump = asyncio.get_running_loop(), 0
        store = ModelStore(lambda: int((EPOCH + loop.time() + jump) * 1000))
        rig = Rig(Target(OK, BUSY, OK), store=store)
        await rig.engine.start()
        await asyncio.sleep(5.1)

        jump = 3600
        await rig.engine.submit([rig.new()])
        await asyncio.sleep(5)
        (task,) = await rig.engine.submit([rig.new(overrides=QUICK)])
        await asyncio.sleep(5)

        assert Status.SUCCEEDED is (await rig.task(task.task)).status
        assert ["transient", "success"] == [one.outcome for one in await rig.attempts(task.task)]
        await rig.engine.stop(1)

    run(main)


def test_stop_takes_up_a_claim_on_its_way() -> None:
    """What it leased is handed back: else nobody would hold it until its lease ends."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = SlowClaims(lambda: int((EPOCH + loop.time()) * 1000))
        rig = Rig(Target(OK), store=store)
        new = rig.new()
        await store.add([new])
        await rig.engine.start()
        await asyncio.sleep(0.5)

        await rig.engine.stop(30)

        task = await rig.task(new.task)
        assert (Status.PENDING, None, 0) == (task.status, task.worker, task.attempts)

    run(main)


def test_stop_does_not_wait_for_ever_for_a_claim() -> None:
    """A store that hangs has half of the time; the rest is for what runs."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = SlowClaims(lambda: int((EPOCH + loop.time()) * 1000))
        rig = Rig(Target(OK), store=store)
        await rig.engine.start()
        await asyncio.sleep(0.1)
        began = loop.time()

        await rig.engine.stop(0.5)

        assert loop.time() - began <= 0.5

    run(main)


def test_attempt_that_fails_during_the_stop_keeps_no_lease() -> None:
    """Its retry is near, but nobody will be there to make it."""

    async def main() -> None:
        async def busy(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(0.3)
            return BUSY

        rig = Rig(Target(busy))
        await rig.engine.start()
        (task,) = await rig.add(rig.new(overrides=QUICK))
        await asyncio.sleep(0.1)

        await rig.engine.stop(30)

        task = await rig.task(task)
        assert (Status.PENDING, None, 1) == (task.status, task.worker, task.attempts)

    run(main)


def test_retry_that_is_kept_while_it_stops_is_handed_back() -> None:
    """Its lease was asked for before the stop, and came after."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        class SlowFinishes(ModelStore):
            async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
                await asyncio.sleep(1)
                return await super().finish(results)

        store = SlowFinishes(lambda: int((EPOCH + loop.time()) * 1000))
        rig = Rig(Target(BUSY), store=store)
        await rig.engine.start()
        (task,) = await rig.add(rig.new(overrides=QUICK))
        await asyncio.sleep(0.5)

        await rig.engine.stop(30)

        task = await rig.task(task)
        assert (Status.PENDING, None, 1) == (task.status, task.worker, task.attempts)

    run(main)


def test_paused_lane_is_not_called_again() -> None:
    """What runs may finish, and its retry waits for whoever resumes the lane."""

    async def main() -> None:
        async def busy(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(0.1)
            return BUSY

        target = Target(busy)
        rig = Rig(target)
        await rig.engine.start()
        (task,) = await rig.add(rig.new(overrides=QUICK))
        await asyncio.sleep(0.05)

        await rig.engine.pause(task.lane)
        await asyncio.sleep(60)
        paused = len(target.seen)
        await rig.engine.resume(task.lane)
        await asyncio.sleep(5)

        assert (1, 2) == (paused, len(target.seen))
        await rig.engine.stop(1)

    run(main)


class SlowEnds(ModelStore):
    """A store that takes its time to write what came of attempts, and to take leases back."""

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Wait, then write."""
        await asyncio.sleep(0.3)
        return await super().finish(results)

    async def release(self, leases: Sequence[Release]) -> list[FinishStatus]:
        """Wait, then take them back."""
        await asyncio.sleep(0.3)
        return await super().release(leases)


def slow_rig(target: Target) -> Rig:
    """An engine over such a store."""
    loop = asyncio.get_running_loop()
    return Rig(target, store=SlowEnds(lambda: int((EPOCH + loop.time()) * 1000)))


def test_pause_holds_for_a_result_on_its_way() -> None:
    """Its retry was decided before the pause, and its lease was kept: it is handed back."""

    async def main() -> None:
        target = Target(BUSY, OK)
        rig = slow_rig(target)
        await rig.engine.start()
        (task,) = await rig.add(rig.new(overrides=QUICK))
        await asyncio.sleep(0.1)

        await rig.engine.pause(task.lane)
        await asyncio.sleep(60)

        assert 1 == len(target.seen)
        assert (Status.PENDING, None) == (
            (await rig.task(task)).status,
            (await rig.task(task)).worker,
        )
        await rig.store.resume(task.lane)  # by another process
        await asyncio.sleep(5)
        assert 2 == len(target.seen)
        assert not rig.lanes[task.lane].is_paused
        await rig.engine.stop(1)

    run(main)


def test_a_task_that_is_cancelled_on_its_way_back_is_told() -> None:
    """To who listens, and to who waits for its end."""

    async def main() -> None:
        rig = slow_rig(Target(OK))
        await rig.engine.start()
        (task,) = await rig.add(rig.new(delay=900))
        settled = asyncio.create_task(rig.engine.wait_for_completion(task.id, 30))
        await rig.engine.pause(task.lane)
        await asyncio.sleep(0.1)

        assert CancelStatus.REQUESTED is await rig.engine.cancel("default", task.id)

        told = await settled
        assert told is not None
        assert Status.CANCELLED is told.status
        assert "cancelled" in rig.kinds()
        await rig.engine.stop(1)

    run(main)


class Away(ModelStore):
    """A store that can be away."""

    is_away = False

    async def claim(
        self, lease: Lease, *, limit: int, per_lane: int, skip: Collection[str] = ()
    ) -> ClaimResult:
        """Claim, if it is there."""
        self._check()
        return await super().claim(lease, limit=limit, per_lane=per_lane, skip=skip)

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Write, if it is there."""
        self._check()
        return await super().finish(results)

    async def release(self, leases: Sequence[Release]) -> list[FinishStatus]:
        """Take them back, if it is there."""
        self._check()
        return await super().release(leases)

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailable("away")


@pytest.mark.parametrize("count", [20, 1900, 2900])
@pytest.mark.parametrize("outage", [60.0, 100.0, 101.3, 120.7])
def test_what_was_delivered_while_the_store_was_away_is_not_sent_again(
    outage: float, count: int
) -> None:
    """Not even if its lease ended meanwhile: who holds the result writes before it claims."""

    async def main() -> None:
        async def slow(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(1)
            return OK

        target, loop = Target(slow), asyncio.get_running_loop()
        store = Away(lambda: int((EPOCH + loop.time()) * 1000))
        rig = Rig(target, store=store, lease=Lease("worker", 70_000, 1_000))
        await rig.engine.start()
        targets = [f"http://{number % 40}.example:80/" for number in range(count)]
        tasks = await rig.add(*[rig.new(target) for target in targets])
        await asyncio.sleep(0.5)
        store.is_away = True
        await asyncio.sleep(outage)
        store.is_away = False
        await asyncio.sleep(30)

        assert count == len(target.seen)
        logs = [[one.outcome for one in await rig.attempts(task)] for task in tasks]
        assert [["success"]] * count == logs
        assert 0 == rig.context.health.delayed_writes
        later = await rig.add(rig.new())
        await asyncio.sleep(5)
        assert Status.SUCCEEDED is (await rig.task(later[0])).status
        await rig.engine.stop(1)

    run(main)


def test_stop_leaves_nothing_behind_while_the_store_is_away() -> None:
    """What cannot be written is given up: a store that is closed is not asked any more."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = Away(lambda: int((EPOCH + loop.time()) * 1000))
        rig = Rig(Target(OK), store=store)
        await rig.engine.start()
        await rig.add(rig.new(), rig.new(delay=900))
        store.is_away = True

        await rig.engine.stop(5)

        assert {asyncio.current_task()} == asyncio.all_tasks()

    run(main)


def test_body_that_is_not_read_in_time_charges_nobody() -> None:
    """The time for an attempt is for all of it, so that its lease outlasts it."""

    async def main() -> None:
        waits = [100.0, 10.0]

        async def read(_content: TaskContent) -> bytes:
            await asyncio.sleep(waits.pop(0))
            return b"large"

        target = Target(OK)
        rig = Rig(target, read_body=read)
        await rig.engine.start()
        (task,) = await rig.add(rig.new(body_ref="x", overrides={"attemptTimeoutMs": 60_000}))
        await asyncio.sleep(90)

        (request,) = target.seen
        assert (b"large", 50.0) == (request.body, round(request.timeout))
        ended = await rig.task(task)
        assert (Status.SUCCEEDED, 1) == (ended.status, ended.attempts)
        await rig.engine.stop(1)

    run(main)


def test_changes_that_do_not_fit_a_new_policy_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The task goes by the policy as it is, and no other task suffers."""

    async def main() -> None:
        rig = Rig(Target(OK))
        await rig.engine.start()
        document = msgspec.json.encode({"initialDelayMs": 5000, "maxDelayMs": 30_000})
        policy = PolicyVersion(tenant="default", id="p", version=1, document=document)
        await rig.store.put_policy(policy, replace=False)
        odd = rig.new(overrides={"maxDelayMs": 1000}, policy_id="p")

        tasks = await rig.add(odd, rig.new("http://b.example:80/"))
        await asyncio.sleep(5)

        assert [Status.SUCCEEDED] * 2 == [(await rig.task(task)).status for task in tasks]
        await rig.engine.stop(1)

    run(main)
    assert "policy overrides ignored" in caplog.text


def test_task_that_cannot_be_started_stands_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of ours is logged, and the task is given back."""

    async def main() -> None:
        rig = Rig(Target(OK), limits=EngineLimits(in_flight=1))
        get_cached = rig.context.policies.get_cached

        def broken(task, overrides):  # type: ignore[no-untyped-def]
            if task.key == "broken":
                raise ZeroDivisionError
            return get_cached(task, overrides)

        monkeypatch.setattr(rig.context.policies, "get_cached", broken)
        await rig.engine.start()
        bad, good = await rig.add(rig.new(key="broken"), rig.new())
        await asyncio.sleep(5)

        assert Status.SUCCEEDED is (await rig.task(good)).status
        bad = await rig.task(bad)
        assert (Status.PENDING, 0) == (bad.status, bad.attempts)
        await rig.engine.stop(1)

    run(main)


def test_retries_that_the_budget_refuses_are_not_asked_for_in_vain() -> None:
    """They come back one after the other, about as fast as it lets them through."""

    async def main() -> None:
        target = Target(BUSY)
        rig = Rig(target, breaker=lambda: Breaker(min_calls=10**6))
        await rig.engine.start()
        overrides = {"maxAttempts": 50, "initialDelayMs": 100, "maxDelayMs": 100}
        await rig.add(*[rig.new(overrides=overrides) for _ in range(500)])
        await asyncio.sleep(60)

        deferred = rig.kinds().count("deferred")
        retries = len(target.seen) - 500
        assert deferred < 3 * retries
        await rig.engine.stop(1)

    run(main)


def test_result_that_the_store_refuses_takes_no_other_with_it() -> None:
    """Its lease ends by itself; the others of its group are written down."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        class Picky(ModelStore):
            async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
                if any(result.task.key == "odd" for result in results):
                    raise ValueError
                return await super().finish(results)

        rig = Rig(Target(OK), store=Picky(lambda: int((EPOCH + loop.time()) * 1000)))
        await rig.engine.start()
        odd, *others = await rig.add(rig.new(key="odd"), *[rig.new() for _ in range(20)])
        await asyncio.sleep(5)

        assert {Status.SUCCEEDED} == {(await rig.task(task)).status for task in others}
        assert Status.IN_FLIGHT is (await rig.task(odd)).status
        await rig.engine.stop(1)

    run(main)
