"""Tests for retry budgets: the figures of their specifications, and comparison with models."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tarry.core.budget import RatioBudget, ThrottleBudget, TokenBudget
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Kind, Outcome, outcome_of_code
from tarry.errors import ConfigurationError
from tests.core.invalid_values import invalid_values, keyword

if TYPE_CHECKING:
    from tarry.core.budget import Budget

THROTTLED = Outcome(Kind.THROTTLED)
OVERLOADED = Outcome(Kind.OVERLOADED)
TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)
FAILURES = [TRANSIENT, TIMEOUT, THROTTLED, OVERLOADED, PERMANENT]

# The price of a retry after a transient failure, a timeout and throttling; the tokens gained by a
# first attempt that succeeds, and by a retry that succeeds (None: the price of that retry).
PRICES = {
    "classic": (5, 5, 5, 5, 5),
    "aws-2020": (5, 10, 5, 1, None),
    "aws-2026": (14, 14, 5, 1, None),
}


def withdraw_until_empty(budget: Budget, outcome: Outcome, now: float = 0.0) -> int:
    """Return the number of retries after `outcome` until the budget is empty."""
    retries = 0
    while budget.withdraw(budget.cost(outcome), now):
        retries += 1
    return retries


def settings_for_few_states() -> settings:
    """Return settings with fewer examples, for a state machine with few states."""
    return settings(max_examples=settings().max_examples // 4, stateful_step_count=40)


# --- token budget --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRICES)
def test_prices(preset: str) -> None:
    """Each preset charges the prices that the documentation of its source states."""
    budget = TokenBudget(preset)
    prices = tuple(budget.cost(outcome) for outcome in (TRANSIENT, TIMEOUT, THROTTLED))
    assert PRICES[preset][:3] == prices


@pytest.mark.parametrize(
    ("preset", "outcome", "expected", "left"),
    [
        ("classic", TRANSIENT, 100, 0),
        ("classic", TIMEOUT, 100, 0),
        ("classic", THROTTLED, 100, 0),
        ("aws-2020", TRANSIENT, 100, 0),
        ("aws-2020", TIMEOUT, 50, 0),
        ("aws-2020", THROTTLED, 100, 0),
        ("aws-2026", TRANSIENT, 35, 10),
        ("aws-2026", TIMEOUT, 35, 10),
        ("aws-2026", THROTTLED, 100, 0),
    ],
)
def test_an_outage_empties_the_bucket(
    preset: str, outcome: Outcome, expected: int, left: int
) -> None:
    """500 tokens pay for the expected number of retries, and the rest does not pay for another."""
    budget = TokenBudget(preset)
    assert (expected, left) == (withdraw_until_empty(budget, outcome), budget.balance(0.0))


@pytest.mark.parametrize(
    ("preset", "expected"), [("classic", 25), ("aws-2020", 14), ("aws-2026", 18)]
)
def test_tokens_gained_by_successes(preset: str, expected: int) -> None:
    """Four first attempts and one retry after a timeout that succeed add the expected tokens."""
    budget = TokenBudget(preset)
    withdraw_until_empty(budget, THROTTLED)
    for _ in range(4):
        budget.record(SUCCESS, 0.0, 0.0)
    budget.record(SUCCESS, budget.cost(TIMEOUT), 0.0)
    assert expected == budget.balance(0.0)


def test_a_success_refunds_only_the_last_retry() -> None:
    """A success after retries for 10 and 5 tokens refunds the 5 tokens of the last retry."""
    budget = TokenBudget("aws-2020")
    for outcome, paid in ((TIMEOUT, 0.0), (TRANSIENT, 10.0)):
        budget.record(outcome, paid, 0.0)
        assert budget.withdraw(budget.cost(outcome), 0.0)
    budget.record(SUCCESS, 5.0, 0.0)
    assert 490 == budget.balance(0.0)


def test_classic_is_the_default() -> None:
    """Without arguments a token budget has the classic preset and 500 tokens."""
    budget = TokenBudget()
    budget.withdraw(500, 0.0)
    budget.record(SUCCESS, 0.0, 0.0)
    assert 5 == budget.balance(0.0)


class TokenMachine(RuleBasedStateMachine):
    """Compares a token bucket with a sum of integers."""

    @initialize(preset=st.sampled_from(list(PRICES)), capacity=st.integers(1, 60))
    def begin(self, preset: str, capacity: int) -> None:
        """Create a full budget."""
        self.budget = TokenBudget(preset, capacity=capacity)
        self.prices, self.capacity, self.tokens = PRICES[preset], capacity, capacity
        self.payments: list[int] = []

    def add_tokens(self, tokens: int) -> None:
        """Add tokens to the model, up to the capacity."""
        self.tokens = min(self.capacity, self.tokens + tokens)

    @rule(index=st.integers(0, 2))
    def retry(self, index: int) -> None:
        """A retry is allowed if and only if the balance covers its price."""
        outcome, price = (TRANSIENT, TIMEOUT, THROTTLED)[index], self.prices[index]
        assert price == self.budget.cost(outcome)
        assert price is not None
        covered = price <= self.tokens
        assert covered == self.budget.withdraw(price, 0.0)
        if covered:
            self.tokens -= price
            self.payments.append(price)

    @rule()
    def first_attempt_succeeds(self) -> None:
        """A first attempt that succeeds adds the tokens of the preset."""
        self.budget.record(SUCCESS, 0.0, 0.0)
        self.add_tokens(self.prices[3] or 0)

    @precondition(lambda self: self.payments)
    @rule()
    def retry_succeeds(self) -> None:
        """A retry that succeeds adds the tokens of the preset."""
        paid = self.payments.pop()
        self.budget.record(SUCCESS, paid, 0.0)
        self.add_tokens(paid if self.prices[4] is None else self.prices[4])

    @precondition(lambda self: self.payments)
    @rule(outcome=st.sampled_from(FAILURES))
    def retry_fails(self, outcome: Outcome) -> None:
        """A failed retry adds no tokens."""
        self.budget.record(outcome, self.payments.pop(), 0.0)

    @precondition(lambda self: self.payments)
    @rule()
    def retry_never_starts(self) -> None:
        """The price of a retry that never starts is refunded."""
        paid = self.payments.pop()
        self.budget.deposit(paid, 0.0)
        self.add_tokens(paid)

    @invariant()
    def balance_agrees_with_the_model(self) -> None:
        """The balance is that of the model, and within its bounds."""
        assert self.tokens == self.budget.balance(0.0)
        assert 0 <= self.budget.balance(0.0) <= self.capacity


@pytest.mark.long_run
def test_token_budget_agrees_with_a_sum() -> None:
    """For any sequence of events the balance is the sum of the deposits and withdrawals."""
    run_state_machine_as_test(TokenMachine, settings=settings_for_few_states())


# --- ratio budget --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "expected"), [(0, 10), (9, 10), (10, 11), (100, 20), (1_000, 110), (10_000, 1_010)]
)
def test_a_tenth_of_the_calls_and_one_per_second(calls: int, expected: int) -> None:
    """By default ten seconds allow ten retries plus a tenth of the calls in those seconds."""
    budget = RatioBudget()
    for n in range(calls):
        budget.record(FAILURES[n % 5], 0.0, 0.0)
    assert expected == withdraw_until_empty(budget, TRANSIENT, 9.9)


def test_calls_leave_the_window() -> None:
    """Calls that have left the window do not allow retries."""
    budget = RatioBudget(min_per_second=0)
    for _ in range(100):
        budget.record(SUCCESS, 0.0, 0.0)
    assert [10.0, 0.0] == [budget.balance(now) for now in (9.9, 10.0)]


def test_without_min_per_second_few_calls_allow_no_retry() -> None:
    """With min_per_second=0 the first retry is allowed after ten calls."""
    budget = RatioBudget(min_per_second=0)
    allowed = []
    for _ in range(10):
        budget.record(TRANSIENT, 0.0, 0.0)
        allowed.append(budget.withdraw(1.0, 0.0))
    assert [False] * 9 + [True] == allowed


def test_retries_are_not_counted_as_calls() -> None:
    """Only first attempts add to the budget; every retry costs 1 after any outcome."""
    budget = RatioBudget(min_per_second=0)
    for outcome in (SUCCESS, *FAILURES) * 10:
        assert 1.0 == budget.cost(outcome)
        budget.record(outcome, 1.0, 0.0)
    assert 0.0 == budget.balance(0.0)


def test_a_retry_that_never_started_is_refunded() -> None:
    """The deposit for a retry that never started can be withdrawn at once."""
    budget = RatioBudget()
    withdraw_until_empty(budget, TRANSIENT)
    budget.deposit(1.0, 0.0)
    assert 1 == withdraw_until_empty(budget, TRANSIENT)


@pytest.mark.parametrize("later", [1.0, 5.0, 12.0])
def test_late_refunds_do_not_add_retries(later: float) -> None:
    """After ten refunds, a new window still allows no more than ten retries."""
    budget = RatioBudget()
    withdraw_until_empty(budget, TRANSIENT, now=0.0)
    for _ in range(10):
        budget.deposit(1.0, later)
    assert 10 == withdraw_until_empty(budget, TRANSIENT, now=12.0)


class RatioMachine(RuleBasedStateMachine):
    """Compares a ratio budget with two lists of times, in exact quarters of a second."""

    @initialize(
        ratio=st.sampled_from([0.125, 0.5, 1.0]), per_second=st.sampled_from([0.0, 0.25, 1.0])
    )
    def begin(self, ratio: float, per_second: float) -> None:
        """Create a budget without calls and retries."""
        self.budget = RatioBudget(ratio, min_per_second=per_second)
        self.ratio, self.minimum = ratio, per_second * 10
        self.now = 0.0
        self.calls: list[float] = []
        self.retries: list[float] = []

    def balance(self) -> float:
        """Return the balance computed from the current second and the nine before it."""
        calls, retried = (
            sum(int(time) > int(self.now) - 10 for time in times)
            for times in (self.calls, self.retries)
        )
        return self.minimum + self.ratio * calls - retried

    @rule(quarters=st.sampled_from([1, 4, 20, 39, 40, 41, 1_000]))
    def advance_clock(self, quarters: int) -> None:
        """Advance the clock."""
        self.now += quarters / 4

    @rule(times=st.integers(1, 20), outcome=st.sampled_from([SUCCESS, *FAILURES]))
    def first_attempts_end(self, times: int, outcome: Outcome) -> None:
        """Record the outcomes of first attempts."""
        for _ in range(times):
            self.budget.record(outcome, 0.0, self.now)
            self.calls.append(self.now)

    @rule(times=st.integers(1, 20))
    def withdraw_retries(self, times: int) -> None:
        """Each retry is allowed if and only if the balance covers its price."""
        for _ in range(times):
            covered = self.balance() >= 1
            assert covered == self.budget.withdraw(1.0, self.now)
            if covered:
                self.retries.append(self.now)

    @invariant()
    def balance_agrees_with_the_model(self) -> None:
        """The balance is that of the lists, or 0 if the lists give a negative number."""
        assert max(0.0, self.balance()) == max(0.0, self.budget.balance(self.now))

    @invariant()
    def retries_stay_below_the_ratio(self) -> None:
        """Retries of nine seconds are at most the minimum plus the ratio of ten seconds' calls."""
        for end in self.retries[-1:]:
            retried = sum(end - 9 < time <= end for time in self.retries)
            calls = sum(end - 10 < time <= end for time in self.calls)
            assert retried <= self.ratio * calls + self.minimum


