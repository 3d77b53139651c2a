"""Tests for the breaker; test_breaker_model.py compares it with a model."""

from __future__ import annotations

from copy import deepcopy
from datetime import timedelta
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


def admit_call(breaker: Breaker, now: float) -> int:
    """Return the permit of a call that must be admitted."""
    permit = breaker.admit(now)
    assert permit is not None
    return permit


def run(breaker: Breaker, results: Iterable[str], now: float = 0.0, duration: float = 0.1) -> None:
    """Make one call per letter: `x` fails, `t` times out, `r` is a failed retry; others succeed."""
    for result in results:
        breaker.record(
            admit_call(breaker, now),
            failed=result in "xtr",
            duration=duration,
            now=now,
            random_number=0.0,
            timed_out=result == "t",
            is_retry=result == "r",
        )


def open_breaker(*, open_for: float = 30.0, **arguments: Any) -> Breaker:
    """Return a breaker that opened at second 0."""
    breaker = Breaker(consecutive=1, open_for=open_for, **arguments)
    run(breaker, "x")
    assert breaker.state is OPEN
    return breaker


def complete_state(breaker: Breaker) -> dict[str, object]:
    """Return the complete state of a breaker, for comparison."""
    state = {name: getattr(breaker, name) for name in Breaker.__slots__}
    window = state.pop("_window")
    return deepcopy(state | {name: getattr(window, name) for name in SlidingWindow.__slots__})


# --- closed state --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([("x", 19)], CLOSED),  # fewer calls than min_calls
        ([("x", 20)], OPEN),
        ([(".", 10), ("x", 10)], OPEN),  # exactly half
        ([("x", 10), (".", 10)], OPEN),  # the 20th call reaches min_calls, although it succeeds
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
    """By default a breaker opens when half of at least 20 calls have failed, and not before."""
    breaker = Breaker(min_span=0)
    run(breaker, "".join(letters * times for letters, times in results))
    assert expected is breaker.state


@given(
    st.lists(st.booleans(), min_size=10, max_size=40),
    st.integers(1, 20),
    st.sampled_from([0.1, 0.25, 0.5, 1]),
)
def test_failure_rate(failures: list[bool], min_calls: int, rate: float) -> None:
    """A breaker opens at the first call that reaches both min_calls and failure_rate."""
    breaker = Breaker(min_calls=min_calls, failure_rate=rate, min_span=0)
    expected = next(
        (n for n in range(min_calls, len(failures) + 1) if sum(failures[:n]) >= rate * n),
        None,
    )
    opened_at = None
    for n, failed in enumerate(failures, 1):
        run(breaker, "x" if failed else ".")
        if breaker.state is OPEN:
            opened_at = n
            break
    assert expected == opened_at


@pytest.mark.parametrize("percentage", range(1, 101))
def test_a_rate_that_is_reached_exactly(percentage: int) -> None:
    """A share of failed or slow calls equal to the configured rate opens a breaker."""
    rate, results = percentage / 100, "." * (100 - percentage) + "x" * percentage
    failing = Breaker(failure_rate=rate, min_calls=100, min_span=0)
    run(failing, results)
    slow = Breaker(slow_after=1.0, slow_rate=rate, min_calls=100)
    for result in results:
        run(slow, ".", duration=2.0 if result == "x" else 0.1)
    assert (OPEN, OPEN) == (failing.state, slow.state)


@pytest.mark.parametrize(
    ("later", "expected"), [(9.5, OPEN), (9.999, OPEN), (10.0, CLOSED), (60.0, CLOSED)]
)
def test_only_the_last_ten_seconds_count(later: float, expected: BreakerState) -> None:
    """A 20th failure opens the breaker only within ten seconds of the other 19."""
    breaker = Breaker()
    run(breaker, "x" * 19, now=0.0)
    run(breaker, "x", now=later)
    assert expected is breaker.state


@pytest.mark.parametrize(
    ("start", "expected"), [(0.5, CLOSED), (0.999, CLOSED), (1.0, OPEN), (3.0, OPEN)]
)
@pytest.mark.parametrize("duration", [0.0, 0.5, 30.0])
def test_failures_must_span_a_second(start: float, duration: float, expected: BreakerState) -> None:
    """The first and the last failed attempt must have started a second apart, even if they hang."""
    breaker = Breaker()
    run(breaker, "x" * 100, now=duration, duration=duration)
    assert CLOSED is breaker.state
    run(breaker, "x", now=start + duration, duration=duration)
    assert expected is breaker.state


