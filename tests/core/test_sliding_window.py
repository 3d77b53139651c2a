"""Tests for the sliding window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.sliding_window import SlidingWindow


def add(window: SlidingWindow, now: float, column: int = 0) -> None:
    """Count one event, with the same code that the callers have inline."""
    if now >= window.bucket_end:
        window.advance(now)
    window.current[column] += 1


def total(window: SlidingWindow, now: float, column: int = 0) -> int:
    """Return the count at `now`."""
    if now >= window.bucket_end:
        window.advance(now)
    return window.total(column)


def test_new_window_is_empty() -> None:
    """In a new window every column is 0."""
    assert [0, 0, 0] == [SlidingWindow(10.0, 3).total(column) for column in range(3)]


def test_buckets_leave_one_by_one() -> None:
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
    """An event changes only the count of its own column, also when it leaves the window."""
    window = SlidingWindow(10.0, 3)
    add(window, 0.0, column=0)
    add(window, 5.0, column=2)
    assert [1, 0, 1] == [total(window, 9.0, column) for column in range(3)]
    assert [0, 0, 1] == [total(window, 10.0, column) for column in range(3)]


def test_a_time_before_the_newest_bucket() -> None:
    window = SlidingWindow(10.0, 1)
    add(window, 25.0)
    window.advance(24.0)
    window.current[0] += 1
    assert 26.0 == window.bucket_end
    assert 2 == total(window, 34.9)
    assert 0 == total(window, 35.0)


def test_clear() -> None:
    """A cleared window is empty and counts later events."""
    window = SlidingWindow(10.0, 2)
    for second in range(12):
        add(window, float(second), second % 2)
    window.clear()
    assert [0, 0] == [total(window, 11.0, column) for column in range(2)]
    add(window, 12.0)
    assert 1 == total(window, 21.9)
    assert 0 == total(window, 22.0)


# Steps of an eighth of a bucket are exact in binary, so that the list has the exact bucket.
steps = st.sampled_from([0, 1, 3, 7, 8, 9, 20, 40, 72, 79, 80, 81, 200, 10_000])


@given(
    st.sampled_from([10.0, 0.625, 2560.0]),
    st.integers(0, 10**9),
    st.lists(st.tuples(steps, st.integers(0, 1), st.booleans()), min_size=8, max_size=40),
)
def test_window_agrees_with_a_list(
    span: float, first: int, events: list[tuple[int, int, bool]]
) -> None:
    """The totals are those of a list of the events in the last ten buckets.

    undo() removes the oldest event of the column from the list, if there is one.
    """
    window = SlidingWindow(span, 2)
    width = span / 10
    eighths = first
    counted: list[tuple[int, int]] = []
    for step, column, undo in events:
        eighths += step
        now = eighths * width / 8
        counted = [(bucket, c) for bucket, c in counted if bucket > eighths // 8 - 10]
        if not undo:
            add(window, now, column)
            counted.append((eighths // 8, column))
        else:
            total(window, now, column)
            window.undo(column)
            oldest = next((event for event in counted if event[1] == column), None)
            if oldest is not None:
                counted.remove(oldest)
        assert [sum(c == column for _, c in counted) for column in range(2)] == [
            window.total(column) for column in range(2)
        ]


def test_undo_removes_the_oldest_event() -> None:
    window = SlidingWindow(10.0, 1)
    for now in (0.0, 2.0, 5.0, 9.0):
        add(window, now)
    window.undo(0)
    window.undo(0)
    assert [2, 2, 2, 1, 0] == [total(window, now) for now in (9.5, 10.0, 12.0, 15.0, 19.0)]


def test_a_time_at_the_rounded_end_of_a_bucket() -> None:
    """Each event at a time that rounding puts at the end of its bucket is counted once."""
    window = SlidingWindow(1.0, 1)
    for _ in range(3):
        add(window, 1.0)  # rounding puts 1.0 in the tenth bucket, 9 * 0.1 to 10 * 0.1
    assert 3 == window.total(0)


def test_undo_without_events() -> None:
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
def test_exact_to_a_tenth_of_the_span(span: float, now: float, fractions: list[float]) -> None:
    """Events of the last 0.9 spans always count, events older than the span never."""
    window = SlidingWindow(span, 1)
    times: list[float] = []
    for fraction in fractions:
        now += fraction * span
        add(window, now)
        times.append(now)
        tolerance = 1e-6 * span + 1e-6  # the precision of a float near a billion seconds
        minimum = sum(now - time < 0.9 * span - tolerance for time in times)
        maximum = sum(now - time <= span + tolerance for time in times)
        assert minimum <= window.total(0) <= maximum


@given(st.floats(1e-3, 1e6), st.floats(0, 1e9))
def test_newest_bucket_contains_now(span: float, now: float) -> None:
    """advance(now) sets the end of the newest bucket to at most a tenth of the span after now."""
    window = SlidingWindow(span, 1)
    window.advance(now)
    tolerance = 1e-6 * span + 1e-6
    assert now - tolerance <= window.bucket_end <= now + span / 10 + tolerance


@pytest.mark.parametrize("span", [5e-324, 1e-300, 1e-9, 1e300, 1.7e308])
@pytest.mark.parametrize("now", [0.0, 1e9])
def test_extreme_spans(span: float, now: float) -> None:
    """An event is counted with the shortest and the longest spans."""
    window = SlidingWindow(span, 1)
    add(window, now)
    assert 1 == window.total(0)
