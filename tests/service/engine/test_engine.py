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
from tests.service.engine.harness import BUSY, OK, EngineHarness, FakeTarget, decision_fields, run


def test_new_task_is_sent_without_a_claim() -> None:
    """A due task is sent at once, with its idempotency key and attempt number."""

    async def main() -> None:
        target = FakeTarget()
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task(body=b"hello", headers={"x-a": "1"}))
        await asyncio.sleep(0.1)

        (request,) = target.requests
        assert ("http://a.example:80/", "POST", b"hello") == (
            request.url,
            request.method,
            request.body,
        )
        ours = [("Idempotency-Key", f'"{task.key}"'), ("X-Retry-Attempt", "1")]
        assert [("x-a", "1"), *ours] == request.headers
        assert Status.SUCCEEDED is (await harness.task(task)).status
        assert ["added", "attempt", "succeeded"] == harness.event_kinds()

    run(main)


def test_failure_is_retried_with_the_same_key() -> None:
    """A 503 is followed by the policy's delay and attempt 2; the log has both."""

    async def main() -> None:
        target = FakeTarget(BUSY, OK)
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(5)

        first, second = target.requests
        assert first.headers[0] == second.headers[0]
        assert [("X-Retry-Attempt", "1")] == first.headers[1:]
        assert [("X-Retry-Attempt", "2")] == second.headers[1:]
        ended = await harness.task(task)
        assert (Status.SUCCEEDED, 2) == (ended.status, ended.attempts)
        log = await harness.attempts(task)
        assert ["transient", "success"] == [attempt.outcome for attempt in log]
        assert "wait" == decision_fields(log[0])["action"]
        assert log[1].started_at >= log[1].scheduled_at
        waited = log[1].scheduled_at - log[0].started_at
        assert 0 <= waited - decision_fields(log[0])["delay_ms"] < 2

    run(main)


def test_retry_within_the_horizon_keeps_its_lease() -> None:
    """A retry that is due soon is not claimed again: it stays with its worker."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(BUSY, OK))
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(0)
        await asyncio.sleep(3)

        assert (
            Status.SUCCEEDED is (await harness.task(task)).status
        )  # no scheduler runs in this test

    run(main)


def test_retry_beyond_the_horizon_is_claimed() -> None:
    """A retry that is due later returns to the store, and is claimed in time."""

    async def main() -> None:
        harness = EngineHarness(
            FakeTarget(DeliveryResult(status=503, headers=[("retry-after", "100")]), OK)
        )
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(1)
        waiting = await harness.task(task)
        assert (Status.PENDING, None) == (waiting.status, waiting.worker)
        assert not len(harness.engine.worker.leased_tasks)

        await harness.engine.start()
        await asyncio.sleep(200)
        await harness.engine.stop(1)
        log = await harness.attempts(task)
        assert ["transient", "success"] == [attempt.outcome for attempt in log]
        assert 100_000 <= log[1].started_at - log[0].started_at
        assert 0 <= log[1].started_at - log[1].scheduled_at <= 1

    run(main)


def test_task_is_exhausted_after_the_last_attempt() -> None:
    """After the last attempt the task is a dead letter, with the core's reason."""

    async def main() -> None:
        target = FakeTarget(BUSY)
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task(overrides={"maxAttempts": 3}))
        await asyncio.sleep(60)

        ended = await harness.task(task)
        assert (Status.EXHAUSTED, "attempts", 3) == (ended.status, ended.reason, ended.attempts)
        assert 3 == len(target.requests)
        assert "stop" == decision_fields((await harness.attempts(task))[-1])["action"]
        assert "exhausted" == harness.event_kinds()[-1]

    run(main)


def test_permanent_responses_end_a_task() -> None:
    """A 404, a 410, a redirect and x-should-retry: false end a task at once."""

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
                harness = EngineHarness(FakeTarget(answer))
                (task,) = await harness.add(harness.new_task())
                await asyncio.sleep(60)
                ended = await harness.task(task)
                assert (Status.EXHAUSTED, reason) == (ended.status, ended.reason)
                assert 1 == ended.attempts

    run(main)


