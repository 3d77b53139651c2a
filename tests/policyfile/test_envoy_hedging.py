"""Tests for the export of hedging to Envoy: a retry that does not cancel the attempt before it."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.hedging import Hedging
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.envoy import to_envoy
from tests.policyfile.builders import difference_text, differing_fields
from tests.policyfile.protos import parse_valid, routes


def export(hedging: Hedging, **components: Any) -> Any:
    """Export hedging for a host."""
    return to_envoy(Defence(hedging=hedging, **components), host="payments.example")


def test_hedging_becomes_a_hedge_policy() -> None:
    """The delay of hedging is the per-try timeout, after which Envoy starts another attempt."""
    document = export(Hedging(after=0.2, max_attempts=3)).documents[0]

    parse_valid(routes.VirtualHost, document)
    route = document["routes"][0]["route"]
    assert {"hedge_on_per_try_timeout": True} == route["hedge_policy"]
    assert ("0.2s", 2) == (
        route["retry_policy"]["per_try_timeout"],
        route["retry_policy"]["num_retries"],
    )


def test_hedge_starts_without_backoff() -> None:
    """The backoff is 1 ms: Envoy draws whole milliseconds below that, so always 0."""
    document = export(Hedging(after=0.2)).documents[0]

    back_off = parse_valid(routes.VirtualHost, document).routes[0].route.retry_policy.retry_back_off
    assert (1, 1) == (
        back_off.base_interval.ToMilliseconds(),
        back_off.max_interval.ToMilliseconds(),
    )


def test_hedging_with_a_breaker_ejects_slow_hosts() -> None:
    """Envoy counts a hedged attempt as a failure of its host, which is a difference."""
    line = difference_text(export(Hedging(after=0.2), breaker={}), "breaker.failure_rate")

    assert line.startswith("breaker.failure_rate = 0.5: Envoy counts an attempt that is hedged")
    assert "breaker.failure_rate" not in differing_fields(
        to_envoy(Defence(breaker={}), host="payments")
    )


def test_differences_of_hedging() -> None:
    """Each setting of hedging that Envoy lacks is a difference."""
    result = export(Hedging(after=0.2, max_extra_load=0.05))

    expected = ["hedging.after", "hedging.max_extra_load", "budget", "hedging.max_hint"]
    assert expected == differing_fields(result)


@pytest.mark.parametrize("hedging", [Hedging(after="p95"), Hedging(max_extra_load=0.05)], ids=repr)
def test_percentile_delay_is_rejected(hedging: Hedging) -> None:
    """A delay that is a measured percentile is rejected: Envoy needs seconds."""
    with pytest.raises(ConfigurationError, match=r"\.after must be set in seconds .* to envoy"):
        export(hedging)
