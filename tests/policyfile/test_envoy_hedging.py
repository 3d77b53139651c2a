"""Hedging in Envoy: a retry that does not end the attempt before it."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.hedging import Hedging
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.envoy import to_envoy
from tests.policyfile.builders import difference_text, fields
from tests.policyfile.protos import parsed, routes


def exported(hedging: Hedging, **parts: Any) -> Any:
    """Export for a host."""
    return to_envoy(Defence(hedging=hedging, **parts), host="payments.example")


def test_hedging_is_a_retry_that_does_not_end_the_first() -> None:
    """A fixed delay is the timeout of a try, after which another one starts beside it."""
    document = exported(Hedging(after=0.2, max_attempts=3)).documents[0]

    parsed(routes.VirtualHost, document)
    route = document["routes"][0]["route"]
    assert {"hedge_on_per_try_timeout": True} == route["hedge_policy"]
    assert ("0.2s", 2) == (
        route["retry_policy"]["per_try_timeout"],
        route["retry_policy"]["num_retries"],
    )


def test_copy_leaves_at_once() -> None:
    """A hedge is a retry to Envoy, which draws whole milliseconds below the interval: none."""
    document = exported(Hedging(after=0.2)).documents[0]

    back_off = parsed(routes.VirtualHost, document).routes[0].route.retry_policy.retry_back_off
    assert (1, 1) == (
        back_off.base_interval.ToMilliseconds(),
        back_off.max_interval.ToMilliseconds(),
    )


def test_hedged_attempt_is_a_failure_of_its_host() -> None:
    """Hedging beside a breaker ejects hosts for being slow, which neither does alone."""
    line = difference_text(exported(Hedging(after=0.2), breaker={}), "breaker.failure_rate")

    assert line.startswith("breaker.failure_rate = 0.5: Envoy counts an attempt that is hedged")
    assert "breaker.failure_rate" not in fields(to_envoy(Defence(breaker={}), host="payments"))


def test_differences_of_hedging() -> None:
    """What Envoy's hedging is not stands in one line each."""
    made = exported(Hedging(after=0.2, max_extra_load=0.05))

    expected = ["hedging.after", "hedging.max_extra_load", "budget", "hedging.max_hint"]
    assert expected == fields(made)


@pytest.mark.parametrize("hedging", [Hedging(after="p95"), Hedging(max_extra_load=0.05)], ids=repr)
def test_live_percentile_is_refused(hedging: Hedging) -> None:
    """A number that is measured while it runs cannot be written down; the message says what can."""
    with pytest.raises(ConfigurationError, match=r"\.after must be set in seconds .* to envoy"):
        exported(hedging)
