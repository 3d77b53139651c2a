"""Tests for the downstream: how it updates its breaker, budget, limiters and latency."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.adaptive_limit import AdaptiveLimit
from tarry.core.breaker import Breaker, BreakerState
from tarry.core.budget import RatioBudget, ThrottleBudget, TokenBudget
from tarry.core.downstream import BreakerTransition, Downstream
from tarry.core.limiter import AIMD, AdaptiveRate, InFlight, Limiter
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Kind, Outcome
from tarry.core.sliding_window import SlidingWindow
from tarry.core.verdict import DelayedPermit, Reason, Stop
from tarry.errors import ConfigurationError
from tests.core.invalid_values import invalid_values, keyword

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
THROTTLED = Outcome(Kind.THROTTLED)
OVERLOADED = Outcome(Kind.OVERLOADED)
TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)


class SpyLimiter:
    """A limiter that returns a fixed delay, or None for a full limiter, and records its calls."""

    def __init__(self, delay: float | None = 0.0) -> None:
        self.delay = delay
        self.calls: list[tuple[object, ...]] = []

    def acquire(self, now: float) -> float | None:
        """Record the call and return the fixed delay."""
        self.calls.append(("acquire", now))
        return self.delay

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Record the call."""
        self.calls.append(("release", outcome, duration, now))

    def on_recovery(self, now: float) -> None:
        """Record the call."""
        self.calls.append(("on_recovery", now))


def admit_attempt(downstream: Downstream, now: float) -> int:
    """Return the permit of an attempt that must be admitted at once."""
    permit = downstream.admit(now)
    assert isinstance(permit, int)
    return permit


def run(downstream: Downstream, outcome: Outcome, now: float = 0.0, times: int = 1) -> None:
    """Make attempts with the same outcome, one after another."""
    for _ in range(times):
        permit = admit_attempt(downstream, now)
        downstream.record(permit, outcome, duration=0.1, now=now, random_number=0.0)


def complete_state(part: object) -> object:
    """Return the complete state of a breaker or a budget, for comparison."""
    state: dict[str, object] = {}
    for name in getattr(type(part), "__slots__", ()):
        value = getattr(part, name)
        if isinstance(value, SlidingWindow):
            value = {slot: getattr(value, slot) for slot in SlidingWindow.__slots__}
        state[name] = deepcopy(value)
    return state


def test_a_downstream_without_parts_rejects_nothing() -> None:
    """Without breaker, budget and limiter every attempt is admitted and latency is measured."""
    downstream = Downstream("payments")
    assert ("payments", False) == (downstream.name, downstream.has_limiters)
    assert (None, None) == downstream.status(0.0)
    assert (None, 0.0) == (
        downstream.check_retry(TRANSIENT, 0.0),
        downstream.withdraw(TRANSIENT, 0.0),
    )
    assert 0.0 == downstream.expected_duration()
    for outcome in (SUCCESS, TRANSIENT, THROTTLED, OVERLOADED, PERMANENT):
        run(downstream, outcome, times=1_000)
    downstream.refund(5.0, 0.0)
    downstream.release(admit_attempt(downstream, 0.0), duration=1.0, now=0.0)
    downstream.force("open")
    assert downstream.try_record_success(admit_attempt(downstream, 0.0), 0.3, 0.0)
    assert ([], 0.1) == (list(downstream.transitions), downstream.expected_duration())


# --- breaker -------------------------------------------------------------------------------------


def test_an_open_breaker_rejects_first_attempts_and_retries() -> None:
    breaker = Breaker(consecutive=1, open_for=30)
    downstream = Downstream("d", breaker=breaker, budget=TokenBudget())
    run(downstream, TRANSIENT)
    stop = Stop(Reason.BREAKER_OPEN, 20.0)
    assert (stop, stop) == (downstream.admit(10.0), downstream.check_retry(TRANSIENT, 10.0))
    assert ("open", 500.0) == downstream.status(10.0)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (SUCCESS, (1, 0, 0)),
        (TRANSIENT, (1, 1, 0)),
        (TIMEOUT, (1, 1, 0)),
        (THROTTLED, (1, 1, 0)),
        (OVERLOADED, (1, 1, 0)),
        (PERMANENT, (0, 0, 0)),
    ],
)
def test_outcomes_counted_by_the_breaker(outcome: Outcome, expected: tuple[int, int, int]) -> None:
    """The breaker counts every outcome except a permanent failure."""
    breaker = Breaker()
    run(Downstream("d", breaker=breaker), outcome)
    assert expected == breaker.counts(0.0)


