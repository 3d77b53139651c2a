"""Tests for limiters: fixed, adaptive concurrency, and the cubic rate of its specification."""

from __future__ import annotations

from itertools import pairwise
from math import floor
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


def admitted(limiter: Limiter, now: float, asking: int = 10_000) -> int:
    """Return the number of simultaneous attempts that are admitted."""
    return sum(limiter.acquire(now) is not None for _ in range(asking))


# --- in flight -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 10, 9_999])
def test_at_most_so_many_at_a_time(limit: int) -> None:
    """Of ten thousand attempts only the limit is admitted, and each release frees a slot."""
    limiter = InFlight(limit)
    assert limit == admitted(limiter, 0.0)
    for outcome in (SUCCESS, TRANSIENT, PERMANENT, None):
        limiter.release(outcome, 1.0, 1.0)
        assert [0.0, None] == [limiter.acquire(1.0) for _ in range(2)]


@pytest.mark.parametrize(
    ("later", "expected"),
    [(0.0, 1), (0.5, 5), (1.0, 10), (2.5, 25), (5.0, 50), (9.99, 99), (10.0, 100), (1e6, 100)],
)
def test_after_an_outage_the_cap_is_a_slope(later: float, expected: int) -> None:
    """The cap grows from one to the limit within the ramp, in a straight line."""
    limiter = InFlight(100)
    limiter.on_recovery(50.0)
    assert expected == limiter.limit(50.0 + later)
    assert expected == admitted(limiter, 50.0 + later)


@given(
    st.integers(1, 10_000),
    st.floats(0.1, 1e4),
    st.floats(0, 1e6),
    st.lists(st.floats(0, 1.5), min_size=3, max_size=12).map(sorted),
)
def test_the_ramp_is_a_straight_line(
    limit: int, ramp: float, recovered: float, shares: list[float]
) -> None:
    """At any moment the cap lies on the line from 0 to the limit, cut to a whole number, or is 1.

    It never falls, and having reached the limit it stays there.
    """
    limiter = InFlight(limit, ramp=ramp)
    limiter.on_recovery(recovered)
    before = 0
    for share in shares:
        now = recovered + share * ramp
        cap = limiter.limit(now)
        line = min(float(limit), limit * (now - recovered) / ramp)
        assert max(1.0, line - 1) - 1e-6 <= cap <= max(1.0, line) + 1e-6
        assert before <= cap
        before = cap


def test_a_second_outage_begins_a_second_ramp() -> None:
    """Each recovery starts low again; running attempts count against the limit."""
    limiter = InFlight(10)
    assert 10 == admitted(limiter, 0.0)
    limiter.on_recovery(100.0)
    for _ in range(8):
        limiter.release(TRANSIENT, 1.0, 100.0)
    assert (1, None) == (limiter.limit(100.0), limiter.acquire(102.0))
    assert 1 == admitted(limiter, 103.0)
    limiter.on_recovery(200.0)
    assert 1 == limiter.limit(200.0)


def test_a_clock_read_before_the_recovery() -> None:
    """A time a little before the recovery has the lowest cap."""
    limiter = InFlight(10)
    limiter.on_recovery(100.0)
    assert 1 == limiter.limit(99.9)


def test_a_clock_that_is_set_back_begins_the_ramp_anew() -> None:
    """After the clock is set back, the ramp starts again."""
    limiter = InFlight(10, ramp=10.0)
    limiter.on_recovery(3600.0)
    assert [1, 5, 10] == [limiter.limit(now) for now in (0.0, 5.0, 10.0)]


# --- AIMD ----------------------------------------------------------------------------------------


def rounds(limiter: AIMD, times: int, now: float = 0.0) -> list[int]:
    """Fill the limit and let everything succeed, some times; return the limit after each round."""
    limits = []
    for _ in range(times):
        for _ in range(admitted(limiter, now, asking=limiter.limit)):
            limiter.release(SUCCESS, 0.1, now)
            limiter.acquire(now)
        while limiter._in_flight:
            limiter.release(None, 0.1, now)
        limits.append(limiter.limit)
    return limits


def test_one_more_per_round_of_successes() -> None:
    """When the limit is used, a round of successes raises it by about one."""
    limits = [10, *rounds(AIMD(), 40)]
    assert {0, 1} >= {after - before for before, after in pairwise(limits)}
    assert 45 <= limits[-1] <= 50


