"""Tests for the Envoy Cluster: limits, retry budget and outlier detection."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.policyfile.envoy import to_envoy
from tests.policyfile.builders import difference_text, differing_fields, new_defence
from tests.policyfile.protos import clusters, parse_valid

COMMON_DIFFERENCES = ["repeatable", "budget"]
"""The first differences of every policy with retries and without a budget."""


def export_cluster(**components: Any) -> Any:
    """Export a defence with these components and return its cluster as a message."""
    return parse_valid(
        clusters.Cluster, to_envoy(new_defence(**components), host="payments").documents[1]
    )


@pytest.mark.parametrize(
    ("budget", "percent", "min_concurrency"),
    [
        ({"kind": "ratio"}, 10.0, 1),
        ({"kind": "ratio", "ratio": 0.255, "min_per_second": 2.5}, 25.5, 3),
        ({"kind": "token"}, 20.0, 3),
        ({"kind": "token", "preset": "aws-2026"}, 7.142857, 3),
        ({"kind": "throttle", "token_ratio": 0.1}, 10.0, 3),
        ({"kind": "throttle", "token_ratio": 0.9}, 20.0, 3),
    ],
    ids=str,
)
def test_budget_becomes_a_retry_budget(budget: Any, percent: float, min_concurrency: int) -> None:
    """A ratio is exported as it is; a token budget, as the retries per success, up to 20 %."""
    retry_budget = export_cluster(budget=budget).circuit_breakers.thresholds[0].retry_budget

    assert (percent, min_concurrency) == (
        retry_budget.budget_percent.value,
        retry_budget.min_retry_concurrency.value,
    )


def test_budget_is_a_difference() -> None:
    """The difference of a budget has the exported numbers."""
    result = to_envoy(new_defence(budget={"kind": "token"}), host="payments")

    assert (
        "budget.kind = token: Envoy counts requests in flight: retries are at most 20 % of all "
        "requests, but 3 can always be in flight" == difference_text(result, "budget.kind")
    )


def test_breaker_becomes_outlier_detection() -> None:
    """Only failure rate and consecutive errors eject hosts; all hosts can be ejected."""
    message = export_cluster(breaker={"consecutive": 5, "failure_rate": 0.4, "min_calls": 10})

    detection = message.outlier_detection
    assert (40, 10, 100) == (
        detection.failure_percentage_threshold.value,
        detection.failure_percentage_request_volume.value,
        detection.enforcing_failure_percentage.value,
    )
    assert (5, 100) == (
        detection.consecutive_5xx.value,
        detection.enforcing_consecutive_5xx.value,
    )
    assert (0, 100) == (
        detection.enforcing_success_rate.value,
        detection.max_ejection_percent.value,
    )
    assert [10_000, 2_000, 300_000, 200] == [
        duration.ToMilliseconds()
        for duration in (
            detection.interval,
            detection.base_ejection_time,
            detection.max_ejection_time,
            detection.max_ejection_time_jitter,
        )
    ]
    assert message.common_lb_config.HasField("healthy_panic_threshold")
    assert 0 == message.common_lb_config.healthy_panic_threshold.value


def test_breaker_without_consecutive_ejects_by_rate_only() -> None:
    """Without `consecutive`, Envoy's default of five consecutive errors is off."""
    detection = export_cluster(breaker={}).outlier_detection

    assert 0 == detection.enforcing_consecutive_5xx.value
    assert not detection.HasField("consecutive_5xx")


def test_breaker_without_growth() -> None:
    """Without growth, the maximum ejection time is the base, and growth is no difference."""
    components = {"breaker": {"growth": 1.0, "spread": 0.0}}
    result = to_envoy(new_defence(**components), host="payments")

    assert 2 == export_cluster(**components).outlier_detection.max_ejection_time.ToSeconds()
    expected = [*COMMON_DIFFERENCES, "breaker.probes", "max_hint", "breaker.min_span"]
    assert expected == differing_fields(result)


def test_breaker_that_counts_attempts() -> None:
    """A breaker without `min_span` that counts retries counts as Envoy does."""
    breaker = {"growth": 1.0, "min_span": 0.0, "count_retries": True}
    result = to_envoy(new_defence(breaker=breaker), host="payments")

    assert [*COMMON_DIFFERENCES, "breaker.probes", "max_hint"] == differing_fields(result)


def test_differences_of_a_breaker() -> None:
    """Probes, time-outs, slow calls, growth and a rate in fractions of a percent differ."""
    breaker = {"slow_after": 1.0, "failure_rate": 0.333, "timeouts": 3}
    result = to_envoy(new_defence(breaker=breaker), host="payments")

    assert [
        *COMMON_DIFFERENCES,
        "breaker.probes",
        "breaker.timeouts",
        "breaker.slow_after",
        "max_hint",
        "breaker.failure_rate",
        "breaker.min_span",
        "breaker.growth",
    ] == differing_fields(result)
    assert "breaker.failure_rate = 0.333: rounded up to 34 % for Envoy" == difference_text(
        result, "breaker.failure_rate"
    )


def test_in_flight_limit_becomes_max_requests() -> None:
    """A fixed in-flight limit is exported to Envoy's circuit breakers."""
    limiter = {"kind": "in-flight", "limit": 7}

    assert 7 == export_cluster(limiter=limiter).circuit_breakers.thresholds[0].max_requests.value


def test_other_limiters_are_left_out() -> None:
    """A limiter that adapts its limit is left out, which is a difference."""
    result = to_envoy(new_defence(limiter={"kind": "aimd"}), host="payments")

    assert "limiter.kind = aimd: left out, because Envoy has no such limiter" == difference_text(
        result, "limiter.kind"
    )
    assert 1 == len(result.documents)
