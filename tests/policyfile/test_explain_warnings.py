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
        (
            {"initial_delay": 500, "max_delay": 600},
            (
                "initial_delay = 500 is 8.33 min, because times are in seconds: for 500 ms, write "
                "initial_delay = 0.5 or initialDelayMs = 500"
            ),
        ),
        (
            {"max_delay": 30_000},
            (
                "max_delay = 30000 is 8.33 h, because times are in seconds: for 30000 ms, write "
                "max_delay = 30 or maxDelayMs = 30000"
            ),
        ),
        (
            {"attempt_timeout": 2500},
            (
                "attempt_timeout = 2500 is 41.7 min, because times are in seconds: for 2500 ms, "
                "write attempt_timeout = 2.5 or attemptTimeoutMs = 2500"
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_warning(changes: dict[str, Any], line: str) -> None:
    """A questionable setting has one warning with the field, the value and the effect."""
    assert [line] == find_warnings(Defence(Policy(**changes)))


@pytest.mark.parametrize(
    ("defence", "line"),
    [
        (
            Defence(hedging=Hedging(after=200)),
            (
                "hedging.after = 200 is 3.33 min, because times are in seconds: for 200 ms, write "
                "hedging.after = 0.2"
            ),
        ),
        (
            Defence(breaker={"open_for": 5000, "max_open": 7200}),
            (
                "breaker.open_for = 5000 is 83.3 min, because times are in seconds: for 5000 ms, "
                "write breaker.open_for = 5"
            ),
        ),
    ],
    ids=["hedging", "breaker"],
)
def test_milliseconds_of_a_table(defence: Defence, line: str) -> None:
    """A time of hedging or the breaker that looks like milliseconds has a warning."""
    assert [line] == find_warnings(defence)


@pytest.mark.parametrize("milliseconds", [100, 150, 200, 250, 500, 750, 1000, 1500, 2000, 5000])
def test_delay_in_milliseconds(milliseconds: int) -> None:
    """Usual delays in milliseconds have a warning."""
    policy = Policy(initial_delay=milliseconds, max_delay=86_400)
    [warning] = find_warnings(Defence(policy))
    assert f"write initial_delay = {milliseconds / 1000:g} or " in warning


@pytest.mark.parametrize(
    "seconds", [30, 45, 60, 90, 120, 180, 300, 600, 900, 1200, 1800, 2700, 3600, 5400, 7200, 21_600]
)
def test_long_delays_in_seconds(seconds: int) -> None:
    """Long delays that are round in minutes or hours have no warning."""
    assert [] == find_warnings(Defence(Policy(initial_delay=seconds, max_delay=86_400)))


@pytest.mark.parametrize(
    "limits",
    [
        {"attempt_timeout": 100, "total_budget": 500, "max_hint": 500, "max_delay": 200},
        {"total_budget": 272_105, "max_hint": 86_400, "max_delay": 43_200},
        {"total_budget": 2_592_000, "attempt_timeout": 3600},
    ],
    ids=repr,
)
def test_long_limits_in_seconds(limits: dict[str, Any]) -> None:
    """Limits of minutes, hours and days have no warning."""
    assert [] == find_warnings(Defence(Policy(**limits)))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_no_warnings(name: str) -> None:
    assert [] == find_warnings(Defence(PRESETS[name]))


@pytest.mark.parametrize(
    "defence",
    [
        Defence(Policy(retryable_statuses=[409, 423, 429, 503])),
        Defence(Policy(retryable_statuses=[429, "5xx"])),
        Defence(Policy(max_attempts=1, initial_delay=20, total_budget=5)),
        Defence(Policy(initial_delay=4, total_budget=5)),
        Defence(hedging=Hedging(after=0.1)),
    ],
    ids=repr,
)
def test_sensible_settings_have_no_warnings(defence: Defence) -> None:
    """Temporary statuses, an unused delay, a delay below the budget and hedging are fine."""
    assert [] == find_warnings(defence)
