"""Tests for hedging: when copies are sent, what they cost, and how losers are measured."""

from __future__ import annotations

import pytest

from tarry.core.breaker import Breaker
from tarry.core.budget import RatioBudget, TokenBudget
from tarry.core.downstream import Downstream
from tarry.core.hedging import HedgedCall, Hedging
from tarry.core.hints import Hint
from tarry.core.limiter import AdaptiveRate, InFlight
from tarry.core.outcome import PERMANENT, TRANSIENT, Kind, Outcome
from tarry.core.verdict import Attempt, DelayedPermit, Reason, Stop
from tarry.errors import ConfigurationError
from tests.core.invalid_values import invalid_values, keyword

THROTTLED = Outcome(Kind.THROTTLED)
OVERLOADED = Outcome(Kind.OVERLOADED)

FIRST, SECOND, THIRD = Attempt(1), Attempt(2), Attempt(3)


def seen(*durations: float, max_in_flight: int | None = None) -> Downstream:
    """Return a downstream with calls of these durations."""
    downstream = Downstream("d", max_in_flight=max_in_flight)
    for duration in durations:
        downstream.latency.add(duration)
    return downstream


def started(hedging: Hedging, downstream: Downstream, now: float = 0.0) -> HedgedCall:
    """Return a call whose first copy is running."""
    call = HedgedCall(hedging, downstream)
    assert FIRST == call.start(now)
    return call


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 0.25, 10])
def test_a_fixed_delay(after: float) -> None:
    """The second copy is due after the delay, from the first call on, and there is no third."""
    call = started(Hedging(after=after), Downstream("d"), now=100.0)
    due = call.next_hedge_at
    assert (100.0 + after, SECOND) == (due, call.hedge(100.0 + after))
    assert (None, None, 2) == (call.next_hedge_at, call.hedge(200.0), call.attempts)


def test_further_copies_follow_at_the_same_distance() -> None:
    """With more attempts, each copy is due one delay after the copy before it."""
    call = started(Hedging(after=2.0, max_attempts=4), Downstream("d"))
    moments = []
    while call.next_hedge_at is not None:
        moments.append(call.next_hedge_at)
        call.hedge(call.next_hedge_at)
    assert ([2.0, 4.0, 6.0], 4) == (moments, call.attempts)


@pytest.mark.parametrize(
    ("after", "expected"),
    [("p50", 0.51), ("p95", 0.96), ("p5", 0.06), ("p99", 1.0), ("p99.9", 1.0), ("p90.5", 0.91)],
)
def test_a_live_percentile(after: str, expected: float) -> None:
    """The delay is the percentile of the last calls, at the time the call begins."""
    downstream = seen(*(n / 100 for n in range(1, 101)))
    call = started(Hedging(after=after), downstream)
    assert pytest.approx(expected) == call.next_hedge_at
    for _ in range(512):
        downstream.latency.add(9.0)
    assert pytest.approx(expected) == call.next_hedge_at


@pytest.mark.parametrize("hedging", [Hedging(after="p95"), Hedging(max_extra_load=0.05)])
def test_off_until_there_are_enough_samples(hedging: Hedging) -> None:
    """A percentile of 99 calls is not believed, one of 100 is."""
    downstream = seen(*[0.5] * 99)
    assert None is started(hedging, downstream).next_hedge_at
    downstream.latency.add(0.5)
    assert 0.5 == started(hedging, downstream).next_hedge_at


def test_the_number_of_samples_can_be_chosen() -> None:
    """From one sample to all that are remembered."""
    assert 0.5 == started(Hedging(after="p95", min_samples=1), seen(0.5)).next_hedge_at
    most = Hedging(after="p95", min_samples=512)
    assert [None, 0.5] == [started(most, seen(*[0.5] * n)).next_hedge_at for n in (511, 600)]


@pytest.mark.parametrize(
    ("hedging", "expected"),
    [
        (Hedging(after=1.0), None),
        (Hedging(after="p99"), 0.99),
        (Hedging(max_extra_load=0.05), 0.95),
        (Hedging(max_extra_load=0.2), 0.8),
        (Hedging(max_extra_load=1), 0.0),
        (Hedging(after=1.0, max_extra_load=0.05), None),
        (Hedging(after="p50", max_extra_load=0.05), 0.5),
    ],
)
def test_one_knob_sets_the_percentile(hedging: Hedging, expected: float | None) -> None:
    """The extra load that is allowed is the share of calls that are slow enough for a copy."""
    assert expected == hedging.quantile


