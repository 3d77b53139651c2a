"""Tests for schedules that no target can express: the first difference has the replacement."""

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
from tests.policyfile.builders import fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.policyfile.translation import Exported

EXPORTS: dict[str, Callable[[Defence], Exported]] = {
    "Istio": partial(to_istio, host="payments"),
    "Envoy": partial(to_envoy, host="payments"),
    "gRPC": to_grpc,
}


@pytest.mark.parametrize(
    ("target", "preset", "effect"),
    [
        ("Istio", "webhook", "9 within 5.42 min, 50 s apart at most"),
        ("Envoy", "webhook", "9 within 42.6 min, 21.3 min apart at most"),
        ("gRPC", "webhook", "4 within 2.19 h, 120 min apart at most"),
        ("Istio", "patient", "99 within 16.1 min, 10 s apart at most"),
        ("gRPC", "patient", "4 within 15 s, 8 s apart at most"),
    ],
)
def test_lost_schedule_is_told_first(target: str, preset: str, effect: str) -> None:
    """The first line has the whole of both schedules, loud enough to be seen."""
    first = EXPORTS[target](Defence(PRESETS[preset])).differences[0]

    meant = {
        "webhook": "9 retries within 75.6 h, 24 h apart at most",
        "patient": "99 retries within 24 h, 60 min apart at most",
    }
    assert (
        f"schedule = {meant[preset]}: THE SCHEDULE CANNOT BE EXPRESSED: {target} makes {effect}, "
        "and gives up" == str(first)
    )


def test_a_gateway_has_a_schedule_of_its_own() -> None:
    """Only the first delay is exported, whatever the schedule."""
    first = to_gateway_api(Defence(PRESETS["webhook"]), host="payments").differences[0]

    assert ("backoff", "THE SCHEDULE CANNOT BE EXPRESSED: 5 s is the shortest wait") == (
        first.field,
        first.effect.partition(";")[0],
    )


@pytest.mark.parametrize("target", EXPORTS)
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
def test_small_differences_are_no_alarm(target: str, changes: dict[str, Any]) -> None:
    """Differences of less than a minute are reported as a difference of delays."""
    assert "schedule" not in fields(EXPORTS[target](Defence(Policy(**changes))))
