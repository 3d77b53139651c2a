"""Tests for limiters: fixed and adaptive concurrency, and the adaptive rate."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.limiter import AIMD, AdaptiveRate, InFlight
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Kind, Outcome
from tarry.errors import ConfigurationError
from tests.core.invalid_values import invalid_values, keyword

if TYPE_CHECKING:
    from collections.abc import Callable

    from _pytest.mark import ParameterSet

    from tarry.core.limiter import Limiter

THROTTLED = Outcome(Kind.THROTTLED)
OVERLOADED = Outcome(Kind.OVERLOADED)
TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)


def count_admitted(limiter: Limiter, now: float, attempts: int = 10_000) -> int:
    """Start simultaneous attempts and return the number that the limiter admits."""
    return sum(limiter.acquire(now) is not None for _ in range(attempts))


# --- InFlight ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 10, 9_999])
def test_in_flight_limit(limit: int) -> None:
    """A fixed limiter admits as many attempts as its limit, and each release frees a slot."""
    limiter = InFlight(limit)
    assert limit == limiter.limit(0.0) == count_admitted(limiter, 0.0)
    for outcome in (SUCCESS, TRANSIENT, PERMANENT, None):
        limiter.release(outcome, 1.0, 1.0)
        assert [0.0, None] == [limiter.acquire(1.0) for _ in range(2)]


@pytest.mark.parametrize(
    ("later", "expected"),
    [(0.0, 1), (0.5, 5), (1.0, 10), (2.5, 25), (5.0, 50), (9.99, 99), (10.0, 100), (1e6, 100)],
)
def test_limit_after_a_recovery(later: float, expected: int) -> None:
    """After a recovery the limit rises linearly from 1 to its configured value."""
    limiter = InFlight(100)
    limiter.on_recovery(50.0)
    assert expected == limiter.limit(50.0 + later)
    assert expected == count_admitted(limiter, 50.0 + later)


@given(
    st.integers(1, 10_000),
    st.floats(0.1, 1e4),
    st.floats(0, 1e6),
    st.lists(st.floats(0, 1.5), min_size=3, max_size=12).map(sorted),
)
def test_the_ramp_is_linear(
    limit: int, ramp: float, recovered_at: float, fractions: list[float]
) -> None:
    """During the ramp the limit rises linearly from 0, rounded down, but at least 1.

    The limit never falls, and stays at its configured value after the ramp.
    """
    limiter = InFlight(limit, ramp=ramp)
    limiter.on_recovery(recovered_at)
    before = 0
    for fraction in fractions:
        now = recovered_at + fraction * ramp
        current = limiter.limit(now)
        exact = min(float(limit), limit * (now - recovered_at) / ramp)
        assert max(1.0, exact - 1) - 1e-6 <= current <= max(1.0, exact) + 1e-6
        assert before <= current
        before = current


def test_a_second_recovery_starts_a_second_ramp() -> None:
    """Each recovery starts a new ramp, and running attempts count against its limit."""
    limiter = InFlight(10)
    assert 10 == count_admitted(limiter, 0.0)
    limiter.on_recovery(100.0)
    for _ in range(8):
        limiter.release(TRANSIENT, 1.0, 100.0)
    assert (1, None) == (limiter.limit(100.0), limiter.acquire(102.0))
    assert 1 == count_admitted(limiter, 103.0)
    limiter.on_recovery(200.0)
    assert 1 == limiter.limit(200.0)


def test_a_time_before_the_recovery() -> None:
    """At a time shortly before the recovery the limit is 1."""
    limiter = InFlight(10)
    limiter.on_recovery(100.0)
    assert 1 == limiter.limit(99.9)


def test_a_clock_that_is_set_back_restarts_the_ramp() -> None:
    """After the clock is set back, the ramp starts again."""
    limiter = InFlight(10, ramp=10.0)
    limiter.on_recovery(3600.0)
    assert [1, 5, 10] == [limiter.limit(now) for now in (0.0, 5.0, 10.0)]


# --- AIMD ----------------------------------------------------------------------------------------


def run_rounds(limiter: AIMD, times: int, now: float = 0.0) -> list[int]:
    """Run rounds of successes that use the full limit; return the limit after each round."""
    limits = []
    for _ in range(times):
        for _ in range(count_admitted(limiter, now, attempts=limiter.limit)):
            limiter.release(SUCCESS, 0.1, now)
            limiter.acquire(now)
        while limiter._in_flight:
            limiter.release(None, 0.1, now)
        limits.append(limiter.limit)
    return limits


def test_one_more_per_round_of_successes() -> None:
    """A round of successes that uses the full limit raises the limit by about one."""
    limits = [10, *run_rounds(AIMD(), 40)]
    assert {0, 1} >= {after - before for before, after in pairwise(limits)}
    assert 45 <= limits[-1] <= 50


def test_an_unused_limit_does_not_grow() -> None:
    """Successes with at most half of the limit in flight do not raise the limit."""
    limiter = AIMD()
    for _ in range(1_000):
        for _ in range(5):
            limiter.acquire(0.0)
        for _ in range(5):
            limiter.release(SUCCESS, 0.1, 0.0)
    assert 10.0 == limiter._limit


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (TRANSIENT, 7),
        (TIMEOUT, 7),
        (THROTTLED, 7),
        (OVERLOADED, 7),
        (PERMANENT, 10),
        (None, 10),
    ],
)
def test_outcomes_that_lower_the_limit(outcome: Outcome | None, expected: int) -> None:
    """A failure that is not permanent multiplies the limit by 0.7; other outcomes do not."""
    limiter = AIMD()
    limiter.acquire(0.0)
    limiter.release(outcome, 1.0, 1.0)
    assert expected == limiter.limit


def test_one_decrease_per_round_trip() -> None:
    """Failures of attempts that started before the last decrease do not lower the limit again."""
    limiter = AIMD(initial=100)
    for _ in range(20):
        limiter.acquire(0.0)
    limits = []
    for now, duration in ((1.0, 1.0), (1.25, 1.25), (1.5, 1.0), (2.0, 1.0), (2.5, 0.25)):
        limiter.release(TRANSIENT, duration, now)
        limits.append(limiter.limit)
    assert [70, 70, 70, 49, 34] == limits


def test_default_bounds_of_aimd() -> None:
    """By default failures lower the limit to 1, and successes raise it to 200."""
    limiter = AIMD()
    for now in range(20):
        limiter.acquire(now)
        limiter.release(TRANSIENT, 0.0, now)
    assert 1 == limiter.limit
    assert 200 == run_rounds(limiter, 250, 21.0)[-1]


def test_recovery_sets_the_minimum_limit() -> None:
    """A recovery sets the limit to min_limit, and failures of earlier attempts do not lower it."""
    limiter = AIMD(min_limit=2, initial=50)
    limiter.on_recovery(100.0)
    assert [2, 2, 3, 4] == [limiter.limit, *run_rounds(limiter, 3, 101.0)]
    for started, expected in ((90.0, 4), (100.5, 3)):
        limiter.acquire(started)
        limiter.release(TRANSIENT, 102.0 - started, 102.0)
        assert expected == limiter.limit


@given(
    st.integers(1, 20),
    st.integers(0, 50),
    st.integers(0, 200),
    st.floats(0.01, 0.99),
    st.lists(
        st.tuples(
            st.sampled_from(["acquire", "acquire", "release", "recover"]),
            st.sampled_from([SUCCESS, SUCCESS, TRANSIENT, THROTTLED, PERMANENT, None]),
            st.floats(0, 2),
        ),
        min_size=10,
        max_size=40,
    ),
)
def test_the_limit_stays_within_its_bounds(
    min_limit: int,
    initial_above_min: int,
    max_above_initial: int,
    decrease_factor: float,
    events: list[tuple[str, Outcome | None, float]],
) -> None:
    """For any events the limit stays within its bounds, and an attempt below it is admitted."""
    initial = min_limit + initial_above_min
    max_limit = initial + max_above_initial
    limiter = AIMD(
        min_limit=min_limit,
        initial=initial,
        max_limit=max_limit,
        decrease_factor=decrease_factor,
    )
    in_flight, now = 0, 0.0
    for action, outcome, seconds in events:
        now += seconds
        if action == "acquire":
            has_slot = in_flight < limiter.limit
            assert (0.0 if has_slot else None) == limiter.acquire(now)
            in_flight += has_slot
        elif action == "recover":
            limiter.on_recovery(now)
        elif in_flight:
            limiter.release(outcome, seconds, now)
            in_flight -= 1
        assert min_limit <= limiter.limit <= max_limit


# --- AdaptiveRate --------------------------------------------------------------------------------


def run_at_rate(limiter: AdaptiveRate, start: float, seconds: float, per_second: float) -> float:
    """Make successful attempts at a constant rate; return the time of the last one."""
    now = start
    for n in range(1, int(seconds * per_second) + 1):
        now = start + n / per_second
        limiter.acquire(now)
        limiter.release(SUCCESS, 0.1, now)
    return now


def test_no_rate_limit_before_the_first_throttling() -> None:
    """Before the first throttled outcome 10,000 simultaneous attempts are admitted."""
    limiter = AdaptiveRate()
    for outcome in (SUCCESS, TRANSIENT, TIMEOUT, OVERLOADED, PERMANENT, None) * 1_000:
        assert 0.0 == limiter.acquire(0.0)
        limiter.release(outcome, 0.1, 0.0)
    limiter.on_recovery(1.0)
    assert (None, 10_000) == (limiter.rate, count_admitted(limiter, 1.0))


def test_throttling_lowers_the_measured_rate() -> None:
    """Throttling sets 0.7 of the measured rate, and the cubic function then restores that rate."""
    limiter = AdaptiveRate()
    now = run_at_rate(limiter, 0.0, 20.0, 100.0)
    assert pytest.approx(100.0, rel=0.01) == limiter.measured
    limiter.release(THROTTLED, 0.1, now)
    measured = limiter.measured
    assert pytest.approx(0.7 * measured) == limiter.rate
    seconds_to_recover = (measured * 0.3 / 0.4) ** (1 / 3)  # until the cubic reaches the old rate
    run_at_rate(limiter, now, seconds_to_recover, 100.0)
    assert pytest.approx(100.0, rel=0.02) == limiter.rate


def test_delays_of_simultaneous_attempts() -> None:
    """At the lowest rate each simultaneous attempt is delayed 2 s more, and rejected above 30 s."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    assert 0.5 == limiter.rate
    assert [*(2.0 * n for n in range(1, 16)), None, None] == [
        limiter.acquire(0.0) for _ in range(17)
    ]
    assert [None, 30.0] == [limiter.acquire(1.999), limiter.acquire(2.0)]