@pytest.mark.parametrize(
    ("end", "start", "expected"),
    [(3.0, 0.5, OPEN), (3.0, 0.75, CLOSED), (2.75, 0.5, CLOSED), (2.75, 0.0, CLOSED)],
)
def test_failures_may_end_in_any_order(end: float, start: float, expected: BreakerState) -> None:
    """An attempt that started first and fails last extends the span of the starts."""
    breaker = Breaker()
    run(breaker, "x" * 20, now=2.0, duration=0.5)
    assert CLOSED is breaker.state
    run(breaker, "x", now=end, duration=end - start)
    assert expected is breaker.state


def reset_running_calls(breaker: Breaker, now: float) -> None:
    """Fail 30 calls at the same time, which started in the three seconds before."""
    for tenths in range(30, 0, -1):
        run(breaker, "x", now=now, duration=tenths / 10)


def test_a_second_reset_in_another_window() -> None:
    """A reset that has left the window does not extend the span of the next one."""
    breaker = Breaker()
    reset_running_calls(breaker, now=100.0)
    reset_running_calls(breaker, now=111.0)
    assert CLOSED is breaker.state


def test_a_reset_after_a_new_state() -> None:
    """Failures from before a change of state do not extend the span."""
    breaker = Breaker()
    run(breaker, "x", now=98.0)
    breaker.force("closed")
    reset_running_calls(breaker, now=100.0)
    assert CLOSED is breaker.state


def test_span_when_the_clock_is_set_back() -> None:
    """A clock that is set back does not extend the span, which begins again at the new time."""
    breaker = Breaker()
    run(breaker, "x", now=1000.0)
    run(breaker, "x" * 20, now=990.0)
    assert CLOSED is breaker.state
    run(breaker, "x", now=991.0)
    assert OPEN is breaker.state


def test_span_begins_after_a_window_without_failures() -> None:
    """A failure that has left the window does not extend the span of later failures."""
    breaker = Breaker()
    run(breaker, "x", now=0.0)
    run(breaker, "x" * 20, now=11.0)
    assert CLOSED is breaker.state


@pytest.mark.parametrize(("count_retries", "expected"), [(False, CLOSED), (True, OPEN)])
def test_retries_are_not_calls(count_retries: bool, expected: BreakerState) -> None:
    """By default, retries do not count towards `min_calls`."""
    breaker = Breaker(count_retries=count_retries)
    run(breaker, "x" * 5, now=0.0)
    run(breaker, "r" * 15, now=2.0)
    assert expected is breaker.state


def test_retries_count_in_the_failure_rate() -> None:
    """Failed retries raise the failure rate, and can open a breaker that has enough calls."""
    breaker = Breaker()
    run(breaker, "." * 15 + "x" * 5, now=0.0)
    run(breaker, "r" * 9, now=2.0)
    assert (CLOSED, (29, 14, 0)) == (breaker.state, breaker.counts(2.0))
    run(breaker, "r", now=2.0)
    assert OPEN is breaker.state


def test_failed_retries_are_consecutive_failures() -> None:
    breaker = Breaker(consecutive=3)
    run(breaker, "xr.xr", now=0.0)
    assert CLOSED is breaker.state
    run(breaker, "r", now=0.0)
    assert OPEN is breaker.state


def test_count_retries_must_be_a_bool() -> None:
    """A `count_retries` that is not a bool is rejected."""
    with pytest.raises(ConfigurationError, match=r"^count_retries must be True or False"):
        Breaker(**keyword("count_retries", 1))


@pytest.mark.parametrize(
    ("results", "expected"),
    [("xxx", OPEN), ("xx", CLOSED), ("xx.xx.xx", CLOSED), ("xx.xxx", OPEN), (".....xxx", OPEN)],
)
def test_consecutive_failures(results: str, expected: BreakerState) -> None:
    """Consecutive failures open a breaker before min_calls is reached."""
    breaker = Breaker(consecutive=3)
    run(breaker, results)
    assert expected is breaker.state


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ("ttt", OPEN),
        ("xttt", OPEN),
        ("tt", CLOSED),
        ("xxxxx", CLOSED),
        ("ttxtt", CLOSED),
        ("tt.tt", CLOSED),
        (".ttt", CLOSED),
    ],
)
def test_consecutive_timeouts(results: str, expected: BreakerState) -> None:
    """Consecutive time-outs open a breaker, unless a call in the window has succeeded."""
    breaker = Breaker(timeouts=3)
    run(breaker, results)
    assert expected is breaker.state


