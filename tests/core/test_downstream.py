"""Tests for the downstream: how it updates its breaker, budget, limiters and latency."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.breaker import Breaker, BreakerState
from tarry.core.budget import RatioBudget, ThrottleBudget, TokenBudget
from tarry.core.downstream import BreakerTransition, Downstream
from tarry.core.limiter import AIMD, AdaptiveRate, InFlight
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Kind, Outcome
from tarry.core.sliding_window import SlidingWindow
from tarry.core.verdict import DelayedPermit, Reason, Stop
from tarry.errors import ConfigurationError
from tests.core.invalid_values import invalid_values, keyword

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
THROTTLED = Outcome(Kind.THROTTLED)
OVERLOADED = Outcome(Kind.OVERLOADED)
TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)


class Spy:
    """A limiter that returns a fixed answer and records its calls."""

    def __init__(self, answer: float | None = 0.0) -> None:
        self.answer = answer
        self.heard: list[tuple[object, ...]] = []

    def acquire(self, now: float) -> float | None:
        """Return the fixed answer."""
        self.heard.append(("acquire", now))
        return self.answer

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Record the call."""
        self.heard.append(("release", outcome, duration, now))

    def on_recovery(self, now: float) -> None:
        """Record the call."""
        self.heard.append(("recovered", now))


def permit_of(downstream: Downstream, now: float) -> int:
    """Return the permit of an attempt that must be admitted at once."""
    permit = downstream.admit(now)
    assert isinstance(permit, int)
    return permit


def run(downstream: Downstream, outcome: Outcome, now: float = 0.0, times: int = 1) -> None:
    """Make attempts with the same outcome, one after another."""
    for _ in range(times):
        permit = permit_of(downstream, now)
        downstream.record(permit, outcome, duration=0.1, now=now, random_number=0.0)


def insides(part: object) -> object:
    """Return the complete state of a part, for comparison."""
    parts: dict[str, object] = {}
    for name in getattr(type(part), "__slots__", ()):
        value = getattr(part, name)
        if isinstance(value, SlidingWindow):
            value = {slot: getattr(value, slot) for slot in SlidingWindow.__slots__}
        parts[name] = deepcopy(value)
    return parts


# --- with nothing in it --------------------------------------------------------------------------


def test_a_bare_downstream_stops_nothing() -> None:
    """Without breaker, budget and limiter everything is admitted and only latency is measured."""
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
    downstream.release(permit_of(downstream, 0.0), duration=1.0, now=0.0)
    downstream.force("open")
    assert downstream.try_record_success(permit_of(downstream, 0.0), 0.3, 0.0)
    assert ([], 0.1) == (list(downstream.transitions), downstream.expected_duration())


# --- breaker -------------------------------------------------------------------------------------


def test_an_open_breaker_says_when_to_come_back() -> None:
    """Open, it stops first attempts and retries alike, with the seconds that are left."""
    downstream = Downstream("d", breaker=Breaker(consecutive=1), budget=TokenBudget())
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
def test_what_counts_for_the_breaker(outcome: Outcome, expected: tuple[int, int, int]) -> None:
    """Failures of the dependency count; a permanent failure is not counted at all."""
    breaker = Breaker()
    run(Downstream("d", breaker=breaker), outcome)
    assert expected == breaker.counts(0.0)


@pytest.mark.parametrize("breaker", [Breaker(), Breaker(consecutive=1, min_calls=1)])
def test_permanent_failures_never_open(breaker: Breaker) -> None:
    """Ten thousand failures that are the caller's fault leave the breaker closed."""
    downstream = Downstream("d", breaker=breaker)
    run(downstream, PERMANENT, times=10_000)
    assert (CLOSED, [], 0) == (breaker.state, list(downstream.transitions), breaker.counts(0.0)[1])


def test_permanent_failures_fill_no_quorum() -> None:
    """Ten failures and ten permanent ones are ten calls, too few to open."""
    breaker = Breaker()
    downstream = Downstream("d", breaker=breaker)
    run(downstream, TRANSIENT, times=10)
    run(downstream, PERMANENT, times=10)
    assert CLOSED is breaker.state


def test_what_failed_on_our_side_gives_everything_back() -> None:
    """An attempt that did not reach the dependency only releases its permit."""
    breaker, budget, limiter = Breaker(consecutive=1), ThrottleBudget(), Spy()
    downstream = Downstream("d", breaker=breaker, budget=budget, limiter=limiter)
    before = budget.balance(0.0)

    run(downstream, Outcome(Kind.TRANSIENT, local=True))

    assert (CLOSED, before) == (breaker.state, budget.balance(0.0))
    assert ("release", None, 0.1, 0.0) == limiter.heard[-1]


