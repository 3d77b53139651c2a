"""Statuses of servers, and how policies classify them."""

from __future__ import annotations

import pytest

from tarry import ConfigurationError, Policy
from tarry.simulator import Clients, Defence, Failure, Fixed, Scenario, Server, Summary, simulate


def _run(policy: Policy, status: int, **limiter: object) -> Summary:
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
    assert expected == _run(Policy(retryable_statuses=statuses), status).attempts_per_call


def test_throttling_waits_longer() -> None:
    """After a 429 the first retry waits up to a second instead of a tenth."""
    last = {
        status: max(
            index for index, seen in enumerate(_run(Policy(), status).series["requests"]) if seen
        )
        for status in (429, 503)
    }

    assert last[503] == 0
    assert last[429] > 1


def test_an_adaptive_limiter_slows_down_when_it_is_throttled() -> None:
    """The limiter is off until the first 429, and then limits the rate."""
    throttling = Server(latency=Fixed(0.1), concurrency=1, queue=0, reject_status=429)
    bare, adaptive = (
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

    assert adaptive.requests < bare.requests / 2
    assert adaptive.failures < bare.failures / 2


@pytest.mark.parametrize("status", [200, 399, 600, 0])
def test_status_must_be_an_error_status(status: int) -> None:
    """Only statuses from 400 to 599 are accepted."""
    with pytest.raises(ConfigurationError, match="status"):
        Failure(end=1.0, status=status)
    with pytest.raises(ConfigurationError, match="reject_status"):
        Server(reject_status=status)
