"""Tests for Call: attempts, waits and the end of a call, alone and with concurrent calls."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tarry.core.breaker import Breaker
from tarry.core.budget import TokenBudget
from tarry.core.call import Call
from tarry.core.downstream import Downstream
from tarry.core.hints import Hint
from tarry.core.limiter import AdaptiveRate, InFlight
from tarry.core.outcome import PERMANENT, TRANSIENT, Kind, Outcome
from tarry.core.policy import Policy
from tarry.core.verdict import Attempt, Progress, Reason, Step, Stop, Wait
from tests.core.call_machine import NO_JITTER, NOW, CallMachine, make_downstream, random_numbers


def rate_limited_downstream() -> Downstream:
    """Return a downstream whose rate limit delays an attempt at NOW by 20 s."""
    rate = AdaptiveRate()
    rate.rate, rate._bucket_rate, rate._tokens, rate._filled_at = 0.5, 0.5, -9.0, NOW
    return Downstream("payments", budget=TokenBudget(), limiter=rate, max_in_flight=1)


def balance_of(downstream: Downstream) -> float:
    """Return the tokens in the budget."""
    assert downstream.budget is not None
    return downstream.budget.balance(NOW)


@pytest.mark.parametrize("has_downstream", [False, True])
def test_a_call_stopped_before_its_retry(has_downstream: bool) -> None:
    """A call that is stopped before a retry gets the retry's cost back and records the reason."""
    downstream = Downstream("payments", budget=TokenBudget()) if has_downstream else None
    call = Call(NO_JITTER, downstream, NOW)
    call.start(NOW)
    call.record_failure(TRANSIENT, NOW, 0.5, "first")
    call.start(NOW + 1)
    call.record_failure(TRANSIENT, NOW + 1, 0.5, "second")

    assert Stop(Reason.STOPPED) == call.replace_verdict_with_stop(
        Reason.STOPPED, TRANSIENT, "second", NOW + 1
    )

    assert [("first", Wait(1, 1)), ("second", Stop(Reason.STOPPED))] == [
        (step.detail, step.verdict) for step in call.steps
    ]
    assert 1 == call.waited
    if downstream is not None:
        assert 495 == balance_of(downstream)  # only the first retry was made


# --- start of an attempt -------------------------------------------------------------------------


def test_attempts_are_numbered_from_one() -> None:
    """Without limits each start() returns the next attempt, without delay and timeout."""
    call = Call(NO_JITTER)
    assert [Attempt(n) for n in range(1, 100)] == [call.start(NOW) for _ in range(99)]
    assert 99 == call.attempts


@pytest.mark.parametrize(
    ("timeout", "deadline", "expected"),
    [(None, None, None), (2, None, 2), (None, 5, 5), (2, 5, 2), (7, 5, 5)],
)
def test_timeout_of_an_attempt(
    timeout: float | None, deadline: float | None, expected: float | None
) -> None:
    """The timeout of an attempt is the shorter of attempt_timeout and the time to the deadline."""
    call = Call(Policy(attempt_timeout=timeout), None, NOW, deadline and NOW + deadline)
    assert Attempt(1, expected) == call.start(NOW)


@pytest.mark.parametrize("late", [0, 0.001, 60])
def test_no_attempt_starts_at_the_deadline(late: float) -> None:
    """At or after its deadline a call starts no attempt, not even the first."""
    parts = make_downstream()
    call = parts.new_call(deadline=NOW + 5)
    assert Stop(Reason.DEADLINE) == call.start(NOW + 5 + late)
    assert (0, 0) == (call.attempts, parts.in_flight)


def test_no_attempt_starts_beyond_the_total_budget() -> None:
    """A call that continues after its total budget starts no further attempt."""
    call = Call(NO_JITTER.replace(total_budget=10), None, NOW)
    assert Attempt(1) == call.start(NOW)
    assert Wait(1, 1) == call.record_failure(TRANSIENT, NOW, 0.5)
    assert Stop(Reason.TOTAL_BUDGET) == call.start(NOW + 60)