def test_a_permanent_failure_proves_no_recovery() -> None:
    """A permanent failure of a probe frees its slot and does not close the breaker."""
    breaker = Breaker(consecutive=1, probes=1)
    downstream = Downstream("d", breaker=breaker)
    run(downstream, TRANSIENT)
    run(downstream, PERMANENT, now=30.0)
    assert (HALF_OPEN, True) == (breaker.state, breaker.would_admit(30.0))


@given(st.lists(st.sampled_from(["cancel", "admit"]), min_size=5, max_size=30), st.booleans())
def test_cancellations_never_count(history: list[str], half_open: bool) -> None:
    """Cancelled attempts do not change breaker, budget and latency."""
    breaker, budget = Breaker(consecutive=1, probes=2), RatioBudget()
    downstream = Downstream("d", breaker=breaker, budget=budget, max_in_flight=3)
    if half_open:
        run(downstream, TRANSIENT)
        downstream.release(permit_of(downstream, 30.0), duration=0.1, now=30.0)
    before = budget.balance(30.0), len(downstream.latency), breaker.state, breaker.counts(30.0)
    out: list[int] = []
    for what in history:
        if what == "admit":
            answer = downstream.admit(30.0)
            assert (len(out) < (2 if half_open else 3)) == isinstance(answer, int)
            out += [answer] if isinstance(answer, int) else []
        elif out:
            downstream.release(out.pop(0), duration=0.1, now=30.0)
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
    """Of ten thousand unread transitions the oldest are dropped."""
    downstream = Downstream("d", breaker=Breaker(consecutive=1, growth=1.0))
    for n in range(10_000):
        run(downstream, TRANSIENT, now=n * 100.0)
    assert 100 == len(downstream.transitions)
    assert BreakerTransition(HALF_OPEN, OPEN) == downstream.transitions[-1]


# --- budget --------------------------------------------------------------------------------------


def test_an_empty_budget_refuses_retries_only() -> None:
    """Without tokens a retry is rejected, but a first attempt never is."""
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
    assert Stop(Reason.BREAKER_OPEN, 30.0) == downstream.check_retry(TRANSIENT, 0.0)


def test_the_price_is_that_of_the_outcome() -> None:
    """A retry after throttling costs what the budget asks for that."""
    downstream = Downstream("d", budget=TokenBudget("aws-2026"))
    assert [14, 5] == [downstream.withdraw(outcome, 0.0) for outcome in (TRANSIENT, THROTTLED)]
    assert (None, 481.0) == downstream.status(0.0)
    downstream.refund(14, 0.0)
    downstream.refund(0.0, 0.0)
    assert (None, 495.0) == downstream.status(0.0)


def test_a_success_after_retries_gives_the_last_cost_back() -> None:
    """What the retry had cost reaches the budget together with its outcome."""
    downstream = Downstream("d", budget=TokenBudget("aws-2020"))
    assert [10, 5] == [downstream.withdraw(outcome, 0.0) for outcome in (TIMEOUT, TRANSIENT)]
    downstream.record(0, TIMEOUT, duration=1.0, now=0.0, random_number=0.0, paid=10.0)
    downstream.record(0, SUCCESS, duration=1.0, now=0.0, random_number=0.0, paid=5.0)
    assert (None, 490.0) == downstream.status(0.0)


# --- limits --------------------------------------------------------------------------------------


def test_limiters_are_called_for_every_attempt() -> None:
    """A limiter is called for each attempt and outcome; a cancellation has the outcome None."""
    spy = Spy()
    downstream = Downstream("d", limiter=spy)
    assert downstream.has_limiters
    for outcome in (SUCCESS, PERMANENT):
        downstream.record(
            permit_of(downstream, 1.0), outcome, duration=0.5, now=2.0, random_number=0.0
        )
    downstream.release(permit_of(downstream, 3.0), duration=0.25, now=4.0)
    assert [
        ("acquire", 1.0),
        ("release", SUCCESS, 0.5, 2.0),
        ("acquire", 1.0),
        ("release", PERMANENT, 0.5, 2.0),
        ("acquire", 3.0),
        ("release", None, 0.25, 4.0),
    ] == spy.heard


