from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.engine import metrics
from tarry.service.engine.context import EngineLimits
from tarry.service.model import AttemptRecord, DecisionRecord
from tests.service.engine.harness import BUSY, OK, EngineHarness, FakeTarget, new_breaker
from tests.service.stores.reference_store import ReferenceStore

LANE = "default/http:a.example:80"


def parse_samples(page: bytes) -> dict[str, float]:
    """Return the samples of a metrics page, as Prometheus parses them."""
    return read_samples(text_string_to_metric_families(page.decode()))


def read_samples(families: Iterable[Metric]) -> dict[str, float]:
    """Return the samples of parsed metrics."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def read_metrics(harness: EngineHarness, tenant: str | None = None) -> dict[str, float]:
    """Return the samples of the current metrics page."""
    counters = await harness.store.counters(tenant) if await harness.store.try_lead() else None
    page, content_type = harness.metrics.render(counters, harness.context.clock.now_s(), tenant)
    assert content_type.startswith("text/plain")
    return parse_samples(page)


def transitions(found: dict[str, float]) -> dict[str, float]:
    """Return the number of breaker transitions by new state."""
    prefix = "retry_breaker_transitions_total{to="
    return {
        name.removeprefix(prefix)[:-1]: value
        for name, value in found.items()
        if name.startswith(prefix)
    }


async def test_attempts_and_finished_tasks_are_counted() -> None:
    """Metrics count the attempts, outcomes, delays and ages of three tasks."""
    harness = EngineHarness(FakeTarget(BUSY, OK, OK, BUSY))
    for overrides in ({}, {}, {"maxAttempts": 2}):
        await harness.add(harness.new_task(overrides=overrides or None))
        await asyncio.sleep(5)
    harness.metrics.attempts["lost", "", ""] += 7
    found = await read_metrics(harness)

    assert 7 == found["retry_attempts_total{lane=,outcome=lost,policy=}"]
    assert 3 == found[f"retry_attempts_total{{lane={LANE},outcome=transient,policy=default}}"]
    assert 2 == found[f"retry_attempts_total{{lane={LANE},outcome=success,policy=default}}"]
    finished = f"retry_task_outcomes_total{{attempts=%s,lane={LANE},outcome=%s}}"
    assert 1 == found[finished % ("retried", "succeeded")]
    assert 1 == found[finished % ("first", "succeeded")]
    assert 1 == found[finished % ("retried", "exhausted")]
    assert 2 == found["retry_delay_seconds_count{}"]
    assert 5 == found["retry_scheduling_lag_seconds_count{}"]
    assert 5 == found["retry_attempt_duration_seconds_bucket{le=0.001}"]
    assert 3 == found["retry_task_age_seconds_bucket{le=+Inf}"]
    assert 2 == found["retry_tasks{status=SUCCEEDED}"]
    assert 1 == found["retry_tasks{status=EXHAUSTED}"]
    assert 0 == found["retry_superseded_total{}"]


async def test_buffered_samples_are_included_when_metrics_are_read() -> None:
    """Metrics are exact whenever they are read, although fewer than 500 samples are buffered."""
    harness = EngineHarness(FakeTarget(OK))
    metrics = harness.metrics
    for number in range(1, 1_235):
        lag_ms, wait = number % 4 - 1, DecisionRecord(action="wait", delay_ms=100.5)
        decision = wait if number % 2 else None
        metrics.record_attempt(
            AttemptRecord(
                attempt_number=1,
                scheduled_at=9_000,
                started_at=9_000 + lag_ms,
                duration_ms=None if number % 3 else 5.0,
                outcome="success",
                decision=decision,
            ),
            "p",
            LANE,
        )
        age_ms = 500 if number % 2 else -500
        metrics.record_finished_task("succeeded", number % 3, LANE, age_ms)
        if number not in (1, 2, 499, 500, 501, 1_234):
            continue
        found = await read_metrics(harness)

        assert number == found[f"retry_attempts_total{{lane={LANE},outcome=success,policy=p}}"]
        assert number // 3 == found["retry_attempt_duration_seconds_count{}"]
        assert number // 3 == found["retry_attempt_duration_seconds_bucket{le=0.005}"]
        assert 0 == found["retry_attempt_duration_seconds_bucket{le=0.002}"]
        odd_count = (number + 1) // 2
        assert pytest.approx(odd_count * 0.1005) == found["retry_delay_seconds_sum{}"]
        assert 0 == found["retry_delay_seconds_bucket{le=0.1}"]
        assert odd_count == found["retry_delay_seconds_bucket{le=0.5}"]
        assert odd_count * 0.5 == found["retry_task_age_seconds_sum{}"]
        assert number - odd_count == found["retry_task_age_seconds_bucket{le=0.1}"]
        lags_ms = [max(0, sample % 4 - 1) for sample in range(1, number + 1)]
        assert sum(lags_ms) / 1000 == found["retry_scheduling_lag_seconds_sum{}"]
        assert lags_ms.count(2) == number - found["retry_scheduling_lag_seconds_bucket{le=0.001}"]
        retried = f"retry_task_outcomes_total{{attempts=retried,lane={LANE},outcome=succeeded}}"
        assert (number + 1) // 3 == found.get(retried, 0)


async def test_breakers_and_budgets_of_lanes_are_gauges() -> None:
    """Gauges show an open breaker and a retry budget, and the transition is counted."""
    harness = EngineHarness(
        FakeTarget(BUSY), build_breaker=lambda: new_breaker(min_calls=2, spread=0.0)
    )
    await harness.add(harness.new_task(), harness.new_task(), harness.new_task())
    await asyncio.sleep(1)
    found = await read_metrics(harness)

    assert 1 == found[f"retry_breaker_state{{lane={LANE},state=open}}"]
    assert 0 == found[f"retry_breaker_state{{lane={LANE},state=closed}}"]
    assert found[f"retry_budget_balance{{lane={LANE}}}"] > 0
    assert 1 == found["retry_breaker_transitions_total{to=open}"]


async def test_metrics_are_counted_without_listeners() -> None:
    """Without listeners, attempts, finished tasks and breaker transitions are still counted."""
    harness = EngineHarness(
        FakeTarget(BUSY), build_breaker=lambda: new_breaker(min_calls=2, spread=0.0)
    )
    harness.events.listeners.clear()
    await harness.add(*(harness.new_task(overrides={"maxAttempts": 1}) for _ in range(3)))
    await asyncio.sleep(1)
    found = await read_metrics(harness)

    assert 3 == found[f"retry_attempts_total{{lane={LANE},outcome=transient,policy=default}}"]
    finished = f"retry_task_outcomes_total{{attempts=first,lane={LANE},outcome=exhausted}}"
    assert 3 == found[finished]
    assert 1 == found["retry_breaker_transitions_total{to=open}"]


async def test_actions_of_an_operator_are_counted() -> None:
    """A cancelled task is counted as finished; resuming a lane changes no closed breaker."""
    harness = EngineHarness(FakeTarget(OK))
    (task,) = await harness.add(harness.new_task(delay_ms=900))
    await harness.engine.cancel(task.tenant, task.id)
    await harness.engine.pause(task.lane)
    await harness.engine.resume(task.lane)
    await harness.engine.reset(task.lane)
    found = await read_metrics(harness)

    finished = f"retry_task_outcomes_total{{attempts=first,lane={LANE},outcome=cancelled}}"
    assert 1 == found[finished]
    assert {} == transitions(found)


@pytest.mark.parametrize("action", ["resume", "reset"])
async def test_operator_closes_an_open_breaker(action: str) -> None:
    """Resuming a lane whose breaker is open counts one transition, and repeating it none."""
    harness = EngineHarness(
        FakeTarget(BUSY), build_breaker=lambda: new_breaker(min_calls=2, spread=0.0)
    )
    (task, *_) = await harness.add(harness.new_task(), harness.new_task())
    await asyncio.sleep(0.5)
    assert {"open": 1} == transitions(await read_metrics(harness))
    for _ in range(2):
        await getattr(harness.engine, action)(task.lane)
    assert {"open": 1, "closed": 1} == transitions(await read_metrics(harness))


async def test_every_transition_of_a_breaker_is_counted() -> None:
    """Transitions are counted when they are stored together, and when another process made them."""
    harness = EngineHarness(FakeTarget(OK))
    lane = harness.lanes[LANE]
    for state in ("open", "closed", "open"):
        lane.downstream.force(state)
    harness.engine.worker.result_writer.store_breaker_state(lane)
    await asyncio.sleep(1)
    assert {"forced-open": 2, "closed": 1} == transitions(await read_metrics(harness))

    harness.engine.scheduler._adopt_lane_state(lane.name, 1, was_parked=False)
    harness.engine.scheduler._adopt_lane_state(lane.name, None, was_parked=True)
    harness.engine.scheduler._adopt_lane_state(lane.name, None, was_parked=True)
    assert {"forced-open": 2, "half-open": 1, "closed": 2} == transitions(
        await read_metrics(harness)
    )


async def test_labels_are_bounded() -> None:
    """Policies and lanes after the first hundred are counted as `other`."""
    harness = EngineHarness(FakeTarget(OK))
    for number in range(130):
        url = f"http://h{number}.example:80/"
        await harness.add(harness.new_task(url, policy_id=f"p{number}"))
    await asyncio.sleep(1)
    found = await read_metrics(harness)

    assert 30 == found["retry_attempts_total{lane=other,outcome=success,policy=other}"]
    assert 101 == sum(name.startswith("retry_attempts_total") for name in found)
    finished = "retry_task_outcomes_total{attempts=first,lane=other,outcome=succeeded}"
    assert 30 == found[finished]
    assert 101 == sum(name.startswith("retry_task_outcomes_total") for name in found)
    assert 100 == sum(name.startswith("retry_budget_balance") for name in found)


async def test_combinations_of_policy_and_lane_are_bounded() -> None:
    """After 1,000 combinations of policy and lane, attempts of others have the lane `other`."""
    harness = EngineHarness(FakeTarget(OK))
    attempt = AttemptRecord(attempt_number=1, scheduled_at=0, started_at=0, outcome="success")
    for number in range(3_000):
        policy_id, lane = f"p{number % 50}", f"default/http:h{number // 50}.example:80"
        harness.metrics.record_attempt(attempt, policy_id, lane)
    found = await read_metrics(harness)

    assert 1_050 == sum(name.startswith("retry_attempts_total") for name in found)
    assert 40 == found["retry_attempts_total{lane=other,outcome=success,policy=p49}"]


async def test_deferrals_are_counted() -> None:
    """An attempt that an open breaker rejects is counted with the reason and the lane."""
    harness = EngineHarness(FakeTarget(OK))
    harness.lanes[LANE].downstream.force("open")
    await harness.add(harness.new_task())
    found = await read_metrics(harness)

    assert 1 == found[f"retry_deferrals_total{{lane={LANE},reason=breaker-open}}"]


async def test_age_of_the_oldest_due_task() -> None:
    """The oldest due task is leased and waits for a slot, or is stored and waits for a claim."""

    async def hang(_: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(30)
        return OK

    async def oldest_age_s(harness: EngineHarness, tenant: str | None = None) -> float:
        name = "retry_oldest_due_task_age_seconds{waiting_for=free-slot}"
        return (await read_metrics(harness, tenant))[name]

    harness = EngineHarness(FakeTarget(hang), limits=EngineLimits(max_running_attempts=1))
    await harness.add(harness.new_task())
    assert 0 == await oldest_age_s(harness)
    await asyncio.sleep(2)
    await harness.add(harness.new_task("http://b.example:80/"))
    await asyncio.sleep(5)
    assert pytest.approx(5) == await oldest_age_s(harness)

    await harness.store.add([harness.new_task("http://c.example:80/", tenant="ann")])
    await asyncio.sleep(3)
    assert pytest.approx(8) == await oldest_age_s(harness)
    assert pytest.approx(3) == await oldest_age_s(harness, "ann")
    await asyncio.sleep(21)  # the first attempt has ended, and the next one runs
    assert pytest.approx(24) == await oldest_age_s(harness)


async def test_tasks_of_busy_lanes_are_gauges() -> None:
    """The tasks of a lane are counted by status."""
    harness = EngineHarness(FakeTarget(OK, BUSY))
    await harness.add(harness.new_task())
    await harness.add(harness.new_task(overrides={"maxAttempts": 1}))
    await asyncio.sleep(1)
    await harness.add(harness.new_task(delay_ms=60_000), harness.new_task(delay_ms=60_000))
    found = await read_metrics(harness)

    prefix = f"retry_lane_tasks{{lane={LANE},status="
    assert {"PENDING": 2, "IN_FLIGHT": 0, "EXHAUSTED": 1} == {
        name.removeprefix(prefix)[:-1]: value
        for name, value in found.items()
        if name.startswith(prefix)
    }


async def test_metrics_of_two_processes_can_be_summed() -> None:
    """Each task is counted by one of two processes with the same store."""
    first = EngineHarness(FakeTarget(OK))
    assert isinstance(first.store, ReferenceStore)
    other_store = ReferenceStore(first.store._clock, first.store.state)
    second = EngineHarness(FakeTarget(OK), store=other_store, seed=2)
    for harness in (first, second):
        await harness.add(harness.new_task(), harness.new_task(delay_ms=60_000))
    await asyncio.sleep(1)
    pages = [await read_metrics(harness) for harness in (first, second)]

    totals = Counter[str]()
    for page in pages:
        totals.update({name: int(value) for name, value in page.items()})
    assert 2 == totals["retry_tasks{status=SUCCEEDED}"] == totals["retry_tasks{status=PENDING}"]
    assert 2 == totals[f"retry_lane_tasks{{lane={LANE},status=PENDING}}"]
    await first.store.close()
    assert 2 == (await read_metrics(second))["retry_tasks{status=PENDING}"]


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("", "text/plain"),
        ("*/*", "text/plain"),
        ("text/plain;version=0.0.4", "text/plain"),
        ("application/openmetrics-text", "application/openmetrics-text"),
        ("Application/OpenMetrics-Text;version=abc, */*;q=0.1", "application/openmetrics-text"),
        (
            "text/html, application/openmetrics-text;version=1.0.0;q=0.5, text/plain;q=0.3",
            "application/openmetrics-text",
        ),
    ],
)
async def test_openmetrics_is_used_on_request(accept: str, media_type: str) -> None:
    """The `Accept` header selects the format. Both formats have the same samples."""
    harness = EngineHarness(FakeTarget(OK))
    await harness.add(harness.new_task())
    await asyncio.sleep(1)
    text, _ = harness.metrics.render(await harness.store.counters(), 0.0)
    page, content_type = harness.metrics.render(await harness.store.counters(), 0.0, accept=accept)

    assert media_type == content_type.partition(";")[0]
    if media_type == "text/plain":
        assert text == page
    else:
        assert page.endswith(b"# EOF\n")
        parse = openmetrics_parser.text_string_to_metric_families
        families = parse(page.decode())  # type: ignore[no-untyped-call]
        assert parse_samples(text) == read_samples(families)


async def test_tenant_sees_only_its_own_metrics() -> None:
    """The metrics of a tenant have no lanes of another tenant, and no policies."""
    harness = EngineHarness(FakeTarget(OK))
    await harness.add(harness.new_task(tenant="ann"))
    await harness.add(
        *(harness.new_task(f"http://h{n}.example:80/", tenant="bob") for n in range(120))
    )
    await asyncio.sleep(1)
    found = await read_metrics(harness, "ann")

    assert 1 == found["retry_tasks{status=SUCCEEDED}"]
    assert 1 == sum(name.startswith("retry_budget_balance{lane=ann/") for name in found)
    assert 3 == sum(name.startswith("retry_breaker_state{lane=ann/") for name in found)
    assert not [name for name in found if "bob" in name or "policy" in name]


async def test_failing_components_are_reported_to_the_operator() -> None:
    """A gauge is 1 for each failing component and 0 for the others; a tenant does not get it."""
    harness = EngineHarness(FakeTarget(OK))
    page, _ = harness.metrics.render(None, 0.0, failing=["store", "another"])
    tenant_page, _ = harness.metrics.render(None, 0.0, "ann", failing=["store"])

    prefix = "retry_component_failing"
    expected = {
        "adding": 0, "another": 1, "bodies": 0, "data": 0, "delivery": 0, "encryption": 0,
        "store": 1,
    }  # fmt: skip
    assert {f"{prefix}{{component={name}}}": value for name, value in expected.items()} == {
        name: value for name, value in parse_samples(page).items() if name.startswith(prefix)
    }
    assert prefix not in tenant_page.decode()


async def test_latencies_are_shared_by_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with many lanes does not prevent the latencies of other tenants."""
    monkeypatch.setattr(metrics, "_MAX_LATENCY_LANES", 10)

    recorded = EngineHarness(FakeTarget()).metrics
    attempt = AttemptRecord(
        attempt_number=1, scheduled_at=0, started_at=0, duration_ms=8.0, outcome="success"
    )
    for _ in range(2):  # the second time, after the latencies were taken
        for number in range(20):
            recorded.record_attempt(attempt, "default", f"noisy/http:{number}.example:80")
        recorded.record_attempt(attempt, "default", "quiet/http:a.example:80")
        lanes = list(recorded.take_latencies())
        assert "quiet/http:a.example:80" in lanes
        assert 6 == len(lanes)
