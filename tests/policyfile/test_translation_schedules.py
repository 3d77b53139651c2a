"""Tests for schedules that a target cannot express, which the first difference reports."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tarry.core.backoff import Schedule
from tarry.core.policy import PRESETS, Policy
from tarry.policyfile.defence import Defence
from tarry.policyfile.envoy import to_envoy
from tarry.policyfile.gateway import to_gateway_api
from tarry.policyfile.grpc import to_grpc
from tarry.policyfile.istio import to_istio
from tests.policyfile.builders import differing_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.policyfile.translation import Exported

EXPORTERS: dict[str, Callable[[Defence], Exported]] = {
    "Istio": partial(to_istio, host="payments"),
    "Envoy": partial(to_envoy, host="payments"),
    "gRPC": to_grpc,
}


@pytest.mark.parametrize(
    ("target", "preset", "target_schedule"),
    [
        ("Istio", "webhook", "9 within 5.42 min, 50 s apart at most"),
        ("Envoy", "webhook", "9 within 42.6 min, 21.3 min apart at most"),
        ("gRPC", "webhook", "4 within 2.19 h, 120 min apart at most"),
        ("Istio", "patient", "99 within 16.1 min, 10 s apart at most"),
        ("gRPC", "patient", "4 within 15 s, 8 s apart at most"),
    ],
)
def test_inexpressible_schedule_is_reported_first(
    target: str, preset: str, target_schedule: str
) -> None:
    """The first difference has the schedules of tarry and of the target."""
    first = EXPORTERS[target](Defence(PRESETS[preset])).differences[0]

    tarry_schedules = {
        "webhook": "9 retries within 75.6 h, 24 h apart at most",
        "patient": "99 retries within 24 h, 60 min apart at most",
    }
    assert (
        f"schedule = {tarry_schedules[preset]}: THE SCHEDULE CANNOT BE EXPRESSED: {target} makes "
        f"{target_schedule}, and gives up" == str(first)
    )


def test_gateway_api_has_only_the_first_delay() -> None:
    """The Gateway API has no setting for the delays after the first, which is reported first."""
    first = to_gateway_api(Defence(PRESETS["webhook"]), host="payments").differences[0]

    assert ("backoff", "THE SCHEDULE CANNOT BE EXPRESSED: 5 s is the shortest wait") == (
        first.field,
        first.effect.partition(";")[0],
    )


@pytest.mark.parametrize("target", EXPORTERS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_attempts": 5, "backoff": "fixed"},
        {"initial_delay": 0.0001},
        {"backoff": Schedule((0.0,))},
        {"jitter": "decorrelated", "max_attempts": 50},
    ],
    ids=str,
)
def test_small_difference_of_schedules(target: str, changes: dict[str, Any]) -> None:
    """A short schedule, or one with decorrelated jitter, is never reported as inexpressible."""
    assert "schedule" not in differing_fields(EXPORTERS[target](Defence(Policy(**changes))))