@pytest.mark.parametrize(("delay", "expected"), [(0.0, 0), (1.5, DelayedPermit(0, 1.5))])
def test_a_limiter_may_delay(delay: float, expected: int | DelayedPermit) -> None:
    """A delayed attempt gets a permit and the seconds until its start."""
    downstream = Downstream("d", limiter=Spy(delay), max_in_flight=2)
    assert [expected, expected, Stop(Reason.LIMIT)] == [downstream.admit(0.0) for _ in range(3)]


def test_a_refused_attempt_leaves_no_trace() -> None:
    """When the second limiter is full, the slot of the first and the probe are released."""
    spy, breaker = Spy(None), Breaker(consecutive=1, probes=1)
    downstream = Downstream("d", breaker=breaker, limiter=spy, max_in_flight=1)
    breaker.record(0, failed=True, duration=0.1, now=0.0, random_number=0.0)
    assert [Stop(Reason.LIMIT)] * 3 == [downstream.admit(30.0) for _ in range(3)]
    spy.answer = 0.0
    assert isinstance(downstream.admit(30.0), int)
    assert [BreakerTransition(OPEN, HALF_OPEN)] == list(downstream.transitions)


def test_a_limiter_that_raises_leaves_no_trace() -> None:
    """An error of a user's limiter is raised, and slots and probe are released."""

    class Broken(Spy):
        def acquire(self, now: float) -> float | None:
            raise LookupError

    breaker = Breaker(consecutive=1, probes=1)
    downstream = Downstream("d", breaker=breaker, limiter=Broken(), max_in_flight=1)
    breaker.record(0, failed=True, duration=0.1, now=0.0, random_number=0.0)
    for _ in range(3):
        with pytest.raises(LookupError):
            downstream.admit(30.0)
    assert (HALF_OPEN, True) == (breaker.state, breaker.would_admit(30.0))


def test_a_limit_without_a_breaker() -> None:
    """A limiter may be full where there is no breaker to take a permit back."""
    assert Stop(Reason.LIMIT) == Downstream("d", limiter=Spy(None)).admit(0.0)


def test_limiters_are_notified_of_a_recovery() -> None:
    """Only the change from half-open to closed is a recovery; each limiter is notified."""
    spy = Spy()
    downstream = Downstream(
        "d", breaker=Breaker(consecutive=1, probes=1), limiter=spy, max_in_flight=100
    )
    run(downstream, TRANSIENT)
    run(downstream, TRANSIENT, now=30.0)
    run(downstream, SUCCESS, now=90.0)
    assert [("recovered", 90.0)] == [heard for heard in spy.heard if heard[0] == "recovered"]
    assert 10 == sum(isinstance(downstream.admit(91.0), int) for _ in range(1_000))


@pytest.mark.parametrize("limiter", [AIMD(initial=100, max_limit=100), InFlight(100)])
def test_recovery_is_gradual(limiter: AIMD | InFlight) -> None:
    """Right after an outage only a few of a thousand calls are admitted."""
    downstream = Downstream("d", breaker=Breaker(consecutive=1, probes=1), limiter=limiter)
    run(downstream, TRANSIENT)
    run(downstream, SUCCESS, now=30.0)
    assert 1 <= sum(isinstance(downstream.admit(30.0), int) for _ in range(1_000)) <= 2


def test_recovery_of_an_adaptive_rate_is_gradual() -> None:
    """The probe that ends an outage does not restore the old rate."""
    limiter = AdaptiveRate()
    downstream = Downstream("d", breaker=Breaker(consecutive=5, probes=1), limiter=limiter)
    for n in range(2_000):
        run(downstream, SUCCESS, now=n / 100)
    for _ in range(5):
        downstream.record(0, THROTTLED, duration=0.1, now=20.0, random_number=0.0)
    run(downstream, SUCCESS, now=60.0)
    assert "closed" == downstream.status(60.0)[0]
    assert pytest.approx(0.5) == limiter.rate


@pytest.mark.parametrize(("field", "value", "words"), invalid_values(max_in_flight="count"))
def test_refused_arguments(field: str, value: object, words: str) -> None:
    """An invalid max_in_flight is reported under that name."""
    with pytest.raises(ConfigurationError, match=words):
        Downstream("d", **keyword(field, value))


# --- latency -------------------------------------------------------------------------------------


