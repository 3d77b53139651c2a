"""The circuit breaker: closed, open, half-open, and the states that an operator sets.

Theory of operation
===================

A breaker estimates whether calls to a dependency are worth making. While they are not, it rejects
them: the caller need not wait for a failure, and the dependency can recover.

    CLOSED ──too many failures──▶ OPEN ──time is up──▶ HALF_OPEN ──probes succeed──▶ CLOSED
                                   ▲                       │
                                   └──too many probes fail─┘   (open for longer each time)

What is estimated
-----------------

Closed: the share of attempts that fail (`failure_rate`) and of those that are slow (`slow_rate`),
in a sliding window of the last seconds, and the numbers of failures and of time-outs in a row. Each
is compared with its limit when an attempt ends.

A share of few attempts says little, so both shares need at least `min_calls` calls. A retry adds no
call: it often fails for the same reason as the attempt before, so 20 calls with 3 retries each
would look like 80 independent failures. But retries are attempts, so they count in the shares.

A short interruption (a *blip*) such as a restart of the dependency ends all running attempts at the
same moment, and may fail all that start in the same moment. A breaker that opened then would reject
calls to a dependency that already works. So for `failure_rate`, the failed attempts must also have
started, and ended, at least `min_span` apart.

Half-open: whether the dependency has recovered. A *probe* is a call that a half-open breaker admits
to find out. `probes` of them run at a time. `close_after` successes close the breaker; it re-opens
as soon as so many probes have failed that fewer than `close_after` of `probes` can succeed.

Permits and generations
-----------------------

`admit` returns a permit, a number that identifies the call when its result is recorded. Every
change of state starts a new *generation*. The permit of a probe is a unique number. The permit of
any other call is the number of the current generation. The result of a call from an earlier
generation is not counted, because it is no evidence about the current state.

Speed
-----

Most calls succeed while the breaker is closed. `try_count_success` counts such a success with one
addition, if two attributes show that it cannot change the state: `can_count_success` (there
is no failure in the window) and `_cannot_open_until_next_bucket` (the share of failures is below
the limit, and successes only lower it). Otherwise, `record` evaluates all rules.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from tarry.core.checks import (
    Seconds,
    check_at_least,
    check_count,
    check_one_of,
    check_positive,
    check_ratio,
    reject_unknown_arguments,
    to_seconds,
)
from tarry.core.sliding_window import SlidingWindow
from tarry.errors import ConfigurationError, ConfigurationTypeError

if TYPE_CHECKING:
    from typing import Never


class BreakerState(StrEnum):
    """The state of a breaker. An operator sets the last three.

    FORCED_OPEN: rejects all calls. DISABLED: admits all calls and counts none. METRICS_ONLY: admits
    and counts all calls, but never opens.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    FORCED_OPEN = "forced-open"
    DISABLED = "disabled"
    METRICS_ONLY = "metrics-only"


_CLOSED, _OPEN, _HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
_FORCED_OPEN, _DISABLED = BreakerState.FORCED_OPEN, BreakerState.DISABLED
_MANUAL_STATES = {
    "open": _FORCED_OPEN,
    "closed": _CLOSED,
    "disabled": _DISABLED,
    "metrics-only": BreakerState.METRICS_ONLY,
}
_CALLS, _RETRIES, _FAILURES, _SLOW = range(4)
"""The columns of the sliding window, one for each kind of event. The attempts are the sum of the
first two: `_CALLS` counts the first attempt of each call. Failed and slow attempts are counted in
`_FAILURES` and `_SLOW` too."""
_OTHER_ARGUMENT_NAMES = {
    "fail_max": "consecutive", "failure_threshold": "consecutive", "reset_timeout": "open_for",
    "recovery_timeout": "open_for",
}  # fmt: skip
"""Arguments of pybreaker and circuitbreaker, with the corresponding arguments of `Breaker`."""
_GENERATION_STEP = 1 << 40
"""Large enough that the permits of probes never reach the next generation."""


