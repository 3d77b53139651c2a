"""The Cluster of Envoy: limits, retry budget and outlier detection, by its own protobufs."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.policyfile.envoy import to_envoy
from tests.policyfile.builders import defence, difference_text, fields
from tests.policyfile.protos import clusters, parsed

ALWAYS = ["repeatable", "budget"]


def cluster(**parts: Any) -> Any:
    """Return the cluster as a message."""
    return parsed(clusters.Cluster, to_envoy(defence(**parts), host="payments").documents[1])


@pytest.mark.parametrize(
    ("budget", "percent", "least"),
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
def test_budget_becomes_a_retry_budget(budget: Any, percent: float, least: int) -> None:
    """A share is that share; a bucket is what its successes pay for, at most Envoy's default."""
    found = cluster(budget=budget).circuit_breakers.thresholds[0].retry_budget

    assert (percent, least) == (found.budget_percent.value, found.min_retry_concurrency.value)


def test_budget_counts_in_another_way() -> None:
    """The line about a budget has the numbers that were taken."""
    made = to_envoy(defence(budget={"kind": "token"}), host="payments")

    assert (
        "budget.kind = token: Envoy counts requests in flight: retries are at most 20 % of all "
        "requests, but 3 can always be in flight" == difference_text(made, "budget.kind")
    )


def test_breaker_becomes_outlier_detection() -> None:
    """Rate and row are both there, what Envoy would do besides is off, and no host is spared."""
    found = cluster(breaker={"consecutive": 5, "failure_rate": 0.4, "min_calls": 10})

    detection = found.outlier_detection
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
    assert [10, 30, 300, 3] == [
        time.ToSeconds()
        for time in (
            detection.interval,
            detection.base_ejection_time,
            detection.max_ejection_time,
            detection.max_ejection_time_jitter,
        )
    ]
    assert found.common_lb_config.HasField("healthy_panic_threshold")
    assert 0 == found.common_lb_config.healthy_panic_threshold.value


def test_breaker_without_a_row_ejects_by_rate_only() -> None:
    """Envoy's default of five in a row is switched off."""
    detection = cluster(breaker={}).outlier_detection

    assert 0 == detection.enforcing_consecutive_5xx.value
    assert not detection.HasField("consecutive_5xx")


def test_breaker_that_does_not_grow() -> None:
    """Ejections of one length are a bound of that length, and no difference."""
    parts = {"breaker": {"growth": 1.0, "spread": 0.0}}
    made = to_envoy(defence(**parts), host="payments")

    assert 30 == cluster(**parts).outlier_detection.max_ejection_time.ToSeconds()
    assert [*ALWAYS, "breaker.probes", "max_hint"] == fields(made)


def test_differences_of_a_breaker() -> None:
    """Hosts and not the dependency, no slow calls, no whole number: one line each."""
    made = to_envoy(defence(breaker={"slow_after": 1.0, "failure_rate": 0.333}), host="payments")

    sent, details = ["probes", "slow_after"], ["failure_rate", "growth"]
    expected = [f"breaker.{field}" for field in sent], [f"breaker.{field}" for field in details]
    assert [*ALWAYS, *expected[0], "max_hint", *expected[1]] == fields(made)
    assert "breaker.failure_rate = 0.333: rounded up to 34 % for Envoy" == difference_text(
        made, "breaker.failure_rate"
    )


def test_cap_in_flight_is_a_threshold() -> None:
    """A fixed cap is what Envoy calls a circuit breaker."""
    limiter = {"kind": "in-flight", "limit": 7}

    assert 7 == cluster(limiter=limiter).circuit_breakers.thresholds[0].max_requests.value


def test_other_limiters_are_left_out() -> None:
    """A limit that finds itself cannot be written down."""
    made = to_envoy(defence(limiter={"kind": "aimd"}), host="payments")

    assert "limiter.kind = aimd: left out: Envoy has no such limiter" == difference_text(
        made, "limiter.kind"
    )
    assert 1 == len(made.documents)