def test_a_local_failure_only_releases_the_permit() -> None:
    """A failure that did not reach the dependency is not counted by breaker and budget."""
    breaker, budget, limiter = Breaker(consecutive=1), ThrottleBudget(), SpyLimiter()
    downstream = Downstream("d", breaker=breaker, budget=budget, limiter=limiter)
    before = budget.balance(0.0)

    run(downstream, Outcome(Kind.TRANSIENT, local=True))

    assert (CLOSED, before) == (breaker.state, budget.balance(0.0))
    assert ("release", None, 0.1, 0.0) == limiter.calls[-1]


def test_a_permanent_failure_does_not_close_the_breaker() -> None:
    """A permanent failure of a probe frees its slot and does not close the breaker."""
    breaker = Breaker(consecutive=1, probes=1)
    downstream = Downstream("d", breaker=breaker)
    run(downstream, TRANSIENT)
    run(downstream, PERMANENT, now=30.0)
    assert (HALF_OPEN, True) == (breaker.state, breaker.would_admit(30.0))


@given(st.lists(st.sampled_from(["cancel", "admit"]), min_size=5, max_size=30), st.booleans())
def test_cancellations_never_count(actions: list[str], half_open: bool) -> None:
    """Cancelled attempts do not change breaker, budget and latency."""
    breaker, budget = Breaker(consecutive=1, probes=2), RatioBudget()
    downstream = Downstream("d", breaker=breaker, budget=budget, max_in_flight=3)
    if half_open:
        run(downstream, TRANSIENT)
        downstream.release(admit_attempt(downstream, 30.0), duration=0.1, now=30.0)
    before = budget.balance(30.0), len(downstream.latency), breaker.state, breaker.counts(30.0)
    permits: list[int] = []
    for action in actions:
        if action == "admit":
            permit = downstream.admit(30.0)
            assert (len(permits) < (2 if half_open else 3)) == isinstance(permit, int)
            permits += [permit] if isinstance(permit, int) else []
        elif permits:
            downstream.release(permits.pop(0), duration=0.1, now=30.0)
    assert before == (
        budget.balance(30.0),
        len(downstream.latency),
        breaker.state,
        breaker.counts(30.0),
    )


def test_transitions_are_recorded() -> None:
    """Changes of the breaker's state are kept in order until they are read."""
    downstream = Downstream("d", breaker=Breaker(consecutive=1, probes=1))
    run(downstream, TRANSIENT)
    run(downstream, SUCCESS, now=30.0)
    downstream.force("disabled")
    assert [
        BreakerTransition(CLOSED, OPEN),
        BreakerTransition(OPEN, HALF_OPEN),
        BreakerTransition(HALF_OPEN, CLOSED),
        BreakerTransition(CLOSED, BreakerState.DISABLED),
    ] == list(downstream.transitions)


def test_an_unchanged_state_is_no_transition() -> None:
    """Forcing the current state records no transition."""
    downstream = Downstream("d", breaker=Breaker())
    downstream.force("closed")
    assert [] == list(downstream.transitions)


def test_transitions_are_bounded() -> None:
    """Of 10,000 unread transitions only the newest 100 are kept."""
    downstream = Downstream("d", breaker=Breaker(consecutive=1, growth=1.0))
    for n in range(10_000):
        run(downstream, TRANSIENT, now=n * 100.0)
    assert 100 == len(downstream.transitions)
    assert BreakerTransition(HALF_OPEN, OPEN) == downstream.transitions[-1]


# --- budget --------------------------------------------------------------------------------------


def test_an_empty_budget_rejects_only_retries() -> None:
    """An empty budget rejects a retry, but not a first attempt."""
    downstream = Downstream("d", budget=TokenBudget(capacity=5))
    assert (None, 5.0) == (
        downstream.check_retry(TRANSIENT, 0.0),
        downstream.withdraw(TRANSIENT, 0.0),
    )
    assert Stop(Reason.BUDGET_EMPTY) == downstream.check_retry(TRANSIENT, 0.0)
    assert None is downstream.withdraw(TRANSIENT, 0.0)
    assert 0 == downstream.admit(0.0)


