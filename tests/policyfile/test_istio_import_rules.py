"""Tests for the import of outlier detection from a DestinationRule of Istio."""

from __future__ import annotations

import pytest

from tarry.policyfile.istio import from_istio
from tests.policyfile.builders import differing_fields
from tests.policyfile.resources import destination_rule


def test_breaker_is_imported() -> None:
    """Outlier detection is imported as a breaker that opens after consecutive failures."""
    result = from_istio([destination_rule(outlierDetection={"consecutive5xxErrors": 7})])

    expected = {
        "failure_rate": 1.0,
        "min_calls": 20,
        "consecutive": 7,
        "open_for": 30.0,
        "max_open": 300.0,
        "spread": 0.0,
    }
    assert expected == result.defence.breaker
    assert ["kind", "spec.trafficPolicy.outlierDetection"] == differing_fields(result)


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
def test_smaller_error_count_is_imported(detection: dict[str, int], expected: int | None) -> None:
    """The smaller of both counts of consecutive errors is imported; 0 is off, 5 is default."""
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
def test_count_of_gateway_errors_is_reported(detection: dict[str, int], reported: bool) -> None:
    """An imported count of 502, 503 and 504 is a difference: tarry counts any failure."""
    result = from_istio([destination_rule(outlierDetection=detection)])

    path = "spec.trafficPolicy.outlierDetection.consecutiveGatewayErrors"
    assert reported == (path in differing_fields(result))


def test_policies_of_subsets_are_reported() -> None:
    """Traffic policies of subsets are not imported, which is a difference."""
    subset = {"name": "v1", "trafficPolicy": {"outlierDetection": {}}}
    rule = {"kind": "DestinationRule", "spec": {"host": "a", "subsets": [subset]}}

    result = from_istio([rule])

    assert result.defence.breaker is None
    assert ["kind", "spec.subsets"] == differing_fields(result)
