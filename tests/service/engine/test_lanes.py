"""What a process knows of a lane."""

from __future__ import annotations

from tarry.service.engine.lanes import Lane, protected


def lane(running: int) -> Lane:
    """A lane with some attempts running."""
    made = Lane("tenant/http:a.example:80", protected("a", max_in_flight=10))
    made.running = running
    return made


def test_full_lane_is_not_asked_again_until_an_attempt_ends() -> None:
    """What its limit let through is remembered."""
    full = lane(2)
    before = full.is_full
    full.refused(1000)
    after = full.is_full
    full.running -= 1
    full.ended(1001)
    has_room = not full.is_full
    full.running += 1
    assert (False, True, True, True) == (before, after, has_room, full.is_full)


def test_limit_that_ramps_is_asked_again() -> None:
    """An attempt that ends later shows whether more may run by now."""
    ramping = lane(2)
    ramping.refused(1000)
    ramping.ended(1050)
    assert not ramping.is_full


def test_idle_lane_is_never_full() -> None:
    """Nothing would end there that could open it."""
    idle = lane(0)
    idle.refused(1000)
    assert not idle.is_full