def test_only_successes_are_measured() -> None:
    """Failures and cancellations are not part of the latency."""
    downstream = Downstream("d")
    for outcome in (TRANSIENT, TIMEOUT, THROTTLED, OVERLOADED, PERMANENT):
        downstream.record(0, outcome, duration=9.0, now=0.0, random_number=0.0)
    downstream.release(0, duration=9.0, now=0.0)
    assert (0, 0.0) == (len(downstream.latency), downstream.expected_duration())
    for duration in (3.0, 1.0, 2.0):
        downstream.record(0, SUCCESS, duration=duration, now=0.0, random_number=0.0)
    assert (3, 2.0) == (len(downstream.latency), downstream.expected_duration())


def test_a_success_is_known_by_its_kind() -> None:
    """A success with a detail, or one that was stored and read back, is a success like any."""
    downstream = Downstream("d", breaker=Breaker())
    downstream.record(
        permit_of(downstream, 0.0),
        Outcome(Kind.SUCCESS, detail="200"),
        duration=2.0,
        now=0.0,
        random_number=0.0,
    )
    assert 2.0 == downstream.expected_duration()


# --- hedge credit --------------------------------------------------------------------------------


@given(st.floats(0.001, 1), st.lists(st.booleans(), min_size=12, max_size=60))
def test_hedges_are_a_share_of_the_calls(share: float, hedges: list[bool]) -> None:
    """However calls and hedges alternate, there were never more hedges than that share of calls."""
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


# --- the fast path -------------------------------------------------------------------------------

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
    parts = [insides(downstream.breaker), insides(downstream.budget)]
    return [*parts, latency, list(downstream.transitions)]


@given(
    st.sampled_from([None, {}, {"consecutive": 2}, {"slow_after": 1.0}]),
    st.sampled_from(list(BUDGETS)),
    st.lists(st.sampled_from(STEPS), min_size=10, max_size=40),
)
def test_try_record_success_is_equivalent_to_record(
    breaker: dict[str, int] | None, budget: str, history: list[tuple[str, float]]
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
    for what, value in history:
        if what == "wait":
            now += value
        elif what == "retry":
            assert slow.withdraw(TRANSIENT, now) == fast.withdraw(TRANSIENT, now)
        elif what in ("succeed", "fail"):
            permit, other = slow.admit(now), fast.admit(now)
            assert permit == other
            outcome = SUCCESS if what == "succeed" else TRANSIENT
            if isinstance(permit, int):
                if outcome is TRANSIENT or not fast.try_record_success(permit, value, now):
                    fast.record(permit, outcome, duration=value, now=now, random_number=0.5)
                slow.record(permit, outcome, duration=value, now=now, random_number=0.5)
        else:
            fast.force(what)
            slow.force(what)
        assert state_of(slow) == state_of(fast)


def test_try_record_success_declines_with_limiters() -> None:
    """With a limiter a success must release a slot, so record() is needed."""
    downstream = Downstream("d", max_in_flight=1)
    for now in (0.0, 1.0):
        permit = permit_of(downstream, now)
        if not downstream.try_record_success(permit, 0.1, now):
            downstream.record(permit, SUCCESS, duration=0.1, now=now, random_number=0.0)
    assert 2 == len(downstream.latency)


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("failures", [0, 1])
def test_success_counts_whatever_came_before(limit: int | None, failures: int) -> None:
    """First attempt or paid retry, with a limit or without, calm or not: it counts once."""
    breaker, budget = Breaker(), TokenBudget("aws-2020", capacity=20)
    downstream = Downstream("d", breaker=breaker, budget=budget, max_in_flight=limit)
    run(downstream, TRANSIENT, times=failures)
    paid = downstream.withdraw(TRANSIENT, 0.0)
    assert 5.0 == paid

    downstream.record(permit_of(downstream, 0.0), SUCCESS, 0.1, 0.0, 0.5, paid=paid)
    run(downstream, SUCCESS)

    assert (2 + failures, failures, 0) == breaker.counts(0.0)
    assert not breaker.can_count_success or not failures
    assert (20.0, 2) == (budget.balance(0.0), len(downstream.latency))


def test_recovery_seen_by_another_process() -> None:
    """on_recovery() closes the breaker and starts the ramp of the limit."""
    for breaker in (Breaker(consecutive=1), None):
        downstream = Downstream("d", breaker=breaker, max_in_flight=10)
        permit = downstream.admit(0.0)
        assert isinstance(permit, int)
        downstream.record(permit, TRANSIENT, 0.0, 0.0, 0.5)

        downstream.on_recovery(1.0)

        assert isinstance(downstream.admit(1.0), int)
        assert isinstance(downstream.admit(1.0), Stop)