@pytest.mark.long_run
def test_ratio_budget_agrees_with_lists() -> None:
    """For any sequence of events the budget allows as many retries as the lists of times."""
    run_state_machine_as_test(RatioMachine, settings=settings_for_few_states())


# --- throttle budget (gRPC) ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "failures"), [(1, 1), (2, 1), (3, 2), (10, 5), (11, 6), (1_000, 500)]
)
def test_retries_only_above_half(max_tokens: int, failures: int) -> None:
    """Each failure takes a token, and at half of the tokens or fewer no retry is allowed."""
    budget = ThrottleBudget(max_tokens)
    recorded = 0
    while budget.withdraw(budget.cost(TRANSIENT), 0.0):
        budget.record(TRANSIENT, 0.0, 0.0)
        recorded += 1
    assert failures == recorded


def test_a_thousandth_above_half_allows_a_retry() -> None:
    """5 of 10 tokens allow no retry, 5.001 do; the default token_ratio is 0.1."""
    default, fine = ThrottleBudget(), ThrottleBudget(10, 0.001)
    for budget in (default, fine):
        for _ in range(5):
            budget.record(TRANSIENT, 0.0, 0.0)
        assert not budget.withdraw(budget.cost(TRANSIENT), 0.0)
        budget.record(SUCCESS, 0.0, 0.0)
        assert budget.withdraw(budget.cost(TRANSIENT), 0.0)
    assert [0.1, 0.001] == [default.balance(0.0), fine.balance(0.0)]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (TRANSIENT, 4.0),
        (TIMEOUT, 4.0),
        (THROTTLED, 4.0),
        (OVERLOADED, 4.0),  # the server asked for no retry
        (PERMANENT, 5.0),
        (outcome_of_code("INVALID_ARGUMENT", [("grpc-retry-pushback-ms", "-1")]), 4.0),
        (SUCCESS, 5.0),  # the budget is already full
    ],
)
@pytest.mark.parametrize("paid", [0.0, 0.001])
def test_failures_that_cost_a_token(outcome: Outcome, expected: float, paid: float) -> None:
    """A failed first attempt or retry costs a token when it is retryable or has a pushback."""
    budget = ThrottleBudget(10)
    budget.record(outcome, paid, 0.0)
    assert expected == budget.balance(0.0)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.1, 0.1), (0.5, 0.5), (0.0019, 0.001), (0.12345, 0.123), (1, 1.0), (1.001, 1.001), (9, 4.0)],
)
def test_the_ratio_is_cut_to_three_decimals(ratio: float, expected: float) -> None:
    """A success adds token_ratio, cut to three decimals, up to max_tokens."""
    budget = ThrottleBudget(10, ratio)
    for _ in range(4):
        budget.record(TRANSIENT, 0.0, 0.0)
    budget.record(SUCCESS, 0.0, 0.0)
    assert pytest.approx(1.0 + expected, abs=1e-12) == budget.balance(0.0)