def test_idle_time_fills_the_bucket_only_to_its_capacity() -> None:
    """After a long idle time the bucket holds max(1, rate) tokens."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    assert [0.0, 2.0] == [limiter.acquire(1e6) for _ in range(2)]


def test_an_attempt_that_was_not_sent_returns_its_token() -> None:
    """A cancelled attempt with a duration of 0 was not sent and returns its token."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    delays = []
    for _ in range(20):  # for example calls whose deadline is before the delayed start
        delays.append(limiter.acquire(0.0))
        limiter.release(None, 0.0, 0.0)
    assert [2.0] * 20 == delays


def test_a_cancelled_attempt_does_not_return_its_token() -> None:
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    delays = []
    for now in (0.0, 0.0, 0.0):  # for example hedges that another attempt was faster than
        delays.append(limiter.acquire(now))
        limiter.release(None, 0.5, now)
    assert [2.0, 4.0, 6.0] == delays


def test_waits_become_shorter_when_the_rate_rises() -> None:
    """When the rate rises, attempts that wait already are sent earlier, in the same order."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    tokens = []
    for _ in range(10):
        limiter.acquire(0.0)
        tokens.append(limiter.last_token)
    assert [2.0 * n for n in range(1, 11)] == [limiter.remaining_wait(n, 0.0) for n in tokens]
    for _ in range(100):
        limiter.release(SUCCESS, 0.1, 5.0)
    limiter.release(SUCCESS, 0.1, 5.5)
    rate = limiter.rate
    assert rate is not None
    assert rate > 60
    waits = [limiter.remaining_wait(token, 5.5) for token in tokens]
    assert [0.0, 0.0] == waits[:2]
    assert [pytest.approx(1 / rate)] * 7 == [later - wait for wait, later in pairwise(waits[2:])]
    assert waits[-1] < 8 / rate


def test_a_returned_token_shortens_the_waits_of_others() -> None:
    """When an attempt is cancelled before it is sent, the attempts that wait get its token."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    for _ in range(3):
        limiter.acquire(0.0)
    limiter.release(None, 0.0, 0.0)
    assert [2.0, 4.0] == [limiter.remaining_wait(2, 0.0), limiter.remaining_wait(3, 0.0)]


