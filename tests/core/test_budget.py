"""Tests for retry budgets: the numbers of their specifications, and comparison with models."""

from __future__ import annotations

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

PRICES = {  # transient, timeout, throttled, a clean success; None: the last cost comes back
    "classic": (5, 5, 5, 5, 5),
    "aws-2020": (5, 10, 5, 1, None),
    "aws-2026": (14, 14, 5, 1, None),
}


def retries(budget: Budget, outcome: Outcome, now: float = 0.0) -> int:
    """Return the number of retries after `outcome` until the budget is empty."""
    times = 0
    while budget.withdraw(budget.cost(outcome), now):
        times += 1
    return times


def fewer() -> settings:
    """Return settings with fewer examples, for a state machine with few states."""
    return settings(max_examples=settings().max_examples // 4, stateful_step_count=40)


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRICES)
def test_prices(preset: str) -> None:
    """Each preset has the price of a retry that its source has."""
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
    """So many retries empty 500 tokens; what is left does not cover another."""
    budget = TokenBudget(preset)
    assert (expected, left) == (retries(budget, outcome), budget.balance(0.0))


@pytest.mark.parametrize(
    ("preset", "expected"), [("classic", 25), ("aws-2020", 14), ("aws-2026", 18)]
)
def test_what_successes_give(preset: str, expected: int) -> None:
    """Four clean successes, then one after a timeout and a last retry that was not throttled."""
    budget = TokenBudget(preset)
    retries(budget, THROTTLED)
    for _ in range(4):
        budget.record(SUCCESS, 0.0, 0.0)
    budget.record(SUCCESS, budget.cost(TIMEOUT), 0.0)
    assert expected == budget.balance(0.0)


def test_a_success_gives_back_the_last_cost_only() -> None:
    """After a timeout (10), a transient failure (5) and a success, the 10 stay paid."""
    budget = TokenBudget("aws-2020")
    for outcome, paid in ((TIMEOUT, 0.0), (TRANSIENT, 10.0)):
        budget.record(outcome, paid, 0.0)
        assert budget.withdraw(budget.cost(outcome), 0.0)
    budget.record(SUCCESS, 5.0, 0.0)
    assert 490 == budget.balance(0.0)


@pytest.mark.parametrize("preset", PRICES)
@pytest.mark.parametrize("outcome", FAILURES)
@pytest.mark.parametrize("paid", [0.0, 5.0])
def test_a_failure_gives_nothing(preset: str, outcome: Outcome, paid: float) -> None:
    """What failed retries have cost is gone, and failures themselves cost nothing."""
    budget = TokenBudget(preset, capacity=100)
    assert budget.withdraw(50, 0.0)
    budget.record(outcome, paid, 0.0)
    assert 50 == budget.balance(0.0)


def test_classic_is_the_default() -> None:
    """Without a name it is the classic one, with 500 tokens."""
    budget = TokenBudget()
    budget.withdraw(500, 0.0)
    budget.record(SUCCESS, 0.0, 0.0)
    assert 5 == budget.balance(0.0)


class TokenMachine(RuleBasedStateMachine):
    """A token bucket beside a whole number."""

    @initialize(preset=st.sampled_from(list(PRICES)), capacity=st.integers(1, 60))
    def begin(self, preset: str, capacity: int) -> None:
        """Begin full."""
        self.budget = TokenBudget(preset, capacity=capacity)
        self.prices, self.capacity, self.tokens = PRICES[preset], capacity, capacity
        self.payments: list[int] = []

    def give(self, tokens: int) -> None:
        """Put tokens into the model."""
        self.tokens = min(self.capacity, self.tokens + tokens)

    @rule(which=st.integers(0, 2))
    def retry(self, which: int) -> None:
        """A retry goes if and only if the balance covers it."""
        outcome, price = (TRANSIENT, TIMEOUT, THROTTLED)[which], self.prices[which]
        assert price == self.budget.cost(outcome)
        assert price is not None
        covered = price <= self.tokens
        assert covered == self.budget.withdraw(price, 0.0)
        if covered:
            self.tokens -= price
            self.payments.append(price)

    @rule()
    def a_call_succeeds_at_once(self) -> None:
        """A clean success gives its gift."""
        self.budget.record(SUCCESS, 0.0, 0.0)
        self.give(self.prices[3] or 0)

    @precondition(lambda self: self.payments)
    @rule()
    def a_retry_succeeds(self) -> None:
        """A success after retries gives what the preset says."""
        paid = self.payments.pop()
        self.budget.record(SUCCESS, paid, 0.0)
        self.give(paid if self.prices[4] is None else self.prices[4])

    @precondition(lambda self: self.payments)
    @rule(outcome=st.sampled_from(FAILURES))
    def a_retry_fails(self, outcome: Outcome) -> None:
        """A failure gives nothing."""
        self.budget.record(outcome, self.payments.pop(), 0.0)

    @precondition(lambda self: self.payments)
    @rule()
    def a_retry_never_starts(self) -> None:
        """What was paid comes back."""
        paid = self.payments.pop()
        self.budget.deposit(paid, 0.0)
        self.give(paid)

    @invariant()
    def balance_is_right(self) -> None:
        """The balance is that of the model, and within its bounds."""
        assert self.tokens == self.budget.balance(0.0)
        assert 0 <= self.budget.balance(0.0) <= self.capacity


