from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tarry.core.breaker import Breaker
from tarry.service.model import AttemptRecord, Decision
from tests.service.engine.rig import BUSY, OK, Rig, Target, run


def samples(page: bytes) -> dict[str, float]:
    """Return the samples of a page, as Prometheus reads them."""
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def rendered(rig: Rig, tenant: str | None = None) -> dict[str, float]:
    """Render a page and read it."""
    page, kind = rig.metrics.render(
        await rig.store.counters(tenant), rig.context.clock.seconds(), tenant
    )
    assert kind.startswith("text/plain")
    return samples(page)


def test_attempts_outcomes_delays_and_ages_are_counted() -> None:
    """One task that was retried, one that was not, one that died."""

    async def main() -> None:
        rig = Rig(Target(BUSY, OK, OK, BUSY))
        for overrides in ({}, {}, {"maxAttempts": 2}):
            await rig.add(rig.new(overrides=overrides or None))
            await asyncio.sleep(5)
        rig.metrics.lost(7)
        found = await rendered(rig)

        assert 7 == found["retry_attempts_total{outcome=lost,policy=}"]
        assert 3 == found["retry_attempts_total{outcome=transient,policy=default}"]
        assert 2 == found["retry_attempts_total{outcome=success,policy=default}"]
        assert 1 == found["retry_task_outcomes_total{attempts=retried,outcome=succeeded}"]
        assert 1 == found["retry_task_outcomes_total{attempts=first,outcome=succeeded}"]
        assert 1 == found["retry_task_outcomes_total{attempts=retried,outcome=exhausted}"]
        assert 2 == found["retry_delay_seconds_count{}"]
        assert 5 == found["retry_scheduling_lag_seconds_count{}"]
        assert 5 == found["retry_attempt_duration_seconds_bucket{le=0.001}"]
        assert 3 == found["retry_task_age_seconds_bucket{le=+Inf}"]
        assert 2 == found["retry_tasks{status=SUCCEEDED}"]
        assert 1 == found["retry_tasks{status=EXHAUSTED}"]
        assert 0 == found["retry_superseded_total{}"]

    run(main)


def test_everything_noted_is_counted_by_who_looks() -> None:
    """Counts are exact at any moment, notes are few, and no time is negative."""

    async def main() -> None:
        rig = Rig(Target(OK))
        metrics, notes = rig.metrics, 0
        for number in range(1, 1_235):
            late, wait = number % 4 - 1, Decision(action="wait", delay_ms=100.5)
            decision = wait if number % 2 else None
            metrics.attempt(
                AttemptRecord(
                    number=1,
                    scheduled_at=9_000,
                    started_at=9_000 + late,
                    duration_ms=None if number % 3 else 5.0,
                    outcome="success",
                    decision=decision,
                ),
                "p",
            )
            metrics.ended("succeeded", number % 3, 500 if number % 2 else -500)
            notes = max(notes, len(metrics._attempt_samples), len(metrics._task_samples))
            if number not in (1, 2, 499, 500, 501, 1_234):
                continue
            found = await rendered(rig)

            assert number == found["retry_attempts_total{outcome=success,policy=p}"]
            assert number // 3 == found["retry_attempt_duration_seconds_count{}"]
            assert number // 3 == found["retry_attempt_duration_seconds_bucket{le=0.005}"]
            assert 0 == found["retry_attempt_duration_seconds_bucket{le=0.002}"]
            odd = (number + 1) // 2
            assert pytest.approx(odd * 0.1005) == found["retry_delay_seconds_sum{}"]
            assert 0 == found["retry_delay_seconds_bucket{le=0.1}"]
            assert odd == found["retry_delay_seconds_bucket{le=0.5}"]
            assert odd * 0.5 == found["retry_task_age_seconds_sum{}"]
            assert number - odd == found["retry_task_age_seconds_bucket{le=0.1}"]
            lags = [max(0, each % 4 - 1) for each in range(1, number + 1)]
            assert sum(lags) / 1000 == found["retry_scheduling_lag_seconds_sum{}"]
            assert lags.count(2) == number - found["retry_scheduling_lag_seconds_bucket{le=0.001}"]
            retried = "retry_task_outcomes_total{attempts=retried,outcome=succeeded}"
            assert (number + 1) // 3 == found.get(retried, 0)
        assert notes < 500

    run(main)