def test_timeouts_far_apart_open_the_breaker() -> None:
    """A success before the time-outs does not count once it has left the window."""
    breaker = Breaker(timeouts=3)
    for now, result in ((0.0, "."), (30.0, "t"), (60.0, "t"), (90.0, "t")):
        assert CLOSED is breaker.state
        run(breaker, result, now)
    assert OPEN is breaker.state


def test_a_success_between_timeouts_far_apart() -> None:
    """A success resets the count of time-outs, also after the time-outs have left the window."""
    breaker = Breaker(timeouts=2)
    run(breaker, "t", 0.0)
    assert not breaker.try_count_success(admit_call(breaker, 30.0), 30.0)
    run(breaker, ".", 30.0)
    run(breaker, "t", 60.0)
    assert CLOSED is breaker.state


def test_closing_resets_consecutive_failures() -> None:
    """After the breaker has closed, the full number of consecutive failures opens it again."""
    breaker = Breaker(consecutive=3, probes=1)
    run(breaker, "xxx")
    run(breaker, ".xx", now=2.0)
    assert CLOSED is breaker.state
    run(breaker, "x", now=2.0)
    assert OPEN is breaker.state


def test_consecutive_failures_outside_the_window_count() -> None:
    """Consecutive failures count even when the first of them has left the window."""
    breaker = Breaker(consecutive=3)
    for now in (0.0, 100.0, 200.0):
        run(breaker, "x", now)
    assert OPEN is breaker.state


@pytest.mark.parametrize(
    ("durations", "expected"),
    [
        ([1.0] * 20, CLOSED),  # a call that takes exactly `slow_after` is not slow
        ([1.001] * 20, OPEN),
        ([1.001] * 19, CLOSED),
        ([0.1] * 10 + [2.0] * 10, OPEN),
        ([2.0] * 10 + [0.1] * 10, OPEN),
        ([0.1] * 11 + [2.0] * 9, CLOSED),
    ],
)
def test_slow_calls(durations: list[float], expected: BreakerState) -> None:
    """A breaker opens when half of at least 20 calls were slow, although none of them failed."""
    breaker = Breaker(slow_after=1.0)
    for duration in durations:
        run(breaker, ".", duration=duration)
    assert expected is breaker.state


def test_no_call_is_slow_without_slow_after() -> None:
    breaker = Breaker()
    run(breaker, "." * 100, duration=1e9)
    assert (CLOSED, (100, 0, 0)) == (breaker.state, breaker.counts(0.0))


def test_counts() -> None:
    """counts() returns all, failed and slow attempts in the window; an attempt may be both."""
    breaker = Breaker(slow_after=1.0)
    run(breaker, "..x", now=0.0)
    run(breaker, "x", now=5.0, duration=1.5)
    assert (4, 2, 1) == breaker.counts(9.9)
    assert (1, 1, 1) == breaker.counts(10.0)
    assert (0, 0, 0) == breaker.counts(15.0)


# --- open state ----------------------------------------------------------------------------------


def test_default_open_time() -> None:
    """By default the first open period lasts two seconds."""
    breaker = Breaker(consecutive=1)
    run(breaker, "x")
    assert 2.0 == breaker.retry_after(0.0)


@pytest.mark.parametrize("now", [0.0, 1.0, 29.0, 29.999])
def test_open_breaker_admits_no_call(now: float) -> None:
    """An open breaker rejects calls for `open_for`, and retry_after() is the time that remains."""
    breaker = open_breaker()
    assert (False, None, OPEN) == (breaker.would_admit(now), breaker.admit(now), breaker.state)
    assert pytest.approx(30.0 - now) == breaker.retry_after(now)