def test_token_budget_agrees_with_a_whole_number() -> None:
    """Whatever happens, the bucket holds what a plain sum says."""
    run_state_machine_as_test(TokenMachine, settings=fewer())


# --- ratio ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "expected"), [(0, 10), (9, 10), (10, 11), (100, 20), (1_000, 110), (10_000, 1_010)]
)
def test_a_tenth_of_the_calls_and_one_per_second(calls: int, expected: int) -> None:
    """By default a tenth of the calls of ten seconds may be retried, plus ten."""
    budget = RatioBudget()
    for n in range(calls):
        budget.record(FAILURES[n % 5], 0.0, 0.0)
    assert expected == retries(budget, TRANSIENT, 9.9)


@pytest.mark.parametrize(("later", "expected"), [(0.0, 0), (9.9, 0), (10.0, 10), (1e6, 10)])
def test_retries_are_forgotten_after_the_window(later: float, expected: int) -> None:
    """A used up budget is full again when the window has gone by."""
    budget = RatioBudget()
    assert 10 == retries(budget, TRANSIENT, 0.0)
    assert expected == retries(budget, TRANSIENT, later)


def test_calls_are_forgotten_after_the_window() -> None:
    """Calls of an earlier window pay for no retry."""
    budget = RatioBudget(min_per_second=0)
    for _ in range(100):
        budget.record(SUCCESS, 0.0, 0.0)
    assert [10.0, 0.0] == [budget.balance(now) for now in (9.9, 10.0)]


def test_without_a_floor_a_quiet_client_cannot_retry() -> None:
    """With no retries per second for free, ten calls must be made for the first retry."""
    budget = RatioBudget(min_per_second=0)
    allowed = []
    for _ in range(10):
        budget.record(TRANSIENT, 0.0, 0.0)
        allowed.append(budget.withdraw(1.0, 0.0))
    assert [False] * 9 + [True] == allowed


def test_retries_are_no_calls() -> None:
    """Only first attempts feed the budget; every retry costs one, whatever its outcome."""
    budget = RatioBudget(min_per_second=0)
    for outcome in (SUCCESS, *FAILURES) * 10:
        assert 1.0 == budget.cost(outcome)
        budget.record(outcome, 1.0, 0.0)
    assert 0.0 == budget.balance(0.0)


def test_a_retry_that_never_started_is_given_back() -> None:
    """What was taken for a retry can be taken again at once if it never started."""
    budget = RatioBudget()
    retries(budget, TRANSIENT)
    budget.deposit(1.0, 0.0)
    assert 1 == retries(budget, TRANSIENT)


@pytest.mark.parametrize("later", [1.0, 5.0, 12.0])
def test_a_retry_given_back_late_adds_none(later: float) -> None:
    """When ten retries are given back, no more than ten can go once the window has passed."""
    budget = RatioBudget()
    retries(budget, TRANSIENT, now=0.0)
    for _ in range(10):
        budget.deposit(1.0, later)
    assert 10 == retries(budget, TRANSIENT, now=12.0)


