"""Tests for the breaker; test_breaker_model.py compares any sequence of events with a model."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.breaker import Breaker, BreakerState
from tarry.core.sliding_window import SlidingWindow
from tarry.errors import ConfigurationError
from tests.core.invalid_values import invalid_values, keyword

if TYPE_CHECKING:
    from collections.abc import Iterable

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def permit_of(breaker: Breaker, now: float) -> int:
    """Return the permit of a call that must be admitted."""
    permit = breaker.admit(now)
    assert permit is not None
    return permit


def run(breaker: Breaker, results: Iterable[str], now: float = 0.0, duration: float = 0.1) -> None:
    """Make one call per letter, one after another: `x` fails, anything else succeeds."""
    for result in results:
        breaker.record(
            permit_of(breaker, now),
            failed=result == "x",
            duration=duration,
            now=now,
            random_number=0.0,
        )


def opened(**arguments: Any) -> Breaker:
    """Return a breaker that opened at second 0."""
    breaker = Breaker(consecutive=1, **arguments)
    run(breaker, "x")
    assert breaker.state is OPEN
    return breaker


def insides(breaker: Breaker) -> dict[str, object]:
    """Return the complete state of a breaker, for comparison."""
    parts = {name: getattr(breaker, name) for name in Breaker.__slots__}
    window = parts.pop("_window")
    return deepcopy(parts | {name: getattr(window, name) for name in SlidingWindow.__slots__})


# --- closed: when it opens -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([("x", 19)], CLOSED),  # too few calls, whatever their results
        ([("x", 20)], OPEN),
        ([(".", 10), ("x", 10)], OPEN),  # exactly half
        ([("x", 10), (".", 10)], OPEN),  # the 20th call decides, although it succeeds
        ([("x.", 10)], OPEN),
        ([(".x", 10)], OPEN),
        ([(".", 11), ("x", 9)], CLOSED),
        ([("x", 9), (".", 11)], CLOSED),
        ([(".", 11), ("x", 10)], CLOSED),  # 10 of 21
        ([(".", 11), ("x", 11)], OPEN),  # 11 of 22
        ([(".", 10_000), ("x", 9_999)], CLOSED),
        ([(".", 10_000), ("x", 10_000)], OPEN),
    ],
)
def test_half_of_at_least_twenty_calls(
    results: list[tuple[str, int]], expected: BreakerState
) -> None:
    """By default it opens when half of at least 20 calls have failed, and not before."""
    breaker = Breaker()
    run(breaker, "".join(letters * times for letters, times in results))
    assert expected is breaker.state


@given(
    st.lists(st.booleans(), min_size=10, max_size=40),
    st.integers(1, 20),
    st.sampled_from([0.1, 0.25, 0.5, 1]),
)
def test_failure_rate(failures: list[bool], min_calls: int, rate: float) -> None:
    """It opens with the first call after which enough calls were made and enough of them failed."""
    breaker = Breaker(min_calls=min_calls, failure_rate=rate)
    expected = next(
        (n for n in range(min_calls, len(failures) + 1) if sum(failures[:n]) >= rate * n),
        None,
    )
    broke = None
    for n, failed in enumerate(failures, 1):
        run(breaker, "x" if failed else ".")
        if breaker.state is OPEN:
            broke = n
            break
    assert expected == broke


@pytest.mark.parametrize(
    ("later", "expected"), [(9.5, OPEN), (9.999, OPEN), (10.0, CLOSED), (60.0, CLOSED)]
)
def test_only_the_last_ten_seconds_count(later: float, expected: BreakerState) -> None:
    """A failure less than ten seconds after 19 others opens it, a later one is alone."""
    breaker = Breaker()
    run(breaker, "x" * 19, now=0.0)
    run(breaker, "x", now=later)
    assert expected is breaker.state


@pytest.mark.parametrize(
    ("results", "expected"),
    [("xxx", OPEN), ("xx", CLOSED), ("xx.xx.xx", CLOSED), ("xx.xxx", OPEN), (".....xxx", OPEN)],
)
def test_consecutive_failures(results: str, expected: BreakerState) -> None:
    """Consecutive failures open it before there are enough calls for a failure rate."""
    breaker = Breaker(consecutive=3)
    run(breaker, results)
    assert expected is breaker.state


@pytest.mark.parametrize("state", ["closed", "metrics-only"])
def test_a_row_of_failures_ends_with_the_state(state: str) -> None:
    """A state that is set manually resets the count of consecutive failures."""
    breaker = Breaker(consecutive=3)
    run(breaker, "xx")
    breaker.force(state)
    breaker.force("closed")
    run(breaker, "xx")
    assert CLOSED is breaker.state


def test_a_row_of_failures_ends_with_the_outage() -> None:
    """After an outage the full number of consecutive failures is needed again."""
    breaker = Breaker(consecutive=3, probes=1)
    run(breaker, "xxx")
    run(breaker, ".xx", now=30.0)
    assert CLOSED is breaker.state
    run(breaker, "x", now=30.0)
    assert OPEN is breaker.state


def test_consecutive_failures_may_lie_far_apart() -> None:
    """Consecutive failures count even when the first of them has left the window."""
    breaker = Breaker(consecutive=3)
    for now in (0.0, 100.0, 200.0):
        run(breaker, "x", now)
    assert OPEN is breaker.state


@pytest.mark.parametrize(
    ("durations", "expected"),
    [
        ([1.0] * 20, CLOSED),  # exactly `slow_after` is not slower
        ([1.001] * 20, OPEN),
        ([1.001] * 19, CLOSED),
        ([0.1] * 10 + [2.0] * 10, OPEN),
        ([2.0] * 10 + [0.1] * 10, OPEN),
        ([0.1] * 11 + [2.0] * 9, CLOSED),
    ],
)
def test_slow_calls(durations: list[float], expected: BreakerState) -> None:
    """Half of at least 20 calls that took too long open it, although none of them failed."""
    breaker = Breaker(slow_after=1.0)
    for duration in durations:
        run(breaker, ".", duration=duration)
    assert expected is breaker.state


def test_without_a_limit_nothing_is_slow() -> None:
    """Without `slow_after` a call may take as long as it likes."""
    breaker = Breaker()
    run(breaker, "." * 100, duration=1e9)
    assert (CLOSED, (100, 0, 0)) == (breaker.state, breaker.counts(0.0))


def test_counts() -> None:
    """The counts are those of the window: calls, failures, slow calls; a call may be both."""
    breaker = Breaker(slow_after=1.0)
    run(breaker, "..x", now=0.0)
    run(breaker, "x", now=5.0, duration=1.5)
    assert (4, 2, 1) == breaker.counts(9.9)
    assert (1, 1, 1) == breaker.counts(10.0)
    assert (0, 0, 0) == breaker.counts(15.0)


# --- open: for how long --------------------------------------------------------------------------


@pytest.mark.parametrize("now", [0.0, 1.0, 29.0, 29.999])
def test_open_admits_no_call_before_its_time(now: float) -> None:
    """For 30 seconds all calls are rejected, with the time until the next probe."""
    breaker = opened()
    assert (False, None, OPEN) == (breaker.would_admit(now), breaker.admit(now), breaker.state)
    assert pytest.approx(30.0 - now) == breaker.retry_after(now)


def test_open_for_is_spread() -> None:
    """The open time is up to a tenth longer at random, so that breakers differ."""
    ends = []
    for random_number in (0.0, 0.5, 0.999):
        breaker = Breaker(consecutive=1)
        breaker.record(
            permit_of(breaker, 0.0),
            failed=True,
            duration=0.1,
            now=100.0,
            random_number=random_number,
        )
        ends.append(breaker.retry_after(100.0))
    assert [30.0, 31.5, pytest.approx(32.997)] == ends


@given(
    open_for=st.floats(0.1, 1e4),
    factor=st.floats(1, 1e6),
    growth=st.floats(1, 10),
    spread=st.floats(0, 2),
    random_number=st.floats(0, 1, exclude_max=True),
    reopenings=st.integers(0, 30),
)
def test_open_time_grows(
    *,
    open_for: float,
    factor: float,
    growth: float,
    spread: float,
    random_number: float,
    reopenings: int,
) -> None:
    """Re-opened k times, it is open for open_for * growth^k, max_open at most, plus its spread."""
    max_open = open_for * factor
    breaker = opened(open_for=open_for, max_open=max_open, growth=growth, spread=spread, probes=1)
    now = 0.0
    for _ in range(reopenings):
        now += breaker.retry_after(now) or 0.0
        breaker.record(
            permit_of(breaker, now), failed=True, duration=0.1, now=now, random_number=random_number
        )
    length = open_for
    for _ in range(reopenings):
        length = min(max_open, length * growth)
    spread_by = random_number if reopenings else 0.0
    assert pytest.approx(length * (1 + spread * spread_by)) == breaker.retry_after(now)


@pytest.mark.parametrize(("growth", "expected"), [(1.0, 30.0), (1.001, 300.0), (1e300, 300.0)])
def test_ten_thousand_openings(growth: float, expected: float) -> None:
    """However often it re-opens, the open time neither overflows nor exceeds the maximum."""
    breaker, now = opened(growth=growth, probes=1), 0.0
    for _ in range(10_000):
        now += breaker.retry_after(now) or 0.0
        run(breaker, "x", now)
    assert pytest.approx(expected) == breaker.retry_after(now)


def test_growth_starts_over_once_closed() -> None:
    """After it has closed, it opens for the initial period again."""
    breaker, now, lengths = opened(probes=1), 0.0, []
    for results in ("x", "x", ".x", "x"):
        lengths.append(breaker.retry_after(now))
        now += lengths[-1] or 0.0
        run(breaker, results, now)
    assert [30.0, 60.0, 120.0, 30.0, 60.0] == [*lengths, breaker.retry_after(now)]


# --- half-open: probes ---------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [1, 3, 100])
def test_half_open_admits_only_its_probes(probes: int) -> None:
    """Of ten thousand concurrent calls only the probes are admitted."""
    breaker = opened(probes=probes)
    admitted = [breaker.admit(30.0) is not None for _ in range(10_000)]
    assert (probes, [True] * probes) == (sum(admitted), admitted[:probes])


def test_closes_when_the_probes_succeed() -> None:
    """It closes after the last probe, with an empty window."""
    breaker = opened()
    permits = [permit_of(breaker, 30.0) for _ in range(3)]
    states = []
    for permit in permits:
        breaker.record(permit, failed=False, duration=0.1, now=31.0, random_number=0.0)
        states.append(breaker.state)
    assert [HALF_OPEN, HALF_OPEN, CLOSED] == states
    assert (0, 0, 0) == breaker.counts(31.0)


@pytest.mark.parametrize(("failed", "duration"), [(True, 0.1), (False, 1.5), (True, 1.5)])
def test_one_bad_probe_opens_again(failed: bool, duration: float) -> None:
    """A failed or slow probe opens it for longer; the other probes are ignored."""
    breaker = opened(slow_after=1.0)
    permits = [permit_of(breaker, 30.0) for _ in range(3)]
    breaker.record(permits[0], failed=failed, duration=duration, now=31.0, random_number=0.0)
    before = insides(breaker)
    breaker.record(permits[1], failed=False, duration=0.1, now=31.0, random_number=0.0)
    breaker.release(permits[2])
    assert (OPEN, 60.0) == (breaker.state, breaker.retry_after(31.0))
    assert before == insides(breaker)


def test_a_cancelled_probe_frees_its_slot() -> None:
    """A cancelled probe is not counted, and another one is admitted."""
    breaker = opened(probes=1)
    breaker.release(permit_of(breaker, 30.0))
    assert (True, HALF_OPEN) == (breaker.would_admit(30.0), breaker.state)


def test_a_lost_probe_frees_its_slot() -> None:
    """A probe without a result for as long as an open period is ignored."""
    breaker = opened(probes=1)
    breaker.admit(30.0)
    assert [False, True] == [breaker.would_admit(now) for now in (59.999, 60.0)]


def test_a_probe_is_lost_by_its_own_time() -> None:
    """The result of a probe removes its own start time, not that of another probe."""
    breaker = opened(probes=2)
    early, _late = permit_of(breaker, 30.0), permit_of(breaker, 59.0)
    breaker.record(early, failed=False, duration=29.5, now=59.5, random_number=0.0)
    admitted = [breaker.admit(60.0) is not None for _ in range(3)]
    assert [True, False, False] == admitted  # the late one is out since a second only


def test_a_late_probe_frees_no_other_slot() -> None:
    """A late result of a lost probe does not free the slots of other probes."""
    breaker = opened(probes=2)
    lost = [permit_of(breaker, 30.0) for _ in range(2)]
    for _ in range(2):
        permit_of(breaker, 60.0)
    breaker.release(lost[0])
    breaker.record(lost[1], failed=False, duration=31.0, now=61.0, random_number=0.0)
    assert not breaker.would_admit(61.0)


def test_a_late_probe_frees_no_slot() -> None:
    """A late result of a lost probe does not allow more probes than configured."""
    breaker = opened(probes=2)
    lost = [permit_of(breaker, 30.0) for _ in range(2)]
    assert breaker.would_admit(60.0)
    breaker.record(lost[0], failed=False, duration=30.0, now=60.0, random_number=0.0)
    assert [True, True, False] == [breaker.admit(60.0) is not None for _ in range(3)]


def test_retry_after_while_probes_run() -> None:
    """While all probes run, the time of the next one is unknown."""
    breaker = opened(probes=1)
    breaker.admit(30.0)
    assert (None, None) == (breaker.admit(31.0), breaker.retry_after(31.0))


@pytest.mark.parametrize("later", [0.0, 29.0, 30.0, 1e6])
def test_would_admit_changes_nothing(later: float) -> None:
    """would_admit() does not change the state, at any time."""
    breakers = [Breaker(), opened(), opened(probes=1)]
    breakers[2].admit(30.0)
    before = [insides(breaker) for breaker in breakers]
    for breaker in breakers:
        breaker.would_admit(30.0 + later)
    assert before == [insides(breaker) for breaker in breakers]


# --- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected", "admits", "counts"),
    [
        ("open", BreakerState.FORCED_OPEN, False, (0, 0, 0)),
        ("closed", CLOSED, True, (0, 0, 0)),
        ("disabled", BreakerState.DISABLED, True, (0, 0, 0)),
        ("metrics-only", BreakerState.METRICS_ONLY, True, (100, 100, 0)),
    ],
)
@pytest.mark.parametrize("start", [Breaker, opened])
def test_manual_states(
    start: type[Breaker], state: str, expected: BreakerState, admits: bool, counts: tuple[int, ...]
) -> None:
    """A manual state admits all calls or none, and only metrics-only counts them."""
    breaker = start()
    breaker.force(state)
    assert expected is breaker.state
    assert (admits, None) == (breaker.would_admit(1e6), breaker.retry_after(0.0))
    assert admits is (breaker.admit(1e6) is not None)
    if state != "closed":
        for _ in range(100 * admits):
            run(breaker, "x", 1e6)
        assert (expected, counts) == (breaker.state, breaker.counts(1e6))


def test_forced_closed_is_automatic_again() -> None:
    """Closed manually, it starts counting from zero and opens for the initial period."""
    breaker = opened()
    run(breaker, "x", 30.0)
    breaker.force("closed")
    run(breaker, "x", 31.0)
    assert (OPEN, 30.0) == (breaker.state, breaker.retry_after(31.0))


@pytest.mark.parametrize("state", ["", "OPEN", "half-open", "forced-open", None, 1, True, ["open"]])
def test_unknown_manual_states(state: str) -> None:
    """An unknown manual state is rejected with the valid names, and changes nothing."""
    breaker = Breaker()
    before = insides(breaker)
    with pytest.raises(ConfigurationError, match=r"^state must be one of closed, disabled, "):
        breaker.force(state)
    assert before == insides(breaker)


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    invalid_values(
        failure_rate="share",
        min_calls="count",
        window="positive",
        consecutive="count",
        slow_after="positive",
        slow_rate="share",
        open_for="positive",
        growth="at least 1",
        max_open="positive",
        spread="at least 0",
        probes="count",
    ),
)
def test_refused_arguments(field: str, value: object, words: str) -> None:
    """Each argument rejects invalid values, with its name in the message."""
    with pytest.raises(ConfigurationError, match=words):
        Breaker(**keyword(field, value))


def test_max_open_below_open_for() -> None:
    """The longest open time cannot be shorter than the first."""
    with pytest.raises(ConfigurationError, match=r"^max_open must be at least open_for \(30\)"):
        Breaker(max_open=29)
    assert 30.0 == opened(max_open=30).retry_after(0.0)


# --- the fast path -------------------------------------------------------------------------------

STEPS = [
    *[("succeed", 0.1)] * 4,
    *[("succeed", 2.0)] * 2,
    *[("fail", 0.1)] * 3,
    *[("admit", 0.0)] * 2,
    *[("wait", seconds) for seconds in (0.5, 1.0, 9.0, 10.0, 30.0, 60.0)],
    *[(state, 0.0) for state in ("open", "closed", "closed", "disabled", "metrics-only")],
]


@given(
    st.sampled_from([None, 2]),
    st.sampled_from([None, 1.0]),
    st.lists(
        st.tuples(st.sampled_from(STEPS), st.sampled_from([0, 0, 0, -1])), min_size=10, max_size=40
    ),
)
def test_try_count_success_is_equivalent_to_record(
    consecutive: int | None,
    slow_after: float | None,
    history: list[tuple[tuple[str, float], int]],
) -> None:
    """try_count_success(), with record() as the fallback, has the same effect as record()."""
    fast, slow = (
        Breaker(min_calls=4, consecutive=consecutive, slow_after=slow_after) for _ in range(2)
    )
    now = 0.0
    for (what, value), stale in history:
        permit = slow.generation + stale  # of now, mostly, or of some earlier time
        success = what == "succeed"
        if what == "wait":
            now += value
        elif what == "admit":
            assert slow.admit(now) == fast.admit(now)
        elif success or what == "fail":
            if not (success and fast.try_count_success(permit, now)):
                fast.record(permit, failed=not success, duration=value, now=now, random_number=0.5)
            slow.record(permit, failed=not success, duration=value, now=now, random_number=0.5)
        else:
            fast.force(what)
            slow.force(what)
        assert insides(slow) == insides(fast)


def test_half_open_after_openings_in_another_process() -> None:
    """It probes at once, and a failed probe opens it for the period of that count."""
    breaker = Breaker(open_for=10.0, growth=2.0, spread=0.0, probes=1)
    breaker.half_open(2)

    permit = breaker.admit(0.0)
    assert permit is not None
    assert breaker.admit(0.0) is None
    breaker.record(permit, failed=True, duration=0.0, now=0.0, random_number=0.5)

    assert (BreakerState.OPEN, 3, 40.0) == (
        breaker.state,
        breaker.consecutive_opens,
        breaker.retry_after(0.0),
    )
