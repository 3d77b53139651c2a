"""Hedging in Envoy: a retry that does not end the attempt before it."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.hedging import Hedging
from tarry.errors import ConfigurationError
from tarry.wire.defence import Defence
from tarry.wire.export import to_envoy
from tests.wire.export.protos import parsed, routes
from tests.wire.export.said import fields


def exported(hedging: Hedging) -> Any:
    """Export for a host."""
    return to_envoy(Defence(hedging=hedging), host="payments.example")


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


def test_losses_of_hedging() -> None:
    """What Envoy's hedging is not stands in one line each."""
    made = exported(Hedging(after=0.2, max_extra_load=0.05))

    expected = ["hedging.after", "hedging.max_extra_load", "hedging.max_hint", "budget"]
    assert expected == fields(made)


@pytest.mark.parametrize("hedging", [Hedging(after="p95"), Hedging(max_extra_load=0.05)], ids=repr)
def test_live_percentile_is_refused(hedging: Hedging) -> None:
    """A number that is measured while it runs cannot be written down; the message says what can."""
    with pytest.raises(ConfigurationError, match=r"^hedging\.after must be seconds .* to envoy"):
        exported(hedging)