def test_success_status_that_the_policy_retries_is_a_failure() -> None:
    """A 202 in retryable_statuses is retried; the log has the jitter that applied."""

    async def main() -> None:
        target = FakeTarget(DeliveryResult(status=202), DeliveryResult(status=200))
        harness = EngineHarness(target)
        overrides = {"retryableStatusCodes": [202], "jitterType": "EQUAL"}
        (task,) = await harness.add(harness.new_task(overrides=overrides))
        await asyncio.sleep(60)

        assert (Status.SUCCEEDED, 2) == (
            (await harness.task(task)).status,
            (await harness.task(task)).attempts,
        )
        assert "equal" == decision_fields((await harness.attempts(task))[0])["jitter"]

    run(main)


def test_blocked_address_is_not_retried() -> None:
    """A target that the guard refuses ends the task."""

    async def main() -> None:
        harness = EngineHarness(
            FakeTarget(DeliveryResult(fault=Fault.BLOCKED, error="10.0.0.1 is private"))
        )
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(60)

        assert (Status.EXHAUSTED, "permanent") == (
            (await harness.task(task)).status,
            (await harness.task(task)).reason,
        )
        (attempt,) = await harness.attempts(task)
        assert ("blocked", "10.0.0.1 is private") == (attempt.error_class, attempt.error)

    run(main)


def test_internal_failure_counts_no_attempt() -> None:
    """It does not affect the breaker either, and the delivery is reported as failing."""

    async def main() -> None:
        ours = DeliveryResult(fault=Fault.INTERNAL, error="proxy down")
        target = FakeTarget(*[ours] * 30, OK)
        harness = EngineHarness(target)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(10)
        assert {"delivery": "proxy down"} == harness.context.health.failing
        assert 0 == (await harness.task(task)).attempts

        await asyncio.sleep(100)
        ended = await harness.task(task)
        assert (Status.SUCCEEDED, 1) == (ended.status, ended.attempts)
        assert {} == harness.context.health.failing
        await harness.engine.stop(1)

    run(main)


def test_delivery_that_raises_is_an_internal_failure() -> None:
    """An exception in the delivery delays the task, and counts no attempt."""

    async def broken(_request: DeliveryRequest) -> DeliveryResult:
        msg = "bug"
        raise RuntimeError(msg)

    async def main() -> None:
        harness = EngineHarness(FakeTarget(broken, OK))
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(10)
        await harness.engine.stop(1)

        ended = await harness.task(task)
        assert (Status.SUCCEEDED, 1) == (ended.status, ended.attempts)

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
        assert 2 == lane.opened
        left = lane.parked_until - harness.context.clock.now()
        assert 45_000 < left <= 60_000
        await harness.engine.stop(1)

    run(main)


def test_empty_retry_budget_defers_without_counting_attempts() -> None:
    """Retries above the budget are deferred; all tasks succeed in the end."""

    async def main() -> None:
        target = FakeTarget(*[BUSY] * 300, OK)
        limits = EngineLimits(lane_in_flight=1000, in_flight=1000)
        harness = EngineHarness(target, limits=limits, breaker=lambda: Breaker(min_calls=10_000))
        await harness.engine.start()
        tasks = await harness.add(*[harness.new_task() for _ in range(300)])
        await asyncio.sleep(120)

        assert {Status.SUCCEEDED} == {(await harness.task(task)).status for task in tasks}
        assert {2} == {(await harness.task(task)).attempts for task in tasks}
        assert "deferred" in harness.event_kinds()
        await harness.engine.stop(1)

    run(main)


def test_slow_lane_does_not_block_another() -> None:
    """A lane that never responds uses only its own in-flight limit."""

    async def main() -> None:
        async def never(request: DeliveryRequest) -> DeliveryResult:
            if "slow" in request.url:
                await asyncio.sleep(1000)
            return OK

        limits = EngineLimits(in_flight=20, lane_in_flight=10)
        harness = EngineHarness(FakeTarget(never), limits=limits)
        await harness.engine.start()
        await harness.add(*[harness.new_task("http://slow.example:80/") for _ in range(100)])
        quick = await harness.add(
            *[harness.new_task("http://quick.example:80/") for _ in range(100)]
        )
        await asyncio.sleep(1)

        assert {Status.SUCCEEDED} == {(await harness.task(task)).status for task in quick}

    run(main)