def test_an_unused_limit_does_not_grow() -> None:
    """Successes below half of the limit do not raise it."""
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
def test_what_lowers_the_limit(outcome: Outcome | None, expected: int) -> None:
    """Only a failure of the dependency decreases the limit, to 0.7 of it."""
    limiter = AIMD()
    limiter.acquire(0.0)
    limiter.release(outcome, 1.0, 1.0)
    assert expected == limiter.limit


def test_one_cut_per_round_trip() -> None:
    """Failures of attempts started before the last decrease do not decrease it again."""
    limiter = AIMD(initial=100)
    for _ in range(20):
        limiter.acquire(0.0)
    limits = []
    for now, duration in ((1.0, 1.0), (1.25, 1.25), (1.5, 1.0), (2.0, 1.0), (2.5, 0.25)):
        limiter.release(TRANSIENT, duration, now)
        limits.append(limiter.limit)
    assert [70, 70, 70, 49, 34] == limits


def test_the_bounds_by_default() -> None:
    """Failures bring the limit down to one, successes up to two hundred."""
    limiter = AIMD()
    for now in range(20):
        limiter.acquire(now)
        limiter.release(TRANSIENT, 0.0, now)
    assert 1 == limiter.limit
    assert 200 == rounds(limiter, 250, 21.0)[-1]


def test_after_an_outage_it_begins_low() -> None:
    """Recovery sets the least limit, from where each round adds one; old failures do not count."""
    limiter = AIMD(min_limit=2, initial=50)
    limiter.on_recovery(100.0)
    assert [2, 2, 3, 4] == [limiter.limit, *rounds(limiter, 3, 101.0)]
    for began, expected in ((90.0, 4), (100.5, 3)):
        limiter.acquire(began)
        limiter.release(TRANSIENT, 102.0 - began, 102.0)
        assert expected == limiter.limit


@given(
    st.integers(1, 20),
    st.integers(0, 50),
    st.integers(0, 200),
    st.floats(0.01, 0.99),
    st.lists(
        st.tuples(
            st.sampled_from(["acquire", "acquire", "release", "recovered"]),
            st.sampled_from([SUCCESS, SUCCESS, TRANSIENT, THROTTLED, PERMANENT, None]),
            st.floats(0, 2),
        ),
        min_size=10,
        max_size=40,
    ),
)
def test_the_limit_stays_within_its_bounds(
    least: int,
    more: int,
    most: int,
    decrease_factor: float,
    events: list[tuple[str, Outcome | None, float]],
) -> None:
    """Whatever happens, the limit keeps its bounds, and slots are free below it only."""
    limiter = AIMD(
        min_limit=least,
        initial=least + more,
        max_limit=least + more + most,
        decrease_factor=decrease_factor,
    )
    running, now = 0, 0.0
    for what, outcome, seconds in events:
        now += seconds
        if what == "acquire":
            free = running < limiter.limit
            assert (0.0 if free else None) == limiter.acquire(now)
            running += free
        elif what == "recovered":
            limiter.on_recovery(now)
        elif running:
            limiter.release(outcome, seconds, now)
            running -= 1
        assert least <= limiter.limit <= least + more + most


# --- the cubic rate ------------------------------------------------------------------------------


class Reference:
    """The adaptive mode as its source describes it, in its three parts."""

    def __init__(self) -> None:
        self.count = 0
        self.last_bucket: float | None = None
        self.measured = 0.0
        self.w_max = self.k = self.t0 = 0.0
        self.rate: float | None = None
        self.level, self.level_at = 0.0, 0.0

    def clock(self, t: float) -> None:
        """Measure the rate in half-second buckets, smoothed by 0.8."""
        bucket = floor(t / 0.5) * 0.5
        last = bucket if self.last_bucket is None else self.last_bucket
        self.count += 1
        if bucket > last:
            self.measured = 0.8 * self.count / (bucket - last) + 0.2 * self.measured
            self.count = 0
            last = bucket
        self.last_bucket = last

    def tokens(self, t: float) -> float:
        """Return what the bucket holds: filled at the rate, up to the rate or one."""
        if self.rate is None:
            return 0.0
        return min(max(1.0, self.rate), self.level + (t - self.level_at) * self.rate)

    def send(self, t: float) -> float | None:
        """Take a token, or return the time until there is one."""
        if self.rate is None:
            return 0.0
        tokens = self.tokens(t)
        wait = max(0.0, 1 - tokens) / self.rate
        if wait > 30:
            return None
        self.level, self.level_at = tokens - 1, t
        return wait

    def receive(self, t: float, *, throttled: bool) -> None:
        """Set the rate: 0.7 of the present one after a throttle, else along the cubic."""
        self.clock(t)
        if throttled:
            self.w_max = self.measured if self.rate is None else min(self.measured, self.rate)
            self.k = (self.w_max * 0.3 / 0.4) ** (1 / 3)
            self.t0 = t
            wanted = 0.7 * self.w_max
        elif self.rate is None:
            return
        else:
            wanted = 0.4 * (t - self.t0 - self.k) ** 3 + self.w_max
        tokens = self.tokens(t)
        self.rate = max(0.5, min(wanted, 2 * self.measured))
        self.level, self.level_at = min(tokens, max(1.0, self.rate)), t