def test_an_open_breaker_rejects_the_first_attempt() -> None:
    """An open breaker ends a call before the first attempt."""
    parts = make_downstream(consecutive=1, open_for=30)
    parts.breaker.record(0, failed=True, duration=0, now=NOW - 10, random_number=0)
    call = parts.new_call()
    assert Stop(Reason.BREAKER_OPEN, 20.0) == call.start(NOW)
    assert (0, 0) == (call.attempts, parts.in_flight)


def test_a_full_limiter_rejects_an_attempt() -> None:
    """An attempt above the in-flight limit is rejected."""
    parts = make_downstream(max_in_flight=1)
    assert Attempt(1) == parts.new_call().start(NOW)
    assert Stop(Reason.LIMIT) == parts.new_call().start(NOW)
    assert 1 == parts.in_flight


def test_a_rate_limit_delays_an_attempt() -> None:
    """The delay of a rate limiter shortens the timeout that the deadline allows."""
    assert Attempt(1, None, 20.0) == Call(NO_JITTER, rate_limited_downstream(), NOW).start(NOW)
    assert Attempt(1, 10.0, 20.0) == Call(
        NO_JITTER, rate_limited_downstream(), NOW, NOW + 30
    ).start(NOW)


def delay_steps(call: Call, now: float) -> list[float]:
    """Return the sleeps of a driver whose attempt is delayed at `now`."""
    steps = []
    while step := call.next_delay_step(now):
        steps.append(step)
        now += step
    return steps


def test_steps_of_a_rate_limit_delay() -> None:
    """A driver sleeps half of the delay that is left, but at most 0.5 s, until little is left."""
    call = Call(NO_JITTER, rate_limited_downstream(), NOW)
    call.start(NOW)
    steps = delay_steps(call, NOW)
    assert pytest.approx(20.0) == sum(steps)
    assert [0.5] * 39 == steps[:39]
    assert [0.25, 0.125] == [pytest.approx(step) for step in steps[39:41]]
    assert 45 == len(steps)


def test_a_rising_rate_shortens_a_rate_limit_delay() -> None:
    """If the rate rises during the delay, the attempt is sent earlier and has more time."""
    downstream = rate_limited_downstream()
    call = Call(NO_JITTER, downstream, NOW, NOW + 30)
    assert Attempt(1, 10.0, 20.0) == call.start(NOW)
    assert 0.5 == call.next_delay_step(NOW)
    assert downstream._adaptive_rate is not None
    downstream._adaptive_rate._set_bucket_rate(100.0, NOW + 0.5)
    steps = delay_steps(call, NOW + 0.5)
    assert pytest.approx(9.75 / 100) == sum(steps)
    attempt = call.delayed_attempt()
    assert (1, 0.0) == (attempt.number, attempt.delay)
    assert pytest.approx(30 - 0.5 - sum(steps)) == attempt.timeout


def falling_rate_steps(**limits: float) -> list[float]:
    """Return the sleeps of an attempt with a delay of 20 s whose rate falls to nearly 0."""
    downstream = rate_limited_downstream()
    downstream.latency.add(2.0)
    call = Call(
        NO_JITTER.replace(total_budget=limits.get("total_budget")),
        downstream,
        NOW,
        NOW + limits["deadline"] if "deadline" in limits else None,
    )
    call.start(NOW)
    assert downstream._adaptive_rate is not None
    downstream._adaptive_rate._tokens = -1_000.0
    return delay_steps(call, NOW)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 30.0),  # max_wait
        ({"deadline": 25.0}, 23.0),  # an attempt takes 2 s
        ({"total_budget": 24.0}, 22.0),
        ({"deadline": 25.0, "total_budget": 24.0}, 22.0),
        ({"deadline": 21.0}, 20.0),  # as planned
    ],
)
def test_a_falling_rate_prolongs_a_rate_limit_delay(
    limits: dict[str, float], expected: float
) -> None:
    """If the rate falls, the attempt waits longer, but not past `max_wait` or the deadline."""
    assert pytest.approx(expected) == sum(falling_rate_steps(**limits))


