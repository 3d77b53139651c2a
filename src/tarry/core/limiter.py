"""Limiters limit all attempts to a dependency, whereas a retry budget limits only retries.

A limiter is any object with the three methods of `Limiter`. After an outage its limit rises slowly,
so that a recovering dependency does not get the full load at once. A limiter belongs to one
`tarry.Downstream` (the state kept for one dependency), whose lock is held during every method of
the limiter. A method that calls the `Downstream` would deadlock.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Protocol

from tarry.core.checks import Seconds, check_count, check_positive, to_seconds
from tarry.core.outcome import Kind, Outcome
from tarry.errors import ConfigurationError


class Limiter(Protocol):
    """The interface of a limiter.

    If a limiter also has an attribute `handles_throttling` that is true, the breaker of its
    downstream does not count throttled attempts as failures. If it has a method `forget_attempts`,
    that is called in a forked child, where the running attempts of the parent do not end.
    """

    def acquire(self, now: float) -> float | None:
        """Return the seconds to wait before the attempt (usually 0), or None to reject it."""
        ...

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Release what `acquire` took.

        `outcome` is None for an attempt that is no evidence about the dependency, for example a
        cancelled attempt, and for an attempt that was not sent; the latter has a duration of 0.
        """
        ...

    def on_recovery(self, now: float) -> None:
        """Lower the limit and let it rise again. Called when the dependency has recovered."""
        ...


class InFlight:
    """A limiter that allows at most `limit` attempts at a time.

    After an outage the limit grows from 1 to `limit` within `ramp` seconds.
    """

    __slots__ = ("_in_flight", "_limit", "_ramp", "_recovered_at", "attempts")

    def __init__(self, limit: int, *, ramp: Seconds = 10.0) -> None:
        self._limit = check_count("limit", limit)
        self._ramp = check_positive("ramp", to_seconds(ramp))
        self._in_flight = 0
        self.attempts: set[int] = set()
        """The ids of attempts with a slot: see `Downstream.forget_attempt`."""
        self._recovered_at: float | None = None

    def limit(self, now: float) -> int:
        """Return the current limit."""
        if self._recovered_at is None:
            return self._limit
        ramp_progress = (now - self._recovered_at) / self._ramp
        if ramp_progress < 0:  # the clock was set back: restart the ramp
            self._recovered_at, ramp_progress = now, 0.0
        if ramp_progress >= 1:
            self._recovered_at = None
            return self._limit
        return max(1, int(self._limit * ramp_progress))

    def acquire(self, now: float) -> float | None:
        """Take a slot, or return None when all are taken."""
        limit = self._limit if self._recovered_at is None else self.limit(now)
        if self._in_flight >= limit:
            return None
        self._in_flight += 1
        return 0.0

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:  # noqa: ARG002 - part of the protocol
        """Release the slot."""
        if self._in_flight:  # not an attempt that `forget_attempts` has forgotten
            self._in_flight -= 1

    def forget_attempts(self) -> None:
        """Free all slots: see `Downstream.forget_attempts`."""
        self._in_flight = 0
        self.attempts.clear()

    def count_attempts(self) -> None:
        """Set the number of taken slots to that of `attempts`: see `Downstream.forget_attempt`."""
        self._in_flight = len(self.attempts)

    def on_recovery(self, now: float) -> None:
        """Start the ramp."""
        self._recovered_at = now