@given(
    st.floats(0, 1e6),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.3, 0.5, 1.0, 3.0]),
            st.sampled_from(["send", "success", "success", "throttle", "failure", "nothing"]),
        ),
        min_size=15,
        max_size=60,
    ),
)
def test_adaptive_rate_agrees_with_its_source(now: float, events: list[tuple[float, str]]) -> None:
    """The same events give the same rates and waits as the specification."""
    limiter, reference = AdaptiveRate(), Reference()
    for seconds, event in events:
        now += seconds
        if event == "send":
            wait = reference.send(now)
            assert (None if wait is None else pytest.approx(wait, rel=1e-6, abs=1e-6)) == (
                limiter.acquire(now)
            )
        elif event == "nothing":
            limiter.release(None, 0.1, now)
        else:
            outcome = {"success": SUCCESS, "throttle": THROTTLED, "failure": TRANSIENT}[event]
            limiter.release(outcome, 0.1, now)
            reference.receive(now, throttled=event == "throttle")
        assert pytest.approx(reference.measured) == limiter.measured
        assert (reference.rate is None) == (limiter.rate is None)
        if reference.rate is not None:
            assert pytest.approx(reference.rate, rel=1e-6) == limiter.rate
            assert limiter.rate is not None
            assert 0.5 <= limiter.rate


def steady(limiter: AdaptiveRate, start: float, seconds: float, per_second: float) -> float:
    """Make successful attempts at a constant rate; return the time of the last one."""
    now = start
    for n in range(1, int(seconds * per_second) + 1):
        now = start + n / per_second
        limiter.acquire(now)
        limiter.release(SUCCESS, 0.1, now)
    return now


def test_off_until_the_first_throttle() -> None:
    """Whatever ends otherwise than throttled, ten thousand attempts at once go through."""
    limiter = AdaptiveRate()
    for outcome in (SUCCESS, TRANSIENT, TIMEOUT, OVERLOADED, PERMANENT, None) * 1_000:
        assert 0.0 == limiter.acquire(0.0)
        limiter.release(outcome, 0.1, 0.0)
    limiter.on_recovery(1.0)
    assert (None, 10_000) == (limiter.rate, admitted(limiter, 1.0))


def test_a_throttle_cuts_the_measured_rate() -> None:
    """At 100 a second, the first throttle sets 0.7 of the rate, and the cubic returns in time."""
    limiter = AdaptiveRate()
    now = steady(limiter, 0.0, 20.0, 100.0)
    assert pytest.approx(100.0, rel=0.01) == limiter.measured
    limiter.release(THROTTLED, 0.1, now)
    measured = limiter.measured
    assert pytest.approx(0.7 * measured) == limiter.rate
    back = now + (measured * 0.3 / 0.4) ** (1 / 3)  # where the cubic passes its old height
    steady(limiter, now, back - now, 100.0)
    assert pytest.approx(100.0, rel=0.02) == limiter.rate


def test_a_place_in_line() -> None:
    """At the lowest rate simultaneous attempts wait two seconds more each, at most thirty."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    assert 0.5 == limiter.rate
    assert [*(2.0 * n for n in range(1, 16)), None, None] == [
        limiter.acquire(0.0) for _ in range(17)
    ]
    assert [None, 30.0] == [limiter.acquire(1.999), limiter.acquire(2.0)]


@pytest.mark.parametrize(("max_wait", "expected"), [(1.999, 0), (2.0, 1), (600.0, 300)])
def test_max_wait(max_wait: float, expected: int) -> None:
    """A wait longer than max_wait is rejected."""
    limiter = AdaptiveRate(max_wait=max_wait)
    limiter.release(THROTTLED, 0.1, 0.0)
    assert expected == admitted(limiter, 0.0)


def test_a_rest_saves_no_more_than_the_capacity() -> None:
    """However long nothing is sent, the bucket holds one second's worth, one at least."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    assert [0.0, 2.0] == [limiter.acquire(1e6) for _ in range(2)]


