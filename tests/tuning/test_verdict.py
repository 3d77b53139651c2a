"""The verdict: what got better, what got worse, and a loss of calls before all else."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from tarry.policyfile.defence import Defence
from tarry.simulator.simulate import simulate
from tarry.tuning.comparison import build_scenario, describe_changes
from tests.tuning.logs import Truth
from tests.tuning.proposals import evidence_of

OLD = replace(
    simulate(build_scenario(evidence_of(Truth(calls=200)), Defence())),
    success_rate=0.97,
    p99=2.1,
    amplification=1.3,
    recovered_after=3.0,
    reasons={"attempts": 300},
)


def verdict_of(**changes: Any) -> str:
    """Return what is said of a run that differs in these numbers."""
    return describe_changes(OLD, replace(OLD, **changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"success_rate": 0.9695}, {"p99": 2.0}, {"p99": nan}, {"recovered_after": 4.5}],
)
def test_what_hardly_changes_is_left_out(changes: dict[str, float]) -> None:
    """Chance and what was never measured are no reason to choose."""
    assert "No metric changes by much." == verdict_of(**changes)


def test_a_loss_is_said_first_with_what_it_buys() -> None:
    """Who trades calls for time should see both sides."""
    assert (
        "The proposal loses calls in this simulation. "
        "Worse: fewer calls succeed: 97 % → 95.7 %, "
        "because more calls end where no attempts are left: 300 → 430. "
        "Better: calls that succeed end sooner: p99 2,100 ms → 500 ms."
    ) == verdict_of(success_rate=0.957, p99=0.5, reasons={"attempts": 430})


def test_a_small_loss_is_worse_and_no_alarm() -> None:
    """Up to one call in a hundred is a trade; the reason is what ends more calls than before."""
    reasons = {"attempts": 10, "budget-empty": 350}

    assert (
        "Worse: fewer calls succeed: 97 % → 96.5 %, "
        "because more calls end where the retry budget is empty: 0 → 350. "
        "Better: fewer requests for each call: 1.3x → 1.03x."
    ) == verdict_of(success_rate=0.965, amplification=1.03, reasons=reasons)


def test_a_loss_without_a_reason_has_none_made_up() -> None:
    """Calls that have not ended when the run is over have no reason."""
    for reasons in ({}, {"attempts": 300}):
        assert "Worse: fewer calls succeed: 97 % → 96.5 %." == verdict_of(
            success_rate=0.965, reasons=reasons
        )


def test_all_can_be_better_or_worse() -> None:
    """More calls, and a recovery that never comes."""
    assert "Better: more calls succeed: 97 % → 99 %." == verdict_of(success_rate=0.99)
    assert (
        "Worse: calls that succeed end later: p99 2,100 ms → 4,000 ms; "
        "more requests for each call: 1.3x → 2x; recovered later: 3 s → never."
    ) == verdict_of(p99=4.0, amplification=2.0, recovered_after=inf)