def test_the_breaker_is_checked_before_the_budget() -> None:
    """When both reject a retry, the reason is the breaker."""
    downstream = Downstream(
        "d", breaker=Breaker(consecutive=1), budget=TokenBudget("aws-2026", capacity=5)
    )
    assert Stop(Reason.BUDGET_EMPTY) == downstream.check_retry(TRANSIENT, 0.0)
    run(downstream, TRANSIENT)
    assert Stop(Reason.BREAKER_OPEN, 2.0) == downstream.check_retry(TRANSIENT, 0.0)


def test_the_price_is_that_of_the_outcome() -> None:
    """A retry costs the price that the budget has for the outcome before it."""
    downstream = Downstream("d", budget=TokenBudget("aws-2026"))
    assert [14, 5] == [downstream.withdraw(outcome, 0.0) for outcome in (TRANSIENT, THROTTLED)]
    assert (None, 481.0) == downstream.status(0.0)
    downstream.refund(14, 0.0)
    downstream.refund(0.0, 0.0)
    assert (None, 495.0) == downstream.status(0.0)


def test_a_success_after_retries_refunds_the_last_price() -> None:
    """record() passes the price of the retry to the budget, which refunds it after a success."""
    downstream = Downstream("d", budget=TokenBudget("aws-2020"))
    assert [10, 5] == [downstream.withdraw(outcome, 0.0) for outcome in (TIMEOUT, TRANSIENT)]
    downstream.record(0, TIMEOUT, duration=1.0, now=0.0, random_number=0.0, paid=10.0)
    downstream.record(0, SUCCESS, duration=1.0, now=0.0, random_number=0.0, paid=5.0)
    assert (None, 490.0) == downstream.status(0.0)


# --- limits --------------------------------------------------------------------------------------


def test_limiters_are_called_for_every_attempt() -> None:
    """A limiter is called at the start and end of each attempt; a cancellation has outcome None."""
    spy = SpyLimiter()
    downstream = Downstream("d", limiter=spy)
    assert downstream.has_limiters
    for outcome in (SUCCESS, PERMANENT):
        downstream.record(
            admit_attempt(downstream, 1.0), outcome, duration=0.5, now=2.0, random_number=0.0
        )
    downstream.release(admit_attempt(downstream, 3.0), duration=0.25, now=4.0)
    assert [
        ("acquire", 1.0),
        ("release", SUCCESS, 0.5, 2.0),
        ("acquire", 1.0),
        ("release", PERMANENT, 0.5, 2.0),
        ("acquire", 3.0),
        ("release", None, 0.25, 4.0),
    ] == spy.calls


@pytest.mark.parametrize(("delay", "expected"), [(0.0, 0), (1.5, DelayedPermit(0, 1.5))])
def test_a_limiter_can_delay_an_attempt(delay: float, expected: int | DelayedPermit) -> None:
    """A delayed attempt gets a permit and the seconds until its start."""
    downstream = Downstream("d", limiter=SpyLimiter(delay), max_in_flight=2)
    assert [expected, expected, Stop(Reason.LIMIT)] == [downstream.admit(0.0) for _ in range(3)]


def test_a_rejected_attempt_releases_slot_and_probe() -> None:
    """When the second limiter is full, the slot of the first and the probe are released."""
    spy, breaker = SpyLimiter(None), Breaker(consecutive=1, probes=1)
    downstream = Downstream("d", breaker=breaker, limiter=spy, max_in_flight=1)
    breaker.record(0, failed=True, duration=0.1, now=0.0, random_number=0.0)
    assert [Stop(Reason.LIMIT)] * 3 == [downstream.admit(30.0) for _ in range(3)]
    spy.delay = 0.0
    assert isinstance(downstream.admit(30.0), int)
    assert [BreakerTransition(OPEN, HALF_OPEN)] == list(downstream.transitions)