@given(st.integers(1, 10_000))
def test_a_ratio_with_three_decimals_is_not_cut(thousandths: int) -> None:
    """A success adds exactly a token_ratio that has three decimals."""
    budget = ThrottleBudget(40, float(f"{thousandths // 1000}.{thousandths % 1000:03}"))
    for _ in range(19):
        budget.record(TRANSIENT, 0.0, 0.0)
    budget.record(SUCCESS, 0.0, 0.0)
    assert 1_000 + thousandths == round(budget.balance(0.0) * 1_000)


def test_withdrawals_and_deposits_do_not_change_a_throttle() -> None:
    """Retries cost nothing and are not refunded, because only failures take tokens."""
    budget = ThrottleBudget(10)
    assert all(budget.withdraw(budget.cost(TRANSIENT), 0.0) for _ in range(10_000))
    budget.record(TRANSIENT, 0.0, 0.0)
    budget.deposit(1.0, 0.0)
    assert 4.0 == budget.balance(0.0)


class ThrottleMachine(RuleBasedStateMachine):
    """Compares a throttle budget with exact fractions."""

    @initialize(max_tokens=st.integers(1, 12), thousandths=st.integers(1, 999))
    def begin(self, max_tokens: int, thousandths: int) -> None:
        """Create a full budget."""
        self.budget = ThrottleBudget(max_tokens, thousandths / 1000)
        self.max_tokens, self.ratio = max_tokens, Fraction(thousandths, 1000)
        self.tokens = Fraction(max_tokens)

    @rule(outcome=st.sampled_from([SUCCESS, *FAILURES]))
    def finish_attempt(self, outcome: Outcome) -> None:
        """A success adds the ratio, a failure that is not permanent takes a token."""
        self.budget.record(outcome, 0.0, 0.0)
        if outcome is SUCCESS:
            self.tokens = min(Fraction(self.max_tokens), self.tokens + self.ratio)
        elif outcome is not PERMANENT:
            self.tokens = max(Fraction(0), self.tokens - 1)

    @invariant()
    def retries_need_more_than_half_of_the_tokens(self) -> None:
        """A retry needs more than half of the tokens; the balance is the number above half."""
        above = self.tokens - Fraction(self.max_tokens, 2)
        assert (above > 0) == self.budget.withdraw(self.budget.cost(TRANSIENT), 0.0)
        assert max(0.0, float(above)) == max(0.0, self.budget.balance(0.0))