def test_a_rate_limit_delay_with_sleeps_that_take_no_time() -> None:
    """The delay ends after sleeps of `max_wait` seconds, even if the clock has not moved."""
    call = Call(NO_JITTER, rate_limited_downstream(), NOW)
    call.start(NOW)
    steps = [call.next_delay_step(NOW) for _ in range(80)]
    assert pytest.approx(30.0) == sum(steps)
    assert 0.0 == steps[-1]


class FixedDelay(InFlight):
    """A limiter of a user, which delays each attempt by 3 s."""

    def acquire(self, now: float) -> float | None:
        """Return the delay."""
        return 3.0


def test_the_delay_of_another_limiter_is_one_step() -> None:
    """The delay of a limiter other than `AdaptiveRate` cannot become shorter."""
    call = Call(NO_JITTER, Downstream("d", limiter=FixedDelay(1)), NOW)
    assert Attempt(1, None, 3.0) == call.start(NOW)
    assert [3.0] == delay_steps(call, NOW)


def test_a_rate_limit_delay_until_the_deadline() -> None:
    """A delay until the deadline or later ends the call and releases the permit."""
    downstream = rate_limited_downstream()
    call = Call(NO_JITTER, downstream, NOW, NOW + 20)
    assert Stop(Reason.LIMIT, 20.0) == call.start(NOW)
    assert 0 == call.attempts
    assert isinstance(Call(NO_JITTER, downstream, NOW).start(NOW), Attempt)


@pytest.mark.parametrize("cancels_last", [True, False])
def test_a_cancelled_delay_keeps_the_delays_before_it(cancels_last: bool) -> None:
    """Calls that stop waiting for a rate limiter do not shorten the delays of calls before them."""
    rate = AdaptiveRate()
    rate.release(Outcome(Kind.THROTTLED), 0.1, NOW)
    downstream = Downstream("payments", limiter=rate)
    calls = [Call(NO_JITTER, downstream, NOW) for _ in range(5)]
    assert [2.0, 4.0, 6.0, 8.0, 10.0] == [call.start(NOW).delay for call in calls]  # type: ignore[union-attr]
    for call in calls[3:] if cancels_last else calls[2:4]:
        call.cancel_attempt(NOW)
    assert [2.0, 4.0] == [rate.remaining_wait(token, NOW) for token in (1, 2)]
    assert 6.0 == rate.remaining_wait(3 if cancels_last else 5, NOW)


def test_a_rate_limit_delay_beyond_the_total_budget() -> None:
    call = Call(NO_JITTER.replace(total_budget=5), rate_limited_downstream(), NOW)
    assert isinstance(call.start(NOW), Stop)


@pytest.mark.parametrize("cause", ["deadline", "breaker", "limit"])
def test_a_rejected_retry_costs_nothing(cause: str) -> None:
    """A retry that was paid for and then rejected is refunded once."""
    parts = make_downstream(max_in_flight=1)
    call = parts.new_call(deadline=NOW + 10)
    call.start(NOW)
    assert isinstance(call.record_failure(TRANSIENT, NOW, 0.5), Wait)
    assert 495 == parts.balance
    if cause == "breaker":
        parts.breaker.force("open")
    elif cause == "limit":
        parts.new_call().start(NOW)
    assert isinstance(call.start(NOW + (10 if cause == "deadline" else 1)), Stop)
    assert (500, 1) == (parts.balance, call.attempts)
    call.refund_retry(NOW)
    assert 500 == parts.balance


def test_adopted_first_attempt() -> None:
    """A first attempt that was admitted before the call existed fails like any other attempt."""
    parts = make_downstream()
    permit = parts.downstream.admit(NOW)
    assert isinstance(permit, int)
    call = parts.new_call()
    call.adopt_first_attempt(permit)
    assert (1, 1) == (call.attempts, parts.in_flight)
    assert Wait(1, 1) == call.record_failure(TRANSIENT, NOW + 2, 0.5)
    assert (0, (1, 1, 0)) == (parts.in_flight, parts.breaker.counts(NOW + 2))
    assert Attempt(2) == call.start(NOW + 3)