def test_a_limiter_that_raises_releases_slot_and_probe() -> None:
    """An error of a user's limiter is raised, and the slot and the probe are released."""

    class RaisingLimiter(SpyLimiter):
        def acquire(self, now: float) -> float | None:
            raise LookupError

    breaker = Breaker(consecutive=1, probes=1)
    downstream = Downstream("d", breaker=breaker, limiter=RaisingLimiter(), max_in_flight=1)
    breaker.record(0, failed=True, duration=0.1, now=0.0, random_number=0.0)
    for _ in range(3):
        with pytest.raises(LookupError):
            downstream.admit(30.0)
    assert (HALF_OPEN, True) == (breaker.state, breaker.would_admit(30.0))


def test_a_full_limiter_without_a_breaker() -> None:
    """A full limiter rejects an attempt on a downstream without a breaker."""
    assert Stop(Reason.LIMIT) == Downstream("d", limiter=SpyLimiter(None)).admit(0.0)


def test_timeouts_are_reported_to_the_breaker() -> None:
    """Two time-outs in a row open a breaker with `timeouts=2`; other failures do not."""
    downstream = Downstream("d", breaker=Breaker(timeouts=2))
    run(downstream, TRANSIENT, times=5)
    run(downstream, TIMEOUT)
    assert "closed" == downstream.status(0.0)[0]
    run(downstream, TIMEOUT)
    assert "open" == downstream.status(0.0)[0]


@pytest.mark.parametrize(
    ("limiter", "expected"),
    [(AdaptiveLimit(), "closed"), (AIMD(), "open"), (None, "open")],
)
def test_throttled_attempts_and_the_breaker(limiter: Limiter | None, expected: str) -> None:
    """Throttled attempts open the breaker, unless the limiter reacts to them."""
    downstream = Downstream("d", breaker=Breaker(consecutive=2), limiter=limiter)
    run(downstream, Outcome(Kind.THROTTLED), times=2)
    assert expected == downstream.status(0.0)[0]


def test_a_throttled_probe_shows_that_the_dependency_works() -> None:
    """With a limiter that reacts to throttling, a throttled probe closes the breaker."""
    breaker = Breaker(consecutive=1, probes=1)
    downstream = Downstream("d", breaker=breaker, limiter=AdaptiveLimit())
    run(downstream, TRANSIENT)
    permit = admit_attempt(downstream, 60.0)
    downstream.record(permit, Outcome(Kind.THROTTLED), 0.1, 60.1, 0.0)
    assert BreakerState.CLOSED is breaker.state


@pytest.mark.parametrize("duration", [0.0, 0.1])
def test_outcome_of_a_suspect_attempt(duration: float) -> None:
    """The limiter releases the slot of a suspect attempt; the breaker counts the failure."""
    spy = SpyLimiter()
    downstream = Downstream("d", breaker=Breaker(consecutive=1), limiter=spy)
    permit = admit_attempt(downstream, 0.0)
    downstream.record(permit, TRANSIENT, duration, 1.0, 0.0, suspect=True)
    _, (name, outcome, released_duration, now) = spy.calls
    assert ("release", None, 1.0) == (name, outcome, now)
    assert isinstance(released_duration, float)
    assert 0 < released_duration == pytest.approx(duration, abs=1e-6)
    assert "open" == downstream.status(1.0)[0]


def test_limiters_are_notified_of_a_recovery() -> None:
    """Only the change from half-open to closed is a recovery; each limiter is notified."""
    spy = SpyLimiter()
    downstream = Downstream(
        "d", breaker=Breaker(consecutive=1, probes=1), limiter=spy, max_in_flight=100
    )
    run(downstream, TRANSIENT)
    run(downstream, TRANSIENT, now=30.0)
    run(downstream, SUCCESS, now=90.0)
    assert [("on_recovery", 90.0)] == [call for call in spy.calls if call[0] == "on_recovery"]
    assert 10 == sum(isinstance(downstream.admit(91.0), int) for _ in range(1_000))


@pytest.mark.parametrize("limiter", [AIMD(initial=100, max_limit=100), InFlight(100)])
def test_recovery_is_gradual(limiter: AIMD | InFlight) -> None:
    """Right after the breaker closes, the limiter admits one or two of 1,000 calls."""
    downstream = Downstream("d", breaker=Breaker(consecutive=1, probes=1), limiter=limiter)
    run(downstream, TRANSIENT)
    run(downstream, SUCCESS, now=30.0)
    assert 1 <= sum(isinstance(downstream.admit(30.0), int) for _ in range(1_000)) <= 2