class AIMD:
    """A concurrency limit that adapts: additive increase, multiplicative decrease.

    The limit starts at `initial` and stays between `min_limit` and `max_limit`. If more than half
    of it is used, a success adds `1 / limit`. A failure multiplies it by `decrease_factor`, unless
    the attempt started before the last decrease: that is no evidence about the current limit.
    """

    __slots__ = (
        "_decrease_factor", "_in_flight", "_last_decrease_at", "_limit", "_max", "_min", "attempts",
    )  # fmt: skip

    def __init__(
        self,
        *,
        initial: int = 10,
        min_limit: int = 1,
        max_limit: int = 200,
        decrease_factor: float = 0.7,
    ) -> None:
        self._min = check_count("min_limit", min_limit)
        self._max = check_count("max_limit", max_limit)
        self._limit = float(check_count("initial", initial))
        if not min_limit <= initial <= max_limit:
            raise ConfigurationError("initial", "must be from min_limit to max_limit", initial)
        if not 0 < check_positive("decrease_factor", decrease_factor) < 1:
            raise ConfigurationError("decrease_factor", "must be less than 1", decrease_factor)
        self._decrease_factor = decrease_factor
        self._in_flight = 0
        self.attempts: set[int] = set()
        """The ids of attempts with a slot: see `Downstream.forget_attempt`."""
        self._last_decrease_at = float("-inf")

    @property
    def limit(self) -> int:
        """The current limit."""
        return int(self._limit)

    def acquire(self, now: float) -> float | None:  # noqa: ARG002 - part of the protocol
        """Take a slot, or return None when all are taken."""
        if self._in_flight >= int(self._limit):
            return None
        self._in_flight += 1
        return 0.0

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Release the slot and adapt the limit to the outcome."""
        # If less than half of the limit is used, a success is no evidence for a higher limit.
        is_half_used = self._in_flight * 2 > self._limit
        if self._in_flight:  # not an attempt that `forget_attempts` has forgotten
            self._in_flight -= 1
        if outcome is None:
            return
        if outcome.counts_as_failure:
            if now - duration >= self._last_decrease_at:
                self._limit = max(self._min, self._limit * self._decrease_factor)
                self._last_decrease_at = now
        elif is_half_used and outcome.kind is Kind.SUCCESS:
            self._limit = min(self._max, self._limit + 1 / self._limit)

    def forget_attempts(self) -> None:
        """Free all slots: see `Downstream.forget_attempts`."""
        self._in_flight = 0
        self.attempts.clear()

    def count_attempts(self) -> None:
        """Set the number of taken slots to that of `attempts`: see `Downstream.forget_attempt`."""
        self._in_flight = len(self.attempts)

    def on_recovery(self, now: float) -> None:
        """Start again from the lowest limit."""
        self._limit = float(self._min)
        self._last_decrease_at = now


class AdaptiveRate:
    """The adaptive mode of the AWS SDKs: no limit until an attempt is throttled.

    From then on attempts are limited to `rate`, which rises along a cubic curve as in TCP CUBIC.
    Tokens are added to a bucket at this rate, and each attempt takes one. When the bucket is empty,
    an attempt waits for a token behind the attempts that wait already. It is rejected if it would
    wait longer than `max_wait` seconds. If the rate changes, the waits change too.
    """

    __slots__ = (
        "_bucket_rate", "_cancelled", "_filled_at", "_inflection", "_interval_count",
        "_interval_start", "_peak", "_throttled_at", "_tokens", "last_token", "max_wait",
        "measured", "rate",
    )  # fmt: skip

    # The constants of the AWS SDKs
    _BETA = 0.7  # factor for the rate after throttling
    _SCALE = 0.4  # steepness of the cubic curve
    _SMOOTHING = 0.8  # weight of the newest measurement
    _MIN_RATE = 0.5  # attempts per second

    def __init__(self, *, max_wait: Seconds = 30.0) -> None:
        self.max_wait: float = check_positive("max_wait", to_seconds(max_wait))
        self.rate: float | None = None
        """The current limit in attempts per second; None before the first throttled attempt."""
        self.measured: float = 0.0
        """The measured rate in attempts per second, smoothed."""
        self.last_token: int = 0
        """The number of the token that was taken last; tokens are numbered from 1."""
        self._tokens = 0.0  # negative while attempts wait for a token
        self._cancelled: list[int] = []  # sorted numbers of returned tokens, see `leave_line`
        self._bucket_rate = 1.0  # tokens per second; unlike `rate`, also set before throttling
        self._filled_at: float | None = None
        self._interval_start: float | None = None
        self._interval_count = 0  # attempts that ended in this interval
        self._peak = 0.0  # the rate at the inflection point of the curve
        self._throttled_at: float | None = None  # at first, the time of the first result
        self._inflection = 0.0  # seconds from `_throttled_at` to the inflection point

    def acquire(self, now: float) -> float | None:
        """Take a token. Return the seconds until the attempt can start, or None to reject it."""
        if self.rate is None:
            return 0.0
        self._fill(now)
        wait = (1 - self._tokens) / self.rate
        if wait > self.max_wait:
            return None
        self._tokens -= 1
        self.last_token += 1
        return max(0.0, wait)

    def remaining_wait(self, token: int, now: float) -> float:
        """Return the seconds until the token with this number is available at the current rate."""
        self._fill(now)
        return max(0.0, self._missing_tokens(token) / self._bucket_rate)

    def leave_line(self, token: int) -> None:
        """Record which token an attempt has returned with `release`, because it was not sent.

        The attempts behind it move up. Those before it do not, so its number is stored as long as
        such attempts wait.
        """
        if token == self.last_token:
            self.last_token -= 1
            return
        insort(self._cancelled, token)
        while self._cancelled and self._missing_tokens(self._cancelled[0]) <= 0:
            del self._cancelled[0]  # no attempt before it waits

    def _missing_tokens(self, token: int) -> float:
        """Return how many tokens must be added before the token with this number is available."""
        cancelled_behind = len(self._cancelled) - bisect_right(self._cancelled, token)
        return token - self.last_token - self._tokens + cancelled_behind

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Update `measured` and `rate`; refund the token of an attempt that was not sent."""
        # Every attempt passes here, also before the first throttling, because botocore's bucket
        # fills from the start. So this code has no `min`, `max` and `**`, which are four to eight
        # times slower than a comparison or a product: 1.0 instead of 2.3 us for an attempt.
        if outcome is None:
            if self.rate is not None and duration <= 0:  # the attempt was not sent
                self._tokens += 1
            return
        self._measure(now)
        if self._throttled_at is None:
            self._throttled_at = now
        is_throttled = outcome.kind is Kind.THROTTLED
        if is_throttled:
            old_rate = self.measured if self.rate is None else min(self.measured, self.rate)
            self._peak = old_rate
            self._throttled_at = now
            self._inflection = (old_rate * (1 - self._BETA) / self._SCALE) ** (1 / 3)
            new_rate = self._BETA * old_rate
        else:
            since_inflection = now - self._throttled_at - self._inflection
            cubed = since_inflection * since_inflection * since_inflection
            new_rate = self._SCALE * cubed + self._peak
        max_rate = 2 * self.measured
        self._set_bucket_rate(max_rate if new_rate > max_rate else new_rate, now)  # noqa: FURB136 - for speed
        if is_throttled or self.rate is not None:
            self.rate = self._bucket_rate

    def forget_attempts(self) -> None:
        """Forget the attempts that wait for a token: see `Downstream.forget_attempts`."""
        self._tokens = max(0.0, self._tokens)
        self._cancelled.clear()

    def on_recovery(self, now: float) -> None:
        """Set the lowest rate; it rises slowly at first, from the flat part of the cubic curve."""
        if self.rate is not None:
            self._set_bucket_rate(self._MIN_RATE, now)
            self.rate = self._bucket_rate
            self._throttled_at = now
            self._peak, self._inflection = self._MIN_RATE, 0.0

    def _set_bucket_rate(self, rate: float, now: float) -> None:
        self._fill(now)
        self._bucket_rate = rate if rate > self._MIN_RATE else self._MIN_RATE  # noqa: FURB136 - for speed

    def _fill(self, now: float) -> None:
        rate, tokens, filled_at = self._bucket_rate, self._tokens, self._filled_at
        if filled_at is None:
            self._filled_at = now
        elif now > filled_at:
            tokens += (now - filled_at) * rate
            self._filled_at = now
        capacity = rate if rate > 1 else 1.0
        self._tokens = capacity if tokens >= capacity else tokens  # noqa: FURB136 - for speed

    def _measure(self, now: float) -> None:
        """Update the measured rate from attempts counted in intervals of half a second."""
        current_start = int(now * 2) / 2
        if self._interval_start is None:
            self._interval_start = current_start
        self._interval_count += 1
        if current_start > self._interval_start:
            rate = self._interval_count / (current_start - self._interval_start)
            self.measured = self._SMOOTHING * rate + (1 - self._SMOOTHING) * self.measured
            self._interval_count = 0
            self._interval_start = current_start