class RatioMachine(RuleBasedStateMachine):
    """A ratio budget beside two lists of times, in quarters of a second, which are exact."""

    @initialize(
        ratio=st.sampled_from([0.125, 0.5, 1.0]), per_second=st.sampled_from([0.0, 0.25, 1.0])
    )
    def begin(self, ratio: float, per_second: float) -> None:
        """Begin with empty lists."""
        self.budget = RatioBudget(ratio, min_per_second=per_second)
        self.ratio, self.floor = ratio, per_second * 10
        self.now = 0.0
        self.calls: list[float] = []
        self.retries: list[float] = []

    def balance(self) -> float:
        """Return what the lists say: the present second and the nine before it count."""
        calls, retried = (
            sum(int(time) > int(self.now) - 10 for time in times)
            for times in (self.calls, self.retries)
        )
        return self.floor + self.ratio * calls - retried

    @rule(quarters=st.sampled_from([1, 4, 20, 39, 40, 41, 1_000]))
    def time_passes(self, quarters: int) -> None:
        """Go on in time."""
        self.now += quarters / 4

    @rule(times=st.integers(1, 20), outcome=st.sampled_from([SUCCESS, *FAILURES]))
    def first_attempts_end(self, times: int, outcome: Outcome) -> None:
        """Calls are made."""
        for _ in range(times):
            self.budget.record(outcome, 0.0, self.now)
            self.calls.append(self.now)

    @rule(times=st.integers(1, 20))
    def retries_are_asked_for(self, times: int) -> None:
        """Each retry goes if and only if the balance covers it."""
        for _ in range(times):
            covered = self.balance() >= 1
            assert covered == self.budget.withdraw(1.0, self.now)
            if covered:
                self.retries.append(self.now)

    @invariant()
    def balance_is_right(self) -> None:
        """The balance is that of the lists, where that is not negative."""
        assert max(0.0, self.balance()) == max(0.0, self.budget.balance(self.now))

    @invariant()
    def retries_stay_below_the_ratio(self) -> None:
        """In any nine seconds: at most the floor, and the ratio of ten seconds' calls."""
        for end in self.retries[-1:]:
            retried = sum(end - 9 < time <= end for time in self.retries)
            calls = sum(end - 10 < time <= end for time in self.calls)
            assert retried <= self.ratio * calls + self.floor


def test_ratio_budget_agrees_with_lists() -> None:
    """Whatever happens, retries stay within the ratio of the calls, and no further below."""
    run_state_machine_as_test(RatioMachine, settings=fewer())


# --- gRPC throttle -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "failures"), [(1, 1), (2, 1), (3, 2), (10, 5), (11, 6), (1_000, 500)]
)
def test_retries_only_above_half(max_tokens: int, failures: int) -> None:
    """Each failure takes a token, and from half of them on no retry goes."""
    budget = ThrottleBudget(max_tokens)
    before = -1
    while budget.withdraw(budget.cost(TRANSIENT), 0.0):
        budget.record(TRANSIENT, 0.0, 0.0)
        before += 1
    assert failures == before + 1


def test_the_least_above_half_is_enough() -> None:
    """At five of ten tokens no retry goes, a thousandth above it does; the default is a tenth."""
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
        (OVERLOADED, 4.0),  # the server said "do not retry"
        (PERMANENT, 5.0),
        (outcome_of_code("INVALID_ARGUMENT", [("grpc-retry-pushback-ms", "-1")]), 4.0),
        (SUCCESS, 5.0),  # full already
    ],
)
@pytest.mark.parametrize("paid", [0.0, 0.001])
def test_which_failures_cost(outcome: Outcome, expected: float, paid: float) -> None:
    """A failure costs a token when it was retryable or pushed back, on any attempt."""
    budget = ThrottleBudget(10)
    budget.record(outcome, paid, 0.0)
    assert expected == budget.balance(0.0)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.1, 0.1), (0.5, 0.5), (0.0019, 0.001), (0.12345, 0.123), (1, 1.0), (1.001, 1.001), (9, 4.0)],
)
def test_the_ratio_is_cut_to_three_decimals(ratio: float, expected: float) -> None:
    """A success gives the ratio without what lies behind its third decimal, up to the most."""
    budget = ThrottleBudget(10, ratio)
    for _ in range(4):
        budget.record(TRANSIENT, 0.0, 0.0)
    budget.record(SUCCESS, 0.0, 0.0)
    assert pytest.approx(1.0 + expected, abs=1e-12) == budget.balance(0.0)


@given(st.integers(1, 10_000))
def test_three_decimals_are_kept_to_the_last(thousandths: int) -> None:
    """A ratio of three decimals is not cut at all."""
    budget = ThrottleBudget(40, float(f"{thousandths // 1000}.{thousandths % 1000:03}"))
    for _ in range(19):
        budget.record(TRANSIENT, 0.0, 0.0)
    budget.record(SUCCESS, 0.0, 0.0)
    assert 1_000 + thousandths == round(budget.balance(0.0) * 1_000)