def test_recovery_of_an_adaptive_rate_is_gradual() -> None:
    """The probe that closes the breaker does not restore the previous rate."""
    limiter = AdaptiveRate()
    downstream = Downstream("d", breaker=Breaker(consecutive=5, probes=1), limiter=limiter)
    for n in range(2_000):
        run(downstream, SUCCESS, now=n / 100)
    for _ in range(5):
        downstream.record(0, THROTTLED, duration=0.1, now=20.0, random_number=0.0)
    run(downstream, SUCCESS, now=60.0)
    assert "closed" == downstream.status(60.0)[0]
    assert pytest.approx(0.5) == limiter.rate


@pytest.mark.parametrize(("field", "value", "pattern"), invalid_values(max_in_flight="count"))
def test_invalid_arguments(field: str, value: object, pattern: str) -> None:
    """An invalid max_in_flight raises an error that names the argument."""
    with pytest.raises(ConfigurationError, match=pattern):
        Downstream("d", **keyword(field, value))


# --- latency -------------------------------------------------------------------------------------


def test_only_successes_are_measured() -> None:
    """The latency contains successes, but not failures and cancellations."""
    downstream = Downstream("d")
    for outcome in (TRANSIENT, TIMEOUT, THROTTLED, OVERLOADED, PERMANENT):
        downstream.record(0, outcome, duration=9.0, now=0.0, random_number=0.0)
    downstream.release(0, duration=9.0, now=0.0)
    assert (0, 0.0) == (len(downstream.latency), downstream.expected_duration())
    for duration in (3.0, 1.0, 2.0):
        downstream.record(0, SUCCESS, duration=duration, now=0.0, random_number=0.0)
    assert (3, 2.0) == (len(downstream.latency), downstream.expected_duration())


def test_a_success_is_recognized_by_its_kind() -> None:
    """An outcome of kind SUCCESS that is not the SUCCESS constant is measured too."""
    downstream = Downstream("d", breaker=Breaker())
    downstream.record(
        admit_attempt(downstream, 0.0),
        Outcome(Kind.SUCCESS, detail="200"),
        duration=2.0,
        now=0.0,
        random_number=0.0,
    )
    assert 2.0 == downstream.expected_duration()


# --- hedge credit --------------------------------------------------------------------------------


@given(st.floats(0.001, 1), st.lists(st.booleans(), min_size=12, max_size=60))
def test_hedges_are_a_share_of_the_calls(share: float, hedges: list[bool]) -> None:
    """In any order of calls and hedges, there are never more hedges than that share of calls."""
    downstream, calls, paid = Downstream("d"), 0, 0
    for hedge in hedges:
        if hedge:
            paid += downstream.take_hedge_credit()
        else:
            downstream.add_hedge_credit(share)
            calls += 1
        assert paid <= share * calls + 1e-9


def test_saved_credit_is_bounded() -> None:
    """At most ten hedges can be saved up."""
    downstream = Downstream("d")
    for _ in range(10_000):
        downstream.add_hedge_credit(0.05)
    assert 10 == sum(downstream.take_hedge_credit() for _ in range(100))


# --- fast path -----------------------------------------------------------------------------------

BUDGETS = {
    "none": None,
    "tokens": TokenBudget("aws-2020", capacity=20),
    "ratio": RatioBudget(),
    "throttle": ThrottleBudget(10),
}
STEPS = [
    *[("succeed", seconds) for seconds in (0.1, 0.1, 0.1, 0.2, 2.0)],
    *[("fail", 0.1)] * 3,
    ("retry", 0.0),
    *[("wait", seconds) for seconds in (0.5, 9.0, 10.0, 30.0, 60.0)],
    *[(state, 0.0) for state in ("open", "closed", "closed", "disabled", "metrics-only")],
]


def state_of(downstream: Downstream) -> list[object]:
    """Return the complete state of a downstream, for comparison."""
    latency = [downstream.latency.quantile(q / 10) for q in range(11)], len(downstream.latency)
    parts = [complete_state(downstream.breaker), complete_state(downstream.budget)]
    return [*parts, latency, list(downstream.transitions)]