def test_open_time_is_randomized() -> None:
    """The open time is randomly up to a tenth longer, so that breakers do not probe together."""
    open_times = []
    for random_number in (0.0, 0.5, 0.999):
        breaker = Breaker(consecutive=1, open_for=30)
        breaker.record(
            admit_call(breaker, 0.0),
            failed=True,
            duration=0.1,
            now=100.0,
            random_number=random_number,
        )
        open_times.append(breaker.retry_after(100.0))
    assert [30.0, 31.5, pytest.approx(32.997)] == open_times


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
    """The k-th reopening lasts min(open_for * growth^k, max_open), plus the random spread."""
    max_open = open_for * factor
    breaker = open_breaker(
        open_for=open_for, max_open=max_open, growth=growth, spread=spread, probes=1
    )
    now = 0.0
    for _ in range(reopenings):
        now += breaker.retry_after(now) or 0.0
        breaker.record(
            admit_call(breaker, now),
            failed=True,
            duration=0.1,
            now=now,
            random_number=random_number,
        )
    length = open_for
    for _ in range(reopenings):
        length = min(max_open, length * growth)
    last_random_number = random_number if reopenings else 0.0
    assert pytest.approx(length * (1 + spread * last_random_number)) == breaker.retry_after(now)


@pytest.mark.parametrize(("growth", "expected"), [(1.0, 30.0), (1.001, 300.0), (1e300, 300.0)])
def test_ten_thousand_openings(growth: float, expected: float) -> None:
    """After 10,000 reopenings the open time neither overflows nor exceeds the maximum."""
    breaker, now = open_breaker(growth=growth, probes=1), 0.0
    for _ in range(10_000):
        now += breaker.retry_after(now) or 0.0
        run(breaker, "x", now)
    assert pytest.approx(expected) == breaker.retry_after(now)


def test_closing_resets_the_open_time() -> None:
    """After a breaker has closed, it opens for the initial period again."""
    breaker, now, lengths = open_breaker(probes=1), 0.0, []
    for results in ("x", "x", ".x", "x"):
        lengths.append(breaker.retry_after(now))
        now += lengths[-1] or 0.0
        run(breaker, results, now)
    assert [30.0, 60.0, 120.0, 30.0, 60.0] == [*lengths, breaker.retry_after(now)]


@pytest.mark.parametrize("failed", [False, True])
def test_result_of_a_call_from_before_the_opening_is_no_probe(failed: bool) -> None:
    """A call that was admitted while closed neither closes nor opens a half-open breaker."""
    breaker = Breaker(consecutive=1, open_for=30.0, probes=1)
    old_permit = admit_call(breaker, 0.0)
    run(breaker, "x")
    probe = admit_call(breaker, 40.0)
    states = []
    for permit, is_failure in ((old_permit, failed), (probe, False)):
        breaker.record(permit, is_failure, duration=0.1, now=40.0, random_number=0.5)
        states.append(breaker.state)
    assert [HALF_OPEN, CLOSED] == states


# --- probes in the half-open state ---------------------------------------------------------------


def test_closes_when_the_probes_succeed() -> None:
    """A half-open breaker closes when its last probe has succeeded, with an empty window."""
    breaker = open_breaker()
    permits = [admit_call(breaker, 30.0) for _ in range(3)]
    states = []
    for permit in permits:
        breaker.record(permit, failed=False, duration=0.1, now=31.0, random_number=0.0)
        states.append(breaker.state)
    assert [HALF_OPEN, HALF_OPEN, CLOSED] == states
    assert (0, 0, 0) == breaker.counts(31.0)


@pytest.mark.parametrize(
    ("close_after", "results", "expected"),
    [
        (1, ".", CLOSED),
        (1, "xx.", CLOSED),
        (1, "xx", HALF_OPEN),
        (1, "xxx", OPEN),
        (2, "x..", CLOSED),
        (2, ".x", HALF_OPEN),
        (2, ".xx", OPEN),
        (3, "..x", OPEN),
    ],
)
def test_close_after(close_after: int, results: str, expected: BreakerState) -> None:
    """`close_after` successes close a breaker with three probes; it re-opens if too many fail."""
    breaker = open_breaker(close_after=close_after)
    run(breaker, results, now=30.0)
    assert expected is breaker.state


def test_failed_probes_of_an_earlier_round_do_not_count() -> None:
    """After it has re-opened, a breaker again admits as many failing probes as at first."""
    breaker = open_breaker(close_after=1, growth=1.0, spread=0.0)
    for now in (30.0, 60.0):
        run(breaker, "xxx", now)
        assert OPEN is breaker.state
    run(breaker, "xx.", 90.0)
    assert (CLOSED, 0) == (breaker.state, breaker.consecutive_opens)


