"""Import of a DestinationRule of Istio: the breaker, and what is not read."""

from __future__ import annotations

import pytest

from tarry.policyfile.istio import from_istio
from tests.policyfile.builders import fields
from tests.policyfile.resources import destination_rule


def test_breaker_is_imported() -> None:
    """Errors in a row are the only way for it to open."""
    made = from_istio([destination_rule(outlierDetection={"consecutive5xxErrors": 7})])

    expected = {
        "failure_rate": 1.0,
        "min_calls": 20,
        "consecutive": 7,
        "open_for": 30.0,
        "max_open": 300.0,
        "spread": 0.0,
    }
    assert expected == made.defence.breaker
    assert ["kind", "spec.trafficPolicy.outlierDetection"] == fields(made)


@pytest.mark.parametrize(
    ("detection", "expected"),
    [
        ({}, 5),
        ({"consecutiveGatewayErrors": 3}, 3),
        ({"consecutive5xxErrors": 0, "consecutiveGatewayErrors": 9}, 9),
        ({"consecutive5xxErrors": 0}, None),
    ],
    ids=repr,
)
def test_the_smaller_row_counts(detection: dict[str, int], expected: int | None) -> None:
    """Both kinds of errors in a row eject; zero is off, and five is the default."""
    breaker = from_istio([destination_rule(outlierDetection=detection)]).defence.breaker

    assert expected == (breaker and breaker["consecutive"])


@pytest.mark.parametrize(
    ("detection", "reported"),
    [
        ({"consecutiveGatewayErrors": 3}, True),
        ({"consecutive5xxErrors": 0, "consecutiveGatewayErrors": 9}, True),
        ({"consecutiveGatewayErrors": 5}, False),
        ({"consecutive5xxErrors": 3}, False),
    ],
    ids=repr,
)
def test_gateway_errors_are_not_all_errors(detection: dict[str, int], reported: bool) -> None:
    """A row of 502, 503 and 504 becomes one of any failure, which is reported."""
    made = from_istio([destination_rule(outlierDetection=detection)])

    path = "spec.trafficPolicy.outlierDetection.consecutiveGatewayErrors"
    assert reported == (path in fields(made))


def test_policies_of_subsets_are_reported() -> None:
    """A breaker that stands beside the traffic policy is not imported, so its path is reported."""
    subset = {"name": "v1", "trafficPolicy": {"outlierDetection": {}}}
    rule = {"kind": "DestinationRule", "spec": {"host": "a", "subsets": [subset]}}

    made = from_istio([rule])

    assert made.defence.breaker is None
    assert ["kind", "spec.subsets"] == fields(made)