def test_adopted_first_failure() -> None:
    """A failure that was handled before the call existed is recorded, and attempt 2 is running."""
    call = Call(NO_JITTER, None, NOW)
    call.adopt_first_failure(TRANSIENT, "503", Wait(1, 1))
    assert (2, 1.0) == (call.attempts, call.previous_delay)
    assert (Step(1, Kind.TRANSIENT, "503", Wait(1, 1), None, None),) == call.steps


# --- failed attempts -----------------------------------------------------------------------------


@given(
    st.sampled_from(["none", "full", "equal", "decorrelated"]),
    st.integers(1, 50),
    st.integers(0, 2**32),
)
def test_delays_of_a_failing_call(jitter: Any, max_attempts: int, seed: int) -> None:
    """A failing call makes max_attempts attempts and waits for the delays of Policy.delays()."""
    policy, random, now = Policy(max_attempts=max_attempts, jitter=jitter), Random(seed), NOW
    call, delays = Call(policy, None, now), list[float]()
    while True:
        assert Attempt(len(delays) + 1) == call.start(now)
        verdict = call.record_failure(TRANSIENT, now, random.random())
        if isinstance(verdict, Stop):
            break
        delays.append(verdict.delay)
        now += verdict.delay
    assert Stop(Reason.ATTEMPTS) == verdict
    assert policy.delays(Random(seed)) == delays
    assert (max_attempts, sum(delays)) == (call.attempts, call.waited)


def test_retry_that_succeeds_is_not_another_call() -> None:
    """A retry that succeeds after all failures have left the window is not counted as a call."""
    parts = make_downstream(min_calls=3, min_span=0, failure_rate=0.3)
    call, second, third = parts.new_call(), parts.new_call(), parts.new_call()
    call.start(NOW)
    call.record_failure(TRANSIENT, NOW, 0.5)
    second.start(NOW + 60)
    second.record_success(NOW + 60, 0.5)
    assert parts.breaker.can_count_success
    call.start(NOW + 60)
    call.record_success(NOW + 60, 0.5)
    third.start(NOW + 60)
    third.record_failure(TRANSIENT, NOW + 60, 0.5)
    assert ("closed", (3, 1, 0)) == (parts.breaker.state, parts.breaker.counts(NOW + 60))


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
def test_a_call_that_ends_is_not_charged(outcome: Outcome, reason: Reason) -> None:
    """A failure that ends the call leaves the balance unchanged and frees the slot."""
    parts = make_downstream()
    policy = NO_JITTER.replace(total_budget=60 if reason is Reason.DEADLINE else 10)
    call = parts.new_call(policy, deadline=NOW + 20)
    call.start(NOW)
    verdict = call.record_failure(outcome, NOW, 0.5)
    assert isinstance(verdict, Stop)
    assert (reason, 500, 0) == (verdict.reason, parts.balance, parts.in_flight)
    call.refund_retry(NOW)
    assert 500 == parts.balance


def test_backoff_starts_over_after_a_pushback() -> None:
    """After a wait with an exact hint, backoff starts again with the first ceiling."""
    policy = Policy(max_attempts=9, initial_delay=1, jitter="decorrelated")
    call = Call(policy, None, NOW)
    pushback = Outcome(Kind.TRANSIENT, hint=Hint(7.0, exact=True))
    waits = list[Wait | Stop]()
    for outcome in (TRANSIENT, TRANSIENT, pushback, TRANSIENT, TRANSIENT):
        call.start(NOW)
        waits.append(call.record_failure(outcome, NOW, 0.5))
    first_waits = [Wait(2.0, 1.0), Wait(3.5, 2.0)]
    assert [*first_waits, Wait(7.0, 4.0, pushback.hint), *first_waits] == waits


def test_decorrelated_jitter_continues_from_a_hint() -> None:
    """The delay after a hint becomes the previous delay of decorrelated jitter."""
    call = Call(Policy(jitter="decorrelated"), None, NOW)
    call.start(NOW)
    call.record_failure(Outcome(Kind.TRANSIENT, hint=Hint(9.0)), NOW, 0.0)
    assert Progress(1, NOW, 9.0 + 0.1) == call.progress