@pytest.mark.parametrize(("failed", "duration"), [(True, 0.1), (False, 1.5), (True, 1.5)])
def test_failed_or_slow_probe_reopens(failed: bool, duration: float) -> None:
    """A failed or slow probe opens the breaker for longer, and the other probes are ignored."""
    breaker = open_breaker(slow_after=1.0)
    permits = [admit_call(breaker, 30.0) for _ in range(3)]
    breaker.record(permits[0], failed=failed, duration=duration, now=31.0, random_number=0.0)
    before = complete_state(breaker)
    breaker.record(permits[1], failed=False, duration=0.1, now=31.0, random_number=0.0)
    breaker.release(permits[2])
    assert (OPEN, 60.0) == (breaker.state, breaker.retry_after(31.0))
    assert before == complete_state(breaker)


def test_a_cancelled_probe_frees_its_slot() -> None:
    """A cancelled probe is not counted, and another one is admitted."""
    breaker = open_breaker(probes=1)
    breaker.release(admit_call(breaker, 30.0))
    assert (True, HALF_OPEN) == (breaker.would_admit(30.0), breaker.state)


def test_a_lost_probe_frees_its_slot() -> None:
    """A probe that has no result after one open period leaves its slot to another probe."""
    breaker = open_breaker(probes=1)
    breaker.admit(30.0)
    assert [False, True] == [breaker.would_admit(now) for now in (59.999, 60.0)]


def test_result_of_a_probe_frees_its_own_slot() -> None:
    """The result of a probe removes its own start time, not that of another probe."""
    breaker = open_breaker(probes=2)
    early, _late = admit_call(breaker, 30.0), admit_call(breaker, 59.0)
    breaker.record(early, failed=False, duration=29.5, now=59.5, random_number=0.0)
    admitted = [breaker.admit(60.0) is not None for _ in range(3)]
    assert [True, False, False] == admitted  # the second probe has run for only a second


def test_result_of_a_lost_probe_frees_no_other_slot() -> None:
    breaker = open_breaker(probes=2)
    lost = [admit_call(breaker, 30.0) for _ in range(2)]
    for _ in range(2):
        admit_call(breaker, 60.0)
    breaker.release(lost[0])
    breaker.record(lost[1], failed=False, duration=31.0, now=61.0, random_number=0.0)
    assert not breaker.would_admit(61.0)


def test_result_of_a_lost_probe_frees_no_slot() -> None:
    """The late result of a lost probe does not allow more probes than configured."""
    breaker = open_breaker(probes=2)
    lost = [admit_call(breaker, 30.0) for _ in range(2)]
    assert breaker.would_admit(60.0)
    breaker.record(lost[0], failed=False, duration=30.0, now=60.0, random_number=0.0)
    assert [True, True, False] == [breaker.admit(60.0) is not None for _ in range(3)]


@pytest.mark.parametrize(("failed", "expected"), [(False, CLOSED), (True, OPEN)])
def test_results_of_probes_that_take_longer_than_the_open_time_count(
    failed: bool, expected: BreakerState
) -> None:
    """Probes of two seconds close or re-open a breaker that opens for half a second."""
    breaker = open_breaker(open_for=0.5, probes=3, close_after=1)
    started = {}
    for number in range(4):
        now = 1.0 + 0.7 * number
        started[now] = admit_call(breaker, now)
    for now, permit in list(started.items())[:3]:
        assert breaker.state is HALF_OPEN
        breaker.record(permit, failed=failed, duration=2.0, now=now + 2.0, random_number=0.0)
        if not failed:
            break
    assert expected is breaker.state


def test_retry_after_while_probes_run() -> None:
    """While all probes run, retry_after() is the time until the oldest one loses its slot."""
    breaker = open_breaker(probes=2)
    probe = admit_call(breaker, 30.0)
    assert 0.0 == breaker.retry_after(31.0)  # a second probe is admitted at once
    admit_call(breaker, 32.0)
    assert (None, 25.0) == (breaker.admit(35.0), breaker.retry_after(35.0))
    assert (True, 0.0) == (breaker.would_admit(60.0), breaker.retry_after(60.0))
    admit_call(breaker, 60.0)
    breaker.release(probe)
    assert (None, 1.0) == (breaker.admit(61.0), breaker.retry_after(61.0))


