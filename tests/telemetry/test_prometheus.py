"""The Prometheus listener: metrics, labels and their limits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import tarry
from tarry.telemetry import prometheus
from tarry.telemetry.prometheus import PrometheusListener
from tarry.testing import VirtualClock
from tests.runtime.drivers import FAIL, OK, Dependency, Driver
from tests.telemetry.sample_calls import (
    CALL_COUNT,
    ConcurrentCaller,
    SampleCall,
    every_driver,
    every_sample_call,
    in_tasks_and_threads,
    listening,
    reopen_breaker,
    sync_and_async_hedged_call,
)


@pytest.fixture
def registry() -> CollectorRegistry:
    """A new registry."""
    return CollectorRegistry()


def samples(registry: CollectorRegistry, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of a time series by these labels, as a scraper reads them."""
    page = generate_latest(registry).decode()
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


@every_driver
@every_sample_call
def test_sample_calls_are_counted(
    driver: Driver, sample: SampleCall, clock: VirtualClock, registry: CollectorRegistry
) -> None:
    """Every sample call is counted with its attempts and delays, with every driver."""
    with listening(PrometheusListener(registry)):
        sample.run(driver, clock)

    attempts = samples(registry, "tarry_attempts_total", "outcome")
    assert {(outcome,): number for outcome, number in sample.attempts.items()} == attempts
    assert {sample.result_and_reason: 1} == samples(
        registry, "tarry_calls_total", "result", "reason"
    )
    delays = samples(registry, "tarry_retry_delay_seconds_count")
    assert ({(): sample.delays} if sample.delays else {}) == delays


def test_labels_of_calls_and_attempts(clock: VirtualClock, registry: CollectorRegistry) -> None:
    """Calls and attempts have the operation and the downstream, which may be empty."""
    with listening(PrometheusListener(registry)):
        tarry.call(lambda: 1, on=OSError, name="load", downstream=tarry.Downstream("disk"))
        tarry.call(lambda: 1, on=OSError, name="load")

    expected = {("load", "disk"): 1, ("load", ""): 1}
    for name in ("tarry_calls_total", "tarry_attempts_total"):
        assert expected == samples(registry, name, "operation", "downstream")


def test_delays_are_in_the_histogram(clock: VirtualClock, registry: CollectorRegistry) -> None:
    """The histogram has the delays after jitter, in seconds."""
    with listening(PrometheusListener(registry)):
        tarry.call(Dependency(clock, FAIL, FAIL, OK).call, on=ConnectionError)

    [total] = samples(registry, "tarry_retry_delay_seconds_sum").values()
    assert pytest.approx(0.05 + 0.1) == total
    buckets = samples(registry, "tarry_retry_delay_seconds_bucket", "le")
    assert [0, 1, 2, 2] == [buckets[le,] for le in ("0.025", "0.05", "0.1", "+Inf")]


@sync_and_async_hedged_call
def test_hedges_are_counted(
    make_hedged_call: Callable[[], None], registry: CollectorRegistry
) -> None:
    """A copy that was sent and won counts as fired and won; the call has one success."""
    with listening(PrometheusListener(registry)):
        make_hedged_call()

    assert {("read", "fired"): 1, ("read", "won"): 1} == samples(
        registry, "tarry_hedges_total", "operation", "result"
    )
    assert {("after-retries", ""): 1} == samples(registry, "tarry_calls_total", "result", "reason")
    assert {("success",): 1} == samples(registry, "tarry_attempts_total", "outcome")


def test_breaker_transitions_and_state(clock: VirtualClock, registry: CollectorRegistry) -> None:
    """State changes of a breaker are counted; the gauge is 1 for its state, else 0."""
    with listening(PrometheusListener(registry)):
        downstream = reopen_breaker(clock, "prometheus-breaker")

    assert {
        ("prometheus-breaker", "closed", "open"): 1,
        ("prometheus-breaker", "open", "half-open"): 1,
        ("prometheus-breaker", "half-open", "open"): 1,
    } == samples(registry, "tarry_breaker_transitions_total", "downstream", "before", "after")
    states = samples(registry, "tarry_breaker_state", "downstream", "state")
    assert {state.value: state is downstream.state for state in tarry.BreakerState} == {
        state: bool(value)
        for (name, state), value in states.items()
        if name == "prometheus-breaker"
    }