def test_another_call_takes_the_last_tokens() -> None:
    """A withdrawal that fails although the balance was sufficient ends the call."""

    class EmptiedBudget(TokenBudget):
        def withdraw(self, cost: float, now: float) -> bool:
            return False

    call = Call(NO_JITTER, Downstream("payments", budget=EmptiedBudget()), NOW)
    call.start(NOW)
    assert Stop(Reason.BUDGET_EMPTY) == call.record_failure(TRANSIENT, NOW, 0.5)
    assert (Stop(Reason.BUDGET_EMPTY), 0.0) == (call.steps[-1].verdict, call.waited)
    assert Progress(1, NOW) == call.progress


# --- success, cancellation and abandoned calls ---------------------------------------------------


def test_success() -> None:
    """A success is counted with its duration and frees the slot."""
    parts = make_downstream()
    call = parts.new_call()
    call.start(NOW)
    call.record_success(NOW + 2.5, 0.5)
    assert (2.5, 0) == (parts.downstream.expected_duration(), parts.in_flight)
    assert (1, 0, 0) == parts.breaker.counts(NOW + 2.5)


def test_duration_excludes_the_rate_limit_delay() -> None:
    """The delay of a rate limiter is not part of the duration of an attempt."""
    downstream = rate_limited_downstream()
    call = Call(NO_JITTER, downstream, NOW)
    call.start(NOW)
    call.record_success(NOW + 21, 0.5)
    assert 1.0 == downstream.expected_duration()


def test_cancelled_probes_free_their_slot() -> None:
    """A cancelled probe frees its slot in a half-open breaker."""
    parts = make_downstream(consecutive=1, open_for=30, probes=1)
    parts.breaker.record(0, failed=True, duration=0, now=NOW - 30, random_number=0)
    probe, other = parts.new_call(), parts.new_call()
    assert Attempt(1) == probe.start(NOW)
    assert Stop(Reason.BREAKER_OPEN, 30.0) == other.start(NOW)
    probe.cancel_attempt(NOW)
    assert Attempt(1) == other.start(NOW)


def test_a_retry_cancelled_after_its_start_is_not_refunded() -> None:
    """A cancelled retry is not refunded, because the dependency has received it."""
    parts = make_downstream()
    call = parts.new_call()
    call.start(NOW)
    call.record_failure(TRANSIENT, NOW, 0.5)
    call.start(NOW + 1)
    call.cancel_attempt(NOW + 2)
    assert (495, 0) == (parts.balance, parts.in_flight)


def test_a_retry_cancelled_during_a_rate_limit_delay_is_refunded() -> None:
    downstream = rate_limited_downstream()
    call = Call(NO_JITTER, downstream, NOW)
    call.start(NOW)
    assert isinstance(call.record_failure(TRANSIENT, NOW + 20, 0.5), Wait)
    assert 495 == balance_of(downstream)
    command = call.start(NOW + 21)
    assert isinstance(command, Attempt)
    assert command.delay > 0.5
    call.cancel_attempt(NOW + 21.5)
    assert 500 == balance_of(downstream)


def test_a_call_abandoned_during_a_wait() -> None:
    """refund_retry() refunds the price of the next attempt only once."""
    parts = make_downstream()
    call = parts.new_call()
    call.start(NOW)
    call.record_failure(TRANSIENT, NOW, 0.5)
    assert 495 == parts.balance
    call.refund_retry(NOW)
    assert 500 == parts.balance
    parts.budget.withdraw(100, NOW)
    call.refund_retry(NOW)
    assert 400 == parts.balance


def test_end_of_a_call_without_a_downstream() -> None:
    """Without a downstream, record_success, cancel_attempt and refund_retry do not fail."""
    call = Call(NO_JITTER)
    call.start(NOW)
    call.record_success(NOW, 0.5)
    call.cancel_attempt(NOW)
    call.refund_retry(NOW)
    assert (1, ()) == (call.attempts, call.steps)


# --- decision record and stored progress ---------------------------------------------------------


