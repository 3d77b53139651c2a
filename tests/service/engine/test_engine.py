from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tarry.core.breaker import Breaker
from tarry.errors import StoreUnavailable
from tarry.service.delivery.messages import DeliveryRequest, DeliveryResult, Fault
from tarry.service.engine.context import EngineLimits
from tarry.service.model import Status
from tarry.service.store import CancelStatus, Lease, RetryNowStatus
from tests.service.engine.rig import BUSY, OK, Rig, Target, decided, run


def test_new_task_goes_straight_to_its_target() -> None:
    """A task that is due is sent without a claim, with its key and its number."""

    async def main() -> None:
        target = Target()
        rig = Rig(target)
        (task,) = await rig.add(rig.new(body=b"hello", headers={"x-a": "1"}))
        await asyncio.sleep(0.1)

        (request,) = target.seen
        assert ("http://a.example:80/", "POST", b"hello") == (
            request.url,
            request.method,
            request.body,
        )
        ours = [("Idempotency-Key", f'"{task.key}"'), ("X-Retry-Attempt", "1")]
        assert [("x-a", "1"), *ours] == request.headers
        assert Status.SUCCEEDED is (await rig.task(task)).status
        assert ["added", "attempt", "succeeded"] == rig.kinds()

    run(main)


def test_failure_is_retried_with_the_same_key_and_its_number() -> None:
    """A 503 is followed by a wait of the policy, then by attempt 2, all in the log."""

    async def main() -> None:
        target = Target(BUSY, OK)
        rig = Rig(target)
        (task,) = await rig.add(rig.new())
        await asyncio.sleep(5)

        first, second = target.seen
        assert first.headers[0] == second.headers[0]
        assert [("X-Retry-Attempt", "1")] == first.headers[1:]
        assert [("X-Retry-Attempt", "2")] == second.headers[1:]
        ended = await rig.task(task)
        assert (Status.SUCCEEDED, 2) == (ended.status, ended.attempts)
        log = await rig.attempts(task)
        assert ["transient", "success"] == [attempt.outcome for attempt in log]
        assert "wait" == decided(log[0])["action"]
        assert log[1].started_at >= log[1].scheduled_at
        waited = log[1].scheduled_at - log[0].started_at
        assert 0 <= waited - decided(log[0])["delay_ms"] < 2

    run(main)


def test_retry_within_the_horizon_keeps_its_lease() -> None:
    """A retry that is near is not claimed: it stays with its worker."""

    async def main() -> None:
        rig = Rig(Target(BUSY, OK))
        (task,) = await rig.add(rig.new())
        await asyncio.sleep(0)
        await asyncio.sleep(3)

        assert Status.SUCCEEDED is (await rig.task(task)).status  # nothing claims in this test

    run(main)


def test_retry_beyond_the_horizon_is_claimed() -> None:
    """A retry that is far off goes back to the store, and comes by a claim."""

    async def main() -> None:
        rig = Rig(Target(DeliveryResult(status=503, headers=[("retry-after", "100")]), OK))
        (task,) = await rig.add(rig.new())
        await asyncio.sleep(1)
        waiting = await rig.task(task)
        assert (Status.PENDING, None) == (waiting.status, waiting.worker)
        assert not len(rig.engine.worker.leased_tasks)

        await rig.engine.start()
        await asyncio.sleep(200)
        await rig.engine.stop(1)
        log = await rig.attempts(task)
        assert ["transient", "success"] == [attempt.outcome for attempt in log]
        assert 100_000 <= log[1].started_at - log[0].started_at
        assert 0 <= log[1].started_at - log[1].scheduled_at <= 1

    run(main)


def test_attempts_end() -> None:
    """After the last attempt a task is dead, with the reason of the core."""

    async def main() -> None:
        target = Target(BUSY)
        rig = Rig(target)
        (task,) = await rig.add(rig.new(overrides={"maxAttempts": 3}))
        await asyncio.sleep(60)

        ended = await rig.task(task)
        assert (Status.EXHAUSTED, "attempts", 3) == (ended.status, ended.reason, ended.attempts)
        assert 3 == len(target.seen)
        assert "stop" == decided((await rig.attempts(task))[-1])["action"]
        assert "exhausted" == rig.kinds()[-1]

    run(main)