@given(
    st.sampled_from([None, {}, {"consecutive": 2}, {"slow_after": 1.0}]),
    st.sampled_from(list(BUDGETS)),
    st.lists(st.sampled_from(STEPS), min_size=10, max_size=40),
)
def test_try_record_success_is_equivalent_to_record(
    breaker: dict[str, Any] | None, budget: str, steps: list[tuple[str, float]]
) -> None:
    """try_record_success(), with record() as the fallback, has the same effect as record()."""
    fast, slow = (
        Downstream(
            "d",
            breaker=None if breaker is None else Breaker(min_calls=4, probes=2, **breaker),
            budget=deepcopy(BUDGETS[budget]),
        )
        for _ in range(2)
    )
    now = 0.0
    for action, value in steps:
        if action == "wait":
            now += value
        elif action == "retry":
            assert slow.withdraw(TRANSIENT, now) == fast.withdraw(TRANSIENT, now)
        elif action in ("succeed", "fail"):
            permit, other = slow.admit(now), fast.admit(now)
            assert permit == other
            outcome = SUCCESS if action == "succeed" else TRANSIENT
            if isinstance(permit, int):
                if outcome is TRANSIENT or not fast.try_record_success(permit, value, now):
                    fast.record(permit, outcome, duration=value, now=now, random_number=0.5)
                slow.record(permit, outcome, duration=value, now=now, random_number=0.5)
        else:
            fast.force(action)
            slow.force(action)
        assert state_of(slow) == state_of(fast)


def test_try_record_success_declines_with_limiters() -> None:
    """With a limiter try_record_success() returns False, so that record() releases the slot."""
    downstream = Downstream("d", max_in_flight=1)
    for now in (0.0, 1.0):
        permit = admit_attempt(downstream, now)
        if not downstream.try_record_success(permit, 0.1, now):
            downstream.record(permit, SUCCESS, duration=0.1, now=now, random_number=0.0)
    assert 2 == len(downstream.latency)


def test_try_record_success_returns_tokens_to_the_budget() -> None:
    downstream = Downstream("d", budget=TokenBudget("aws-2020"))
    downstream.withdraw(TRANSIENT, 0.0)
    assert 495.0 == downstream.status(0.0)[1]
    assert downstream.try_record_success(admit_attempt(downstream, 0.0), 0.1, 0.0)
    assert 496.0 == downstream.status(0.0)[1]


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("failures", [0, 1])
def test_each_success_is_counted_once(limit: int | None, failures: int) -> None:
    """A success of a first attempt or a paid retry is counted once, on the fast and slow path."""
    breaker, budget = Breaker(), TokenBudget("aws-2020", capacity=20)
    downstream = Downstream("d", breaker=breaker, budget=budget, max_in_flight=limit)
    run(downstream, TRANSIENT, times=failures)
    paid = downstream.withdraw(TRANSIENT, 0.0)
    assert 5.0 == paid

    downstream.record(admit_attempt(downstream, 0.0), SUCCESS, 0.1, 0.0, 0.5, paid=paid)
    run(downstream, SUCCESS)

    assert (2 + failures, failures, 0) == breaker.counts(0.0)
    assert not breaker.can_count_success or not failures
    assert (20.0, 2) == (budget.balance(0.0), len(downstream.latency))


def test_on_recovery() -> None:
    """on_recovery() closes the breaker and starts the ramp of the in-flight limit."""
    for breaker in (Breaker(consecutive=1), None):
        downstream = Downstream("d", breaker=breaker, max_in_flight=10)
        permit = downstream.admit(0.0)
        assert isinstance(permit, int)
        downstream.record(permit, TRANSIENT, 0.0, 0.0, 0.5)

        downstream.on_recovery(1.0)

        assert isinstance(downstream.admit(1.0), int)
        assert isinstance(downstream.admit(1.0), Stop)


@pytest.mark.parametrize(
    "limiter",
    [InFlight(2), AIMD(initial=2, min_limit=1, max_limit=2), AdaptiveLimit(max_in_flight=2)],
    ids=lambda limiter: type(limiter).__name__,
)
def test_forgotten_attempts(limiter: Limiter) -> None:
    """Attempts that are forgotten free their slots once: their release has no effect later."""
    downstream = Downstream("payments", limiter=limiter)
    permits = [admit_attempt(downstream, 0.0), admit_attempt(downstream, 0.0)]
    assert Stop(Reason.LIMIT) == downstream.admit(0.0)

    downstream.forget_attempts()
    for permit in permits:
        downstream.release(permit, 1.0, 1.0)

    assert [0, 0, Stop(Reason.LIMIT)] == [downstream.admit(2.0) for _ in range(3)]


