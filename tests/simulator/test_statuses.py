"""Statuses of servers, and how policies classify them."""

from __future__ import annotations

import pytest

from tarry import ConfigurationError, Policy
from tarry.simulator import Clients, Defence, Failure, Fixed, Scenario, Server, Summary, simulate


def _run_with_failing_server(policy: Policy, status: int, **limiter: object) -> Summary:
    failing = Failure(end=60.0, kind="error", status=status)
    defence = Defence(policy, limiter=limiter or None)
    return simulate(
        Scenario(
            servers={"server": Server(failures=(failing,))},
            clients=Clients(arrivals="at-once", count=50, defence=defence),
            duration=60.0,
        )
    )


@pytest.mark.parametrize(
    ("status", "statuses", "expected"),
    [(503, {503}, 4), (503, {429}, 1), (429, {429}, 4), (404, {503}, 1), (404, {404}, 4)],
)
def test_policy_decides_which_statuses_are_retried(
    status: int, statuses: set[int], expected: int
) -> None:
    """A status that the policy does not list ends the call."""
    assert (
        expected
        == _run_with_failing_server(Policy(retryable_statuses=statuses), status).attempts_per_call
    )


def test_throttled_call_waits_longer() -> None:
    """After a 429 the first retry waits up to a second, after a 503 up to a tenth of a second."""
    last_request_s = {
        status: max(
            second
            for second, count in enumerate(
                _run_with_failing_server(Policy(), status).series["requests"]
            )
            if count
        )
        for status in (429, 503)
    }

    assert last_request_s[503] == 0
    assert last_request_s[429] > 1


def test_adaptive_limiter_slows_down_after_429() -> None:
    """An adaptive limiter sends less than half the requests to a throttling server."""
    throttling = Server(latency=Fixed(0.1), concurrency=1, queue=0, reject_status=429)
    unlimited, adaptive = (
        simulate(
            Scenario(
                servers={"server": throttling},
                clients=Clients(
                    rate=50.0, defence=Defence(Policy(max_attempts=1), limiter=limiter)
                ),
                duration=30.0,
            )
        )
        for limiter in (None, {"kind": "adaptive"})
    )

    assert adaptive.requests < unlimited.requests / 2
    assert adaptive.failures < unlimited.failures / 2


@pytest.mark.parametrize("status", [200, 399, 600, 0])
def test_status_must_be_an_error_status(status: int) -> None:
    """Only statuses from 400 to 599 are accepted."""
    with pytest.raises(ConfigurationError, match="status"):
        Failure(end=1.0, status=status)
    with pytest.raises(ConfigurationError, match="reject_status"):
        Server(reject_status=status)