class Breaker:
    """A circuit breaker: rejects calls to a failing dependency, and tests whether it recovered.

    It opens when, of the attempts in the last `window` seconds, the fraction `failure_rate` or more
    failed, or the fraction `slow_rate` or more took longer than `slow_after` seconds. Both rules
    need at least `min_calls` calls in the window. A call counts once, with its first attempt; with
    `count_retries`, each retry counts as another call. For the first rule, failed attempts must
    have started at least `min_span` seconds apart, and ended at least `min_span` seconds apart.
    Without these conditions, a few calls and their retries during a short interruption, or a
    restart that resets all running calls, would open the breaker.

    It also opens after `consecutive` failed attempts in a row, and after `timeouts` time-outs in a
    row if the window has no success. The latter is for dependencies with few calls.

    It stays open for `open_for` seconds. Each time it re-opens, this period grows by the factor
    `growth`, up to `max_open`. A random part of up to `spread` times the period is added. After the
    period it admits `probes` calls at a time. It closes once `close_after` of these calls have
    succeeded (by default all of them), and re-opens as soon as so many have failed that fewer than
    `close_after` of `probes` can succeed.

    Times are seconds or a `timedelta`.
    """

    __slots__ = (
        "_cannot_open_until_next_bucket", "_failure_share_to_open", "_failures_in_a_row",
        "_failures_in_a_row_to_open", "_first_failed_end", "_first_failed_start", "_growth",
        "_has_optional_rules", "_last_failed_end", "_last_failed_start", "_last_probe_permit",
        "_max_open", "_min_calls", "_min_failure_span", "_open_for", "_open_until",
        "_probe_failures", "_probe_successes", "_probe_successes_to_close", "_retry_column",
        "_running_probes", "_slow_after", "_slow_share_to_open", "_spread", "_timeouts_in_a_row",
        "_timeouts_in_a_row_to_open", "_window", "can_count_success", "consecutive_opens",
        "generation", "is_tripped", "permit_if_closed", "probes", "state",
    )  # fmt: skip

    def __init__(
        self,
        *,
        failure_rate: float = 0.5,
        min_calls: int = 20,
        window: Seconds = 10.0,
        min_span: Seconds = 1.0,
        count_retries: bool = False,
        consecutive: int | None = None,
        timeouts: int | None = None,
        slow_after: Seconds | None = None,
        slow_rate: float = 0.5,
        open_for: Seconds = 2.0,
        growth: float = 2.0,
        max_open: Seconds = 300.0,
        spread: float = 0.1,
        probes: int = 3,
        close_after: int | None = None,
        **unknown: Never,
    ) -> None:
        known = Breaker.__init__.__kwdefaults__ or ()
        reject_unknown_arguments("tarry.Breaker", unknown, known, _OTHER_ARGUMENT_NAMES)
        self._failure_share_to_open = check_ratio("failure_rate", failure_rate)
        self._min_calls = check_count("min_calls", min_calls)
        self._window = SlidingWindow(check_positive("window", to_seconds(window)), 4)
        self._min_failure_span = check_at_least("min_span", to_seconds(min_span), 0)
        if not isinstance(count_retries, bool):
            raise ConfigurationTypeError("count_retries", "must be True or False", count_retries)
        self._retry_column = _CALLS if count_retries else _RETRIES
        self._failures_in_a_row_to_open = (
            None if consecutive is None else check_count("consecutive", consecutive)
        )
        self._timeouts_in_a_row_to_open = (
            None if timeouts is None else check_count("timeouts", timeouts)
        )
        self._slow_after = (
            None if slow_after is None else check_positive("slow_after", to_seconds(slow_after))
        )
        self._slow_share_to_open = check_ratio("slow_rate", slow_rate)
        self._open_for = check_positive("open_for", to_seconds(open_for))
        self._growth = check_at_least("growth", growth, 1)
        self._max_open = check_positive("max_open", to_seconds(max_open))
        if self._max_open < self._open_for:
            rule = f"must be at least open_for ({self._open_for:g}), got {self._max_open:g}"
            raise ConfigurationError("max_open", rule)
        self._spread = check_at_least("spread", spread, 0)
        self.probes: int = check_count("probes", probes)
        """Number of calls admitted at a time while half-open."""
        self._probe_successes_to_close = self.probes
        if close_after is not None:
            self._probe_successes_to_close = check_count("close_after", close_after)
            if close_after > probes:
                rule = f"must be at most probes ({probes})"
                raise ConfigurationError("close_after", rule, close_after)

        self.state: BreakerState = _CLOSED
        self.generation: int = 0
        self.is_tripped: bool = False
        """Whether the breaker is open or half-open; not while it is forced open."""
        self.permit_if_closed: int | None = 0
        """The permit that `admit` returns while the breaker is closed; None in other states."""
        # Both are False with `slow_after` (a success may be slow), and after a time-out (a success
        # ends the time-outs in a row).
        self.can_count_success: bool = self._slow_after is None
        """True while the window has no failure. Then a success cannot open or close the breaker."""
        self._cannot_open_until_next_bucket = self.can_count_success
        """True while the share of failures is below `failure_rate`, in the newest bucket.

        Until that bucket ends, a success only lowers the share. Without a new failure, the share
        rises only when an old bucket leaves the window.
        """
        # The rules `consecutive`, `timeouts` and `slow_after`
        self._has_optional_rules = (consecutive, timeouts, slow_after) != (None, None, None)
        self._failures_in_a_row = 0
        self._timeouts_in_a_row = 0
        # The earliest and the latest start, and the first and the last end, of the attempts that
        # have failed since the window was last without failures. A blip can fail attempts that
        # start together but end at different times, and it can reset attempts that started at
        # different times.
        self._first_failed_start = self._last_failed_start = 0.0
        self._first_failed_end = self._last_failed_end = 0.0
        self.consecutive_opens: int = 0
        """Number of times the breaker has opened since it was last closed."""
        self._open_until = 0.0
        self._running_probes: dict[int, float] = {}  # start times by permit
        self._last_probe_permit = 0
        self._probe_successes = self._probe_failures = 0

    def admit(self, now: float) -> int | None:
        """Return a permit for a call, or None when the call is rejected."""
        state = self.state
        if state is _CLOSED:
            return self.generation
        if state is _OPEN and now >= self._open_until:
            state = self._set_state(_HALF_OPEN)
        if state is _HALF_OPEN:
            return self._admit_probe(now)
        return None if state is _OPEN or state is _FORCED_OPEN else self.generation

    def would_admit(self, now: float) -> bool:
        """Return whether `admit` would return a permit. Changes no state."""
        state = self.state
        if state is _CLOSED:
            return True
        if state is _HALF_OPEN:
            return self._count_running_probes(now) < self.probes
        is_waiting = state is _OPEN and now < self._open_until
        return not is_waiting and state is not _FORCED_OPEN

    def try_count_success(self, permit: int, now: float, is_retry: bool = False) -> bool:  # noqa: FBT001, FBT002 - positional for speed
        """Count a success if it cannot open or close the breaker.

        Return whether it was counted; if not, the caller must use `record`. This is the hot path.
        """
        if permit != self.generation:
            return False
        window = self._window
        if self.can_count_success:
            if now >= window.bucket_end:
                window.advance(now)
        elif self._cannot_open_until_next_bucket and now < window.bucket_end:
            self._failures_in_a_row = self._timeouts_in_a_row = 0
        else:
            return False
        window.current[self._retry_column if is_retry else _CALLS] += 1
        return True

    def record(
        self,
        permit: int,
        failed: bool,  # noqa: FBT001 - positional for speed
        duration: float,
        now: float,
        random_number: float,
        *,
        timed_out: bool = False,
        is_retry: bool = False,
    ) -> None:
        """Record the result of an attempt; `random_number` (from [0, 1)) spreads the open time.

        `timed_out`: the attempt failed because it took too long. `is_retry`: it is not the first
        attempt of its call, and by default does not count towards `min_calls`.
        """
        state, slow_after = self.state, self._slow_after
        is_slow = slow_after is not None and duration > slow_after
        if state is _HALF_OPEN:
            if permit > self.generation:  # a probe of this generation, perhaps one that hung
                self._running_probes.pop(permit, None)
                self._record_probe(now, random_number, is_success=not failed and not is_slow)
            return
        if permit != self.generation or state is _DISABLED:
            return
        window = self._window
        if now >= window.bucket_end:
            window.advance(now)
        current, past = window.current, window.past
        current[self._retry_column if is_retry else _CALLS] += 1
        if is_slow:
            current[_SLOW] += 1
        if failed:
            self._extend_failure_span(now - duration, now)
            current[_FAILURES] += 1
            self._failures_in_a_row += 1
        else:
            self._failures_in_a_row = 0
        self._timeouts_in_a_row = self._timeouts_in_a_row + 1 if timed_out else 0
        failure_count = past[_FAILURES] + current[_FAILURES]
        self.can_count_success = slow_after is None and not (failure_count or timed_out)
        call_count = past[_CALLS] + current[_CALLS]
        attempt_count = call_count + past[_RETRIES] + current[_RETRIES]
        # A division, because 0.07 * 100 is slightly above 7: with a share of 0.07, 7 failures of
        # 100 attempts would not reach it.
        is_failure_share_reached = failure_count / attempt_count >= self._failure_share_to_open
        self._cannot_open_until_next_bucket = slow_after is None and not (
            is_failure_share_reached or timed_out
        )
        if state is not _CLOSED:
            return
        if (
            is_failure_share_reached
            and call_count >= self._min_calls
            and self._last_failed_start - self._first_failed_start >= self._min_failure_span
            and self._last_failed_end - self._first_failed_end >= self._min_failure_span
        ) or (
            self._has_optional_rules
            and (failed or slow_after is not None)
            and self._is_optional_rule_met(call_count, attempt_count, failure_count)
        ):
            self._open(now, random_number)

    def forget_probes(self) -> None:
        """Admit new probes in place of those that run: their results will never be recorded."""
        self._running_probes.clear()

    def release(self, permit: int) -> None:
        """Release the permit of a call without a result; count no success or failure."""
        self._running_probes.pop(permit, None)

    def force(self, state: str) -> None:
        """Set the state: "open" (FORCED_OPEN), "closed", "disabled" or "metrics-only".

        A closed breaker then opens as usual. In the other states it stays until the next `force`.
        """
        check_one_of("state", state, _MANUAL_STATES)
        self.consecutive_opens = 0
        self._set_state(_MANUAL_STATES[state])

    def half_open(self, consecutive_opens: int) -> None:
        """Start to probe a dependency whose breaker was opened by another process.

        `consecutive_opens` is the number of times that the other process opened it in a row.
        """
        self.consecutive_opens = consecutive_opens
        self._set_state(_HALF_OPEN)

    def retry_after(self, now: float) -> float | None:
        """Return the seconds until a probe is admitted; None unless the breaker is tripped.

        While all probes of a half-open breaker run, this is the time until the oldest one counts as
        hung. A probe is admitted sooner if one of them ends.
        """
        if not self.is_tripped:
            return None
        if self.would_admit(now):
            return 0.0
        if self.state is _OPEN:
            return self._open_until - now
        latest_hung = now - self._open_for
        starts = [start for start in self._running_probes.values() if start > latest_hung]
        return min(starts) - latest_hung

    def counts(self, now: float) -> tuple[int, int, int]:
        """Return the numbers of attempts, failed attempts and slow attempts in the window."""
        if now >= self._window.bucket_end:
            self._window.advance(now)
            self._cannot_open_until_next_bucket = self.can_count_success
        total = self._window.total
        return total(_CALLS) + total(_RETRIES), total(_FAILURES), total(_SLOW)

    def _extend_failure_span(self, started: float, now: float) -> None:
        """Update the span of the failures. Attempts may end in another order than they started."""
        self._last_failed_end = now
        # If `now` is before the first end, the clock was set back: measure the span from `now`.
        if not self._window.total(_FAILURES) or now < self._first_failed_end:
            self._first_failed_start = self._last_failed_start = started
            self._first_failed_end = now
        elif started > self._last_failed_start:
            self._last_failed_start = started
        elif started < self._first_failed_start:
            self._first_failed_start = started

    def _is_optional_rule_met(
        self, call_count: int, attempt_count: int, failure_count: int
    ) -> bool:
        limit = self._failures_in_a_row_to_open
        if limit is not None and self._failures_in_a_row >= limit:
            return True
        limit = self._timeouts_in_a_row_to_open
        # With many concurrent calls, several can time out in a row while others succeed.
        is_without_success = failure_count == attempt_count
        if limit is not None and self._timeouts_in_a_row >= limit and is_without_success:
            return True
        if self._slow_after is None or call_count < self._min_calls:
            return False
        return self._window.total(_SLOW) / attempt_count >= self._slow_share_to_open

    def _count_running_probes(self, now: float) -> int:
        """Return the number of probes without a result.

        A probe that started at least `open_for` seconds ago is not counted, so that a call that
        hangs cannot keep the breaker half-open for ever. Its result still counts: otherwise, no
        result would ever count if all calls take longer than `open_for`.
        """
        return sum(started > now - self._open_for for started in self._running_probes.values())

    def _admit_probe(self, now: float) -> int | None:
        if self._count_running_probes(now) >= self.probes:
            return None
        latest_hung = now - self._open_for  # older probes hang: see `_count_running_probes`
        running = self._running_probes.items()
        self._running_probes = {permit: start for permit, start in running if start > latest_hung}
        self._last_probe_permit += 1
        self._running_probes[self._last_probe_permit] = now
        return self._last_probe_permit

    def _record_probe(self, now: float, random_number: float, *, is_success: bool) -> None:
        if is_success:
            self._probe_successes += 1
            if self._probe_successes >= self._probe_successes_to_close:
                self.consecutive_opens = 0
                self._set_state(_CLOSED)
        else:
            self._probe_failures += 1
            if self._probe_failures > self.probes - self._probe_successes_to_close:
                self._open(now, random_number)

    def _open(self, now: float, random_number: float) -> None:
        try:
            period = min(self._max_open, self._open_for * self._growth**self.consecutive_opens)
        except OverflowError:
            period = self._max_open
        self.consecutive_opens += 1
        self._open_until = now + period * (1 + self._spread * random_number)
        self._set_state(_OPEN)

    def _set_state(self, state: BreakerState) -> BreakerState:
        self.state = state
        self.generation = self._last_probe_permit = self.generation + _GENERATION_STEP
        self._failures_in_a_row = self._timeouts_in_a_row = 0
        self._running_probes.clear()
        self._probe_successes = self._probe_failures = 0
        self._window.clear()
        self.is_tripped = state is _OPEN or state is _HALF_OPEN
        self.permit_if_closed = self.generation if state is _CLOSED else None
        self.can_count_success = state is _CLOSED and self._slow_after is None
        self._cannot_open_until_next_bucket = self.can_count_success
        return state