def test_forgotten_attempts_of_a_limiter_of_the_user() -> None:
    """A limiter without the optional method is left as it is."""

    class Own:
        def acquire(self, now: float) -> float | None:
            return 0.0

        def release(self, outcome: Outcome | None, duration: float, now: float) -> None: ...
        def on_recovery(self, now: float) -> None: ...

    downstream = Downstream("payments", limiter=Own())
    downstream.forget_attempts()
    assert 0 == downstream.admit(0.0)


def test_forgotten_probes() -> None:
    """A half-open breaker admits new probes in place of those that are forgotten."""
    breaker = Breaker(consecutive=1, min_span=0, open_for=1, spread=0, probes=1)
    downstream = Downstream("payments", breaker=breaker)
    run(downstream, TRANSIENT)
    assert isinstance(downstream.admit(1.0), int)
    assert isinstance(downstream.admit(1.5), Stop)

    downstream.forget_attempts()

    assert isinstance(downstream.admit(1.5), int)


def test_forgotten_waiting_attempts() -> None:
    """An adaptive rate has no debt for forgotten attempts that waited for a token."""
    limiter = AdaptiveRate()
    downstream = Downstream("payments", limiter=limiter)
    for now in (0.0, 0.6, 1.2):
        downstream.admit(now)
        downstream.record(0, Outcome(Kind.THROTTLED), 0.1, now, 0.5)
    waits = [downstream.admit(1.2) for _ in range(3)]
    assert isinstance(waits[-1], DelayedPermit)

    downstream.forget_attempts()
    new = downstream.admit(1.2)

    assert isinstance(new, DelayedPermit)
    assert new.delay < waits[-1].delay


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize(
    "limiter",
    [InFlight(2), AIMD(initial=2, min_limit=1, max_limit=2), AdaptiveLimit(max_in_flight=2)],
    ids=lambda limiter: type(limiter).__name__,
)
def test_interrupted_attempt(limiter: Any, is_counted: bool) -> None:
    """The slot of an interrupted attempt is free, whether or not the limiter has counted it."""
    downstream = Downstream("payments", max_in_flight=9, limiter=limiter)
    ids = [downstream.new_attempt_id() for _ in range(2)]
    assert [0, 0] == [downstream.admit(0.0, attempt_id) for attempt_id in ids]
    if not is_counted:
        limiter._in_flight -= 1  # as if an interrupt had come between the set and the counter

    downstream.forget_attempt(ids[0])
    downstream.forget_attempt(ids[0])

    assert [0, Stop(Reason.LIMIT)] == [downstream.admit(1.0, id_) for id_ in (98, 99)]
    downstream.release(0, 1.0, 2.0, attempt_id=ids[1])
    downstream.record(0, SUCCESS, 1.0, 2.0, 0.5, attempt_id=98)
    assert (0, set()) == (limiter._in_flight, limiter.attempts)


def test_interrupted_attempt_with_a_limiter_of_the_user() -> None:
    """A limiter of the user that has no `attempts` is not changed by an interrupt."""
    limiter = SpyLimiter(0.0)
    downstream = Downstream("payments", limiter=limiter)
    downstream.admit(0.0, 1)
    downstream.forget_attempt(1)
    assert 0 == downstream.admit(0.0, 2)


def test_limiter_of_the_user_with_an_attribute_of_the_same_name() -> None:
    """A limiter of the user may count its attempts in an attribute `attempts`."""

    class CountingLimiter(SpyLimiter):
        attempts = 0

        def acquire(self, now: float) -> float | None:
            """Count an attempt."""
            self.attempts += 1
            return super().acquire(now)

    limiter = CountingLimiter()
    downstream = Downstream("payments", limiter=limiter)
    assert 0 == downstream.admit(0.0, 1)
    downstream.record(0, SUCCESS, 1.0, 2.0, 0.5, attempt_id=1)
    downstream.forget_attempt(1)
    assert 1 == limiter.attempts