def test_decision_record() -> None:
    """Each failed attempt records its kind, detail, verdict, breaker state and balance."""
    parts = make_downstream()
    call = parts.new_call(NO_JITTER.replace(max_attempts=2))
    for now in (NOW, NOW + 1):
        call.start(now)
        call.record_failure(Outcome(Kind.TRANSIENT, detail="503"), now, 0.5)
    expected = (
        Step(1, Kind.TRANSIENT, "503", Wait(1, 1), "closed", 500),
        Step(2, Kind.TRANSIENT, "503", Stop(Reason.ATTEMPTS), "closed", 495),
    )
    assert (expected, 1.0) == (call.steps, call.waited)


def test_decision_record_without_a_downstream() -> None:
    """Without a breaker and a budget their fields in the record are None."""
    for downstream in (None, Downstream("payments")):
        call = Call(NO_JITTER, downstream, NOW)
        call.start(NOW)
        call.record_failure(PERMANENT, NOW, 0.5)
        assert (Step(1, Kind.PERMANENT, "", Stop(Reason.PERMANENT), None, None),) == call.steps


def test_calls_do_not_share_their_state() -> None:
    """Calls do not affect each other and have no `__dict__`."""
    one, other = Call(NO_JITTER), Call(NO_JITTER)
    one.start(NOW)
    one.record_failure(TRANSIENT, NOW, 0.5)
    assert (0, 0.0, (), Progress()) == (other.attempts, other.waited, other.steps, other.progress)
    assert not hasattr(one, "__dict__")


@given(
    st.sampled_from(["none", "full", "equal", "decorrelated"]),
    st.lists(
        st.tuples(st.none() | st.tuples(st.floats(0, 9), st.booleans()), random_numbers), max_size=8
    ),
)
def test_stored_and_resumed_call(
    jitter: Any, failures: list[tuple[tuple[float, bool] | None, float]]
) -> None:
    """A call that is stored and resumed after each attempt makes the same decisions."""
    policy = Policy(max_attempts=7, jitter=jitter, total_budget=30)
    uninterrupted, stored, now = Call(policy, None, NOW), json.dumps(Progress(0, NOW)), NOW
    for hint, random_number in failures:
        resumed = Call(policy)
        resumed.resume(Progress(*json.loads(stored)))
        outcome = Outcome(Kind.TRANSIENT, hint=hint and Hint(hint[0], exact=hint[1]))
        assert uninterrupted.start(now) == resumed.start(now)
        expected, actual = (
            call.record_failure(outcome, now, random_number) for call in (uninterrupted, resumed)
        )
        assert expected == actual
        stored = json.dumps(resumed.progress)
        if isinstance(actual, Stop):
            break
        now += actual.delay


# --- concurrent calls ----------------------------------------------------------------------------


@pytest.mark.long_run
def test_concurrent_calls() -> None:
    """For any sequence of events on concurrent calls all invariants of the machine are true."""
    # One example runs many steps, so half as many examples suffice.
    half = settings(max_examples=settings().max_examples // 2)
    run_state_machine_as_test(CallMachine, settings=half)


def test_failure_after_a_cancelled_attempt_is_not_counted() -> None:
    """A failure after the permit was released gets a verdict and is not counted."""
    downstream = Downstream("d", budget=TokenBudget(), breaker=Breaker(consecutive=1))
    call = Call(Policy(), downstream)
    call.start(0.0)
    call.cancel_attempt(0.0)
    call.cancel_attempt(0.0)
    assert isinstance(call.record_failure(Outcome(Kind.TRANSIENT), 0.0, 0.5), Wait)
    assert "closed" == downstream.status(0.0)[0]


def test_interrupted_attempt_of_a_call() -> None:
    """`forget_attempt` frees the slot of an attempt whose permit was lost."""
    downstream = Downstream("payments", max_in_flight=1)
    call = Call(Policy(), downstream)
    call.forget_attempt()
    call.start(0.0)
    call._permit = None  # as if an interrupt had come before the permit was stored

    call.forget_attempt()
    call.forget_attempt()

    assert isinstance(Call(Policy(), downstream).start(0.0), Attempt)
    Call(Policy()).forget_attempt()