def test_all_may_be_hedged() -> None:
    """An extra load of 1 hedges at the fastest call seen."""
    downstream = seen(*(n / 100 for n in range(1, 101)))
    assert 0.01 == started(Hedging(max_extra_load=1), downstream).next_hedge_at


# --- how it ends ---------------------------------------------------------------------------------


def test_the_winner_counts_and_the_losers_time_is_remembered() -> None:
    """The second copy wins: one call for the breaker, two durations for the percentile."""
    breaker = Breaker()
    downstream = Downstream("d", breaker=breaker, max_in_flight=2)
    call = started(Hedging(after=1.0), downstream)
    assert SECOND == call.hedge(1.0)
    call.record_success(2, 1.25, 0.0)
    assert (1, 0, 0) == breaker.counts(1.25)
    assert [0.25, 1.25] == [downstream.latency.quantile(q) for q in (0.0, 1.0)]
    assert 2 == len(downstream.latency)
    assert [True, True, False] == [isinstance(downstream.admit(2.0), int) for _ in range(3)]


@pytest.mark.parametrize("outcome", [TRANSIENT, THROTTLED])
def test_a_failure_sends_the_next_copy_at_once(outcome: Outcome) -> None:
    """After a failure that is not fatal the next copy does not wait for its time."""
    call = started(Hedging(after=10.0, max_attempts=3), Downstream("d"))
    assert (SECOND, 11.0) == (call.record_failure(1, outcome, 1.0, 0.0), call.next_hedge_at)
    assert (THIRD, None) == (call.record_failure(2, outcome, 2.0, 0.0), call.next_hedge_at)
    assert Stop(Reason.ATTEMPTS) == call.record_failure(3, outcome, 3.0, 0.0)


def test_a_failure_while_another_copy_runs() -> None:
    """When no copy is left to send, those that run may still win."""
    downstream = Downstream("d")
    call = started(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    assert None is call.record_failure(1, TRANSIENT, 2.0, 0.0)
    call.record_success(2, 3.0, 0.0)
    assert (1, 2.0) == (len(downstream.latency), downstream.expected_duration())


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (PERMANENT, Stop(Reason.PERMANENT)),
        (OVERLOADED, Stop(Reason.OVERLOADED)),
    ],
)
def test_a_fatal_failure_is_the_answer(outcome: Outcome, expected: Stop) -> None:
    """A failure that would be the same again ends the call, and the copies that still run."""
    downstream = Downstream("d", max_in_flight=3)
    call = started(Hedging(after=1.0, max_attempts=3), downstream)
    call.hedge(1.0)
    assert expected == call.record_failure(1, outcome, 1.5, 0.0)
    assert 3 == sum(isinstance(downstream.admit(2.0), int) for _ in range(10))


@pytest.mark.parametrize("exact", [True, False])
def test_a_pushback_sets_the_time_of_the_next_copy(exact: bool) -> None:
    """When the server names a delay, the next copy goes after it, not at once (gRFC A6)."""
    call = started(Hedging(after=10.0), Downstream("d"))
    outcome = Outcome(Kind.THROTTLED, Hint(delay=3.0, exact=exact))
    assert (None, 4.0) == (call.record_failure(1, outcome, 1.0, 0.0), call.next_hedge_at)


def test_a_pushback_of_the_last_copy() -> None:
    """A delay that the server names makes no copy of which there are none left."""
    call = started(Hedging(after=1.0), Downstream("d"))
    call.hedge(1.0)
    outcome = Outcome(Kind.THROTTLED, Hint(delay=3.0))
    assert (None, None) == (call.record_failure(1, outcome, 2.0, 0.0), call.next_hedge_at)
    assert (Stop(Reason.ATTEMPTS), None) == (
        call.record_failure(2, outcome, 2.0, 0.0),
        call.next_hedge_at,
    )


def test_a_copy_that_was_pushed_back_and_then_refused_ends_the_call() -> None:
    """When no copy runs and the next one is rejected, the call ends."""
    downstream = Downstream("d", budget=TokenBudget(capacity=5))
    call = started(Hedging(after=10.0), downstream)
    assert None is call.record_failure(1, Outcome(Kind.THROTTLED, Hint(delay=3.0)), 1.0, 0.0)
    downstream.withdraw(TRANSIENT, 2.0)
    assert Stop(Reason.BUDGET_EMPTY) == call.hedge(4.0)