def test_due_retry_is_sent_before_queued_first_attempts() -> None:
    """A retry has a promised time; first attempts in the queue of its lane do not."""

    async def main() -> None:
        async def slow(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(0.1)
            return OK

        target = FakeTarget(BUSY, slow)
        harness = EngineHarness(target, limits=EngineLimits(lane_in_flight=1))
        await harness.engine.start()
        tasks = await harness.add(*[harness.new_task() for _ in range(50)])
        await asyncio.sleep(30)

        (log,) = [log for log in [await harness.attempts(task) for task in tasks] if len(log) == 2]
        waited = (log[1].started_at - log[1].scheduled_at) / 1000
        assert 51 == len(target.requests)
        assert waited <= 0.1

    run(main)


def test_total_budget_ends_a_task_before_an_attempt() -> None:
    """A task whose total budget is used up is exhausted without another attempt."""

    async def main() -> None:
        target = FakeTarget(OK)
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task(overrides={"totalBudgetMs": 5000}))
        await harness.engine.pause(task.lane)  # too late for the attempt in flight
        later = harness.new_task(overrides={"totalBudgetMs": 5000})
        (late,) = await harness.add(later)
        await asyncio.sleep(10)
        await harness.engine.resume(task.lane)
        await harness.engine.start()
        await asyncio.sleep(5)
        await harness.engine.stop(1)

        ended = await harness.task(late)
        assert (Status.EXHAUSTED, "total-budget", 0) == (
            ended.status,
            ended.reason,
            ended.attempts,
        )
        assert 1 == len(target.requests)

    run(main)


def test_cancelled_task_that_waits_here_is_cancelled_at_once() -> None:
    """A leased task that is not due yet is cancelled: no attempt follows."""

    async def main() -> None:
        target = FakeTarget()
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task(delay=500))
        assert CancelStatus.CANCELLED is await harness.engine.cancel("default", task.id)
        await asyncio.sleep(5)

        assert Status.CANCELLED is (await harness.task(task)).status
        assert [] == target.requests
        assert CancelStatus.TERMINAL is await harness.engine.cancel("default", task.id)
        assert await harness.engine.cancel("other", task.id) is None

    run(main)


