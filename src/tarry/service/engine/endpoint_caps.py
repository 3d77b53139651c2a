"""The limits of rate and concurrency that all lanes of one tenant and endpoint share."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tarry.core.outcome import Outcome

_BURST_S = 0.02  # attempts of 20 ms may start together, as with `AdaptiveLimit`
_CLOCK_ERROR_S = 1e-6  # shorter delays are rounding errors of times in epoch seconds
_MAX_SET_BACK_S = 1.0  # if the clock was set back further, `delay` forgets earlier starts


class EndpointCap:
    """A limiter that lanes share, so that lane keys do not multiply the limits of an endpoint.

    An attempt is rejected while `max_in_flight` attempts run, or if it would exceed `max_rate`. Its
    lane then waits until the worker continues it.
    """

    __slots__ = ("__weakref__", "_in_flight", "_interval_s", "_max_in_flight", "_next_start_at")

    def __init__(self) -> None:
        self._in_flight = 0
        self._max_in_flight: float = inf
        self._interval_s = 0.0  # between two starts; 0: the rate is not limited
        self._next_start_at = -inf  # if starts were evenly spaced; a burst may start earlier

    def configure(self, *, max_rate: float | None, max_in_flight: int | None) -> None:
        """Set the limits; attempts in flight stay counted."""
        self._interval_s = 0.0 if max_rate is None else 1 / max_rate
        self._max_in_flight = inf if max_in_flight is None else max_in_flight

    @property
    def is_full(self) -> bool:
        """Whether as many attempts run as are allowed."""
        return self._in_flight >= self._max_in_flight

    def delay(self, now: float) -> float:
        """Return the seconds until the rate admits an attempt.

        If the clock was set back far, this resets `_next_start_at` to now.
        """
        burst_s = max(0.0, _BURST_S - self._interval_s)
        if self._next_start_at > now + burst_s + self._interval_s + _MAX_SET_BACK_S:
            self._next_start_at = now
        delay = self._next_start_at - burst_s - now
        return delay if delay > _CLOCK_ERROR_S else 0.0

    def admits(self, now: float) -> bool:
        """Return whether an attempt may start; may reset `_next_start_at`, see `delay`."""
        return not (self.is_full or self.delay(now))

    def acquire(self, now: float) -> float | None:
        """Count the start of an attempt and return 0.0, or return None to reject the attempt."""
        if not self.admits(now):
            return None
        self._in_flight += 1
        if self._interval_s:
            self._next_start_at = max(self._next_start_at, now) + self._interval_s
        return 0.0

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:  # noqa: ARG002 - part of the protocol
        """Count the end of an attempt. If it was not sent, the next one may start in its place."""
        self._in_flight -= 1
        if outcome is None and duration <= 0:
            self._next_start_at -= self._interval_s

    def on_recovery(self, now: float) -> None:
        """Do nothing: the limiter of each lane raises its rate slowly."""