@pytest.mark.parametrize("later", [0.0, 29.0, 30.0, 1e6])
def test_would_admit_changes_nothing(later: float) -> None:
    """would_admit() does not change the breaker in any state."""
    breakers = [Breaker(), open_breaker(), open_breaker(probes=1)]
    breakers[2].admit(30.0)
    before = [complete_state(breaker) for breaker in breakers]
    for breaker in breakers:
        breaker.would_admit(30.0 + later)
    assert before == [complete_state(breaker) for breaker in breakers]


# --- manual states -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected", "admits", "counts"),
    [
        ("open", BreakerState.FORCED_OPEN, False, (0, 0, 0)),
        ("closed", CLOSED, True, (0, 0, 0)),
        ("disabled", BreakerState.DISABLED, True, (0, 0, 0)),
        ("metrics-only", BreakerState.METRICS_ONLY, True, (100, 100, 0)),
    ],
)
@pytest.mark.parametrize("start", [Breaker, open_breaker])
def test_manual_states(
    start: type[Breaker], state: str, expected: BreakerState, admits: bool, counts: tuple[int, ...]
) -> None:
    """A manual state admits all calls or none; of these states only metrics-only counts calls."""
    breaker = start()
    breaker.force(state)
    assert expected is breaker.state
    assert (admits, None) == (breaker.would_admit(1e6), breaker.retry_after(0.0))
    assert admits is (breaker.admit(1e6) is not None)
    if state != "closed":
        for _ in range(100 * admits):
            run(breaker, "x", 1e6)
        assert (expected, counts) == (breaker.state, breaker.counts(1e6))


def test_forced_closed_resets_the_breaker() -> None:
    """A breaker that is closed manually counts from zero and opens for the initial period."""
    breaker = open_breaker()
    run(breaker, "x", 30.0)
    breaker.force("closed")
    run(breaker, "x", 31.0)
    assert (OPEN, 30.0) == (breaker.state, breaker.retry_after(31.0))


@pytest.mark.parametrize("state", ["", "OPEN", "half-open", "forced-open", None, 1, True, ["open"]])
def test_unknown_manual_states(state: str) -> None:
    """An unknown manual state raises an error with the valid names, and changes nothing."""
    breaker = Breaker()
    before = complete_state(breaker)
    with pytest.raises(ConfigurationError, match=r"^state must be one of closed, disabled, "):
        breaker.force(state)
    assert before == complete_state(breaker)


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    invalid_values(
        failure_rate="ratio",
        min_calls="count",
        window="positive",
        min_span="at least 0",
        consecutive="count",
        slow_after="positive",
        slow_rate="ratio",
        open_for="positive",
        growth="at least 1",
        max_open="positive",
        spread="at least 0",
        probes="count",
        close_after="count",
        timeouts="count",
    ),
)
def test_invalid_arguments(field: str, value: object, pattern: str) -> None:
    """An invalid argument raises an error that names the argument."""
    with pytest.raises(ConfigurationError, match=pattern):
        Breaker(**keyword(field, value))


def test_close_after_above_probes() -> None:
    """A breaker that could never close is rejected."""
    with pytest.raises(
        ConfigurationError, match=r"^close_after must be at most probes \(2\), got 3"
    ):
        Breaker(probes=2, close_after=3)


def test_max_open_below_open_for() -> None:
    with pytest.raises(ConfigurationError, match=r"^max_open must be at least open_for \(30\)"):
        Breaker(open_for=30, max_open=29)
    assert 30.0 == open_breaker(max_open=30).retry_after(0.0)


# --- fast path -----------------------------------------------------------------------------------

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
    steps: list[tuple[tuple[str, float], int]],
) -> None:
    """try_count_success(), with record() as the fallback, has the same effect as record()."""
    fast, slow = (
        Breaker(min_calls=4, min_span=0, consecutive=consecutive, slow_after=slow_after)
        for _ in range(2)
    )
    now = 0.0
    for (action, value), generation_offset in steps:
        permit = slow.generation + generation_offset  # of the current or the previous generation
        success = action == "succeed"
        if action == "wait":
            now += value
        elif action == "admit":
            assert slow.admit(now) == fast.admit(now)
        elif success or action == "fail":
            if not (success and fast.try_count_success(permit, now)):
                fast.record(permit, failed=not success, duration=value, now=now, random_number=0.5)
            slow.record(permit, failed=not success, duration=value, now=now, random_number=0.5)
        else:
            fast.force(action)
            slow.force(action)
        assert complete_state(slow) == complete_state(fast)


