"""Tests for hedging: when hedges start, what they cost and which durations are measured."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tarry.core.breaker import Breaker
from tarry.core.budget import RatioBudget, TokenBudget
from tarry.core.downstream import Downstream
from tarry.core.hedging import HedgedCall, Hedging
from tarry.core.hints import Hint
from tarry.core.limiter import AdaptiveRate, InFlight
from tarry.core.outcome import TRANSIENT, Kind, Outcome
from tarry.core.verdict import Attempt, DelayedPermit, Reason, Stop
from tarry.errors import ConfigurationError
from tests.core.invalid_values import invalid_values, keyword

THROTTLED = Outcome(Kind.THROTTLED)
OVERLOADED = Outcome(Kind.OVERLOADED)

FIRST, SECOND, THIRD = Attempt(1), Attempt(2), Attempt(3)


def downstream_with_latencies(*durations: float, max_in_flight: int | None = None) -> Downstream:
    """Return a downstream that has measured calls of these durations."""
    downstream = Downstream("d", max_in_flight=max_in_flight)
    for duration in durations:
        downstream.latency.add(duration)
    return downstream


def start_call(hedging: Hedging, downstream: Downstream, now: float = 0.0) -> HedgedCall:
    """Return a call whose first attempt is running."""
    call = HedgedCall(hedging, downstream)
    assert FIRST == call.start(now)
    return call


# --- time of a hedge -----------------------------------------------------------------------------


def test_several_hedges() -> None:
    """With more attempts, each hedge is due one delay after the attempt before it."""
    call = start_call(Hedging(after=2.0, max_attempts=4), Downstream("d"))
    times = []
    while call.next_hedge_at is not None:
        times.append(call.next_hedge_at)
        call.hedge(call.next_hedge_at)
    assert ([2.0, 4.0, 6.0], 4) == (times, call.attempts)


@pytest.mark.parametrize(
    ("after", "expected"),
    [("p50", 0.51), ("p95", 0.96), ("p5", 0.06), ("p99", 1.0), ("p99.9", 1.0), ("p90.5", 0.92)],
)
def test_a_live_percentile(after: str, expected: float) -> None:
    """The delay is the percentile of the latest calls at the time when the call starts."""
    downstream = downstream_with_latencies(*(n / 100 for n in range(1, 101)))
    call = start_call(Hedging(after=after), downstream)
    assert pytest.approx(expected) == call.next_hedge_at
    for _ in range(512):
        downstream.latency.add(9.0)
    assert pytest.approx(expected) == call.next_hedge_at


@pytest.mark.parametrize("hedging", [Hedging(after="p95"), Hedging(max_extra_load=0.05)])
def test_off_until_there_are_enough_samples(hedging: Hedging) -> None:
    """By default a percentile is used from 100 measured calls on."""
    downstream = downstream_with_latencies(*[0.5] * 99)
    assert None is start_call(hedging, downstream).next_hedge_at
    downstream.latency.add(0.5)
    assert 0.5 == start_call(hedging, downstream).next_hedge_at


def test_min_samples() -> None:
    """min_samples can be any number from 1 to 512."""
    assert (
        0.5
        == start_call(
            Hedging(after="p95", min_samples=1), downstream_with_latencies(0.5)
        ).next_hedge_at
    )
    hedging = Hedging(after="p95", min_samples=512)
    assert [None, 0.5] == [
        start_call(hedging, downstream_with_latencies(*[0.5] * n)).next_hedge_at for n in (511, 600)
    ]


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
def test_max_extra_load_sets_the_percentile(hedging: Hedging, expected: float | None) -> None:
    """Without `after` the quantile is 1 - max_extra_load, so that share of the calls is hedged."""
    assert expected == hedging.quantile


def test_max_extra_load_of_one() -> None:
    """With max_extra_load=1 the delay is the duration of the fastest measured call."""
    downstream = downstream_with_latencies(*(n / 100 for n in range(1, 101)))
    assert 0.01 == start_call(Hedging(max_extra_load=1), downstream).next_hedge_at


# --- end of a call -------------------------------------------------------------------------------


def test_breaker_counts_one_call_and_latency_two_durations() -> None:
    """When the hedge wins, the breaker counts one call and both durations are measured."""
    breaker = Breaker()
    downstream = Downstream("d", breaker=breaker, max_in_flight=2)
    call = start_call(Hedging(after=1.0), downstream)
    assert SECOND == call.hedge(1.0)
    call.record_success(2, 1.25, 0.0)
    assert (1, 0, 0) == breaker.counts(1.25)
    assert [0.25, 1.25] == [downstream.latency.quantile(q) for q in (0.0, 1.0)]
    assert 2 == len(downstream.latency)
    assert [True, True, False] == [isinstance(downstream.admit(2.0), int) for _ in range(3)]


def test_overtaken_attempt_is_measured_as_one_that_was_longer() -> None:
    """A cancelled attempt would have taken longer: one of the longer durations is added for it."""
    downstream = downstream_with_latencies(*[0.1] * 100, 3.0, 5.0)
    call = start_call(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    assert 0.1 == downstream.latency.quantile(0.5)
    call.record_success(2, 1.25, 0.9)
    assert [3.0, 5.0, 5.0] == [downstream.latency.quantile(q) for q in (0.963, 0.975, 0.985)]


@pytest.mark.parametrize("outcome", [TRANSIENT, THROTTLED])
def test_a_failure_starts_the_next_attempt_at_once(outcome: Outcome) -> None:
    """A retryable failure starts the next attempt before the hedge is due."""
    call = start_call(Hedging(after=10.0, max_attempts=3), Downstream("d"))
    assert (SECOND, 11.0) == (call.record_failure(1, outcome, 1.0, 0.0), call.next_hedge_at)
    assert (THIRD, None) == (call.record_failure(2, outcome, 2.0, 0.0), call.next_hedge_at)
    assert Stop(Reason.ATTEMPTS) == call.record_failure(3, outcome, 3.0, 0.0)


def test_a_failure_while_another_attempt_runs() -> None:
    """A failure with no attempts left does not end the call while another attempt runs."""
    downstream = Downstream("d")
    call = start_call(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    assert None is call.record_failure(1, TRANSIENT, 2.0, 0.0)
    call.record_success(2, 3.0, 0.0)
    assert (1, 2.0) == (len(downstream.latency), downstream.expected_duration())


@pytest.mark.parametrize("exact", [True, False])
def test_a_hint_sets_the_time_of_the_next_hedge(exact: bool) -> None:
    """After a failure with a hint the next hedge is due after the hint (gRFC A6)."""
    call = start_call(Hedging(after=10.0), Downstream("d"))
    outcome = Outcome(Kind.THROTTLED, Hint(delay=3.0, exact=exact))
    assert (None, 4.0) == (call.record_failure(1, outcome, 1.0, 0.0), call.next_hedge_at)


def test_a_hint_after_the_last_attempt() -> None:
    """A hint does not add an attempt when none is left."""
    call = start_call(Hedging(after=1.0), Downstream("d"))
    call.hedge(1.0)
    outcome = Outcome(Kind.THROTTLED, Hint(delay=3.0))
    assert (None, None) == (call.record_failure(1, outcome, 2.0, 0.0), call.next_hedge_at)
    assert (Stop(Reason.ATTEMPTS), None) == (
        call.record_failure(2, outcome, 2.0, 0.0),
        call.next_hedge_at,
    )


def test_a_rejected_hedge_after_a_hint_ends_the_call() -> None:
    """The call ends when no attempt runs and the next hedge is rejected."""
    downstream = Downstream("d", budget=TokenBudget(capacity=5))
    call = start_call(Hedging(after=10.0), downstream)
    assert None is call.record_failure(1, Outcome(Kind.THROTTLED, Hint(delay=3.0)), 1.0, 0.0)
    downstream.withdraw(TRANSIENT, 2.0)
    assert Stop(Reason.BUDGET_EMPTY) == call.hedge(4.0)


def test_an_unsent_hedge_is_refunded() -> None:
    """A hedge that could not be sent returns its permit, tokens and hedge credit."""
    budget = TokenBudget()
    downstream = Downstream("d", budget=budget, max_in_flight=3)
    downstream.add_hedge_credit(2.0)
    call = start_call(Hedging(after=1.0, max_extra_load=0.05, max_attempts=3), downstream)
    assert (SECOND, 495.0) == (call.hedge(1.0), budget.balance(1.0))
    assert (True, None) == (call.record_unsent(2, 1.0), call.next_hedge_at)
    assert 500.0 == budget.balance(1.0)
    assert THIRD == call.record_failure(1, TRANSIENT, 2.0, 0.0)
    assert not call.record_unsent(3, 2.0)
    assert [0, 0, 0, Stop(Reason.LIMIT)] == [downstream.admit(2.0) for _ in range(4)]
    assert [True, True, False] == [downstream.take_hedge_credit() for _ in range(3)]


def test_an_unsent_hedge_without_max_extra_load() -> None:
    downstream = Downstream("d")
    call = start_call(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    assert call.record_unsent(2, 1.0)
    assert not downstream.take_hedge_credit()


class RaisingLimiter(InFlight):
    """A limiter that releases the slot and then raises an error."""

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Release the slot and raise the number in flight."""
        super().release(outcome, duration, now)
        raise LookupError(self._in_flight)


