"""Tests for the description of a defence and its worst case load."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.hedging import Hedging
from tarry.core.policy import PRESETS, Policy
from tarry.policyfile.defence import Defence
from tarry.policyfile.explain import explain


def line_of(defence: Defence, label: str) -> str:
    """Return the line of the description that has this label, without the label."""
    (found,) = [line for line in explain(defence).splitlines() if line.startswith(f"{label}: ")]
    return found.removeprefix(f"{label}: ")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_policy_comes_first(name: str) -> None:
    """The description starts with that of the policy; a hint about the budget follows."""
    policy = PRESETS[name]
    hint = 'budget: none; with kind = "ratio", the load would be about 1.1 x the calls'

    assert f"{policy.explain()}\n{hint}" == explain(Defence(policy))


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (
            {"kind": "ratio", "ratio": 0.5},
            (
                "retries are at most 50 % of the calls in the last 10 s, plus 1 per second; "
                "worst case load: 1.5 x the calls, plus 1 per second"
            ),
        ),
        (
            {"kind": "ratio", "ratio": 0.02, "min_per_second": 0, "window": 60},
            (
                "retries are at most 2 % of the calls in the last 60 s; worst case load: 1.02 x "
                "the calls"
            ),
        ),
        (
            {"kind": "token"},
            (
                "retries take 5 of 500 tokens each, and a success of a first attempt adds 5; "
                "without any success, they stop after 100 retries, and then the load is 1 x the "
                "calls"
            ),
        ),
        (
            {"kind": "token", "preset": "aws-2026", "capacity": 100},
            (
                "retries take 14 of 100 tokens each, and a success of a first attempt adds 1; "
                "without any success, they stop after 7 retries, and then the load is 1 x the "
                "calls"
            ),
        ),
        (
            {"kind": "throttle", "max_tokens": 9, "token_ratio": 0.2},
            (
                "a failure takes 1 of 9 tokens, a success adds 0.2, and retries stop when 4.5 or "
                "fewer are left; without any success, they stop after 5 failures, and then "
                "the load is 1 x the calls"
            ),
        ),
    ],
    ids=str,
)
def test_budget_is_described(budget: dict[str, Any], text: str) -> None:
    """The line of a budget has its numbers and the worst case load."""
    defence = Defence(budget=budget)

    assert text == line_of(defence, "budget")
    assert "1.1 x" not in explain(defence)


def test_budget_without_retries_is_not_used() -> None:
    """With one attempt, a budget is reported as not used, and no budget is suggested."""
    once = Policy(max_attempts=1)

    assert "not used, because nothing is retried" == line_of(
        Defence(once, budget={"kind": "ratio"}), "budget"
    )
    assert once.explain() == explain(Defence(once))


@pytest.mark.parametrize(
    ("hedging", "after", "load"),
    [
        (Hedging(after=0.2), "200 ms", "2 x the calls while every attempt is slow or fails"),
        (
            Hedging(after="p99.9", max_attempts=3),
            "the measured p99.9 latency (once 100 calls are measured)",
            "3 x the calls while every attempt is slow or fails",
        ),
        (
            Hedging(max_extra_load=0.05, min_samples=7),
            "the measured p95 latency (once 7 calls are measured)",
            "1.05 x the calls: hedges add 5 % at most",
        ),
    ],
    ids=repr,
)
def test_hedging_is_described_with_its_load(hedging: Hedging, after: str, load: str) -> None:
    """The description has the number of attempts, the delay and the worst case load."""
    defence = Defence(hedging=hedging)

    text = line_of(defence, "hedging")
    assert text.startswith(f"at most {hedging.max_attempts} attempts of a call, and the first")
    assert f"another attempt (a hedge) starts after {after} without a result, or when" in text
    assert load == line_of(defence, "worst case load")
    capped = hedging.max_extra_load is not None
    assert capped == ("budget: none" not in explain(defence))


def test_budget_with_hedging_is_about_hedges() -> None:
    """With hedging, the line of the budget is about hedges instead of retries."""
    defence = Defence(hedging=Hedging(after=0.2), budget={"kind": "ratio"})

    assert line_of(defence, "budget").startswith("hedges are at most 10 % of the calls")


@pytest.mark.parametrize(
    ("breaker", "text"),
    [
        (
            {},
            (
                "opens when, of the attempts of at least 20 calls in the last 10 s, at least 50 % "
                "failed over at least 1 s; then it rejects attempts for 2 s (2 x as long each "
                "further time, up to 5 min), plus a random part of up to 10 %, and closes when 3 "
                "probes (test calls) have succeeded"
            ),
        ),
        (
            {"consecutive": 5, "slow_after": 0.5, "growth": 1, "spread": 0, "probes": 2},
            (
                "opens when, of the attempts of at least 20 calls in the last 10 s, at least 50 % "
                "failed over at least 1 s or at least 50 % took longer than 500 ms, or when 5 "
                "attempts in a row failed; then it rejects attempts for 2 s, and closes when 2 "
                "probes (test calls) have succeeded"
            ),
        ),
        (
            {
                "timeouts": 4,
                "close_after": 1,
                "growth": 1,
                "spread": 0,
                "min_span": 0,
                "count_retries": True,
            },
            (
                "opens when, of at least 20 attempts in the last 10 s, at least 50 % failed, or "
                "when 4 attempts in a row timed out and no attempt succeeded; then it rejects "
                "attempts for 2 s, and closes when 1 probe (test call) has succeeded"
            ),
        ),
    ],
    ids=str,
)
def test_breaker_is_described(breaker: dict[str, Any], text: str) -> None:
    """The line of a breaker says when it opens, for how long, and when it closes."""
    assert text == line_of(Defence(breaker=breaker), "breaker")


@pytest.mark.parametrize(
    ("limiter", "start"),
    [
        ({"kind": "in-flight", "limit": 20}, "at most 20 attempts at a time, others are rejected"),
        ({"kind": "aimd", "max_limit": 50}, "at most 10 attempts at a time at first"),
        ({"kind": "adaptive"}, "no limit before the first throttled response"),
        ({"kind": "adaptive-limit"}, "at most 128 attempts at a time; after an outage"),
        (
            {"kind": "adaptive-limit", "max_rate": 50, "max_in_flight": 9},
            "at most 9 attempts at a time and 50 per second; after an outage",
        ),
    ],
    ids=str,
)
def test_limiter_is_described(limiter: dict[str, Any], start: str) -> None:
    """The line of a limiter has the limit and says that attempts above it are rejected."""
    text = line_of(Defence(limiter=limiter), "limiter")

    assert text.startswith(start)
    assert "rejected" in text