def test_what_the_target_says_is_heeded() -> None:
    """A 404, a redirect and x-should-retry: false end a task at once; a 410 does too."""

    async def main() -> None:
        said = {
            "permanent": [
                DeliveryResult(status=404),
                DeliveryResult(status=302),
                DeliveryResult(status=410),
            ],
            "overloaded": [DeliveryResult(status=503, headers=[("x-should-retry", "false")])],
        }
        for reason, answers in said.items():
            for answer in answers:
                rig = Rig(Target(answer))
                (task,) = await rig.add(rig.new())
                await asyncio.sleep(60)
                ended = await rig.task(task)
                assert (Status.EXHAUSTED, reason) == (ended.status, ended.reason)
                assert 1 == ended.attempts

    run(main)


def test_a_success_that_the_policy_asks_again_for_is_none() -> None:
    """A 202 of who is not ready yet, as in the library; the log knows the jitter of its day."""

    async def main() -> None:
        target = Target(DeliveryResult(status=202), DeliveryResult(status=200))
        rig = Rig(target)
        overrides = {"retryableStatusCodes": [202], "jitterType": "EQUAL"}
        (task,) = await rig.add(rig.new(overrides=overrides))
        await asyncio.sleep(60)

        assert (Status.SUCCEEDED, 2) == (
            (await rig.task(task)).status,
            (await rig.task(task)).attempts,
        )
        assert "equal" == decided((await rig.attempts(task))[0])["jitter"]

    run(main)


def test_address_that_is_blocked_is_not_tried_again() -> None:
    """The guard's no is final."""

    async def main() -> None:
        rig = Rig(Target(DeliveryResult(fault=Fault.BLOCKED, error="10.0.0.1 is private")))
        (task,) = await rig.add(rig.new())
        await asyncio.sleep(60)

        assert (Status.EXHAUSTED, "permanent") == (
            (await rig.task(task)).status,
            (await rig.task(task)).reason,
        )
        (attempt,) = await rig.attempts(task)
        assert ("blocked", "10.0.0.1 is private") == (attempt.error_class, attempt.error)

    run(main)


def test_fault_of_our_own_charges_nobody() -> None:
    """A failure on our side is no attempt, does not touch the breaker, and turns health red."""

    async def main() -> None:
        ours = DeliveryResult(fault=Fault.INTERNAL, error="proxy down")
        target = Target(*[ours] * 30, OK)
        rig = Rig(target)
        await rig.engine.start()
        (task,) = await rig.add(rig.new())
        await asyncio.sleep(10)
        assert {"delivery": "proxy down"} == rig.context.health.failing
        assert 0 == (await rig.task(task)).attempts

        await asyncio.sleep(100)
        ended = await rig.task(task)
        assert (Status.SUCCEEDED, 1) == (ended.status, ended.attempts)
        assert {} == rig.context.health.failing
        await rig.engine.stop(1)

    run(main)


def test_delivery_that_raises_is_a_fault_of_our_own() -> None:
    """An error in our code costs the task nothing but time."""

    async def broken(_request: DeliveryRequest) -> DeliveryResult:
        msg = "bug"
        raise RuntimeError(msg)

    async def main() -> None:
        rig = Rig(Target(broken, OK))
        await rig.engine.start()
        (task,) = await rig.add(rig.new())
        await asyncio.sleep(10)
        await rig.engine.stop(1)

        ended = await rig.task(task)
        assert (Status.SUCCEEDED, 1) == (ended.status, ended.attempts)

    run(main)


