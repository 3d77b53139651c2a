"""Tests for DurableCall, whose progress is stored between attempts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.breaker import Breaker, BreakerState
from tarry.core.budget import TokenBudget
from tarry.core.call import Defer, DurableCall, NewDurableCall
from tarry.core.downstream import Downstream
from tarry.core.limiter import AdaptiveRate
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Kind, Outcome
from tarry.core.policy import Policy
from tarry.core.verdict import Attempt, Progress, Reason, Stop, Wait


def resume_call(
    policy: Policy, downstream: Downstream | None = None, attempts: int = 0, started: float = 0.0
) -> DurableCall:
    """Return a call that continues from stored progress."""
    call = DurableCall(policy, downstream)
    call.resume(Progress(attempts, started))
    return call


def test_no_attempts_left_ends_the_call_before_an_attempt() -> None:
    """A call that is resumed with no attempts left ends, for example after a lost attempt."""
    assert Stop(Reason.ATTEMPTS) == resume_call(Policy(max_attempts=2), attempts=2).start_or_defer(
        0.0
    )


def test_attempt_that_cannot_fit_the_total_budget_is_not_made() -> None:
    """A call ends if the elapsed time plus the expected latency reaches the total budget."""
    downstream = Downstream("d")
    downstream.latency.add(2.0)
    policy = Policy(total_budget=10.0)

    assert isinstance(resume_call(policy, downstream).start_or_defer(7.9), Attempt)
    assert Stop(Reason.TOTAL_BUDGET) == resume_call(policy, downstream).start_or_defer(8.0)
    assert isinstance(resume_call(policy).start_or_defer(9.9), Attempt)


def test_open_breaker_defers_until_its_probes() -> None:
    """An open breaker defers the attempt until the end of its open period, without counting it."""
    downstream = Downstream("d", breaker=Breaker(consecutive=1, spread=0.0, open_for=30.0))
    call = resume_call(Policy(), downstream)
    call.start_or_defer(0.0)
    call.record_failure(TRANSIENT, 0.0, 0.5)

    later = resume_call(Policy(), downstream, attempts=1)
    assert Defer(Reason.BREAKER_OPEN, 20.0) == later.start_or_defer(10.0)
    assert 1 == later.attempts
    assert isinstance(later.start_or_defer(30.0), Attempt)


def test_in_flight_limit_defers() -> None:
    """A reached in-flight limit defers the attempt."""
    downstream = Downstream("d", max_in_flight=1)
    first = resume_call(Policy(), downstream)
    first.start_or_defer(0.0)

    second = resume_call(Policy(), downstream)
    assert Defer(Reason.LIMIT) == second.start_or_defer(0.0)
    first.record_success(1.0, 0.5)
    assert isinstance(second.start_or_defer(1.0), Attempt)


def test_rate_limit_defers_and_takes_no_token() -> None:
    limiter = AdaptiveRate()
    downstream = Downstream("d", limiter=limiter)
    for moment in (0.0, 10.0):
        call = resume_call(Policy(), downstream)
        assert isinstance(call.start_or_defer(moment), Attempt)
        call.record_failure(Outcome(Kind.THROTTLED), moment, 0.5)

    commands = [resume_call(Policy(), downstream).start_or_defer(10.5) for _ in range(10)]

    deferred = [command for command in commands if isinstance(command, Defer)]
    assert deferred
    assert 1 == len({command.delay for command in deferred})
    assert all(command.reason is Reason.LIMIT for command in deferred)


@pytest.mark.parametrize(("suspect", "is_limited"), [(False, True), (True, False)])
def test_outcomes_of_suspect_tasks_do_not_change_the_rate(suspect: bool, is_limited: bool) -> None:
    """A limiter ignores the outcomes of tasks that have failed before in a healthy lane."""
    limiter = AdaptiveRate()
    call = resume_call(Policy(), Downstream("d", limiter=limiter))
    assert isinstance(call.start_or_defer(0.0, suspect=suspect), Attempt)
    call.record_failure(Outcome(Kind.THROTTLED), 0.1, 0.5)
    assert is_limited is (limiter.rate is not None)


def test_empty_budget_defers_a_retry_and_releases_the_permit() -> None:
    """An empty budget defers a retry and releases its permit; a first attempt costs nothing."""
    downstream = Downstream(
        "d", breaker=Breaker(), budget=TokenBudget("classic", capacity=5), max_in_flight=1
    )
    policy = Policy(max_attempts=9)
    retry = resume_call(policy, downstream, attempts=1)
    assert isinstance(retry.start_or_defer(0.0), Attempt)
    retry.record_failure(TRANSIENT, 0.0, 0.5)

    assert Defer(Reason.BUDGET_EMPTY) == resume_call(policy, downstream, attempts=1).start_or_defer(
        1.0
    )
    assert isinstance(resume_call(policy, downstream).start_or_defer(1.0), Attempt)


def test_failure_waits_despite_empty_budget_and_open_breaker() -> None:
    """The breaker and the budget are checked before the retry, not after the failure."""
    downstream = Downstream(
        "d", breaker=Breaker(consecutive=1), budget=TokenBudget("classic", capacity=5)
    )
    downstream.withdraw(TRANSIENT, 0.0)
    call = resume_call(Policy(jitter="none"), downstream)
    call.start_or_defer(0.0)

    verdict = call.record_failure(TRANSIENT, 0.0, 0.5, "503")

    assert isinstance(verdict, Wait)
    assert downstream.breaker is not None
    assert BreakerState.OPEN is downstream.breaker.state
    assert ("open", 0.0) == (call.steps[0].breaker, call.steps[0].balance)


def test_failure_without_a_downstream_is_decided_by_the_policy() -> None:
    call = resume_call(Policy(max_attempts=2))
    call.start_or_defer(0.0)
    assert isinstance(call.record_failure(TRANSIENT, 0.0, 0.5), Wait)
    call.start_or_defer(1.0)
    assert Stop(Reason.ATTEMPTS) == call.record_failure(TRANSIENT, 1.0, 0.5)
    assert Stop(Reason.PERMANENT) == resume_call(Policy()).record_failure(PERMANENT, 0.0, 0.5)


def test_retry_that_cannot_fit_the_total_budget_is_not_scheduled() -> None:
    """A failure ends the call if delay plus expected latency exceeds the total budget."""
    downstream = Downstream("d")
    downstream.latency.add(2.0)
    policy = Policy(total_budget=10.0, initial_delay=1.0, jitter="none")
    call = resume_call(policy, downstream)
    call.start_or_defer(0.0)

    assert Stop(Reason.TOTAL_BUDGET) == call.record_failure(TRANSIENT, 7.5, 0.5)


def test_attempts_beyond_the_precomputed_commands() -> None:
    """A policy precomputes the first attempt commands; later ones are created when needed."""
    call = resume_call(Policy(max_attempts=100, attempt_timeout=3.0), attempts=50)

    assert Attempt(51, 3.0) == call.start_or_defer(0.0)


def test_last_status() -> None:
    """last_status is the breaker's state and the budget's balance after the last failure."""
    fresh = resume_call(Policy())
    call = resume_call(Policy(), Downstream("d", breaker=Breaker(), budget=TokenBudget(capacity=7)))
    call.start_or_defer(0.0)
    call.record_failure(TRANSIENT, 1.0, 0.5)

    assert ((None, None), ("closed", 7)) == (fresh.last_status, call.last_status)


OUTCOMES = [
    SUCCESS,
    TRANSIENT,
    PERMANENT,
    Outcome(Kind.THROTTLED),
    Outcome(Kind.TRANSIENT, local=True),
]


STEPS = [(outcome, duration) for outcome in (*OUTCOMES, None) for duration in (0.0, 2.0)]


def run_attempts(
    call_class: type[DurableCall],
    steps: list[tuple[Outcome | None, float]],
    *,
    total_budget: float | None = None,
    max_in_flight: int | None = None,
    suspect: bool = False,
) -> list[object]:
    """Make attempts of new calls (outcome None: cancelled); return everything that they changed."""
    policy = Policy(max_attempts=4, total_budget=total_budget)
    breaker = Breaker(min_calls=3, min_span=0.0)
    budget, limiter = TokenBudget("aws-2020"), AdaptiveRate()
    downstream = Downstream(
        "d", breaker=breaker, budget=budget, limiter=limiter, max_in_flight=max_in_flight
    )
    now = 0.0
    log: list[object] = []
    for outcome, duration in steps:
        call = call_class(policy, downstream, now - 1.0)
        call.cancel_attempt(now)  # has no effect, because no attempt runs
        call.record_success(now, 0.5)
        command = call.start_or_defer(now, suspect=suspect)
        log += [command, call.attempts]
        now += duration
        if outcome is None:
            call.cancel_attempt(now)
        elif isinstance(command, Attempt) and outcome is SUCCESS:
            call.record_success(now, 0.5)
        elif isinstance(command, Attempt):
            verdict = call.record_failure(outcome, now, 0.5)
            log += [verdict, call.last_status, call.steps, call.progress]
        call.cancel_attempt(now)
        log += [downstream.status(now), breaker.counts(now), limiter.rate, limiter.measured]
        log += [len(downstream.latency), downstream.check_retry(TRANSIENT, now)]
    return log


@pytest.mark.parametrize("suspect", [False, True])
@pytest.mark.parametrize("total_budget", [None, 2.5])
@pytest.mark.parametrize(
    "steps", [STEPS, STEPS[:2] * 3, STEPS[2:4] * 5, STEPS[6:8] * 10, STEPS[10:] * 2]
)
def test_new_call_is_equivalent_to_a_call_without_attempts(
    steps: list[tuple[Outcome | None, float]], total_budget: float | None, suspect: bool
) -> None:
    """NewDurableCall has the same results, and the same effects on its downstream."""
    expected, actual = (
        run_attempts(call_class, steps, total_budget=total_budget, suspect=suspect)
        for call_class in (DurableCall, NewDurableCall)
    )
    assert expected == actual


@given(
    st.lists(st.sampled_from(STEPS), max_size=12),
    st.sampled_from([None, 2.5, 10.0]),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_any_new_call_is_equivalent_to_a_call_without_attempts(
    steps: list[tuple[Outcome | None, float]],
    total_budget: float | None,
    max_in_flight: int | None,
    suspect: bool,
) -> None:
    """NewDurableCall is equivalent after any outcomes."""
    expected, actual = (
        run_attempts(
            call_class,
            steps,
            total_budget=total_budget,
            max_in_flight=max_in_flight,
            suspect=suspect,
        )
        for call_class in (DurableCall, NewDurableCall)
    )
    assert expected == actual
