"""Tests for Call: each step with policy and downstream, and many concurrent calls."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tarry.core.breaker import Breaker, BreakerState
from tarry.core.budget import TokenBudget
from tarry.core.call import Call
from tarry.core.downstream import Downstream
from tarry.core.hints import Hint
from tarry.core.limiter import AdaptiveRate
from tarry.core.outcome import PERMANENT, TRANSIENT, Kind, Outcome
from tarry.core.policy import Policy
from tarry.core.verdict import Attempt, Progress, Reason, Step, Stop, Wait
from tests.core.call_machine import NOW, PLAIN, Calls, behind, draws

TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)


def slow_lane() -> Downstream:
    """Return a downstream whose rate limit delays an attempt at NOW by 20 s."""
    rate = AdaptiveRate()
    rate.rate, rate._tokens, rate._filled_at = 0.5, -9.0, NOW
    return Downstream("payments", budget=TokenBudget(), limiter=rate, max_in_flight=1)


def balance_of(downstream: Downstream) -> float:
    """Return the tokens in the budget."""
    assert downstream.budget is not None
    return downstream.budget.balance(NOW)


# --- start ---------------------------------------------------------------------------------------


def test_attempts_are_numbered_from_one() -> None:
    """Without limits each start is the next attempt, at once and without a timeout."""
    call = Call(PLAIN)
    assert [Attempt(n) for n in range(1, 100)] == [call.start(NOW) for _ in range(99)]
    assert 99 == call.attempts


@pytest.mark.parametrize(
    ("timeout", "deadline", "expected"),
    [(None, None, None), (2, None, 2), (None, 5, 5), (2, 5, 2), (7, 5, 5)],
)
def test_the_timeout_of_an_attempt(
    timeout: float | None, deadline: float | None, expected: float | None
) -> None:
    """An attempt has its timeout, or the time that is left until the deadline when that is less."""
    call = Call(Policy(attempt_timeout=timeout), None, NOW, deadline and NOW + deadline)
    assert Attempt(1, expected) == call.start(NOW)


@pytest.mark.parametrize("late", [0, 0.001, 60])
def test_no_attempt_starts_at_the_deadline(late: float) -> None:
    """From its deadline on a call makes no attempt, not even the first."""
    there = behind()
    call = there.call(deadline=NOW + 5)
    assert Stop(Reason.DEADLINE) == call.start(NOW + 5 + late)
    assert (0, 0) == (call.attempts, there.running)


def test_no_attempt_starts_beyond_the_total_budget() -> None:
    """A call that is resumed too late makes no further attempt."""
    call = Call(PLAIN.replace(total_budget=10), None, NOW)
    assert Attempt(1) == call.start(NOW)
    assert Wait(1, 1) == call.record_failure(TRANSIENT, NOW, 0.5)
    assert Stop(Reason.TOTAL_BUDGET) == call.start(NOW + 60)


def test_an_open_breaker_refuses_the_first_attempt() -> None:
    """An open breaker ends a call before the first attempt."""
    there = behind(consecutive=1, open_for=30)
    there.breaker.record(0, failed=True, duration=0, now=NOW - 10, random_number=0)
    call = there.call()
    assert Stop(Reason.BREAKER_OPEN, 20.0) == call.start(NOW)
    assert (0, 0) == (call.attempts, there.running)


def test_a_full_limit_refuses() -> None:
    """A full limiter rejects the attempt."""
    there = behind(at_once=1)
    assert Attempt(1) == there.call().start(NOW)
    assert Stop(Reason.LIMIT) == there.call().start(NOW)
    assert 1 == there.running


def test_a_rate_limit_delays() -> None:
    """An attempt that a limiter delays has less time until the deadline."""
    assert Attempt(1, None, 20.0) == Call(PLAIN, slow_lane(), NOW).start(NOW)
    assert Attempt(1, 10.0, 20.0) == Call(PLAIN, slow_lane(), NOW, NOW + 30).start(NOW)


def test_a_turn_beyond_the_deadline() -> None:
    """A delay until the deadline or later ends the call and releases the permit."""
    lane = slow_lane()
    call = Call(PLAIN, lane, NOW, NOW + 20)
    assert Stop(Reason.LIMIT, 20.0) == call.start(NOW)
    assert 0 == call.attempts
    assert isinstance(Call(PLAIN, lane, NOW).start(NOW), Attempt)


def test_a_turn_beyond_the_total_budget() -> None:
    """A delay beyond the total budget ends the call as well."""
    call = Call(PLAIN.replace(total_budget=5), slow_lane(), NOW)
    assert isinstance(call.start(NOW), Stop)


@pytest.mark.parametrize("why", ["deadline", "breaker", "limit"])
def test_a_refused_retry_costs_nothing(why: str) -> None:
    """A retry that was paid for and then refused gets its price back, once."""
    there = behind(at_once=1)
    call = there.call(deadline=NOW + 10)
    call.start(NOW)
    assert isinstance(call.record_failure(TRANSIENT, NOW, 0.5), Wait)
    assert 495 == there.balance
    if why == "breaker":
        there.breaker.force("open")
    elif why == "limit":
        there.call().start(NOW)
    assert isinstance(call.start(NOW + (10 if why == "deadline" else 1)), Stop)
    assert (500, 1) == (there.balance, call.attempts)
    call.refund_retry(NOW)
    assert 500 == there.balance


def test_adopted_attempts() -> None:
    """A first attempt that the driver started itself ends like any other."""
    there = behind()
    permit = there.downstream.admit(NOW)
    assert isinstance(permit, int)
    call = there.call()
    call.adopt_first_attempt(permit)
    assert (1, 1) == (call.attempts, there.running)
    assert Wait(1, 1) == call.record_failure(TRANSIENT, NOW + 2, 0.5)
    assert (0, (1, 1, 0)) == (there.running, there.breaker.counts(NOW + 2))
    assert Attempt(2) == call.start(NOW + 3)


# --- failed --------------------------------------------------------------------------------------


@given(
    st.sampled_from(["none", "full", "equal", "decorrelated"]),
    st.integers(1, 50),
    st.integers(0, 2**32),
)
def test_a_call_waits_as_its_policy_says(jitter: Any, most: int, seed: int) -> None:
    """A call that only fails makes max_attempts attempts and waits as `Policy.delays` drew it."""
    policy, dice, now = Policy(max_attempts=most, jitter=jitter), Random(seed), NOW
    call, delays = Call(policy, None, now), list[float]()
    while True:
        assert Attempt(len(delays) + 1) == call.start(now)
        verdict = call.record_failure(TRANSIENT, now, dice.random())
        if isinstance(verdict, Stop):
            break
        delays.append(verdict.delay)
        now += verdict.delay
    assert Stop(Reason.ATTEMPTS) == verdict
    assert policy.delays(Random(seed)) == delays
    assert (most, sum(delays)) == (call.attempts, call.waited)


def test_the_failure_that_opens_the_breaker_ends_the_call() -> None:
    """The outcome is recorded before the decision is made."""
    there = behind(consecutive=1)
    call = there.call()
    call.start(NOW)
    assert Stop(Reason.BREAKER_OPEN, 30.0) == call.record_failure(TRANSIENT, NOW, 0.5)
    assert (BreakerState.OPEN, 500) == (there.breaker.state, there.balance)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (PERMANENT, Reason.PERMANENT),
        (Outcome(Kind.OVERLOADED), Reason.OVERLOADED),
        (Outcome(Kind.TRANSIENT, repeatable=False), Reason.NOT_REPEATABLE),
        (Outcome(Kind.TRANSIENT, retried_below=True), Reason.RETRIED_BELOW),
        (Outcome(Kind.TRANSIENT, hint=Hint(1_000.0)), Reason.HINT_TOO_LONG),
        (Outcome(Kind.TRANSIENT, hint=Hint(30.0)), Reason.DEADLINE),
        (Outcome(Kind.TRANSIENT, hint=Hint(15.0)), Reason.TOTAL_BUDGET),
    ],
)
def test_nothing_is_charged_before_the_last_yes(outcome: Outcome, reason: Reason) -> None:
    """Whichever check ends the call, the balance stays and the slot is free."""
    there = behind()
    policy = PLAIN.replace(total_budget=60 if reason is Reason.DEADLINE else 10)
    call = there.call(policy, deadline=NOW + 20)
    call.start(NOW)
    verdict = call.record_failure(outcome, NOW, 0.5)
    assert isinstance(verdict, Stop)
    assert (reason, 500, 0) == (verdict.reason, there.balance, there.running)
    call.refund_retry(NOW)
    assert 500 == there.balance


def test_permanent_failures_do_not_count() -> None:
    """A permanent failure says nothing against the dependency."""
    there = behind(consecutive=1)
    call = there.call()
    call.start(NOW)
    call.record_failure(PERMANENT, NOW, 0.5)
    assert (BreakerState.CLOSED, 0) == (there.breaker.state, there.breaker.counts(NOW)[1])


def test_backoff_starts_over_after_a_pushback() -> None:
    """An exact delay is waited for, then the first ceiling and the initial delay come again."""
    policy = Policy(max_attempts=9, initial_delay=1, jitter="decorrelated")
    call = Call(policy, None, NOW)
    pushed = Outcome(Kind.TRANSIENT, hint=Hint(7.0, exact=True))
    waits = list[Wait | Stop]()
    for outcome in (TRANSIENT, TRANSIENT, pushed, TRANSIENT, TRANSIENT):
        call.start(NOW)
        waits.append(call.record_failure(outcome, NOW, 0.5))
    first = [Wait(2.0, 1.0), Wait(3.5, 2.0)]
    assert [*first, Wait(7.0, 4.0, pushed.hint), *first] == waits


def test_a_hint_is_what_decorrelated_jitter_goes_on_from() -> None:
    """A delay from a hint is the previous delay of the next one."""
    call = Call(Policy(jitter="decorrelated"), None, NOW)
    call.start(NOW)
    call.record_failure(Outcome(Kind.TRANSIENT, hint=Hint(9.0)), NOW, 0.0)
    assert Progress(1, NOW, 9.0 + 0.1) == call.progress


@pytest.mark.parametrize(
    ("preset", "outcomes", "balances"),
    [
        ("classic", [TRANSIENT, TIMEOUT, None], [495, 490, 495]),
        ("aws-2020", [TRANSIENT, TIMEOUT, None], [495, 485, 495]),
        ("aws-2020", [TIMEOUT, TRANSIENT, None], [490, 485, 490]),
        ("aws-2020", [TRANSIENT] * 4, [495, 490, 485, 485]),
        ("aws-2026", [TRANSIENT, Outcome(Kind.THROTTLED), None], [486, 481, 486]),
    ],
)
def test_quotas(preset: str, outcomes: list[Outcome | None], balances: list[float]) -> None:
    """A success refunds the price of the last retry, a final failure does not."""
    there = behind(preset)
    call, actual = there.call(), list[float]()
    for outcome in outcomes:
        call.start(NOW)
        if outcome is None:
            call.record_success(NOW, 0.5)
        else:
            call.record_failure(outcome, NOW, 0.5)
        actual.append(there.balance)
    assert balances == actual


def test_without_tokens_a_call_fails_at_once() -> None:
    """An empty budget ends the call on its first failure."""
    there = behind(capacity=4)
    call = there.call()
    call.start(NOW)
    assert Stop(Reason.BUDGET_EMPTY) == call.record_failure(TRANSIENT, NOW, 0.5)
    assert 4 == there.balance


def test_somebody_else_took_the_last_tokens() -> None:
    """A budget shared with other processes may refuse what it had a moment before."""

    class Raced(TokenBudget):
        def withdraw(self, cost: float, now: float) -> bool:
            return False

    call = Call(PLAIN, Downstream("payments", budget=Raced()), NOW)
    call.start(NOW)
    assert Stop(Reason.BUDGET_EMPTY) == call.record_failure(TRANSIENT, NOW, 0.5)
    assert (Stop(Reason.BUDGET_EMPTY), 0.0) == (call.steps[-1].verdict, call.waited)
    assert Progress(1, NOW) == call.progress


# --- succeeded, cancelled, abandoned -------------------------------------------------------------


def test_success() -> None:
    """A success is counted with its duration, and the slot is free."""
    there = behind()
    call = there.call()
    call.start(NOW)
    call.record_success(NOW + 2.5, 0.5)
    assert (2.5, 0) == (there.downstream.expected_duration(), there.running)
    assert (1, 0, 0) == there.breaker.counts(NOW + 2.5)


def test_the_wait_for_a_turn_is_no_part_of_the_duration() -> None:
    """The delay of a rate limiter is not part of the duration of an attempt."""
    lane = slow_lane()
    call = Call(PLAIN, lane, NOW)
    call.start(NOW)
    call.record_success(NOW + 21, 0.5)
    assert 1.0 == lane.expected_duration()


def test_cancelled_attempts_are_not_counted() -> None:
    """A cancelled attempt changes nothing but frees its slot."""
    there = behind(consecutive=1)
    call = there.call()
    call.start(NOW)
    call.cancel_attempt(NOW + 3)
    assert (0, 500, (0, 0, 0)) == (there.running, there.balance, there.breaker.counts(NOW))
    assert 0 == there.downstream.expected_duration()
    assert () == call.steps


def test_cancelled_probes_make_room() -> None:
    """A cancelled probe frees its slot in a half-open breaker."""
    there = behind(consecutive=1, open_for=30, probes=1)
    there.breaker.record(0, failed=True, duration=0, now=NOW - 30, random_number=0)
    probe, other = there.call(), there.call()
    assert Attempt(1) == probe.start(NOW)
    assert Stop(Reason.BREAKER_OPEN) == other.start(NOW)
    probe.cancel_attempt(NOW)
    assert Attempt(1) == other.start(NOW)


def test_a_retry_that_was_sent_and_cancelled_stays_paid_for() -> None:
    """A cancelled retry is not refunded, because the dependency had its load."""
    there = behind()
    call = there.call()
    call.start(NOW)
    call.record_failure(TRANSIENT, NOW, 0.5)
    call.start(NOW + 1)
    call.cancel_attempt(NOW + 2)
    assert (495, 0) == (there.balance, there.running)


def test_a_retry_cancelled_before_its_turn_costs_nothing() -> None:
    """A retry that is cancelled while the rate limiter delays it is refunded."""
    lane = slow_lane()
    call = Call(PLAIN, lane, NOW)
    call.start(NOW)
    assert isinstance(call.record_failure(TRANSIENT, NOW + 20, 0.5), Wait)
    assert 495 == balance_of(lane)
    command = call.start(NOW + 21)
    assert isinstance(command, Attempt)
    assert command.delay > 0.5
    call.cancel_attempt(NOW + 21.5)
    assert 500 == balance_of(lane)


def test_a_call_abandoned_while_it_waits() -> None:
    """The price of the next attempt is refunded, once."""
    there = behind()
    call = there.call()
    call.start(NOW)
    call.record_failure(TRANSIENT, NOW, 0.5)
    assert 495 == there.balance
    call.refund_retry(NOW)
    assert 500 == there.balance
    there.budget.withdraw(100, NOW)
    call.refund_retry(NOW)
    assert 400 == there.balance


def test_without_a_downstream_nothing_is_owed() -> None:
    """A call without a downstream can end in every way."""
    call = Call(PLAIN)
    call.start(NOW)
    call.record_success(NOW, 0.5)
    call.cancel_attempt(NOW)
    call.refund_retry(NOW)
    assert (1, ()) == (call.attempts, call.steps)


# --- the record and what is stored ---------------------------------------------------------------


def test_the_decision_record() -> None:
    """Each failed attempt leaves its class, detail, verdict, breaker state and balance."""
    there = behind()
    call = there.call(PLAIN.replace(max_attempts=2))
    for now in (NOW, NOW + 1):
        call.start(now)
        call.record_failure(Outcome(Kind.TRANSIENT, detail="503"), now, 0.5)
    expected = (
        Step(1, Kind.TRANSIENT, "503", Wait(1, 1), "closed", 500),
        Step(2, Kind.TRANSIENT, "503", Stop(Reason.ATTEMPTS), "closed", 495),
    )
    assert (expected, 1.0) == (call.steps, call.waited)


def test_the_record_without_a_downstream() -> None:
    """Without breaker and budget their fields in the record are None."""
    for downstream in (None, Downstream("payments")):
        call = Call(PLAIN, downstream, NOW)
        call.start(NOW)
        call.record_failure(PERMANENT, NOW, 0.5)
        assert (Step(1, Kind.PERMANENT, "", Stop(Reason.PERMANENT), None, None),) == call.steps


def test_calls_do_not_share_their_state() -> None:
    """Calls do not affect each other and have no further attributes."""
    one, other = Call(PLAIN), Call(PLAIN)
    one.start(NOW)
    one.record_failure(TRANSIENT, NOW, 0.5)
    assert (0, 0.0, (), Progress()) == (other.attempts, other.waited, other.steps, other.progress)
    assert not hasattr(one, "__dict__")


@given(
    st.sampled_from(["none", "full", "equal", "decorrelated"]),
    st.lists(st.tuples(st.none() | st.tuples(st.floats(0, 9), st.booleans()), draws), max_size=8),
)
def test_another_process_goes_on(
    jitter: Any, failures: list[tuple[tuple[float, bool] | None, float]]
) -> None:
    """A call that is stored and resumed after each attempt makes the same decisions."""
    policy = Policy(max_attempts=7, jitter=jitter, total_budget=30)
    whole, stored, now = Call(policy, None, NOW), json.dumps(Progress(0, NOW)), NOW
    for hint, random_number in failures:
        part = Call(policy)
        part.resume(Progress(*json.loads(stored)))
        outcome = Outcome(Kind.TRANSIENT, hint=hint and Hint(hint[0], exact=hint[1]))
        assert whole.start(now) == part.start(now)
        expected, actual = (
            call.record_failure(outcome, now, random_number) for call in (whole, part)
        )
        assert expected == actual
        stored = json.dumps(part.progress)
        if isinstance(actual, Stop):
            break
        now += actual.delay


# --- any number of calls at once -----------------------------------------------------------------


def test_any_number_of_calls() -> None:
    """For any sequence of events all invariants hold."""
    steps = settings(max_examples=settings().max_examples // 2)  # a step is dearer than a call
    run_state_machine_as_test(Calls, settings=steps)


def test_an_attempt_that_was_dropped_is_not_recorded() -> None:
    """A failure after the permit was released gets a verdict and is not counted."""
    there = Downstream("there", budget=TokenBudget(), breaker=Breaker(consecutive=1))
    call = Call(Policy(), there)
    call.start(0.0)
    call.cancel_attempt(0.0)
    call.cancel_attempt(0.0)
    assert isinstance(call.record_failure(Outcome(Kind.TRANSIENT), 0.0, 0.5), Wait)
    assert "closed" == there.status(0.0)[0]
