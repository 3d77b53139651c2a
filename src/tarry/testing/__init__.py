"""Tools for tests of programs that use tarry: skip waits, cap attempts, virtual time, events."""

from __future__ import annotations

from tarry.testing.clock import VirtualClock
from tarry.testing.controls import capped_attempts, captured_events, no_wait, scripted_random

__all__ = ["VirtualClock", "capped_attempts", "captured_events", "no_wait", "scripted_random"]