@given(
    st.lists(st.sampled_from(["join", "join", "wait", "leave"]) | st.integers(0, 9), max_size=40)
)
def test_attempts_that_leave_the_line(events: list[str | int]) -> None:
    """Only the attempts behind an attempt that leaves the line are sent earlier."""
    limiter = AdaptiveRate(max_wait=1e6)
    limiter.release(THROTTLED, 0.1, 0.0)
    now, tokens, line = 0.0, 0.0, list[int]()
    for event in events:
        if event == "join":
            limiter.acquire(now)
            line.append(limiter.last_token)
        elif event == "wait":
            now, tokens = now + 1.0, tokens + 0.5
        elif line:
            token = line.pop(-1 if event == "leave" else int(event) % len(line))
            limiter.release(None, 0.0, now)
            limiter.leave_line(token)
        while line and tokens >= 1:
            tokens -= 1
            assert 0.0 == limiter.remaining_wait(line.pop(0), now)
        tokens = min(tokens, 1.0)
        expected = [(position - tokens) / 0.5 for position in range(1, len(line) + 1)]
        assert expected == [limiter.remaining_wait(token, now) for token in line]


def test_few_numbers_of_returned_tokens_are_stored() -> None:
    """The number of a returned token is removed when no attempt before it waits."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    for n in range(100):
        now = 10.0 * n
        first = limiter.last_token + 1
        for _ in range(3):
            limiter.acquire(now)
        for token in (first + 1, first + 2):
            limiter.release(None, 0.0, now)
            limiter.leave_line(token)
    assert len(limiter._cancelled) <= 1


def test_times_that_go_backwards_add_no_tokens() -> None:
    """Times that go back and forth do not refill the bucket twice for the same second."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 100.0)
    delays = [limiter.acquire(now) for now in (101.0, 100.0, 101.0, 100.0, 101.0)]
    assert [1.0, 3.0, 5.0, 7.0, 9.0] == delays