def test_a_cancelled_call_is_not_counted() -> None:
    """When the caller gives up, every place comes back, and no time is learnt from that."""
    breaker = Breaker()
    downstream = Downstream("d", breaker=breaker, max_in_flight=2)
    call = started(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    call.cancel(1.001)
    assert 2 == sum(isinstance(downstream.admit(2.0), int) for _ in range(10))
    assert ((0, 0, 0), 0) == (breaker.counts(2.0), len(downstream.latency))


def test_a_copy_that_could_not_be_sent() -> None:
    """When a driver has no thread for a copy, all it had taken comes back, and the others go on."""
    budget = TokenBudget()
    downstream = Downstream("d", budget=budget, max_in_flight=3)
    downstream.add_hedge_credit(2.0)
    call = started(Hedging(after=1.0, max_extra_load=0.05, max_attempts=3), downstream)
    assert (SECOND, 495.0) == (call.hedge(1.0), budget.balance(1.0))
    assert (True, None) == (call.record_unsent(2, 1.0), call.next_hedge_at)
    assert 500.0 == budget.balance(1.0)
    assert THIRD == call.record_failure(1, TRANSIENT, 2.0, 0.0)
    assert not call.record_unsent(3, 2.0)
    assert [0, 0, 0, Stop(Reason.LIMIT)] == [downstream.admit(2.0) for _ in range(4)]
    assert [True, True, False] == [downstream.take_hedge_credit() for _ in range(3)]


def test_no_knob_no_credit() -> None:
    """Without an extra load to keep to, a copy that could not be sent gives back no credit."""
    downstream = Downstream("d")
    call = started(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    assert call.record_unsent(2, 1.0)
    assert not downstream.take_hedge_credit()


class Broken(InFlight):
    """A limiter that gives places back and then raises."""

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Fail each time."""
        super().release(outcome, duration, now)
        raise LookupError(self._in_flight)


def test_a_limiter_that_raises_keeps_no_place() -> None:
    """Whatever a user's limiter does, every copy is given back, and its first error shows."""
    limiter = Broken(3)
    call = started(Hedging(after=0, max_attempts=3), Downstream("d", limiter=limiter))
    call.hedge(0.0)
    call.hedge(0.0)
    with pytest.raises(LookupError, match="2"):
        call.cancel(1.0)
    assert 0 == limiter._in_flight


def test_nothing_is_given_back_twice() -> None:
    """A driver may drop a call that is over: its places came back already."""
    downstream = Downstream("d", max_in_flight=2)
    call = started(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    call.record_success(1, 1.5, 0.0)
    call.cancel(1.5)
    assert [0, 0, Stop(Reason.LIMIT)] == [downstream.admit(2.0) for _ in range(3)]


def test_ten_thousand_copies() -> None:
    """However many copies a call may have, each has its number and all of them end."""
    downstream = Downstream("d", max_in_flight=10_000)
    call = started(Hedging(after=0, max_attempts=10_000), downstream)
    numbers = []
    while call.next_hedge_at is not None:
        attempt = call.hedge(call.next_hedge_at)
        assert isinstance(attempt, Attempt)
        numbers.append(attempt.number)
    call.record_success(5_000, 1.0, 0.0)
    assert [*range(2, 10_001)] == numbers
    assert downstream.admit(1.0) == 0


# --- what says no --------------------------------------------------------------------------------


def test_an_open_breaker_stops_the_first_copy() -> None:
    """Open, it fails the call before it begins; half-open, a copy needs a probe of its own."""
    breaker = Breaker(consecutive=1, probes=1)
    downstream = Downstream("d", breaker=breaker)
    breaker.record(0, failed=True, duration=0.1, now=0.0, random_number=0.0)
    call = HedgedCall(Hedging(after=1.0), downstream)
    assert (Stop(Reason.BREAKER_OPEN, 29.0), None) == (call.start(1.0), call.next_hedge_at)
    assert (FIRST, 31.0) == (call.start(30.0), call.next_hedge_at)
    assert (None, 1) == (call.hedge(31.0), call.attempts)


def test_an_empty_retry_budget_means_no_hedge() -> None:
    """Without tokens there is no second copy, and the first goes on as if nothing had been."""
    downstream = Downstream("d", budget=TokenBudget(capacity=5))
    hedging = Hedging(after=1.0)
    assert SECOND == started(hedging, downstream).hedge(1.0)
    call = started(hedging, downstream)
    assert None is call.hedge(1.0)
    call.record_success(1, 2.0, 0.0)
    assert (None, 5.0) == downstream.status(2.0)


def test_an_empty_hedge_budget_means_no_hedge() -> None:
    """One knob at 5 %: of twenty calls one may have a copy, the others go on without."""
    downstream = seen(*[0.5] * 100)
    copies = []
    for _ in range(40):
        call = started(Hedging(max_extra_load=0.05), downstream)
        copies.append(call.hedge(0.5) is not None)
        call.record_success(1, 0.5, 0.0)
    assert ([19, 39], 2) == ([n for n, copy in enumerate(copies) if copy], sum(copies))


def test_a_full_limit_means_no_hedge() -> None:
    """When the limiter has no place for a copy, nothing was paid for it."""
    budget = TokenBudget()
    downstream = Downstream("d", budget=budget, max_in_flight=1)
    call = started(Hedging(after=1.0), downstream)
    assert (None, 500.0) == (call.hedge(1.0), budget.balance(1.0))
    call.record_success(1, 2.0, 0.0)
    assert FIRST == HedgedCall(Hedging(after=1.0), downstream).start(2.0)


def test_a_full_limit_takes_no_hedge_credit() -> None:
    """The credit for a copy is taken when the copy goes, not when it is rejected."""
    downstream = seen(*[0.5] * 100, max_in_flight=1)
    downstream.add_hedge_credit(1.0)
    call = started(Hedging(max_extra_load=0.05), downstream)
    call.hedge(0.5)
    assert [True, False] == [downstream.take_hedge_credit() for _ in range(2)]


class Contested(TokenBudget):
    """A budget that another call empties between the check and the withdrawal."""

    def withdraw(self, cost: float, now: float) -> bool:
        """Come too late."""
        return False


def test_a_budget_that_is_gone_takes_no_hedge_credit() -> None:
    """When the last tokens went to another call, there is no copy and nothing was paid."""
    budget = Contested()
    assert TokenBudget.withdraw(budget, 100, 0.0)
    downstream = Downstream("d", budget=budget)
    downstream.add_hedge_credit(1.0)
    call = started(Hedging(after=1.0, max_extra_load=0.05), downstream)
    assert (None, 400.0) == (call.hedge(1.0), budget.balance(1.0))
    assert [True, False] == [downstream.take_hedge_credit() for _ in range(2)]


def test_a_rejected_call_earns_no_hedge() -> None:
    """Calls that were never sent add nothing to what copies are a share of."""
    downstream = seen(*[0.5] * 100, max_in_flight=1)
    hedging = Hedging(max_extra_load=0.05)
    call = started(hedging, downstream)
    for _ in range(100):
        assert Stop(Reason.LIMIT) == HedgedCall(hedging, downstream).start(0.1)
    call.record_success(1, 0.5, 0.0)
    assert not downstream.take_hedge_credit()


@pytest.mark.parametrize(
    ("downstream", "expected"),
    [
        (Downstream("d", budget=TokenBudget(capacity=1)), Stop(Reason.BUDGET_EMPTY)),
        (Downstream("d", breaker=Breaker(consecutive=1)), Stop(Reason.BREAKER_OPEN, 30.0)),
    ],
    ids=["budget", "breaker"],
)
def test_the_last_failure_says_why_no_copy_followed(downstream: Downstream, expected: Stop) -> None:
    """With attempts left and nothing running, the reason is that of the rejection."""
    call = started(Hedging(after=10.0), downstream)
    assert expected == call.record_failure(1, TRANSIENT, 1.0, 0.0)


def test_copies_count_as_retries_for_the_budget() -> None:
    """A copy is paid for like a retry, and what it had cost is known when it ends."""
    budget = TokenBudget("aws-2020")
    downstream = Downstream("d", budget=budget)
    call = started(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    assert 495 == budget.balance(1.0)
    call.record_success(2, 1.5, 0.0)
    assert 500 == budget.balance(1.5)


def test_a_call_counts_once_for_a_ratio_budget() -> None:
    """A first copy that failed is a call, its second copy is not another."""
    budget = RatioBudget(1.0, min_per_second=0.1)
    call = started(Hedging(after=1.0), Downstream("d", budget=budget))
    assert SECOND == call.record_failure(1, TRANSIENT, 0.5, 0.0)
    call.record_success(2, 1.0, 0.0)
    assert 1.0 + 1.0 - 1.0 == budget.balance(1.0)


def adaptive(now: float) -> Downstream:
    """Return a downstream that was throttled down to one attempt in two seconds."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, now)
    return Downstream("d", limiter=limiter)


def test_a_copy_may_have_to_wait_its_turn() -> None:
    """Under a rate limit a copy gets its delay, and its time counts from when it began."""
    downstream = adaptive(0.0)
    call = HedgedCall(Hedging(after=1.0), downstream)
    assert Attempt(1, delay=2.0) == call.start(0.0)
    assert Attempt(2, delay=3.0) == call.hedge(1.0)
    call.record_success(2, 4.5, 0.0)
    assert [0.5, 2.5] == [downstream.latency.quantile(q) for q in (0.0, 1.0)]


def test_a_loser_that_ran_for_less_than_the_winner_tells_nothing() -> None:
    """A copy that had just been sent when the first one answered does not pull percentiles down."""
    downstream = Downstream("d")
    call = started(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    call.record_success(1, 1.005, 0.0)
    assert (1, 1.005) == (len(downstream.latency), downstream.latency.quantile(0.5))


def test_a_copy_is_due_when_the_last_one_has_had_its_time() -> None:
    """While the first copy still waits for its turn, the second is not due."""
    call = HedgedCall(Hedging(after=1.0, max_attempts=3), adaptive(0.0))
    assert (Attempt(1, delay=2.0), 3.0) == (call.start(0.0), call.next_hedge_at)
    assert (Attempt(2, delay=1.0), 5.0) == (call.hedge(3.0), call.next_hedge_at)


def test_a_copy_that_never_began_has_no_duration() -> None:
    """A loser that still waited for its turn tells nothing, and gives back token and payment."""
    downstream = adaptive(0.0)
    downstream.budget = TokenBudget()
    call = HedgedCall(Hedging(after=1.0), downstream)
    call.start(0.0)
    assert Attempt(2, delay=3.0) == call.hedge(1.0)
    call.record_success(1, 2.5, 0.0)
    assert (1, 0.5) == (len(downstream.latency), downstream.latency.quantile(0.0))
    assert (None, 500.0) == downstream.status(2.5)
    answer = downstream.admit(2.5)  # of 1.25 tokens one was taken; the rate has grown to 1.28
    assert isinstance(answer, DelayedPermit)
    assert pytest.approx(0.75 / 1.28) == answer.delay


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        case
        for case in invalid_values(
            after="at least 0",
            max_extra_load="ratio",
            max_attempts="count from 2",
            max_hint="at least 0",
            min_samples="count",
        )
        if case.values[:2] != ("after", "1")  # a text is held against percentiles
    ],
)
def test_refused_arguments(field: str, value: object, words: str) -> None:
    """Each argument rejects invalid values, with its name in the message."""
    with pytest.raises(ConfigurationError, match=words):
        Hedging(**{"after": 1.0, **keyword(field, value)})


@pytest.mark.parametrize(
    "after",
    ["", "1", "p", "p0", "p00.0", "p100", "P95", "95", "p95 ", "p95\n", "p-5", "p1e1", "pnan"],
)
def test_what_is_no_percentile(after: str) -> None:
    """A text that is not p and a number between 0 and 100 is rejected."""
    with pytest.raises(
        ConfigurationError, match=r'^after must be seconds or a percentile such as "p95"'
    ):
        Hedging(after=after)


def test_one_of_the_two_must_be_given() -> None:
    """Without after and max_extra_load there is no time for a copy."""
    with pytest.raises(ConfigurationError, match=r"^after or max_extra_load must be given"):
        Hedging()


def test_more_samples_than_are_kept() -> None:
    """A hedge that would never come is rejected."""
    with pytest.raises(ConfigurationError, match=r"^min_samples must be at most 512, got 513$"):
        Hedging(after="p95", min_samples=513)
