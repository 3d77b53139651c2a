from __future__ import annotations

from tarry.service.engine.context import StoreClock


class FakeMonotonicClock:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.time = 50.0

    def __call__(self) -> float:
        """Return the time."""
        return self.time


def test_nothing_is_due_before_the_first_synchronization() -> None:
    """A clock that was never synchronized is far in the past."""
    assert StoreClock(FakeMonotonicClock()).now_ms() < 0


def test_estimate_is_never_ahead_of_the_store() -> None:
    """The estimate assumes that the store read its clock when the reply arrived."""
    monotonic = FakeMonotonicClock()
    clock = StoreClock(monotonic)
    sent_at = clock.local_ms()
    monotonic.time += 0.5
    clock.synchronize(sent_at, 1_000_000)

    assert 1_000_000 == clock.now_ms()
    monotonic.time += 1
    assert (1_001_000, 1001.0) == (clock.now_ms(), clock.now_s())
    monotonic.time += 0.000_75
    assert (1_001_000, 1_001_000.75) == (clock.now_ms(), clock.unrounded_ms())


def test_slow_reply_does_not_replace_a_more_precise_estimate() -> None:
    """A slow reply gives a lower estimate, which does not replace that of a fast reply."""
    monotonic = FakeMonotonicClock()
    clock = StoreClock(monotonic)
    clock.synchronize(clock.local_ms(), 1_000_000)
    sent_at = clock.local_ms()
    monotonic.time += 2.0
    clock.synchronize(sent_at, 1_000_500)  # read half a second after the request was sent

    assert 1_002_000 == clock.now_ms()


def test_store_clock_that_was_set_back_is_followed() -> None:
    """A reply that is too early for any network delay shows that the clock was set back."""
    monotonic = FakeMonotonicClock()
    clock = StoreClock(monotonic)
    clock.synchronize(clock.local_ms(), 1_000_000)
    clock.synchronize(clock.local_ms(), 400_000)

    assert 400_000 == clock.now_ms()


def test_store_clock_that_was_set_forward_is_followed() -> None:
    """A later time of the store replaces the estimate."""
    monotonic = FakeMonotonicClock()
    clock = StoreClock(monotonic)
    clock.synchronize(clock.local_ms(), 1_000_000)
    clock.synchronize(clock.local_ms(), 9_000_000)

    assert 9_000_000 == clock.now_ms()
