"""What a budget comes to is what the budget itself does."""

from __future__ import annotations

from math import floor
from typing import Any

import pytest

from tarry.core.budget import Budget
from tarry.core.outcome import TRANSIENT
from tarry.policyfile.defence import Defence
from tarry.policyfile.translation import summarize_budget


def retries_without_success(budget: Budget) -> int:
    """Count the retries that a fresh budget pays for while every attempt fails."""
    counted = 0
    price = budget.cost(TRANSIENT)
    while budget.withdraw(price, 0.0):
        counted += 1
        budget.record(TRANSIENT, price, 0.0)
    return counted


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
def test_retries_without_success_can_be_counted(arguments: dict[str, Any]) -> None:
    """The number that is exported is the one that can be counted."""
    defence = Defence(budget=arguments)
    found, budget = summarize_budget(defence), defence.downstream("payments").budget
    assert found is not None
    assert budget is not None

    assert floor(found.retries_without_success) == retries_without_success(budget)


def test_no_budget_is_no_allowance() -> None:
    """Nothing is made up."""
    assert summarize_budget(Defence()) is None