def test_a_place_that_was_not_used_is_given_back() -> None:
    """An attempt that was never sent gives its token back."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    waits = []
    for _ in range(20):  # callers whose deadline comes before their turn
        waits.append(limiter.acquire(0.0))
        limiter.release(None, 0.0, 0.0)
    assert [2.0] * 20 == waits


def test_a_cancelled_attempt_has_used_its_place() -> None:
    """An attempt that was sent and then cancelled keeps its token, because it was load."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 0.0)
    waits = []
    for now in (0.0, 0.0, 0.0):  # copies that lost a race, say
        waits.append(limiter.acquire(now))
        limiter.release(None, 0.5, now)
    assert [2.0, 4.0, 6.0] == waits


def test_a_clock_read_earlier_earns_nothing_twice() -> None:
    """Times that go back and forth a little fill the bucket no faster than time itself."""
    limiter = AdaptiveRate()
    limiter.release(THROTTLED, 0.1, 100.0)
    waits = [limiter.acquire(now) for now in (101.0, 100.0, 101.0, 100.0, 101.0)]
    assert [1.0, 3.0, 5.0, 7.0, 9.0] == waits


def test_recovery_leaves_no_savings() -> None:
    """What was saved at the old rate is gone: after an outage one goes at once, the next waits."""
    limiter = AdaptiveRate()
    now = steady(limiter, 0.0, 20.0, 100.0)
    limiter.release(THROTTLED, 0.1, now)
    limiter.on_recovery(now + 60)
    assert [0.0, 2.0, 4.0] == [limiter.acquire(now + 60) for _ in range(3)]


def test_recovery_of_the_rate_is_a_slope() -> None:
    """After an outage the rate begins at its least and takes seconds to come back."""
    limiter = AdaptiveRate()
    now = steady(limiter, 0.0, 20.0, 100.0)
    limiter.release(THROTTLED, 0.1, now)
    now = steady(limiter, now, 5.0, 100.0) + 60.0
    for _ in range(2):  # probes of a breaker, and the one that closes it
        limiter.release(SUCCESS, 0.1, now)
    limiter.on_recovery(now)
    assert 0.5 == limiter.rate
    limiter.release(SUCCESS, 0.1, now)
    recovered, rates = now, []
    while now < recovered + 60:  # a client that always has something to send, and waits its turn
        wait = limiter.acquire(now)
        assert wait is not None
        assert limiter.rate is not None
        rates.append((now - recovered, limiter.rate))
        now += wait + 0.01
        limiter.release(SUCCESS, 0.01, now)
    assert pytest.approx(0.5) == rates[0][1]
    assert all(rate <= 0.5 + 0.4 * age**3 + 1e-6 for age, rate in rates)
    assert rates[-1][1] > 50


# --- arguments -----------------------------------------------------------------------------------


def in_flight(limit: int = 10, **arguments: Any) -> InFlight:
    """Return a cap with every argument by name."""
    return InFlight(limit, **arguments)


CHECKED: list[tuple[str, Callable[..., Limiter], list[ParameterSet]]] = [
    ("InFlight", in_flight, invalid_values(limit="count", ramp="positive")),
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
    ("limiter", "field", "value", "words"),
    [
        pytest.param(limiter, *case.values, id=f"{name}-{case.id}")
        for name, limiter, cases in CHECKED
        for case in cases
    ],
)
def test_refused_arguments(
    limiter: Callable[..., Limiter], field: str, value: object, words: str
) -> None:
    """Each argument rejects invalid values, with its name in the message."""
    with pytest.raises(ConfigurationError, match=words):
        limiter(**keyword(field, value))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"initial": 201}, "^initial must be from min_limit to max_limit, got 201$"),
        ({"initial": 4, "min_limit": 5}, "^initial must be from min_limit to max_limit, got 4$"),
        ({"min_limit": 20, "max_limit": 5}, "^initial must be from min_limit to max_limit"),
        ({"decrease_factor": 1}, "^decrease_factor must be less than 1, got 1$"),
        ({"decrease_factor": 1.5}, "^decrease_factor must be less than 1, got 1.5$"),
    ],
)
def test_arguments_that_do_not_fit_together(arguments: dict[str, Any], words: str) -> None:
    """The first limit lies between the others, and decrease_factor is less than 1."""
    with pytest.raises(ConfigurationError, match=words):
        AIMD(**arguments)