def test_breakers_and_budgets_of_lanes_are_gauges() -> None:
    """A lane whose breaker is open says so, and its move is counted."""

    async def main() -> None:
        rig = Rig(Target(BUSY), breaker=lambda: Breaker(min_calls=2, spread=0.0))
        await rig.add(rig.new(), rig.new(), rig.new())
        await asyncio.sleep(1)
        found = await rendered(rig)

        lane = "default/http:a.example:80"
        assert 1 == found[f"retry_breaker_state{{lane={lane},state=open}}"]
        assert 0 == found[f"retry_breaker_state{{lane={lane},state=closed}}"]
        assert found[f"retry_budget_balance{{lane={lane}}}"] > 0
        assert 1 == found["retry_breaker_transitions_total{to=open}"]

    run(main)


def test_what_nobody_listens_to_is_counted() -> None:
    """Attempts, ends and breakers that move; no event is made of them."""

    async def main() -> None:
        rig = Rig(Target(BUSY), breaker=lambda: Breaker(min_calls=2, spread=0.0))
        rig.events.listeners.clear()
        await rig.add(*(rig.new(overrides={"maxAttempts": 1}) for _ in range(3)))
        await asyncio.sleep(1)
        found = await rendered(rig)

        assert 3 == found["retry_attempts_total{outcome=transient,policy=default}"]
        assert 3 == found["retry_task_outcomes_total{attempts=first,outcome=exhausted}"]
        assert 1 == found["retry_breaker_transitions_total{to=open}"]
        assert [] == rig.told

    run(main)


def test_what_a_person_does_is_counted() -> None:
    """A task that is cancelled has ended, and a lane that is resumed is closed again."""

    async def main() -> None:
        rig = Rig(Target(OK))
        (task,) = await rig.add(rig.new(delay=900))
        await rig.engine.cancel(task.tenant, task.id)
        await rig.engine.pause(task.lane)
        await rig.engine.resume(task.lane)
        found = await rendered(rig)

        assert 1 == found["retry_task_outcomes_total{attempts=first,outcome=cancelled}"]
        assert 1 == found["retry_breaker_transitions_total{to=closed}"]
        assert 1 == sum(name.startswith("retry_breaker_transitions_total") for name in found)

    run(main)


def test_labels_are_bounded() -> None:
    """After a hundred policies and lanes there is `other`, and no more lines."""

    async def main() -> None:
        rig = Rig(Target(OK))
        for number in range(130):
            url = f"http://h{number}.example:80/"
            await rig.add(rig.new(url, policy_id=f"p{number}"))
        await asyncio.sleep(1)
        found = await rendered(rig)

        assert 30 == found["retry_attempts_total{outcome=success,policy=other}"]
        assert 101 == sum(name.startswith("retry_attempts_total") for name in found)
        assert 100 == sum(name.startswith("retry_budget_balance") for name in found)

    run(main)


def test_tenant_sees_what_is_his() -> None:
    """His tasks and his lanes, and no name of another tenant's lane or policy."""

    async def main() -> None:
        rig = Rig(Target(OK))
        await rig.add(rig.new(tenant="ann"))
        await rig.add(*(rig.new(f"http://h{n}.example:80/", tenant="bob") for n in range(120)))
        await asyncio.sleep(1)
        found = await rendered(rig, "ann")

        assert 1 == found["retry_tasks{status=SUCCEEDED}"]
        assert 1 == sum(name.startswith("retry_budget_balance{lane=ann/") for name in found)
        assert 3 == sum(name.startswith("retry_breaker_state{lane=ann/") for name in found)
        assert not [name for name in found if "bob" in name or "policy" in name]

    run(main)
