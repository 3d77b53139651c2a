"""Label values and gauges that the Prometheus and OpenTelemetry listeners share."""

from __future__ import annotations

import pytest

from tarry import Breaker, BreakerState, Downstream, GaveUp, Reason, Succeeded, TokenBudget
from tarry.telemetry.metrics import (
    LabelLimit,
    call_result,
    count_breaker_states,
    sum_budget_balances,
)


def test_label_limit_keeps_the_first_values() -> None:
    """Values beyond the limit become "other"; values that were seen before stay."""
    names = LabelLimit(2)

    assert ["a", "b", "other", "a"] == [names.limit(value) for value in "abca"]


@pytest.mark.parametrize(
    ("event", "result"),
    [
        (Succeeded("load", None, 1), "first-try"),
        (Succeeded("load", None, 2), "after-retries"),
        (GaveUp("load", None, 4, Reason.ATTEMPTS, 1.0, None, None, None), "failed"),
    ],
)
def test_call_result(event: Succeeded | GaveUp, result: str) -> None:
    """The label distinguishes a success of the first attempt, a later success and a failure."""
    assert result == call_result(event)


def test_breakers_of_one_name_are_counted_by_state() -> None:
    """Downstreams with the same name are added up; states without a breaker are 0."""
    downstreams = [Downstream("metrics-states", breaker=Breaker()) for _ in range(2)]
    downstreams[0].force("open")

    counts = count_breaker_states(LabelLimit())

    assert {state: counts["metrics-states", state] for state in BreakerState} == {
        **dict.fromkeys(BreakerState, 0),
        BreakerState.CLOSED: 1,
        BreakerState.FORCED_OPEN: 1,
    }


def test_balances_of_one_name_are_summed() -> None:
    """Budgets of downstreams with the same name are summed; one without a budget is left out."""
    budgets = [Downstream("metrics-sums", budget=TokenBudget()) for _ in range(2)]
    without_budget = Downstream("metrics-none")

    sums = sum_budget_balances(LabelLimit())

    assert sums["metrics-sums"] == sum(budget.balance or 0.0 for budget in budgets) > 0
    assert without_budget.name not in sums