def test_recovery_leaves_one_token() -> None:
    """After a recovery the bucket holds one token, so that the second attempt is delayed."""
    limiter = AdaptiveRate()
    now = run_at_rate(limiter, 0.0, 20.0, 100.0)
    limiter.release(THROTTLED, 0.1, now)
    limiter.on_recovery(now + 60)
    assert [0.0, 2.0, 4.0] == [limiter.acquire(now + 60) for _ in range(3)]


def test_recovery_of_the_rate_is_gradual() -> None:
    """After a recovery the rate starts at 0.5 and rises with the cubic function."""
    limiter = AdaptiveRate()
    now = run_at_rate(limiter, 0.0, 20.0, 100.0)
    limiter.release(THROTTLED, 0.1, now)
    now = run_at_rate(limiter, now, 5.0, 100.0) + 60.0
    for _ in range(2):  # the first probes of a breaker; the last probe closes it
        limiter.release(SUCCESS, 0.1, now)
    limiter.on_recovery(now)
    assert 0.5 == limiter.rate
    limiter.release(SUCCESS, 0.1, now)
    recovered_at, rates = now, []
    while now < recovered_at + 60:  # a client that always has the next attempt to send
        delay = limiter.acquire(now)
        assert delay is not None
        assert limiter.rate is not None
        rates.append((now - recovered_at, limiter.rate))
        now += delay + 0.01
        limiter.release(SUCCESS, 0.01, now)
    assert pytest.approx(0.5) == rates[0][1]
    assert all(rate <= 0.5 + 0.4 * elapsed**3 + 1e-6 for elapsed, rate in rates)
    assert rates[-1][1] > 50


# --- arguments -----------------------------------------------------------------------------------


def make_in_flight(limit: int = 10, **arguments: Any) -> InFlight:
    """Return an in-flight limiter, with a default for `limit`."""
    return InFlight(limit, **arguments)


INVALID_ARGUMENTS: list[tuple[str, Callable[..., Limiter], list[ParameterSet]]] = [
    ("InFlight", make_in_flight, invalid_values(limit="count", ramp="positive")),
    (
        "AIMD",
        AIMD,
        invalid_values(
            initial="count", min_limit="count", max_limit="count", decrease_factor="positive"
        ),
    ),
    ("AdaptiveRate", AdaptiveRate, invalid_values(max_wait="positive")),
]


@pytest.mark.parametrize(
    ("limiter", "field", "value", "pattern"),
    [
        pytest.param(limiter, *case.values, id=f"{name}-{case.id}")
        for name, limiter, cases in INVALID_ARGUMENTS
        for case in cases
    ],
)
def test_invalid_arguments(
    limiter: Callable[..., Limiter], field: str, value: object, pattern: str
) -> None:
    """An invalid argument raises an error that names the argument."""
    with pytest.raises(ConfigurationError, match=pattern):
        limiter(**keyword(field, value))


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"initial": 201}, "^initial must be from min_limit to max_limit, got 201$"),
        ({"initial": 4, "min_limit": 5}, "^initial must be from min_limit to max_limit, got 4$"),
        ({"min_limit": 20, "max_limit": 5}, "^initial must be from min_limit to max_limit"),
        ({"decrease_factor": 1}, "^decrease_factor must be less than 1, got 1$"),
        ({"decrease_factor": 1.5}, "^decrease_factor must be less than 1, got 1.5$"),
    ],
)
def test_invalid_combinations_of_arguments(arguments: dict[str, Any], pattern: str) -> None:
    """An `initial` outside of the other limits and a `decrease_factor` of 1 are rejected."""
    with pytest.raises(ConfigurationError, match=pattern):
        AIMD(**arguments)


def test_times_can_be_timedeltas() -> None:
    """The ramp of an `InFlight` and the longest wait of an `AdaptiveRate` can be `timedelta`s."""
    limiter = InFlight(10, ramp=timedelta(minutes=1))
    limiter.on_recovery(0.0)

    assert 5 == limiter.limit(30.0)
    assert 60.0 == AdaptiveRate(max_wait=timedelta(minutes=1)).max_wait
