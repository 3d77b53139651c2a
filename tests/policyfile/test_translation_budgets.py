"""Tests that the summary of a budget matches the behaviour of the budget."""

from __future__ import annotations

from math import floor
from typing import Any

import pytest

from tarry.core.budget import Budget
from tarry.core.outcome import TRANSIENT
from tarry.policyfile.defence import Defence
from tarry.policyfile.translation import summarize_budget


def count_retries_without_success(budget: Budget) -> int:
    """Count the retries that a new budget allows while every attempt fails."""
    count = 0
    price = budget.cost(TRANSIENT)
    while budget.withdraw(price, 0.0):
        count += 1
        budget.record(TRANSIENT, price, 0.0)
    return count


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "ratio"},
        {"kind": "ratio", "window": 7.0, "min_per_second": 3.0},
        {"kind": "ratio", "min_per_second": 0},
        {"kind": "throttle"},
        {"kind": "throttle", "max_tokens": 8},
        {"kind": "token"},
        {"kind": "token", "preset": "aws-2026"},
        {"kind": "token", "capacity": 3},
    ],
    ids=str,
)
def test_retries_without_success(arguments: dict[str, Any]) -> None:
    """The summary has the number of retries that the budget allows without a success."""
    defence = Defence(budget=arguments)
    summary, budget = summarize_budget(defence), defence.downstream("payments").budget
    assert summary is not None
    assert budget is not None

    assert floor(summary.retries_without_success) == count_retries_without_success(budget)


def test_no_budget_has_no_summary() -> None:
    """The summary of a defence without a budget is None."""
    assert summarize_budget(Defence()) is None