def test_a_withdrawal_takes_nothing() -> None:
    """Ten thousand retries cost nothing, as only failures do, and there is nothing to give back."""
    budget = ThrottleBudget(10)
    assert all(budget.withdraw(budget.cost(TRANSIENT), 0.0) for _ in range(10_000))
    budget.record(TRANSIENT, 0.0, 0.0)
    budget.deposit(1.0, 0.0)
    assert 4.0 == budget.balance(0.0)


class ThrottleMachine(RuleBasedStateMachine):
    """A gRPC throttle beside a fraction."""

    @initialize(most=st.integers(1, 12), thousandths=st.integers(1, 999))
    def begin(self, most: int, thousandths: int) -> None:
        """Begin full."""
        self.budget = ThrottleBudget(most, thousandths / 1000)
        self.most, self.ratio, self.tokens = most, Fraction(thousandths, 1000), Fraction(most)

    @rule(outcome=st.sampled_from([SUCCESS, *FAILURES]))
    def an_attempt_ends(self, outcome: Outcome) -> None:
        """A success gives the ratio, a failure that is not permanent takes a token."""
        self.budget.record(outcome, 0.0, 0.0)
        if outcome is SUCCESS:
            self.tokens = min(Fraction(self.most), self.tokens + self.ratio)
        elif outcome is not PERMANENT:
            self.tokens = max(Fraction(0), self.tokens - 1)

    @invariant()
    def retries_go_only_above_half(self) -> None:
        """A retry goes while more than half of the tokens are left; what is above half is shown."""
        above = self.tokens - Fraction(self.most, 2)
        assert (above > 0) == self.budget.withdraw(self.budget.cost(TRANSIENT), 0.0)
        assert max(0.0, float(above)) == max(0.0, self.budget.balance(0.0))


def test_throttle_agrees_with_a_fraction() -> None:
    """Whatever happens, the tokens are those of exact arithmetic."""
    run_state_machine_as_test(ThrottleMachine, settings=fewer())


# --- all of them ---------------------------------------------------------------------------------


def test_a_balance_is_never_negative() -> None:
    """A balance is what could be withdrawn, and less than nothing cannot."""
    ratio, throttle = RatioBudget(min_per_second=0), ThrottleBudget(10)
    for _ in range(100):
        ratio.record(SUCCESS, 0.0, 0.0)
        throttle.record(TRANSIENT, 0.0, 0.0)
    retries(ratio, TRANSIENT, 9.0)
    assert [0.0, 0.0] == [ratio.balance(10.0), throttle.balance(0.0)]


@pytest.mark.parametrize(
    ("budget", "field", "value", "words"),
    [
        pytest.param(budget, *case.values, id=f"{budget.__name__}-{case.id}")
        for budget, cases in [
            (TokenBudget, invalid_values(capacity="positive")),
            (
                RatioBudget,
                invalid_values(ratio="share", window="positive", min_per_second="at least 0"),
            ),
            (ThrottleBudget, invalid_values(max_tokens="count", token_ratio="positive")),  # noqa: S106
        ]
        for case in cases
    ],
)
def test_refused_arguments(budget: type[Budget], field: str, value: object, words: str) -> None:
    """Each argument rejects invalid values, with its name in the message."""
    with pytest.raises(ConfigurationError, match=words):
        budget(**keyword(field, value))


@pytest.mark.parametrize("preset", ["", "Classic", "aws", None, 1, True, ["classic"]])
def test_unknown_presets(preset: str) -> None:
    """An unknown preset is rejected with the names of the known ones."""
    with pytest.raises(ConfigurationError, match=r"^preset must be one of aws-2020, aws-2026, c"):
        TokenBudget(preset)


def test_the_bounds_of_the_throttle() -> None:
    """From one to a thousand tokens, and a ratio that three decimals can tell from nothing."""
    with pytest.raises(ConfigurationError, match=r"^max_tokens must be at most 1000, got 1001$"):
        ThrottleBudget(1_001)
    with pytest.raises(
        ConfigurationError, match=r"^token_ratio must be at least 0.001, got 0.0009"
    ):
        ThrottleBudget(10, 0.0009)
    assert [500.0, 0.5] == [ThrottleBudget(n, 0.001).balance(0.0) for n in (1_000, 1)]
    assert 5.0 == ThrottleBudget(10, 1e308).balance(0.0)
