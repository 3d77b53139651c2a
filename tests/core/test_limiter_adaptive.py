"""Tests for AdaptiveLimit: the model of a target with a capacity, and each rule alone.

The marks of the model hold on seeds that were not used to choose the constants.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tarry.core.adaptive_limit import AdaptiveLimit
from tarry.core.hints import Hint
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Kind, Outcome
from tarry.errors import ConfigurationError
from tests.core.invalid_values import invalid_values, keyword
from tests.core.limiter_model import (
    FixedWindowTarget,
    SlidingWindowTarget,
    TokenBucketTarget,
    UnlimitedTarget,
    run,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.limiter_model import Target

TARGETS = [SlidingWindowTarget, FixedWindowTarget, TokenBucketTarget]
TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)
THROTTLED = Outcome(Kind.THROTTLED, Hint(delay=7.0))


def recovered(rate_before: float | None = None, **arguments: float) -> AdaptiveLimit:
    """Return a limiter of a target that has just recovered from an outage."""
    limiter = AdaptiveLimit(max_in_flight=4000, **arguments)
    if rate_before is not None:
        limiter.restore(rate=rate_before, limit=100)
    limiter.on_recovery(0.0)
    return limiter


def record(
    limiter: AdaptiveLimit, outcome: Outcome | None, now: float, duration: float = 0.01
) -> None:
    """Make one attempt that ends at `now`."""
    assert limiter.acquire(now - duration) is not None
    limiter.release(outcome, duration, now)


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.long_run
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rate_before", [None, 1.0])
@pytest.mark.parametrize(("capacity", "latency"), [(20, 0.02), (20, 0.1), (200, 0.002), (200, 0.1)])
def test_a_backlog_is_drained_at_the_capacity(
    target: Callable[..., Target], rate_before: float | None, capacity: int, latency: float
) -> None:
    """A backlog of 25 s is drained within 1.3 x the ideal time, with less than 10 % refused."""
    limiter = recovered(None if rate_before is None else capacity * rate_before)
    result = run(
        limiter, target(lambda _: capacity), backlog=25 * capacity, latency=latency, seed=1
    )
    assert 25 * capacity == len(result.successes)
    assert result.ended <= 1.3 * 25
    assert result.waste < 0.1
    if target is SlidingWindowTarget:
        assert result.peak() <= 1.2 * capacity


@pytest.mark.long_run
def test_a_fast_target_is_found_quickly() -> None:
    """From 10 per second the limiter reaches 2,000 per second, and does not exceed it by 20 %."""
    target = SlidingWindowTarget(lambda _: 2000)
    result = run(recovered(), target, backlog=20_000, seconds=8.0, seed=1)
    assert result.successes_between(6.0, 7.0) > 0.75 * 2000
    assert result.peak() <= 1.2 * 2000


@pytest.mark.parametrize("target", TARGETS)
def test_the_capacity_drops_during_the_drain(target: Callable[..., Target]) -> None:
    """The backlog takes at most 1.22 x the ideal 70 s when the capacity drops from 200 to 50."""
    result = run(recovered(), target(lambda now: 200 if now < 10 else 50), backlog=5000, seed=500)
    assert result.ended <= 1.22 * 70
    assert result.waste < 0.1


@pytest.mark.long_run
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("arrivals_per_s", [240, 300, 450])
def test_more_is_offered_than_the_target_accepts(
    target: Callable[..., Target], arrivals_per_s: int
) -> None:
    """A target that throttles above 200 per second gets at least 0.9 x 200 that succeed."""
    result = run(
        AdaptiveLimit(),
        target(lambda _: 200),
        arrivals_per_s=arrivals_per_s,
        retry_after=1.0,
        seconds=40.0,
        seed=1,
    )
    assert result.successes_between(0.0, 40.0) >= 0.9 * 200 * 40
    assert result.waste < 0.1


@pytest.mark.long_run
@pytest.mark.parametrize("failing_share", [0.25, 0.4, 0.75])
@pytest.mark.parametrize("is_recovered", [False, True])
def test_tasks_that_always_fail_do_not_stop_the_others(
    failing_share: float, is_recovered: bool
) -> None:
    """After 20 s, the tasks that can succeed do so at the rate at which they arrive."""
    limiter = recovered() if is_recovered else AdaptiveLimit()
    result = run(
        limiter,
        UnlimitedTarget(),
        arrivals_per_s=100,
        failing_share=failing_share,
        seconds=40.0,
        seed=1,
    )
    assert result.successes_between(20.0, 40.0) >= 0.7 * (1 - failing_share) * 100 * 20


@pytest.mark.parametrize("is_recovered", [False, True])
def test_a_target_that_refuses_everything(is_recovered: bool) -> None:
    """Without a breaker, a dead target gets one attempt per second until it is back."""

    class Target(SlidingWindowTarget):
        def accept(self, now: float) -> bool:
            return now > 60 and super().accept(now)

    limiter = recovered() if is_recovered else AdaptiveLimit()
    result = run(limiter, Target(lambda _: 50), arrivals_per_s=20, seconds=100.0, seed=1)
    assert 30 <= sum(20 <= start < 60 for start in result.starts) <= 50
    assert result.successes_between(90, 100) > 0.8 * 200


def test_a_target_that_does_not_fail_is_not_limited() -> None:
    """Without failures a new limiter has no rate limit."""
    limiter = AdaptiveLimit()
    result = run(limiter, UnlimitedTarget(), backlog=2000, seed=1)
    assert limiter.rate is None
    assert result.ended < 1.0


def test_a_share_of_failures_is_tolerated_for_a_minute() -> None:
    """Tests at a lower rate, once a minute, hardly delay the tasks that can succeed."""
    result = run(
        AdaptiveLimit(),
        UnlimitedTarget(),
        arrivals_per_s=30,
        failing_share=0.4,
        seconds=150.0,
        seed=1,
    )
    assert result.successes_between(0, 150) >= 0.9 * 0.6 * 30 * 150


def test_a_share_of_failures_is_measured_again() -> None:
    """A target that refused half of all calls and then has a capacity is limited to it."""

    class Target(SlidingWindowTarget):
        calls = 0

        def accept(self, now: float) -> bool:
            self.calls += 1
            return self.calls % 2 == 0 if now < 30 else super().accept(now)

    target = Target(lambda _: 50)
    result = run(AdaptiveLimit(), target, arrivals_per_s=100, seconds=150.0, seed=1)
    starts = sum(start >= 120 for start in result.starts)
    assert result.successes_between(120, 150) >= 0.8 * starts


@pytest.mark.parametrize("rate_before", [None, 0.9])
def test_all_attempts_are_throttled_for_half_a_minute(rate_before: float | None) -> None:
    """After 30 s of 429 with `Retry-After: 2`, a backlog of 20 s is drained in 1.3 x this time.

    Meanwhile the target gets about one attempt per 2 s.
    """
    limiter = AdaptiveLimit(max_in_flight=4000)
    if rate_before is not None:
        limiter.restore(rate=70 * rate_before, limit=100)
    target = SlidingWindowTarget(lambda now: 0 if now < 30 else 70)
    result = run(limiter, target, backlog=20 * 70, retry_after=2.0, seed=1)
    assert result.ended <= 30 + 1.3 * 20
    assert result.peak() <= 1.2 * 70
    assert sum(10 <= start < 30 for start in result.starts) <= 11


@pytest.mark.parametrize(
    ("capacity", "failing_attempts"),
    [
        (100, 0.2),
        pytest.param(23, 0.05, marks=pytest.mark.long_run),
        pytest.param(310, 0.05, marks=pytest.mark.long_run),
    ],
)
def test_a_share_of_all_attempts_fails(capacity: int, failing_attempts: float) -> None:
    """A capacity is found although a share of the accepted attempts fails, too."""
    limits = {"seconds": 60.0, "seed": 1}
    target = SlidingWindowTarget(lambda _: capacity)
    result = run(
        recovered(), target, backlog=100 * capacity, failing_attempts=failing_attempts, **limits
    )
    assert result.successes_between(20, 60) >= 0.8 * (1 - failing_attempts) * capacity * 40
    assert result.peak() <= 1.3 * capacity
    assert result.refused <= 0.1 * len(result.starts)


def test_the_capacity_drops_to_a_quarter() -> None:
    """A backlog takes at most 1.35 x the ideal time when the capacity drops to a quarter."""
    target = SlidingWindowTarget(lambda now: 310 if now < 10 else 77)
    result = run(recovered(), target, backlog=5000, seed=1)
    assert result.ended <= 1.35 * (10 + (5000 - 3100) / 77)
    assert result.waste < 0.1


# --- the rate ------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.floats(0.0, 0.2), st.sampled_from([SUCCESS, SUCCESS, TRANSIENT, THROTTLED])),
        max_size=50,
    ),
    st.floats(1.0, 500.0),
)
def test_never_faster_than_the_rate(steps: list[tuple[float, Outcome]], max_rate: float) -> None:
    """In t seconds at most `max_rate` * t attempts start, plus a burst of 20 ms."""
    limiter, now, starts = AdaptiveLimit(max_rate=max_rate), 0.0, []
    limiter.on_recovery(now)
    for pause, outcome in steps:
        now += pause
        while (wait := limiter.acquire(now)) != 0:  # as the service does: try again after the delay
            assert wait is not None
            limiter.release(None, 0.0, now)
            now += wait
        starts.append(now)
        limiter.release(outcome, 0.0, now)
    burst = max(1.0, 0.02 * max_rate)
    for first, start in enumerate(starts):
        for last in range(first, len(starts)):
            assert last - first + 1 <= max_rate * (starts[last] - start) + burst + 1e-6


RUNS_OF_RESULTS = st.lists(
    st.tuples(
        st.sampled_from([SUCCESS, SUCCESS, TRANSIENT, TIMEOUT, THROTTLED, PERMANENT, None]),
        st.integers(1, 60),  # results in a row
        st.sampled_from([-0.5, 0.0, 0.001, 0.02, 0.1, 0.4, 3.0]),  # seconds between two attempts
        st.sampled_from([0.0, 0.002, 0.1, 2.0]),  # duration
        st.sampled_from([None, None, None, "recovery", 0.5, 2.0, 50.0, inf]),  # event, `max_rate`
    ),
    max_size=20,
)


@given(RUNS_OF_RESULTS, st.sampled_from([None, 0.3, 50.0]))
@example([(TRANSIENT, 4, 0.02, 0.002, None), (SUCCESS, 1, 0.02, 0.002, 50.0)], None)
def test_limits_stay_within_their_bounds(
    runs: list[tuple[Outcome | None, int, float, float, str | float | None]],
    restored_rate: float | None,
) -> None:
    """No sequence of results leaves the bounds, and each result moves the rate in its direction.

    Exceptions: a failure may end a test and restore the rate before it, a success may end a test
    that lowers the rate again, and a permanent failure shows that a target throttles no more.
    """
    limiter, now = AdaptiveLimit(max_in_flight=40, max_wait=1e9), 100.0
    min_rate, max_rate, rate_before_test = 0.93, inf, inf
    if restored_rate is not None:
        limiter.restore(rate=restored_rate, limit=20)
        min_rate = min(min_rate, restored_rate)
    for outcome, count, spacing, duration, event in runs:
        if event == "recovery":
            limiter.on_recovery(now)
        elif isinstance(event, float):
            max_rate, min_rate = event, min(min_rate, event)
            limiter.configure(max_rate=None if event == inf else event, max_in_flight=40)
        for _ in range(count):
            now += spacing
            wait = limiter.acquire(now)
            assert wait is not None
            assert 0 <= wait < inf
            rate, is_testing = limiter.rate or inf, limiter._test is not None
            rate_before_test = max(rate, rate_before_test) if is_testing else rate
            limiter.release(outcome, duration, now + duration)
            new_rate = limiter.rate or inf

            assert min_rate <= new_rate <= max_rate
            assert 1 <= limiter.limit <= 40
            if outcome is SUCCESS:
                assert new_rate >= rate or is_testing
            elif outcome is not PERMANENT:
                assert new_rate <= rate_before_test


def test_an_attempt_waits_for_its_turn() -> None:
    """At 10 per second attempts start 100 ms apart; one that would wait too long is rejected."""
    limiter = AdaptiveLimit(max_wait=0.25)
    limiter.on_recovery(0.0)
    waits = [limiter.acquire(0.0) for _ in range(4)]
    assert [pytest.approx(0.1), pytest.approx(0.2), None, None] == waits


def test_an_attempt_that_was_not_sent_costs_nothing() -> None:
    """The token of an attempt that was not sent is refunded, with or without a rate limit."""
    limiter = AdaptiveLimit()
    assert 0.0 == limiter.acquire(0.0)
    limiter.release(None, 0.0, 0.0)
    limiter.on_recovery(0.0)
    for _ in range(100):
        assert pytest.approx(0.1) == limiter.acquire(0.0)
        limiter.release(None, 0.0, 0.0)


def test_outcomes_without_evidence() -> None:
    """Permanent failures and cancelled attempts do not change the rate."""
    limiter = AdaptiveLimit()
    for number in range(100):
        record(limiter, (PERMANENT, None)[number % 2], 0.1 * number)
    assert limiter.rate is None


def test_attempts_without_evidence_do_not_slow_down_the_growth() -> None:
    """After an outage the rate grows as fast if a third of the attempts are ignored retries."""

    def rate_after(outcomes: list[Outcome | None]) -> float:
        limiter = recovered()
        for number in range(120):
            record(limiter, outcomes[number % len(outcomes)], 1.0 + 0.01 * number)
        assert limiter.rate is not None
        return limiter.rate

    expected = rate_after([SUCCESS])
    assert rate_after([SUCCESS, SUCCESS, None]) == pytest.approx(expected, rel=0.05)
    assert rate_after([SUCCESS, None, None, None, None]) < 0.5 * expected


def test_recovery_starts_at_half_of_the_rate_before() -> None:
    """The start rate after an outage is 10, or half of the rate before the outage."""
    for before, expected in ((None, 10.0), (12.0, 10.0), (200.0, 100.0)):
        limiter = recovered(before)
        assert (expected, 8) == (limiter.rate, limiter.limit)


def test_recovery_keeps_the_unrelated_failure_share() -> None:
    """After an outage, a lane in which a fifth always fails needs no new tests of the rate."""
    limiter = recovered()
    target = UnlimitedTarget()
    run(limiter, target, backlog=3000, failing_attempts=0.2, seconds=12.0, seed=1)
    assert 0.1 < limiter._unrelated_failure_share < 0.3
    share = limiter._unrelated_failure_share
    for _ in range(2):
        limiter.on_recovery(20.0)
        assert share == limiter._unrelated_failure_share
        for number in range(100):  # the next outage begins during a test
            record(limiter, TRANSIENT, 21.0 + 0.001 * number)
        assert limiter._test is not None


def test_phases() -> None:
    """The phase shows what the control loop does; "waiting" is tested with throttled attempts."""
    limiter = AdaptiveLimit()
    phases = [limiter.phase]
    limiter.on_recovery(0.0)
    phases.append(limiter.phase)
    for number in range(3):
        record(limiter, TRANSIENT, 1.0 + 0.01 * number)
    phases.append(limiter.phase)
    limiter = AdaptiveLimit()
    limiter.restore(rate=20.0, limit=8)
    phases.append(limiter.phase)
    assert ["unlimited", "slow-start", "test", "probing"] == phases


def test_recovery_during_a_test_uses_the_rate_before_the_test() -> None:
    """An outage that begins with a cut does not lower the rate after it."""
    limiter = AdaptiveLimit()
    limiter.restore(rate=200.0, limit=100)
    for number in range(20):
        record(limiter, TRANSIENT, 1.0 + 0.01 * number)
    assert limiter.rate is not None
    assert limiter.rate < 190
    limiter.on_recovery(30.0)
    assert 100.0 == limiter.rate


def test_most_attempts_are_throttled() -> None:
    """If most attempts get a 429 with a hint, no attempt starts before the end of the hint."""
    limiter = recovered(200.0)
    for number in range(5):
        record(limiter, THROTTLED, 1.0 + 0.01 * number)
    wait = limiter.acquire(1.05)
    assert wait is not None
    assert 6.9 < wait < 7.1


@pytest.mark.parametrize("last_outcome", [SUCCESS, PERMANENT], ids=["success", "permanent"])
def test_one_attempt_at_a_time_while_all_are_throttled(last_outcome: Outcome) -> None:
    """While all attempts are throttled, each one waits for the end of the last `Retry-After`."""
    limiter = AdaptiveLimit()
    limiter.restore(rate=200.0, limit=100)
    for number in range(20):
        record(limiter, SUCCESS, 4.0 + 0.01 * number)
    for number in range(40):
        record(limiter, THROTTLED, 4.4 + 0.04 * number)
    assert (1.0, 1, 200.0) == (limiter.rate, limiter.limit, limiter.settled_rate)
    assert "waiting" == limiter.phase
    wait = limiter.acquire(7.0)
    assert wait is not None
    assert 5.0 < wait < 7.0
    assert limiter.acquire(21.0) is None  # one attempt at a time
    limiter.release(THROTTLED, 0.1, 21.0)
    assert pytest.approx(7.0) == limiter.acquire(21.0)
    limiter.release(TIMEOUT, 1.0, 29.0)
    assert 1 == limiter.limit
    assert pytest.approx(1.0) == limiter.acquire(29.0)
    limiter.release(last_outcome, 0.1, 30.0)
    assert (100.0, 8) == (limiter.rate, limiter.limit)


def test_few_attempts_are_throttled() -> None:
    """If most attempts succeed, a hint delays only its own task."""
    limiter = recovered(200.0)
    for number in range(50):
        record(limiter, SUCCESS, 1.0 + 0.01 * number)
    for number in range(5):
        record(limiter, THROTTLED, 1.5 + 0.01 * number)
    wait = limiter.acquire(1.56)
    assert wait is not None
    assert wait < 0.5


def test_an_old_hint_is_ignored() -> None:
    """A hint that has ended does not stop the attempts when others fail later."""
    limiter = AdaptiveLimit(max_in_flight=100)
    record(limiter, THROTTLED, 1.0)
    for number in range(10):
        record(limiter, Outcome(Kind.THROTTLED), 8.1 + 0.01 * number)
    assert limiter.rate is not None
    wait = limiter.acquire(8.2)
    assert wait is not None
    assert wait < 1.0


def test_a_clock_that_is_set_back() -> None:
    """After a set-back the limiter starts attempts within a second, and adapts as before."""
    limiter = recovered(200.0)
    for number in range(20):
        record(limiter, THROTTLED, 1000.0 + 0.01 * number)
    now, rates = 5.0, []
    for _ in range(200):
        wait = limiter.acquire(now)
        assert wait is not None
        assert wait < 1.0
        now += wait + 0.01
        limiter.release(SUCCESS, 0.01, now)
        assert limiter.rate is not None
        rates.append(limiter.rate)
    assert rates[-1] > rates[0]


# --- concurrency ---------------------------------------------------------------------------------


def round_of(limiter: AdaptiveLimit, outcome: Outcome, now: float) -> None:
    """Make as many concurrent attempts as the limit allows."""
    attempts = 0
    while limiter.acquire(now) is not None:
        attempts += 1
    for _ in range(attempts):
        limiter.release(outcome, 0.1, now + 0.1)


def test_the_concurrency_grows_quickly_until_the_first_timeout() -> None:
    """The limit starts at 8 and grows by a third per round; a round of time-outs halves it once."""
    limiter = AdaptiveLimit(max_in_flight=100)
    for number in range(20):
        before = limiter.limit
        round_of(limiter, SUCCESS, float(number))
        assert min(100, 1.3 * before) <= limiter.limit <= min(100, 2 * before)
    assert 100 == limiter.limit
    for _ in range(100):
        assert 0.0 == limiter.acquire(30.0)
    assert limiter.is_full
    for _ in range(100):
        limiter.release(TIMEOUT, 5.0, 35.0)
    assert 50 == limiter.limit
    assert not limiter.is_full


def test_the_concurrency_grows_slowly_after_a_timeout() -> None:
    """After a time-out, a round of successes adds less than one."""
    limiter = AdaptiveLimit()
    record(limiter, TIMEOUT, 10.0)
    assert 4 == limiter.limit
    for number in range(10):
        before = limiter.limit
        round_of(limiter, SUCCESS, 20.0 + number)
        assert before <= limiter.limit <= before + 1
    assert 7 <= limiter.limit <= 10


def test_the_concurrency_is_at_least_one() -> None:
    """Time-outs never close the limiter completely."""
    limiter = AdaptiveLimit()
    for number in range(10):
        record(limiter, TIMEOUT, 10.0 * number, duration=5.0)
    assert 1 == limiter.limit


# --- arguments -----------------------------------------------------------------------------------


def test_configure() -> None:
    """The upper limits apply at once, and a rate limit can be removed."""
    limiter = AdaptiveLimit()
    limiter.configure(max_rate=50.0, max_in_flight=4)
    assert (50.0, 4) == (limiter.rate, limiter.limit)
    limiter.configure(max_rate=0.001, max_in_flight=4)
    assert 0.001 == limiter.rate
    limiter.configure(max_rate=20.0, max_in_flight=4)
    assert 20.0 == limiter.rate
    limiter.configure(max_rate=None, max_in_flight=100)
    assert limiter.settled_rate is None
    assert 4 == limiter.limit
    result = run(limiter, UnlimitedTarget(), backlog=3000, seed=1)
    assert result.ended < 10


def test_configure_keeps_a_rate_that_the_limiter_has_found() -> None:
    """A higher upper limit does not raise a rate that was below the old one."""
    limiter = AdaptiveLimit(max_rate=50.0)
    limiter.restore(rate=30.0, limit=8)
    limiter.configure(max_rate=None, max_in_flight=128)
    assert 30.0 == limiter.rate


def test_a_rate_limit_that_the_operator_sets_is_kept() -> None:
    """The rate stays at `max_rate`, also when a part of the tasks fails always."""
    limiter = AdaptiveLimit(max_rate=100.0)
    result = run(limiter, UnlimitedTarget(), backlog=10_000, failing_share=0.3, seconds=30, seed=1)
    assert result.peak() <= 103
    assert result.successes_between(10, 30) > 0.7 * 0.7 * 0.6 * 100 * 20


def test_restore() -> None:
    """A restored limiter continues with the stored rate and limit, within the upper limits."""
    limiter = AdaptiveLimit(max_in_flight=50)
    limiter.restore(rate=None, limit=30)
    assert (None, 30) == (limiter.rate, limiter.limit)
    limiter.restore(rate=120.0, limit=100)
    assert (120.0, 50) == (limiter.rate, limiter.limit)


def test_rate_of_a_single_caller_recovers() -> None:
    """A caller that waits for each turn is limited by the rate, also if the turn is a second away.

    After an outage its rate is at the minimum, at which each wait takes longer than a second.
    """
    limiter, now = AdaptiveLimit(max_in_flight=64, max_wait=60.0), 0.0

    def call(outcome: Outcome) -> None:
        nonlocal now
        delay = limiter.acquire(now)
        assert delay is not None
        now += delay + 0.02
        limiter.release(outcome, 0.02, now)

    while now < 5:
        call(SUCCESS)
    while now < 35:
        call(TRANSIENT)
    assert limiter.rate is not None
    assert limiter.rate < 1
    while now < 60:
        call(SUCCESS)
    assert limiter.rate > 10


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    invalid_values(max_rate="positive", max_in_flight="count", max_wait="positive"),
)
def test_invalid_arguments(field: str, value: object, pattern: str) -> None:
    """Each argument rejects invalid values, with its name in the message."""
    with pytest.raises(ConfigurationError, match=pattern):
        AdaptiveLimit(**keyword(field, value))


@pytest.mark.parametrize(
    "call",
    [
        partial(AdaptiveLimit().restore, rate=0.0, limit=1),
        partial(AdaptiveLimit().restore, rate=1.0, limit=0),
        partial(AdaptiveLimit().configure, max_rate=None, max_in_flight=0),
    ],
)
def test_invalid_arguments_of_methods(call: Callable[[], None]) -> None:
    """`restore` and `configure` check their arguments, too."""
    with pytest.raises(ConfigurationError, match="must be"):
        call()


@pytest.mark.parametrize("max_wait", [1.5, timedelta(seconds=1.5)], ids=repr)
def test_max_wait_can_be_a_timedelta(max_wait: float | timedelta) -> None:
    """The longest wait can be a `timedelta`; an attempt that would wait longer is rejected."""
    limiter = AdaptiveLimit(max_rate=1, max_wait=max_wait)

    assert [True, False] == [limiter.acquire(0.0) is not None for _ in range(2)]