def test_a_limiter_that_raises_releases_all_slots() -> None:
    """When a limiter raises errors, every attempt is released and the first error is raised."""
    limiter = RaisingLimiter(3)
    call = start_call(Hedging(after=0, max_attempts=3), Downstream("d", limiter=limiter))
    call.hedge(0.0)
    call.hedge(0.0)
    with pytest.raises(LookupError, match="2"):
        call.cancel(1.0)
    assert 0 == limiter._in_flight


# --- breaker, budgets and limits -----------------------------------------------------------------


def test_breaker_counts_a_hedged_call_once() -> None:
    """The first result of a hedged call counts towards `min_calls`, other results do not."""
    breaker = Breaker(min_calls=2, min_span=0)
    downstream = Downstream("d", breaker=breaker)
    call = start_call(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    call.record_failure(2, TRANSIENT, 2.0, 0.0)
    call.record_failure(1, TRANSIENT, 3.0, 0.0)
    assert ("closed", (2, 2, 0)) == (breaker.state, breaker.counts(3.0))
    start_call(Hedging(after=1.0), downstream, 3.0).record_failure(1, TRANSIENT, 3.0, 0.0)
    assert "open" == breaker.state


def test_an_open_breaker_rejects_the_first_attempt() -> None:
    """An open breaker rejects the call; a half-open breaker needs a probe for each attempt."""
    breaker = Breaker(consecutive=1, open_for=30, probes=1)
    downstream = Downstream("d", breaker=breaker)
    breaker.record(0, failed=True, duration=0.1, now=0.0, random_number=0.0)
    call = HedgedCall(Hedging(after=1.0), downstream)
    assert (Stop(Reason.BREAKER_OPEN, 29.0), None) == (call.start(1.0), call.next_hedge_at)
    assert (FIRST, 31.0) == (call.start(30.0), call.next_hedge_at)
    assert (None, 1) == (call.hedge(31.0), call.attempts)


def test_an_empty_retry_budget_means_no_hedge() -> None:
    """Without tokens there is no hedge, and the first attempt continues."""
    downstream = Downstream("d", budget=TokenBudget(capacity=5))
    hedging = Hedging(after=1.0)
    assert SECOND == start_call(hedging, downstream).hedge(1.0)
    call = start_call(hedging, downstream)
    assert None is call.hedge(1.0)
    call.record_success(1, 2.0, 0.0)
    assert (None, 5.0) == downstream.status(2.0)


def test_an_empty_hedge_budget_means_no_hedge() -> None:
    """With max_extra_load=0.05 one of twenty calls is hedged."""
    downstream = downstream_with_latencies(*[0.5] * 100)
    hedged = []
    for n in range(40):
        call = start_call(Hedging(max_extra_load=0.05), downstream)
        if call.hedge(0.5) is not None:
            hedged.append(n)
        call.record_success(1, 0.5, 0.0)
    assert [19, 39] == hedged


def test_a_full_limiter_means_no_hedge() -> None:
    """A hedge that a full limiter rejects costs nothing."""
    budget = TokenBudget()
    downstream = Downstream("d", budget=budget, max_in_flight=1)
    call = start_call(Hedging(after=1.0), downstream)
    assert (None, 500.0) == (call.hedge(1.0), budget.balance(1.0))
    call.record_success(1, 2.0, 0.0)
    assert FIRST == HedgedCall(Hedging(after=1.0), downstream).start(2.0)


def test_a_full_limiter_takes_no_hedge_credit() -> None:
    downstream = downstream_with_latencies(*[0.5] * 100, max_in_flight=1)
    downstream.add_hedge_credit(1.0)
    call = start_call(Hedging(max_extra_load=0.05), downstream)
    call.hedge(0.5)
    assert [True, False] == [downstream.take_hedge_credit() for _ in range(2)]


class EmptiedBudget(TokenBudget):
    """A budget that another call empties between the check and the withdrawal."""

    def withdraw(self, cost: float, now: float) -> bool:
        """Reject every withdrawal."""
        return False


def test_a_failed_withdrawal_takes_no_hedge_credit() -> None:
    """When another call takes the last tokens, there is no hedge and no credit is taken."""
    budget = EmptiedBudget()
    assert TokenBudget.withdraw(budget, 100, 0.0)
    downstream = Downstream("d", budget=budget)
    downstream.add_hedge_credit(1.0)
    call = start_call(Hedging(after=1.0, max_extra_load=0.05), downstream)
    assert (None, 400.0) == (call.hedge(1.0), budget.balance(1.0))
    assert [True, False] == [downstream.take_hedge_credit() for _ in range(2)]


def test_hedges_cost_as_much_as_retries() -> None:
    """A hedge costs the price of a retry, which its success refunds."""
    budget = TokenBudget("aws-2020")
    downstream = Downstream("d", budget=budget)
    call = start_call(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    assert 495 == budget.balance(1.0)
    call.record_success(2, 1.5, 0.0)
    assert 500 == budget.balance(1.5)


def test_a_call_counts_once_for_a_ratio_budget() -> None:
    """The first attempt counts as a call for the ratio, a hedge does not."""
    budget = RatioBudget(1.0, min_per_second=0.1)
    call = start_call(Hedging(after=1.0), Downstream("d", budget=budget))
    assert SECOND == call.record_failure(1, TRANSIENT, 0.5, 0.0)
    call.record_success(2, 1.0, 0.0)
    assert 1.0 + 1.0 - 1.0 == budget.balance(1.0)


def rate_limited_downstream(now: float) -> Downstream:
    """Return a downstream that throttling has limited to one attempt in two seconds."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, now)
    return Downstream("d", limiter=limiter)


def test_a_rate_limit_delays_attempts() -> None:
    """A rate limit delays each attempt, and the delay is not part of the duration."""
    downstream = rate_limited_downstream(0.0)
    call = HedgedCall(Hedging(after=1.0), downstream)
    assert Attempt(1, delay=2.0) == call.start(0.0)
    assert Attempt(2, delay=3.0) == call.hedge(1.0)
    call.record_success(2, 4.5, 0.0)
    assert [0.5, 2.5] == [downstream.latency.quantile(q) for q in (0.0, 1.0)]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_delayed_hedge_that_is_not_sent(is_cancelled: bool) -> None:
    """A delayed hedge that is not sent does not shorten the delays of attempts before it."""
    rate = AdaptiveRate()
    rate.release(THROTTLED, 0.1, 0.0)
    downstream = Downstream("d", limiter=rate)
    call = HedgedCall(Hedging(after=1.0), downstream)
    rate.acquire(0.0)
    assert Attempt(1, delay=4.0) == call.start(0.0)
    if is_cancelled:
        call.cancel(0.0)
    else:
        call.record_unsent(1, 0.0)
    assert 2.0 == rate.remaining_wait(1, 0.0)
    assert 4.0 == rate.acquire(0.0)


def test_a_loser_shorter_than_the_winner_is_not_measured() -> None:
    """A hedge that was cancelled after a shorter time than the winner's is not measured."""
    downstream = Downstream("d")
    call = start_call(Hedging(after=1.0), downstream)
    call.hedge(1.0)
    call.record_success(1, 1.005, 0.0)
    assert (1, 1.005) == (len(downstream.latency), downstream.latency.quantile(0.5))


def test_next_hedge_is_due_after_the_rate_limit_delay() -> None:
    """A hedge is due its delay after the delayed start of the attempt before it."""
    call = HedgedCall(Hedging(after=1.0, max_attempts=3), rate_limited_downstream(0.0))
    assert (Attempt(1, delay=2.0), 3.0) == (call.start(0.0), call.next_hedge_at)
    assert (Attempt(2, delay=1.0), 5.0) == (call.hedge(3.0), call.next_hedge_at)


def test_a_hedge_cancelled_during_its_delay() -> None:
    """A hedge that is cancelled during its delay is not measured, and is refunded."""
    downstream = rate_limited_downstream(0.0)
    downstream.budget = TokenBudget()
    call = HedgedCall(Hedging(after=1.0), downstream)
    call.start(0.0)
    assert Attempt(2, delay=3.0) == call.hedge(1.0)
    call.record_success(1, 2.5, 0.0)
    assert (1, 0.5) == (len(downstream.latency), downstream.latency.quantile(0.0))
    assert (None, 500.0) == downstream.status(2.5)
    permit = downstream.admit(2.5)  # one of 1.25 tokens was taken; the rate has grown to 1.28
    assert isinstance(permit, DelayedPermit)
    assert pytest.approx(0.75 / 1.28) == permit.delay


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        case
        for case in invalid_values(
            after="at least 0",
            max_extra_load="ratio",
            max_attempts="count from 2",
            max_hint="at least 0",
            min_samples="count",
        )
        if case.values[:2] != ("after", "1")  # a string must be a percentile
    ],
)
def test_invalid_arguments(field: str, value: object, pattern: str) -> None:
    """An invalid argument raises an error that names the argument."""
    with pytest.raises(ConfigurationError, match=pattern):
        Hedging(**{"after": 1.0, **keyword(field, value)})