RESULT_STEPS = [
    *[("succeed", seconds) for seconds in (0.1, 0.1, 0.1, 0.1, 2.0)],
    *[("fail", seconds) for seconds in (0.1, 0.1, 2.0)],
    ("time out", 0.1),
    ("time out, but do not fail", 0.1),
    ("retry succeeds", 0.1),
    ("retry fails", 0.1),
    *[("wait", seconds) for seconds in (0.25, 0.5, 1.0, 1.0, 5.0, 9.0, 10.0, -1.0)],
    ("read counts", 0.0),
    *[("admit", 0.0)] * 2,
    *[(state, 0.0) for state in ("closed", "disabled", "metrics-only")],
]


@given(
    st.fixed_dictionaries(
        {
            "min_calls": st.integers(1, 6),
            "failure_rate": st.sampled_from([0.25, 0.5, 0.9, 1.0]),
            "min_span": st.sampled_from([0.0, 0.0, 1.0]),
            "count_retries": st.booleans(),
            "consecutive": st.sampled_from([None, None, 3]),
            "timeouts": st.sampled_from([None, 2]),
            "slow_after": st.sampled_from([None, None, None, 1.0]),
            "open_for": st.just(1.0),
        }
    ),
    st.lists(st.sampled_from(RESULT_STEPS), min_size=10, max_size=80),
)
def test_try_count_success_decides_like_record(
    arguments: dict[str, Any], steps: list[tuple[str, float]]
) -> None:
    """try_count_success() never hides a success that opens the breaker, whatever failed before."""
    fast, slow = Breaker(**arguments), Breaker(**arguments)
    now = 0.0
    for action, value in steps:
        if action == "wait":
            now += value
        elif action == "read counts":
            assert slow.counts(now) == fast.counts(now)
        elif action == "admit":
            assert slow.admit(now) == fast.admit(now)
        elif action in {"closed", "disabled", "metrics-only"}:
            fast.force(action)
            slow.force(action)
        else:
            is_success, is_retry = "succeed" in action, "retry" in action
            for breaker in (fast, slow):
                permit = breaker.generation
                if breaker is fast and is_success and fast.try_count_success(permit, now, is_retry):
                    continue
                breaker.record(
                    permit,
                    failed=action in {"fail", "time out", "retry fails"},
                    duration=value,
                    now=now,
                    random_number=0.5,
                    timed_out="time out" in action,
                    is_retry=is_retry,
                )
        assert complete_state(slow) == complete_state(fast)


@pytest.mark.parametrize("reads_counts", [False, True])
def test_try_count_success_after_the_end_of_a_bucket(*, reads_counts: bool) -> None:
    """A success can open the breaker, and is left to record(), when others have left the window."""
    breaker = Breaker(min_calls=4, min_span=0)
    run(breaker, "....", now=0.0)
    run(breaker, "xxx.", now=5.0)
    assert breaker.try_count_success(breaker.generation, 5.5)
    if reads_counts:
        assert (5, 3, 0) == breaker.counts(10.5)
    assert not breaker.try_count_success(breaker.generation, 10.5)
    run(breaker, ".", now=10.5)
    assert breaker.state is OPEN


def test_half_open_continues_a_count_of_openings() -> None:
    """half_open(n) admits a probe at once, and a failed probe is opening number n + 1."""
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


def test_times_can_be_timedeltas() -> None:
    seconds: dict[str, Any] = {
        "window": 20,
        "min_span": 0.5,
        "slow_after": 2,
        "open_for": 30,
        "max_open": 60,
    }
    times: dict[str, Any] = {name: timedelta(seconds=value) for name, value in seconds.items()}

    assert complete_state(Breaker(**seconds)) == complete_state(Breaker(**times))
    with pytest.raises(ConfigurationError, match=r"at least open_for \(30\), got 29"):
        Breaker(open_for=timedelta(seconds=30), max_open=timedelta(seconds=29))