def test_budget_is_read_at_each_scrape(registry: CollectorRegistry) -> None:
    """The balance is read at each scrape, and disappears with its downstream."""
    PrometheusListener(registry)
    downstream = tarry.Downstream("prometheus-budget", budget=tarry.TokenBudget(capacity=40))
    assert 40 == samples(registry, "tarry_budget_balance", "downstream")["prometheus-budget",]

    assert downstream.budget is not None
    downstream.budget.withdraw(5, 0)
    assert 35 == samples(registry, "tarry_budget_balance", "downstream")["prometheus-budget",]

    del downstream
    assert ("prometheus-budget",) not in samples(registry, "tarry_budget_balance", "downstream")


def test_downstreams_with_the_same_name_are_summed(registry: CollectorRegistry) -> None:
    """Downstreams with the same name share a time series."""
    PrometheusListener(registry)
    twins = [
        tarry.Downstream("twin", breaker=tarry.Breaker(), budget=tarry.TokenBudget(capacity=4))
        for _ in range(2)
    ]
    twins[0].force("open")

    assert 8 == samples(registry, "tarry_budget_balance", "downstream")["twin",]
    states = samples(registry, "tarry_breaker_state", "downstream", "state")
    assert (1, 1, 0) == tuple(
        states["twin", state] for state in ("closed", "forced-open", "half-open")
    )


def test_budget_that_raises_does_not_break_the_scrape(registry: CollectorRegistry) -> None:
    """A budget that raises is left out of the scrape, and other budgets are included."""

    class Broken(tarry.TokenBudget):
        def balance(self, now: float) -> float:
            raise RuntimeError

    PrometheusListener(registry)
    downstreams = [
        tarry.Downstream("broken", budget=Broken()),
        tarry.Downstream("healthy", budget=tarry.TokenBudget()),
    ]

    balances = samples(registry, "tarry_budget_balance", "downstream")
    assert [False, True] == [(downstream.name,) in balances for downstream in downstreams]


def test_number_of_names_is_limited(registry: CollectorRegistry) -> None:
    """Names beyond the limit are counted as "other"."""
    with listening(PrometheusListener(registry, max_names=2)):
        for number in range(5):
            downstream = tarry.Downstream(f"host{number}", budget=tarry.TokenBudget())
            tarry.call(int, on=OSError, name=f"job {number}", downstream=downstream)

    assert {("job 0", "host0"): 1, ("job 1", "host1"): 1, ("other", "other"): 3} == samples(
        registry, "tarry_calls_total", "operation", "downstream"
    )
    balances = samples(registry, "tarry_budget_balance", "downstream")
    assert {("host0",), ("host1",), ("other",)} >= set(balances)


def test_registry_is_checked() -> None:
    """An object that is not a registry is rejected."""
    with pytest.raises(tarry.ConfigurationTypeError, match="registry must be a prometheus_client"):
        PrometheusListener("x")  # type: ignore[arg-type]


def test_max_names_is_checked(registry: CollectorRegistry) -> None:
    """A limit below one is rejected."""
    with pytest.raises(tarry.ConfigurationError, match="max_names must be at least 1"):
        PrometheusListener(registry, max_names=0)


@in_tasks_and_threads
def test_concurrent_calls(make_calls: ConcurrentCaller, registry: CollectorRegistry) -> None:
    """Concurrent calls are counted separately."""
    with listening(PrometheusListener(registry)):
        make_calls(context_of=lambda _: nullcontext())

    results = samples(registry, "tarry_calls_total", "operation", "result")
    assert {
        (f"op{number}", "after-retries" if number % 3 else "first-try"): 1
        for number in range(CALL_COUNT)
    } == results
    attempts = samples(registry, "tarry_attempts_total", "operation", "outcome")
    assert {
        (f"op{number}", "transient"): number % 3 for number in range(CALL_COUNT) if number % 3
    } == {key: value for key, value in attempts.items() if key[1] != "success"}


@every_driver
def test_listener_that_raises(
    driver: Driver,
    clock: VirtualClock,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failure of the metrics does not fail the call, and is logged."""
    listener = PrometheusListener(registry)
    monkeypatch.setattr(listener, "_attempts", None)

    with listening(listener):
        assert "done" == driver.run(clock, Dependency(clock, FAIL, OK))

    assert 2 == sum(record.levelno == logging.ERROR for record in caplog.records)


def test_global_registry(monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry) -> None:
    """By default, the metrics are in the global registry."""
    assert prometheus_client.REGISTRY is vars(prometheus)["REGISTRY"]
    monkeypatch.setattr(prometheus, "REGISTRY", registry)

    PrometheusListener()

    assert b"tarry_calls_total" in generate_latest(registry)