@pytest.mark.parametrize(
    "after",
    ["", "1", "p", "p0", "p00.0", "p100", "P95", "95", "p95 ", "p95\n", "p-5", "p1e1", "pnan"],
)
def test_invalid_percentiles(after: str) -> None:
    """A string that is not "p" and a number between 0 and 100 is rejected."""
    with pytest.raises(
        ConfigurationError, match=r'^after must be seconds or a percentile such as "p95"'
    ):
        Hedging(after=after)


def test_after_or_max_extra_load_is_required() -> None:
    """Hedging without after and max_extra_load is rejected."""
    with pytest.raises(ConfigurationError, match=r"^after or max_extra_load must be given"):
        Hedging()


def test_min_samples_above_the_window() -> None:
    """min_samples above 512 is rejected, because only 512 durations are kept."""
    with pytest.raises(ConfigurationError, match=r"^min_samples must be at most 512, got 513$"):
        Hedging(after="p95", min_samples=513)


def test_after_may_be_a_timedelta() -> None:
    """`after` accepts a `timedelta`, which is stored as seconds."""
    assert Hedging(after=timedelta(milliseconds=50)) == Hedging(after=0.05)


def test_interrupted_attempts_of_a_hedged_call() -> None:
    """`forget_attempts` frees the slots of attempts whose permits were lost."""
    downstream = Downstream("payments", max_in_flight=1)
    call = HedgedCall(Hedging(after=1.0), downstream)
    call.start(0.0)
    call._running.clear()  # as if an interrupt had come before the permit was stored

    call.forget_attempts()

    assert isinstance(HedgedCall(Hedging(after=1.0), downstream).start(0.0), Attempt)