def test_dead_lane_is_parked_and_costs_nothing() -> None:
    """When the breaker opens, the lane is parked, its tasks go back, and none is sent."""

    async def main() -> None:
        target = Target(BUSY)
        rig = Rig(target, breaker=lambda: Breaker(min_calls=5, open_for=30.0, spread=0.0))
        await rig.engine.start()
        tasks = await rig.add(*[rig.new(overrides={"maxAttempts": 50}) for _ in range(20)])
        await asyncio.sleep(5)
        lane = await rig.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert lane.parked_until is not None
        assert 0 == len(rig.engine.worker.leased_tasks)
        sent = len(target.seen)

        await asyncio.sleep(20)
        assert sent == len(target.seen)
        assert "parked" in rig.kinds()
        await rig.engine.stop(1)

    run(main)


def test_parked_lane_is_probed_and_drains() -> None:
    """When its time is up a few probes go; they succeed, and the rest follows."""

    async def main() -> None:
        target = Target(*[BUSY] * 20, OK)
        rig = Rig(target, breaker=lambda: Breaker(min_calls=5, open_for=30.0, spread=0.0))
        await rig.engine.start()
        tasks = await rig.add(*[rig.new(overrides={"maxAttempts": 50}) for _ in range(20)])
        await asyncio.sleep(300)

        assert {Status.SUCCEEDED} == {(await rig.task(task)).status for task in tasks}
        kinds = rig.kinds()
        assert kinds.index("parked") < kinds.index("probing") < kinds.index("resumed")
        lane = await rig.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert lane.parked_until is None
        await rig.engine.stop(1)

    run(main)


def test_probe_that_fails_parks_the_lane_for_longer() -> None:
    """Each opening doubles the time, and the store knows how often that was."""

    async def main() -> None:
        rig = Rig(Target(BUSY), breaker=lambda: Breaker(min_calls=5, open_for=30.0, spread=0.0))
        await rig.engine.start()
        tasks = await rig.add(*[rig.new(overrides={"maxAttempts": 50}) for _ in range(20)])
        await asyncio.sleep(40)
        lane = await rig.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert lane.parked_until is not None
        assert 2 == lane.opened
        left = lane.parked_until - rig.context.clock.now()
        assert 45_000 < left <= 60_000
        await rig.engine.stop(1)

    run(main)


def test_empty_budget_defers_and_consumes_no_attempts() -> None:
    """Retries beyond the budget wait; all tasks get through in the end."""

    async def main() -> None:
        target = Target(*[BUSY] * 300, OK)
        limits = EngineLimits(lane_in_flight=1000, in_flight=1000)
        rig = Rig(target, limits=limits, breaker=lambda: Breaker(min_calls=10_000))
        await rig.engine.start()
        tasks = await rig.add(*[rig.new() for _ in range(300)])
        await asyncio.sleep(120)

        assert {Status.SUCCEEDED} == {(await rig.task(task)).status for task in tasks}
        assert {2} == {(await rig.task(task)).attempts for task in tasks}
        assert "deferred" in rig.kinds()
        await rig.engine.stop(1)

    run(main)


def test_slow_lane_does_not_hold_up_another() -> None:
    """A lane that never answers keeps its own places; others have theirs."""

    async def main() -> None:
        async def never(request: DeliveryRequest) -> DeliveryResult:
            if "slow" in request.url:
                await asyncio.sleep(1000)
            return OK

        limits = EngineLimits(in_flight=20, lane_in_flight=10)
        rig = Rig(Target(never), limits=limits)
        await rig.engine.start()
        await rig.add(*[rig.new("http://slow.example:80/") for _ in range(100)])
        quick = await rig.add(*[rig.new("http://quick.example:80/") for _ in range(100)])
        await asyncio.sleep(1)

        assert {Status.SUCCEEDED} == {(await rig.task(task)).status for task in quick}

    run(main)


