"""For tests of programs that use tarry: no waiting, few attempts, virtual time, captured events."""

from __future__ import annotations

from tarry.testing.clock import VirtualClock
from tarry.testing.controls import capped_attempts, captured_events, no_wait, scripted_random

__all__ = ["VirtualClock", "capped_attempts", "captured_events", "no_wait", "scripted_random"]
