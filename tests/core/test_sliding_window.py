"""Tests for the sliding window, compared with a list of all events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.sliding_window import SlidingWindow


def add(window: SlidingWindow, now: float, column: int = 0) -> None:
    """Count one event with the inline code of the callers."""
    if now >= window.bucket_end:
        window.advance(now)
    window.current[column] += 1


def total(window: SlidingWindow, now: float, column: int = 0) -> int:
    """Return the count at `now`."""
    if now >= window.bucket_end:
        window.advance(now)
    return window.total(column)


def test_new_window_is_empty() -> None:
    """Before anything was counted every column is 0."""
    assert [0, 0, 0] == [SlidingWindow(10.0, 3).total(column) for column in range(3)]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (0.0, 1),
        (0.5, 1),
        (1.0, 1),
        (9.0, 1),
        (9.999, 1),  # the last of the ten tenths that began with second 0
        (10.0, 0),
        (10.5, 0),
        (19.0, 0),
        (20.0, 0),
        (10_000.0, 0),
        (1e15, 0),
    ],
)
def test_a_count_is_forgotten_after_the_span(now: float, expected: int) -> None:
    """An event at second 0 counts until ten buckets have passed."""
    window = SlidingWindow(10.0, 1)
    add(window, 0.0)
    assert expected == total(window, now)


def test_tenths_leave_one_by_one() -> None:
    """One event per bucket adds up to ten, and then drops by one per bucket."""
    window = SlidingWindow(10.0, 1)
    filling = []
    for second in range(20):
        add(window, second + 0.5)
        filling.append(window.total(0))
    draining = [total(window, second + 0.5) for second in range(20, 31)]
    assert [*range(1, 11), *[10] * 10] == filling
    assert [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0] == draining


def test_columns_are_separate() -> None:
    """A count in one column shows in no other, also when it leaves."""
    window = SlidingWindow(10.0, 3)
    add(window, 0.0, column=0)
    add(window, 5.0, column=2)
    assert [1, 0, 1] == [total(window, 9.0, column) for column in range(3)]
    assert [0, 0, 1] == [total(window, 10.0, column) for column in range(3)]


def test_a_clock_that_was_read_earlier() -> None:
    """A time before the newest bucket is counted in the newest bucket."""
    window = SlidingWindow(10.0, 1)
    add(window, 25.0)
    window.advance(24.0)
    window.current[0] += 1
    assert 26.0 == window.bucket_end
    assert 2 == total(window, 34.9)
    assert 0 == total(window, 35.0)


def test_clear() -> None:
    """A cleared window is empty, and counts on from there."""
    window = SlidingWindow(10.0, 2)
    for second in range(12):
        add(window, float(second), second % 2)
    window.clear()
    assert [0, 0] == [total(window, 11.0, column) for column in range(2)]
    add(window, 12.0)
    assert 1 == total(window, 21.9)
    assert 0 == total(window, 22.0)


# Steps of an eighth of a tenth are exact in binary, so that the list knows each tenth for sure.
steps = st.sampled_from([0, 1, 3, 7, 8, 9, 20, 40, 72, 79, 80, 81, 200, 10_000])


@given(
    st.sampled_from([10.0, 0.625, 2560.0]),
    st.integers(0, 10**9),
    st.lists(st.tuples(steps, st.integers(0, 1), st.booleans()), min_size=8, max_size=40),
)
def test_counts_what_a_list_counts(
    span: float, first: int, events: list[tuple[int, int, bool]]
) -> None:
    """The totals are those of a list that forgets what is older than ten tenths.

    To take a count back removes the oldest that the list still has, or nothing.
    """
    window = SlidingWindow(span, 2)
    width = span / 10
    eighths = first
    counted: list[tuple[int, int]] = []
    for step, column, take_back in events:
        eighths += step
        now = eighths * width / 8
        counted = [(tenth, c) for tenth, c in counted if tenth > eighths // 8 - 10]
        if not take_back:
            add(window, now, column)
            counted.append((eighths // 8, column))
        else:
            total(window, now, column)
            window.undo(column)
            oldest = next((entry for entry in counted if entry[1] == column), None)
            if oldest is not None:
                counted.remove(oldest)
        assert [sum(c == column for _, c in counted) for column in range(2)] == [
            window.total(column) for column in range(2)
        ]


def test_the_oldest_is_taken_back() -> None:
    """undo() takes back the oldest event."""
    window = SlidingWindow(10.0, 1)
    for now in (0.0, 2.0, 5.0, 9.0):
        add(window, now)
    window.undo(0)
    window.undo(0)
    assert [2, 2, 2, 1, 0] == [total(window, now) for now in (9.5, 10.0, 12.0, 15.0, 19.0)]


def test_a_tenth_that_ends_between_two_numbers() -> None:
    """A time that no fraction can tell from the end of its tenth is counted once each time."""
    window = SlidingWindow(1.0, 1)
    for _ in range(3):
        add(window, 1.0)  # the tenth bucket, 9 * 0.1 to 10 * 0.1, by the rounding of fractions
    assert 3 == window.total(0)


def test_nothing_to_take_back() -> None:
    """undo() without events has no effect."""
    window = SlidingWindow(10.0, 2)
    window.undo(0)
    add(window, 0.0, column=1)
    window.undo(0)
    assert [0, 1] == [total(window, 0.0, column) for column in range(2)]


@given(
    st.floats(1e-3, 1e6),
    st.floats(0, 1e9),
    st.lists(st.floats(0, 1.5), min_size=4, max_size=20),
)
def test_exact_to_a_tenth_of_the_span(span: float, now: float, shares: list[float]) -> None:
    """Events of nine buckets always count, events older than the span never."""
    window = SlidingWindow(span, 1)
    times: list[float] = []
    for share in shares:
        now += share * span
        add(window, now)
        times.append(now)
        grain = 1e-6 * span + 1e-6  # a billion seconds have no finer fractions
        certain = sum(now - time < 0.9 * span - grain for time in times)
        possible = sum(now - time <= span + grain for time in times)
        assert certain <= window.total(0) <= possible


@given(st.floats(1e-3, 1e6), st.floats(0, 1e9))
def test_the_present_tenth_holds_now(span: float, now: float) -> None:
    """After a roll, the present tenth ends after now, and no later than a tenth from now."""
    window = SlidingWindow(span, 1)
    window.advance(now)
    grain = 1e-6 * span + 1e-6
    assert now - grain <= window.bucket_end <= now + span / 10 + grain


@pytest.mark.parametrize("first", [-1e9, -100.0, -10.5, -1.0, -0.1])
def test_times_before_zero(first: float) -> None:
    """A clock may count from anywhere: the window slides before 0 as it does after."""
    window = SlidingWindow(10.0, 1)
    add(window, first)
    assert 1 == total(window, first + 8.9)
    assert 0 == total(window, first + 10.1)


@pytest.mark.parametrize("span", [5e-324, 1e-300, 1e-9, 1e300, 1.7e308])
@pytest.mark.parametrize("now", [0.0, 1e9])
def test_any_positive_span_works(span: float, now: float) -> None:
    """No span that is accepted, however short or long, makes a count fail."""
    window = SlidingWindow(span, 1)
    add(window, now)
    assert 1 == window.total(0)