@pytest.mark.long_run
def test_throttle_agrees_with_fractions() -> None:
    """For any sequence of events the tokens are those of exact arithmetic."""
    run_state_machine_as_test(ThrottleMachine, settings=settings_for_few_states())


# --- balance and arguments -----------------------------------------------------------------------


def test_a_balance_is_never_negative() -> None:
    """balance() returns 0 when the tokens are below the limit for a retry."""
    ratio, throttle = RatioBudget(min_per_second=0), ThrottleBudget(10)
    for _ in range(100):
        ratio.record(SUCCESS, 0.0, 0.0)
        throttle.record(TRANSIENT, 0.0, 0.0)
    withdraw_until_empty(ratio, TRANSIENT, 9.0)
    assert [0.0, 0.0] == [ratio.balance(10.0), throttle.balance(0.0)]


@pytest.mark.parametrize(
    ("budget", "field", "value", "pattern"),
    [
        pytest.param(budget, *case.values, id=f"{budget.__name__}-{case.id}")
        for budget, cases in [
            (TokenBudget, invalid_values(capacity="at least 0")),
            (
                RatioBudget,
                invalid_values(ratio="ratio", window="positive", min_per_second="at least 0"),
            ),
            (ThrottleBudget, invalid_values(max_tokens="count", token_ratio="positive")),  # noqa: S106
        ]
        for case in cases
    ],
)
def test_invalid_arguments(budget: type[Budget], field: str, value: object, pattern: str) -> None:
    """An invalid argument raises an error that names the argument."""
    with pytest.raises(ConfigurationError, match=pattern):
        budget(**keyword(field, value))


