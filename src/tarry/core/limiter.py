"""Limits on what is sent to a dependency at all, first attempts included.

A limiter is anything with the three methods of `Limiter`. After an outage its limit ramps:
recovery is a slope, not a wall. It belongs to one downstream, whose lock is held while it works:
it must not call back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tarry.core.checks import check_count, check_positive
from tarry.core.outcome import Kind
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from tarry.core.outcome import Outcome


class Limiter(Protocol):
    """What a downstream needs of a limiter."""

    def acquire(self, now: float) -> float | None:
        """Let an attempt through after the seconds returned (mostly 0), or answer None: full."""
        ...

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Learn that an attempt ended; None stands for one that came to no result."""
        ...

    def on_recovery(self, now: float) -> None:
        """Learn that the dependency has just come back from an outage: begin low."""
        ...


class InFlight:
    """At most `limit` attempts at a time. After an outage the cap grows from 1 within `ramp` s."""

    __slots__ = ("_limit", "_ramp", "_recovered", "_running")

    def __init__(self, limit: int, *, ramp: float = 10.0) -> None:
        self._limit = check_count("limit", limit)
        self._ramp = check_positive("ramp", ramp)
        self._running = 0
        self._recovered: float | None = None

    def limit(self, now: float) -> int:
        """Return the cap in force."""
        if self._recovered is None:
            return self._limit
        share = (now - self._recovered) / self._ramp
        if share < 0:  # the clock was set back: the ramp goes on from here
            self._recovered, share = now, 0.0
        if share >= 1:
            self._recovered = None
            return self._limit
        return max(1, int(self._limit * share))

    def acquire(self, now: float) -> float | None:
        """Take a place."""
        limit = self._limit if self._recovered is None else self.limit(now)
        if self._running >= limit:
            return None
        self._running += 1
        return 0.0

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:  # noqa: ARG002
        """Give the place back."""
        self._running -= 1

    def on_recovery(self, now: float) -> None:
        """Begin the ramp."""
        self._recovered = now


class AIMD:
    """A concurrency limit that finds itself: one more per round of successes, less on overload.

    The limit shrinks by `backoff` at most once per round trip: only a failure of an attempt
    that began after the last cut speaks about the present limit.
    """

    __slots__ = ("_backoff", "_cut", "_limit", "_max", "_min", "_running")

    def __init__(
        self,
        *,
        initial: int = 10,
        min_limit: int = 1,
        max_limit: int = 200,
        backoff: float = 0.7,
    ) -> None:
        self._min = check_count("min_limit", min_limit)
        self._max = check_count("max_limit", max_limit)
        self._limit = float(check_count("initial", initial))
        if not min_limit <= initial <= max_limit:
            rule = f"must lie from min_limit to max_limit, got {initial}"
            raise ConfigurationError("initial", rule)
        if not 0 < check_positive("backoff", backoff) < 1:
            raise ConfigurationError("backoff", "must be less than 1", backoff)
        self._backoff = backoff
        self._running = 0
        self._cut = float("-inf")

    @property
    def limit(self) -> int:
        """The limit in force."""
        return int(self._limit)

    def acquire(self, now: float) -> float | None:  # noqa: ARG002 - part of the protocol
        """Take a place."""
        if self._running >= int(self._limit):
            return None
        self._running += 1
        return 0.0

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Give the place back and learn from the outcome."""
        # An unused limit proves nothing: it grows only while it is what holds attempts back.
        pressed = self._running * 2 > self._limit
        self._running -= 1
        if outcome is None:
            return
        if outcome.counts_as_failure:
            if now - duration >= self._cut:
                self._limit = max(self._min, self._limit * self._backoff)
                self._cut = now
        elif pressed and outcome.kind is Kind.SUCCESS:
            self._limit = min(self._max, self._limit + 1 / self._limit)

    def on_recovery(self, now: float) -> None:
        """Begin from the least limit."""
        self._limit = float(self._min)
        self._cut = now


class AdaptiveRate:
    """The adaptive mode of the AWS SDKs: off until the first throttle, then a cubic rate.

    A bucket is filled at `rate`; each attempt takes a token, or the place in line that comes
    after the tokens owed. A place further off than `max_wait` seconds is refused.
    """

    __slots__ = (
        "_bucket_time",
        "_filled_at",
        "_inflection",
        "_max_wait",
        "_peak",
        "_seen",
        "_throttled_at",
        "_tokens",
        "measured",
        "rate",
    )

    _BETA, _SCALE, _SMOOTH, _LEAST = 0.7, 0.4, 0.8, 0.5

    def __init__(self, *, max_wait: float = 30.0) -> None:
        self._max_wait = check_positive("max_wait", max_wait)
        self.rate: float | None = None
        """Attempts per second in force; None while no throttle was seen."""
        self.measured: float = 0.0
        """Attempts per second that were really made, smoothed."""
        self._tokens = 0.0
        self._filled_at = 0.0
        self._bucket_time: float | None = None
        self._seen = 0
        self._peak = 0.0
        self._throttled_at = 0.0
        self._inflection = 0.0

    def acquire(self, now: float) -> float | None:
        """Take a token or a place in line."""
        if self.rate is None:
            return 0.0
        self._fill(now)
        wait = (1 - self._tokens) / self.rate
        if wait > self._max_wait:
            return None
        self._tokens -= 1
        return max(0.0, wait)

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Measure the rate, and set the next one from it; take back a token that was not used."""
        if outcome is None:
            self._tokens += self.rate is not None and duration <= 0  # it was never sent
            return
        self._measure(now)
        if outcome.kind is Kind.THROTTLED:
            present = self.measured if self.rate is None else min(self.measured, self.rate)
            self._peak = present
            self._throttled_at = now
            self._inflection = (present * (1 - self._BETA) / self._SCALE) ** (1 / 3)
            target = self._BETA * present
        elif self.rate is None:
            return
        else:
            since = now - self._throttled_at - self._inflection
            target = self._SCALE * since**3 + self._peak
        self._fill(now)
        self.rate = max(self._LEAST, min(target, 2 * self.measured))
        self._tokens = min(self._tokens, max(1.0, self.rate))

    def on_recovery(self, now: float) -> None:
        """Begin at the least rate, on the flat part of the cubic, and climb from there."""
        if self.rate is not None:
            self._fill(now)
            self.rate = self._LEAST
            self._tokens = min(self._tokens, 1.0)
            self._throttled_at = now
            self._peak, self._inflection = self._LEAST, 0.0

    def _fill(self, now: float) -> None:
        if self.rate is not None:
            earned = max(0.0, now - self._filled_at) * self.rate
            self._tokens = min(max(1.0, self.rate), self._tokens + earned)
        self._filled_at = max(self._filled_at, now)

    def _measure(self, now: float) -> None:
        """Count attempts in half-second buckets."""
        bucket = int(now * 2) / 2
        if self._bucket_time is None:
            self._bucket_time = bucket
        self._seen += 1
        if bucket > self._bucket_time:
            rate = self._seen / (bucket - self._bucket_time)
            self.measured = self._SMOOTH * rate + (1 - self._SMOOTH) * self.measured
            self._seen = 0
            self._bucket_time = bucket
