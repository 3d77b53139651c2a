"""Tests for warnings about settings that are valid but probably a mistake."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.hedging import Hedging
from tarry.core.policy import PRESETS, Policy
from tarry.policyfile.defence import Defence
from tarry.policyfile.explain import find_warnings


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"retryable_statuses": [200, 302, 503]},
            "retryable_statuses has 200, 302: responses without an error are retried",
        ),
        (
            {"retryable_statuses": [404, 501, 503]},
            "retryable_statuses has 404, 501: the same request fails again",
        ),
        (
            {"retryable_codes": ["OK"]},
            "retryable_codes has OK, which has no effect: a success is never retried",
        ),
        (
            {"retryable_codes": ["NOT_FOUND", "UNAVAILABLE"]},
            "retryable_codes has NOT_FOUND: the same request fails again",
        ),
        ({"jitter": "none"}, 'jitter is "none": clients that fail together retry together'),
        (
            {"initial_delay": 0.001},
            "initial_delay = 0.001 is 1 ms: too short for a dependency to recover",
        ),
        (
            {"max_attempts": 500},
            (
                "max_attempts = 500: one call may be sent 500 times; set total_budget to limit the "
                "time"
            ),
        ),
        (
            {"initial_delay": 20, "total_budget": 5, "jitter": "equal"},
            "total_budget = 5 leaves no time for any retry: the first delay is at least 10 s",
        ),
        (
            {"initial_delay": 20, "total_budget": 5},
            (
                "total_budget = 5 may be shorter than the first delay, which is up to 20 s: there "
                "is no retry if this delay is 5 s or longer"
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_warning(changes: dict[str, Any], line: str) -> None:
    """A questionable setting has one warning with the field, the value and the effect."""
    assert [line] == find_warnings(Defence(Policy(**changes)))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_no_warnings(name: str) -> None:
    """The presets of tarry have no warnings."""
    assert [] == find_warnings(Defence(PRESETS[name]))


@pytest.mark.parametrize(
    "defence",
    [
        Defence(Policy(retryable_statuses=[409, 423, 429, 503])),
        Defence(Policy(max_attempts=1, initial_delay=20, total_budget=5)),
        Defence(Policy(initial_delay=4, total_budget=5)),
        Defence(hedging=Hedging(after=0.1)),
    ],
    ids=repr,
)
def test_sensible_settings_have_no_warnings(defence: Defence) -> None:
    """Temporary statuses, an unused delay, a delay below the budget and hedging are fine."""
    assert [] == find_warnings(defence)