@pytest.mark.parametrize("preset", ["", "Classic", "aws", None, 1, True, ["classic"]])
def test_unknown_presets(preset: str) -> None:
    """An unknown preset raises an error that lists the presets."""
    with pytest.raises(ConfigurationError, match=r"^preset must be one of aws-2020, aws-2026, c"):
        TokenBudget(preset)


def test_bounds_of_the_throttle_arguments() -> None:
    """max_tokens is at most 1000 and token_ratio at least 0.001."""
    with pytest.raises(ConfigurationError, match=r"^max_tokens must be at most 1000, got 1001$"):
        ThrottleBudget(1_001)
    with pytest.raises(
        ConfigurationError, match=r"^token_ratio must be at least 0.001, got 0.0009"
    ):
        ThrottleBudget(10, 0.0009)
    assert [500.0, 0.5] == [ThrottleBudget(n, 0.001).balance(0.0) for n in (1_000, 1)]
    assert 5.0 == ThrottleBudget(10, 1e308).balance(0.0)


def test_window_of_a_ratio_budget_can_be_a_timedelta() -> None:
    budget = RatioBudget(window=timedelta(minutes=1), min_per_second=2)

    assert 120 == budget.balance(0.0)


def test_capacity_of_zero() -> None:
    """A bucket without capacity pays for no retry."""
    budget = TokenBudget(capacity=0)
    assert (0, False) == (budget.balance(0.0), budget.withdraw(1.0, 0.0))