def test_retry_that_is_due_goes_before_new_tasks() -> None:
    """A task that has begun was promised a time; those that queue in its lane were not."""

    async def main() -> None:
        async def slow(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(0.1)
            return OK

        target = Target(BUSY, slow)
        rig = Rig(target, limits=EngineLimits(lane_in_flight=1))
        await rig.engine.start()
        tasks = await rig.add(*[rig.new() for _ in range(50)])
        await asyncio.sleep(30)

        (log,) = [log for log in [await rig.attempts(task) for task in tasks] if len(log) == 2]
        waited = (log[1].started_at - log[1].scheduled_at) / 1000
        assert 51 == len(target.seen)
        assert waited <= 0.1

    run(main)


def test_total_budget_ends_a_task_before_an_attempt_that_cannot_fit() -> None:
    """A task whose time is over is dead without another attempt."""

    async def main() -> None:
        target = Target(OK)
        rig = Rig(target)
        (task,) = await rig.add(rig.new(overrides={"totalBudgetMs": 5000}))
        await rig.engine.pause(task.lane)  # too late for the task that runs
        later = rig.new(overrides={"totalBudgetMs": 5000})
        (late,) = await rig.add(later)
        await asyncio.sleep(10)
        await rig.engine.resume(task.lane)
        await rig.engine.start()
        await asyncio.sleep(5)
        await rig.engine.stop(1)

        ended = await rig.task(late)
        assert (Status.EXHAUSTED, "total-budget", 0) == (
            ended.status,
            ended.reason,
            ended.attempts,
        )
        assert 1 == len(target.seen)

    run(main)


def test_cancel_of_a_task_that_waits_here_is_confirmed() -> None:
    """A leased task whose time has not come is cancelled for good: no attempt follows."""

    async def main() -> None:
        target = Target()
        rig = Rig(target)
        (task,) = await rig.add(rig.new(delay=500))
        assert CancelStatus.CANCELLED is await rig.engine.cancel("default", task.id)
        await asyncio.sleep(5)

        assert Status.CANCELLED is (await rig.task(task)).status
        assert [] == target.seen
        assert CancelStatus.TERMINAL is await rig.engine.cancel("default", task.id)
        assert await rig.engine.cancel("other", task.id) is None

    run(main)


def test_cancel_while_an_attempt_runs_lets_it_finish_and_stops_the_next() -> None:
    """The attempt is logged, and no other follows."""

    async def main() -> None:
        async def slowly(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(1)
            return BUSY

        target = Target(slowly)
        rig = Rig(target)
        (task,) = await rig.add(rig.new())
        await asyncio.sleep(0.1)
        assert CancelStatus.REQUESTED is await rig.engine.cancel("default", task.id)
        await asyncio.sleep(60)

        ended = await rig.task(task)
        assert (Status.CANCELLED, 1) == (ended.status, len(await rig.attempts(task)))
        assert 1 == len(target.seen)

    run(main)


def test_retry_now_does_not_wait() -> None:
    """A task that waits here, and one that waits in the store, are sent at once, and only once."""

    async def main() -> None:
        target = Target()
        rig = Rig(target)
        await rig.engine.start()
        near, far = await rig.add(rig.new(delay=900), rig.new(delay=900_000))
        assert RetryNowStatus.DUE is await rig.engine.retry_now("default", near.id)
        assert RetryNowStatus.DUE is await rig.engine.retry_now("default", far.id)
        await asyncio.sleep(0.5)
        assert 2 == len(target.seen)

        await asyncio.sleep(1000)
        assert 2 == len(target.seen)
        assert RetryNowStatus.FINISHED is await rig.engine.retry_now("default", near.id)
        assert await rig.engine.retry_now("default", "0190a000-0000-7000-8000-ffffffffffff") is None
        await rig.engine.stop(1)

    run(main)


def test_waiter_gets_the_end_and_the_answer() -> None:
    """Who waits for a task is told when it is over; who waits too short gets nothing."""

    async def main() -> None:
        rig = Rig(Target(BUSY, DeliveryResult(status=201, excerpt=b"made")))
        (task,) = await rig.add(rig.new())
        assert await rig.engine.wait_for_completion(task.id, 0.0) is None
        settled = await rig.engine.wait_for_completion(task.id, 60)
        assert settled is not None
        assert settled.delivered is not None
        assert (Status.SUCCEEDED, b"made") == (settled.status, settled.delivered.excerpt)

    run(main)


def test_callback_is_a_task_of_its_own() -> None:
    """The end of a task is posted to its callbackUrl, and retried like anything."""

    async def main() -> None:
        async def by_url(request: DeliveryRequest) -> DeliveryResult:
            return OK if "a.example" in request.url or len(told.seen) > 2 else BUSY

        told = Target(by_url)
        rig = Rig(told)
        await rig.engine.start()
        (task,) = await rig.add(rig.new(callback_url="http://hook.example/done"))
        await asyncio.sleep(30)
        await rig.engine.stop(1)

        callback = told.seen[-1]
        assert "http://hook.example/done" == callback.url
        news = msgspec.json.decode(callback.body)
        assert (task.id, "SUCCEEDED", 200) == (
            news["taskId"],
            news["status"],
            news["responseStatus"],
        )
        assert 3 == len(told.seen)

    run(main)


def test_stop_hands_back_what_has_not_begun_and_waits_for_what_runs() -> None:
    """After a stop nothing is leased, and the attempt that ran is written down."""

    async def main() -> None:
        async def slowly(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(3)
            return OK

        rig = Rig(Target(slowly), limits=EngineLimits(in_flight=1))
        await rig.engine.start()
        runs, waits = await rig.add(rig.new(), rig.new())
        await asyncio.sleep(1)
        await rig.engine.stop(10)

        assert Status.SUCCEEDED is (await rig.task(runs)).status
        waiting = await rig.task(waits)
        assert (Status.PENDING, None, 0) == (waiting.status, waiting.worker, waiting.attempts)

    run(main)


def test_stop_does_not_wait_for_ever() -> None:
    """An attempt that outlives the patience is cut off; its lease ends by itself."""

    async def main() -> None:
        async def never(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(1e6)
            return OK

        rig = Rig(Target(never))
        (task,) = await rig.add(rig.new())
        await asyncio.sleep(1)
        await rig.engine.stop(5)

        assert Status.IN_FLIGHT is (await rig.task(task)).status

    run(main)


class Flaky:
    """A store that fails when it is told to."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.down: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if name not in self.down:
            return method

        async def fail(*_args: object, **_kwargs: object) -> None:
            msg = f"{name}: the disk is full"
            raise StoreUnavailable(msg)

        return fail


def test_store_that_is_away_charges_nobody_and_comes_back() -> None:
    """An answer is kept until the store takes it; readiness is red meanwhile."""

    async def main() -> None:
        target = Target()
        rig = Rig(target)
        flaky = Flaky(rig.store)
        rig = Rig(target, store=flaky)
        await rig.engine.start()
        flaky.down = {"finish", "claim", "sweep"}
        (task,) = await rig.add(rig.new())
        await asyncio.sleep(20)
        assert "store" in rig.context.health.failing
        assert 1 == len(target.seen)

        flaky.down = set()
        await asyncio.sleep(5)
        assert {} == rig.context.health.failing
        assert Status.SUCCEEDED is (await rig.task(task)).status
        assert 1 == len(target.seen)
        await rig.engine.stop(1)

    run(main)


def test_task_whose_lease_was_lost_is_not_started() -> None:
    """A worker that was held up past its lease hands a task back, and does not send it."""

    async def main() -> None:
        target = Target()
        ahead = 0.0
        loop = asyncio.get_running_loop()
        rig = Rig(
            target,
            lease=Lease("worker", 40_000, 1_000),
            monotonic=lambda: loop.time() + ahead,
        )
        (task,) = await rig.add(rig.new(delay=900))
        ahead = 60.0  # the process was stopped meanwhile
        await asyncio.sleep(2)

        assert [] == target.seen
        assert Status.PENDING is (await rig.task(task)).status

    run(main)


@pytest.mark.parametrize(("lost", "sent"), [(1, 1), (9, 1), (10, 0)])
def test_lost_attempt_does_not_end_a_task(lost: int, sent: int) -> None:
    """Nobody knows whether it was made, so another takes its place; but not for ever."""

    async def main() -> None:
        target = Target(OK)
        rig = Rig(target, limits=EngineLimits(in_flight=1))
        new = rig.new(overrides={"maxAttempts": 1})
        new.direct = True
        await rig.store.add([new], Lease("dead", 10_000, 1_000))
        for worker in range(lost - 1):
            await asyncio.sleep(11)
            lease = Lease(f"dead {worker}", 10_000, 1_000)
            assert (await rig.store.claim(lease, limit=1, per_lane=1)).tasks
        await asyncio.sleep(11)

        await rig.engine.start()
        await asyncio.sleep(5)

        ended = await rig.task(new.task)
        assert sent == len(target.seen)
        assert (Status.SUCCEEDED if sent else Status.EXHAUSTED) is ended.status
        assert ["lost"] * lost == [one.outcome for one in await rig.attempts(ended)][:lost]
        assert [1] == [event.attempts for event in rig.told if event.kind == "lost"]
        page, _ = rig.metrics.render(await rig.store.counters(), 0.0)
        assert b'retry_attempts_total{outcome="lost",policy=""} 1.0' in page

    run(main)


def test_caller_who_leaves_while_a_task_is_written_does_not_stop_it() -> None:
    """It is leased to this process, so this process makes it, and at once."""

    async def main() -> None:
        target = Target(OK)
        rig = Rig(target)
        add, written = rig.store.add, asyncio.Event()

        async def slowly(*args: Any, **options: Any) -> Any:
            await written.wait()
            return await add(*args, **options)

        rig.store.add = slowly  # type: ignore[method-assign]
        adding = asyncio.ensure_future(rig.add(rig.new()))
        await asyncio.sleep(1)
        adding.cancel()
        await asyncio.wait([adding])
        written.set()
        await asyncio.sleep(1)

        assert adding.cancelled()
        assert 1 == len(target.seen)

    run(main)


def test_result_after_a_lost_lease_is_void() -> None:
    """Somebody else has taken the task over: our finish changes nothing, and is counted."""

    async def main() -> None:
        async def slowly(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(200)  # past every timeout and the lease
            return OK

        first = Rig(Target(slowly))
        (task,) = await first.add(first.new())
        second = Rig(Target(OK), store=first.store, seed=2, lease=Lease("second", 70_000, 1_000))
        await second.engine.start()
        await asyncio.sleep(150)
        taken = await first.task(task)
        assert (Status.SUCCEEDED, 2) == (taken.status, taken.attempts)
        outcomes = [attempt.outcome for attempt in await first.attempts(task)]
        assert ["lost", "success"] == outcomes

        await asyncio.sleep(100)
        assert taken == await first.task(task)
        assert 1 == first.kinds().count("superseded")
        page, _ = first.metrics.render(await first.store.counters(), 0.0)
        assert b"retry_superseded_total 1.0" in page
        await second.engine.stop(1)

    run(main)


def test_breaker_is_shared_by_way_of_the_store() -> None:
    """A second worker that never saw a failure gets probes only, and parks for as long as due."""

    async def main() -> None:
        def breaker() -> Breaker:
            return Breaker(min_calls=5, open_for=30.0, spread=0.0)

        first = Rig(Target(BUSY), breaker=breaker)
        tasks = await first.add(*[first.new(overrides={"maxAttempts": 50}) for _ in range(20)])
        await asyncio.sleep(5)
        await first.engine.stop(1)

        target = Target(BUSY)
        second = Rig(
            target,
            store=first.store,
            seed=2,
            breaker=breaker,
            lease=Lease("second", 70_000, 1_000),
        )
        await second.engine.start()
        await asyncio.sleep(35)
        assert 1 <= len(target.seen) <= 3
        lane = await first.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert 2 == lane.opened
        await second.engine.stop(1)

    run(main)


def test_lane_opened_by_a_person_is_open_here_too() -> None:
    """Resume closes the breaker and the tasks flow again, slowly at first."""

    async def main() -> None:
        target = Target(*[BUSY] * 5, OK)
        rig = Rig(target, breaker=lambda: Breaker(min_calls=5, open_for=300.0, spread=0.0))
        await rig.engine.start()
        tasks = await rig.add(*[rig.new(overrides={"maxAttempts": 50}) for _ in range(5)])
        await asyncio.sleep(10)
        assert 5 == len(target.seen)
        standing = rig.engine.local_stats(tasks[0].lane)
        assert standing is not None
        assert "open" == standing["breaker"]

        await rig.engine.resume(tasks[0].lane)
        await asyncio.sleep(20)
        assert {Status.SUCCEEDED} == {(await rig.task(task)).status for task in tasks}
        await rig.engine.reset(tasks[0].lane)
        assert rig.engine.local_stats("default/http:nobody.example:80") is None
        await rig.engine.stop(1)

    run(main)


def test_policy_that_changes_is_used_from_the_next_decision_on() -> None:
    """A new version is taken up within a second, also when another process wrote it."""

    async def main() -> None:
        from tarry.service.model import PolicyVersion

        target = Target(BUSY)
        rig = Rig(target)
        await rig.engine.start()
        document = msgspec.json.encode({"maxAttempts": 50, "maxDelayMs": 1000})
        await rig.store.put_policy(
            PolicyVersion(tenant="default", id="p", version=1, document=document), replace=False
        )
        (task,) = await rig.add(rig.new(policy_id="p"))
        await asyncio.sleep(6)
        assert Status.EXHAUSTED is not (await rig.task(task)).status

        document = msgspec.json.encode({"maxAttempts": 2})
        await rig.store.put_policy(
            PolicyVersion(tenant="default", id="p", version=2, document=document), replace=True
        )
        await asyncio.sleep(60)
        ended = await rig.task(task)
        assert (Status.EXHAUSTED, "attempts") == (ended.status, ended.reason)
        assert ended.attempts < 20
        await rig.engine.stop(1)

    run(main)


def test_policy_that_is_gone_leaves_the_default() -> None:
    """A task whose policy was deleted goes on by the default one, and nothing spins."""

    async def main() -> None:
        rig = Rig(Target(BUSY))
        (task,) = await rig.add(rig.new(policy_id="gone"))
        await asyncio.sleep(60)

        ended = await rig.task(task)
        assert (Status.EXHAUSTED, 5) == (ended.status, ended.attempts)

    run(main)


def test_cancel_is_told() -> None:
    """Whoever listens hears of a task that was cancelled while it waited."""

    async def main() -> None:
        rig = Rig(Target())
        near, far = await rig.add(rig.new(delay=500), rig.new(delay=500_000))
        for task in (near, far):
            await rig.engine.cancel("default", task.id)

        assert ["added", "added", "cancelled", "cancelled"] == rig.kinds()

    run(main)


@pytest.mark.parametrize(
    ("answer", "logged"),
    [
        (DeliveryResult(status=404, excerpt=b"gone"), ("gone", False)),
        (DeliveryResult(status=404, excerpt=b"g" * 512), ("g" * 512, False)),
        (DeliveryResult(status=404, excerpt=b"g" * 513), ("g" * 512, True)),
        (DeliveryResult(status=404, excerpt=b"go\nne", truncated=True), ("go ne", True)),
        (DeliveryResult(status=404), (None, False)),
        (DeliveryResult(status=200, excerpt=b"fine", truncated=True), (None, False)),
    ],
)
def test_log_says_whether_an_answer_had_more(
    answer: DeliveryResult, logged: tuple[str | None, bool]
) -> None:
    """Of a failed attempt 512 characters are kept, of one that went well nothing."""

    async def main() -> None:
        rig = Rig(Target(answer))
        [task] = await rig.add(rig.new())
        await asyncio.sleep(1)
        [attempt] = await rig.attempts(task)
        assert logged == (attempt.excerpt, attempt.truncated)

    run(main)