def test_cancel_during_an_attempt_prevents_the_next() -> None:
    """The attempt is logged, and no other follows."""

    async def main() -> None:
        async def slowly(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(1)
            return BUSY

        target = FakeTarget(slowly)
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(0.1)
        assert CancelStatus.REQUESTED is await harness.engine.cancel("default", task.id)
        await asyncio.sleep(60)

        ended = await harness.task(task)
        assert (Status.CANCELLED, 1) == (ended.status, len(await harness.attempts(task)))
        assert 1 == len(target.requests)

    run(main)


def test_retry_now_sends_at_once() -> None:
    """This holds for tasks that wait here and in the store, and each is sent only once."""

    async def main() -> None:
        target = FakeTarget()
        harness = EngineHarness(target)
        await harness.engine.start()
        near, far = await harness.add(harness.new_task(delay=900), harness.new_task(delay=900_000))
        assert RetryNowStatus.DUE is await harness.engine.retry_now("default", near.id)
        assert RetryNowStatus.DUE is await harness.engine.retry_now("default", far.id)
        await asyncio.sleep(0.5)
        assert 2 == len(target.requests)

        await asyncio.sleep(1000)
        assert 2 == len(target.requests)
        assert RetryNowStatus.FINISHED is await harness.engine.retry_now("default", near.id)
        assert (
            await harness.engine.retry_now("default", "0190a000-0000-7000-8000-ffffffffffff")
            is None
        )
        await harness.engine.stop(1)

    run(main)


def test_waiting_caller_gets_the_completion_and_the_response() -> None:
    """After a timeout that is too short it gets None."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(BUSY, DeliveryResult(status=201, excerpt=b"made")))
        (task,) = await harness.add(harness.new_task())
        assert await harness.engine.wait_for_completion(task.id, 0.0) is None
        settled = await harness.engine.wait_for_completion(task.id, 60)
        assert settled is not None
        assert settled.delivered is not None
        assert (Status.SUCCEEDED, b"made") == (settled.status, settled.delivered.excerpt)

    run(main)


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


def test_stop_releases_waiting_tasks_and_waits_for_attempts() -> None:
    """After a stop nothing is leased, and the attempt in flight is recorded."""

    async def main() -> None:
        async def slowly(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(3)
            return OK

        harness = EngineHarness(FakeTarget(slowly), limits=EngineLimits(in_flight=1))
        await harness.engine.start()
        runs, waits = await harness.add(harness.new_task(), harness.new_task())
        await asyncio.sleep(1)
        await harness.engine.stop(10)

        assert Status.SUCCEEDED is (await harness.task(runs)).status
        waiting = await harness.task(waits)
        assert (Status.PENDING, None, 0) == (waiting.status, waiting.worker, waiting.attempts)

    run(main)


def test_stop_has_a_timeout() -> None:
    """An attempt that takes longer is cancelled; its lease expires by itself."""

    async def main() -> None:
        async def never(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(1e6)
            return OK

        harness = EngineHarness(FakeTarget(never))
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(1)
        await harness.engine.stop(5)

        assert Status.IN_FLIGHT is (await harness.task(task)).status

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


def test_task_whose_lease_has_expired_is_not_started() -> None:
    """A worker that was suspended past its lease releases the task instead of sending it."""

    async def main() -> None:
        target = FakeTarget()
        ahead = 0.0
        loop = asyncio.get_running_loop()
        harness = EngineHarness(
            target,
            lease=Lease("worker", 40_000, 1_000),
            monotonic=lambda: loop.time() + ahead,
        )
        (task,) = await harness.add(harness.new_task(delay=900))
        ahead = 60.0  # the process was suspended meanwhile
        await asyncio.sleep(2)

        assert [] == target.requests
        assert Status.PENDING is (await harness.task(task)).status

    run(main)


@pytest.mark.parametrize(("lost", "sent"), [(1, 1), (9, 1), (10, 0)])
def test_lost_attempt_does_not_exhaust_a_task(lost: int, sent: int) -> None:
    """It may not have been sent, so it is repeated, but not for ever."""

    async def main() -> None:
        target = FakeTarget(OK)
        harness = EngineHarness(target, limits=EngineLimits(in_flight=1))
        new_task = harness.new_task(overrides={"maxAttempts": 1})
        new_task.direct = True
        await harness.store.add([new_task], Lease("dead", 10_000, 1_000))
        for worker in range(lost - 1):
            await asyncio.sleep(11)
            lease = Lease(f"dead {worker}", 10_000, 1_000)
            assert (await harness.store.claim(lease, limit=1, per_lane=1)).tasks
        await asyncio.sleep(11)

        await harness.engine.start()
        await asyncio.sleep(5)

        ended = await harness.task(new_task.task)
        assert sent == len(target.requests)
        assert (Status.SUCCEEDED if sent else Status.EXHAUSTED) is ended.status
        assert ["lost"] * lost == [one.outcome for one in await harness.attempts(ended)][:lost]
        assert [1] == [event.attempts for event in harness.published if event.kind == "lost"]
        page, _ = harness.metrics.render(await harness.store.counters(), 0.0)
        assert b'retry_attempts_total{outcome="lost",policy=""} 1.0' in page

    run(main)


def test_cancelled_caller_does_not_stop_its_task() -> None:
    """The task is leased to this process, so this process sends it at once."""

    async def main() -> None:
        target = FakeTarget(OK)
        harness = EngineHarness(target)
        add, written = harness.store.add, asyncio.Event()

        async def slowly(*args: Any, **options: Any) -> Any:
            await written.wait()
            return await add(*args, **options)

        harness.store.add = slowly  # type: ignore[method-assign]
        adding = asyncio.ensure_future(harness.add(harness.new_task()))
        await asyncio.sleep(1)
        adding.cancel()
        await asyncio.wait([adding])
        written.set()
        await asyncio.sleep(1)

        assert adding.cancelled()
        assert 1 == len(target.requests)

    run(main)


def test_result_after_a_lost_lease_is_discarded() -> None:
    """Another worker has the task: the result changes nothing, and is counted."""

    async def main() -> None:
        async def slowly(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(200)  # past every timeout and the lease
            return OK

        first = EngineHarness(FakeTarget(slowly))
        (task,) = await first.add(first.new_task())
        second = EngineHarness(
            FakeTarget(OK), store=first.store, seed=2, lease=Lease("second", 70_000, 1_000)
        )
        await second.engine.start()
        await asyncio.sleep(150)
        taken = await first.task(task)
        assert (Status.SUCCEEDED, 2) == (taken.status, taken.attempts)
        outcomes = [attempt.outcome for attempt in await first.attempts(task)]
        assert ["lost", "success"] == outcomes

        await asyncio.sleep(100)
        assert taken == await first.task(task)
        assert 1 == first.event_kinds().count("superseded")
        page, _ = first.metrics.render(await first.store.counters(), 0.0)
        assert b"retry_superseded_total 1.0" in page
        await second.engine.stop(1)

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
            lease=Lease("second", 70_000, 1_000),
        )
        await second.engine.start()
        await asyncio.sleep(35)
        assert 1 <= len(target.requests) <= 3
        lane = await first.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert 2 == lane.opened
        await second.engine.stop(1)

    run(main)


def test_lane_resumed_by_an_operator_is_open_here_too() -> None:
    """Resume closes the breaker, and tasks are sent again, slowly at first."""

    async def main() -> None:
        target = FakeTarget(*[BUSY] * 5, OK)
        harness = EngineHarness(
            target, breaker=lambda: Breaker(min_calls=5, open_for=300.0, spread=0.0)
        )
        await harness.engine.start()
        tasks = await harness.add(
            *[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(5)]
        )
        await asyncio.sleep(10)
        assert 5 == len(target.requests)
        stats = harness.engine.local_stats(tasks[0].lane)
        assert stats is not None
        assert "open" == stats["breaker"]

        await harness.engine.resume(tasks[0].lane)
        await asyncio.sleep(20)
        assert {Status.SUCCEEDED} == {(await harness.task(task)).status for task in tasks}
        await harness.engine.reset(tasks[0].lane)
        assert harness.engine.local_stats("default/http:nobody.example:80") is None
        await harness.engine.stop(1)

    run(main)


def test_changed_policy_applies_to_the_next_decision() -> None:
    """A new version is used within a second, also if another process wrote it."""

    async def main() -> None:
        from tarry.service.model import PolicyVersion

        target = FakeTarget(BUSY)
        harness = EngineHarness(target)
        await harness.engine.start()
        document = msgspec.json.encode({"maxAttempts": 50, "maxDelayMs": 1000})
        await harness.store.put_policy(
            PolicyVersion(tenant="default", id="p", version=1, document=document), replace=False
        )
        (task,) = await harness.add(harness.new_task(policy_id="p"))
        await asyncio.sleep(6)
        assert Status.EXHAUSTED is not (await harness.task(task)).status

        document = msgspec.json.encode({"maxAttempts": 2})
        await harness.store.put_policy(
            PolicyVersion(tenant="default", id="p", version=2, document=document), replace=True
        )
        await asyncio.sleep(60)
        ended = await harness.task(task)
        assert (Status.EXHAUSTED, "attempts") == (ended.status, ended.reason)
        assert ended.attempts < 20
        await harness.engine.stop(1)

    run(main)


def test_deleted_policy_is_replaced_by_the_default() -> None:
    """The task continues with the default policy, without a busy loop."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(BUSY))
        (task,) = await harness.add(harness.new_task(policy_id="gone"))
        await asyncio.sleep(60)

        ended = await harness.task(task)
        assert (Status.EXHAUSTED, 5) == (ended.status, ended.attempts)

    run(main)


def test_cancel_publishes_an_event() -> None:
    """Listeners get an event for a task that was cancelled while it waited."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget())
        near, far = await harness.add(harness.new_task(delay=500), harness.new_task(delay=500_000))
        for task in (near, far):
            await harness.engine.cancel("default", task.id)

        assert ["added", "added", "cancelled", "cancelled"] == harness.event_kinds()

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
def test_attempt_log_marks_a_truncated_excerpt(
    answer: DeliveryResult, logged: tuple[str | None, bool]
) -> None:
    """It has 512 characters of a failed response, and none of a successful one."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(answer))
        [task] = await harness.add(harness.new_task())
        await asyncio.sleep(1)
        [attempt] = await harness.attempts(task)
        assert logged == (attempt.excerpt, attempt.truncated)

    run(main)
