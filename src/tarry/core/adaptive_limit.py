"""A limiter that finds the capacity of a dependency: a rate and a concurrency limit that adapt.

A control loop sets the rate. It has two unknowns: the *capacity*, which is the rate above which
attempts are refused, and the *base*, which is the share of attempts that fail at any rate, because
some tasks always fail. Below the capacity the share of successes is 1 - base. Above it, the number
of successes per second stays the same, so their share falls as the rate grows. A single share
cannot tell a high base from a low capacity. Two shares at different rates can. The phases:

* Slow start: the rate doubles about every half second while calls succeed.
* Test: after too many failures the rate is lowered to the estimated capacity, which is the
  successes of the last second divided by 1 - base. The results at the lower rate show why the calls
  failed. If the share of successes is 1 - base now, the old rate was above the capacity. Otherwise
  the rate is lowered again. If the share is still the same, the failures do not depend on the rate.
  Then the old rate is restored, and this share of failures is the new base for a minute. But if one
  of several cuts has helped, only the last cut is undone: the rate before the first one was
  refused.
* Probing: the rate follows a cubic curve as in TCP CUBIC (RFC 9438). It returns quickly to the
  capacity that was found, stays there for a while, and then probes for more.
* Waiting: while all attempts are throttled (429), one attempt at a time is started, after the time
  of the last `Retry-After`. The first success has the effect of a recovery from an outage: slow
  start from half of the old rate, with the old base. (If all attempts fail otherwise, the breaker
  opens.)

The constants were chosen in simulations of targets with capacities of 20 to 2,000 calls per second
and latencies of 2 to 500 ms; tests/core/limiter_model.py has the model.
"""

from __future__ import annotations

from math import inf, log, sqrt

from tarry.core.checks import Seconds, check_count, check_positive, to_seconds
from tarry.core.outcome import Kind, Outcome
from tarry.core.sliding_window import SlidingWindow

_SUCCESS, _PERMANENT, _THROTTLED = Kind.SUCCESS, Kind.PERMANENT, Kind.THROTTLED
_SENT, _IGNORED, _FAILURES = range(3)  # columns of the sliding window of one second

_START_RATE = 10.0  # attempts per second after an outage, if no higher rate is known
_START_LIMIT = 8  # attempts at a time, in a new limiter and after an outage
_MIN_RATE = 1.0  # attempts per second; at a lower rate a test would take minutes
_BURST_S = 0.02  # the bucket holds the tokens of 20 ms, so that a timer can start several attempts
_MAX_HINT_S = 60.0  # longest `Retry-After` that delays all attempts, not only its own task
_MAX_SET_BACK_S = 1.0  # if the clock was set back further, the limiter is reset
_CLOCK_ERROR_S = 1e-6  # rounding errors of times in epoch seconds

# Growth. In slow start a success adds 1.4 attempts per second, so the rate grows by the factor e in
# 0.7 s. The step shrinks with the latency L of results, because the rate exceeds the capacity for
# at least L before a failure shows it.
_SLOW_START_STEP = 1.4
_LATENCY_WEIGHT = 6.0  # 1 / s
_MAX_STEP_FACTOR = 2.0  # if some attempts are ignored, see `_raise_rate`
_CUBIC_SCALE = 0.07  # the rate is 7 % above the capacity after two periods of the curve
_MIN_PERIOD_S, _MAX_PERIOD_S = 2.0, 20.0  # of the curve
_PERIOD_GROWTH = 2.0  # factor, each time a cut confirms the capacity
# A period is long enough for this many results at the capacity. With 40, a capacity of 20 per
# second was exceeded by 25 % and more: the rate was far above it when two attempts were refused.
_MIN_PERIOD_RESULTS = 80.0
_MAX_FIRST_PERIOD_S = 4.0  # but not longer, until a second cut has confirmed the capacity
_MAX_CURVE_POSITION = 1.5  # in periods; no cut at 1.24 x the capacity: the estimate was too low

# Detection: the cumulative sum (CUSUM) of failures above the tolerated share. At a rate of up to 88
# per second two consecutive failures exceed the threshold; at a higher rate, about 20 ms of refused
# attempts do. The threshold grows with the variance of the base: with a base of 25 % there is one
# false alarm in about 10,000 results.
_TOLERATED_SHARE = 0.06
_TOLERATED_PER_S = 1.5  # failures per second at low rates, where tests take long
_MIN_THRESHOLD, _THRESHOLD_S = 1.75, 0.02  # in failures; in seconds at the current rate
_UNLIMITED_THRESHOLD = 6.0  # while the rate is not limited
_THRESHOLD_PER_VARIANCE = 36.0

# Cuts
_TEST_RATE_FACTOR = 0.93  # rate of a test, relative to the assumed capacity
_MAX_CAPACITY_FACTOR = 0.97  # upper bound of the capacity, relative to the rate of refused calls
_MIN_CUT_FACTOR = 0.5  # a cut at most halves the rate, because it is based on few results
_MIN_EARLY_CUT_FACTOR = 0.9  # in the first `_MIN_HISTORY_S`, with even fewer results
_MIN_HISTORY_S = 0.7  # a slow start from half of the capacity reaches the capacity in 0.95 s
_PAUSE_S = 0.2  # after a deep cut, until the queues and windows of the target are empty
_LONG_PAUSE_S = 0.5  # after a burst without a rate limit
_SETTLING_S = 0.25  # after a small cut: attempts that start in this time do not count for the test
_TARGET_WINDOW_S = 1.0  # a target that counts calls per second refuses calls until this has passed

# Tests
_MIN_TEST_S = 1.0  # at least one window of a target that counts calls per second
_MAX_TEST_S = 4.0  # at a low rate, if there are at least _MIN_TEST_RESULTS
_MIN_TEST_RESULTS = 8
_MIN_PASSED_RESULTS = 24  # results that confirm a capacity
_MIN_DEAD_RESULTS = 32  # fewer results do not show that a target is down
_PASSING_SHARE = 0.94  # of successes; with fewer the rate is still above the capacity
_MOST_REFUSED_SHARE = 0.5  # of successes, below which most attempts were refused
_DEAD_SHARE = 0.1  # of successes, below which the capacity cannot be estimated
_BELOW_CAPACITY_SHARE = 0.97  # expected share of successes if the rate is below the capacity
_MAX_SHARE_BEFORE = 0.9  # of successes before the cut; a test against a higher share takes too long
_MAX_BASE = 0.85  # keeps the expected share of successes above `_DEAD_SHARE`
_MAX_KEPT_BASE = 0.5  # the largest base that is kept over an outage
_DECISION_LEVEL = 4.0  # log likelihood ratio of Wald's sequential test: 2 % of wrong decisions
_MAX_SMALL_BASE = 0.06  # the largest base that a passed test keeps
_BASE_WEIGHT = 64.0  # weight of that base, in results
_MAX_BASE_AGE_S = 60.0  # a base is measured again, because the target may have recovered

_PASSED, _REFUSED, _UNRELATED, _CHANGED, _DEAD = range(5)
"""Verdicts of a test: the rate is now below the capacity; it is still above it; the failures do not
depend on the rate; the capacity has probably dropped during the test; all attempts are throttled.
"""


class _RateTest:
    """The results of attempts at a lowered rate, and the state before the rate was lowered."""

    __slots__ = (
        "earlier_results", "earlier_successes", "has_changed", "has_history", "has_improved",
        "is_repeated", "likelihood_ratio", "max_ratio", "old_base", "old_capacity", "old_rate",
        "rate_before", "results", "results_before", "share_before", "successes", "throttled",
        "was_unlimited",
    )  # fmt: skip

    old_capacity: float  # 0: not known
    was_unlimited: bool

    def __init__(
        self, *, rate: float, base: float, results: int, successes: int, has_history: bool
    ) -> None:
        self.old_rate, self.old_base = rate, base
        self.earlier_results = self.earlier_successes = 0
        self.is_repeated = False  # whether the rate was lowered more than once
        self.has_changed = False  # whether there was a verdict `_CHANGED`
        self.has_improved = False  # whether a cut has raised the share of successes
        self.results, self.successes = results, successes
        self.restart(rate, has_history=has_history)

    def restart(self, rate: float, *, has_history: bool) -> None:
        """Start a test at a lower rate than `rate`.

        `has_history`: the results so far are enough to estimate the capacity.
        """
        self.has_history = has_history
        self.rate_before, self.results_before = rate, self.results
        highest = _MAX_SHARE_BEFORE * (1 - self.old_base)
        self.share_before = max(_DEAD_SHARE, min(highest, self.share))
        self.earlier_results += self.results
        self.earlier_successes += self.successes
        self.discard_results()

    def discard_results(self) -> None:
        """Start the test again, at the same rate."""
        self.results = self.successes = self.throttled = 0
        self.likelihood_ratio = self.max_ratio = 0.0

    @property
    def share(self) -> float:
        """The share of successes at the current rate."""
        return self.successes / self.results

    @property
    def total_share(self) -> float:
        """The share of successes, including the earlier results."""
        total = self.successes + self.earlier_successes
        return total / (self.results + self.earlier_results)

    @property
    def is_better(self) -> bool:
        """Whether the share of successes is significantly higher than before the cut."""
        before, results = self.share_before, self.results
        deviation = sqrt(before * (1 - before) * (1 / results + 1 / self.results_before))
        return self.share > before + 2 * deviation + 0.02

    @property
    def is_certain(self) -> bool:
        """Whether a passed test has found the capacity."""
        has_results = self.results >= _MIN_PASSED_RESULTS and self.has_history
        return has_results and self.likelihood_ratio >= _DECISION_LEVEL

    def record(self, is_success: bool, elapsed: float, rate: float) -> int | None:  # noqa: FBT001
        """Count a result at `rate`. Return the verdict, or None if more results are needed."""
        self.results += 1
        self.successes += is_success
        results, before = self.results, self.share_before
        # Wald's sequential test: is the share of successes as high as below the capacity, or is it
        # the same as before the cut?
        below = _BELOW_CAPACITY_SHARE * (1 - self.old_base)
        self.likelihood_ratio += (
            log(below / before) if is_success else log((1 - below) / (1 - before))
        )
        self.max_ratio = max(self.max_ratio, self.likelihood_ratio)
        can_change = not (self.has_changed or self.is_repeated)
        change_level = max(_DECISION_LEVEL, self.likelihood_ratio + 2 * _DECISION_LEVEL)
        if can_change and self.max_ratio >= change_level:
            return _CHANGED
        if elapsed < _MIN_TEST_S:
            return None
        if self.throttled == results and results >= _MIN_TEST_RESULTS:
            return _DEAD
        is_late = elapsed >= _MAX_TEST_S and results >= _MIN_TEST_RESULTS
        if not is_late and abs(self.likelihood_ratio) < _DECISION_LEVEL:
            return None
        if self.likelihood_ratio > 0:
            if not is_late and results < _MIN_PASSED_RESULTS:
                return None
            return _PASSED if self.share >= _PASSING_SHARE * (1 - self.old_base) else _REFUSED
        if self.total_share < _DEAD_SHARE:
            is_dead = results + self.earlier_results >= _MIN_DEAD_RESULTS
            return _REFUSED if is_dead else None
        # If the share has changed, the failures depend on the rate. The share before the first cut
        # is not comparable, because the rate was rising.
        is_worse = self.share < before - 2 * sqrt(before * (1 - before) / results)
        # Above the capacity, the accepted calls per second stay the same, so their share rises.
        above_share = min(below, before * self.rate_before / rate)
        is_better = results >= 2 * _MIN_TEST_RESULTS and self.share > (before + above_share) / 2
        return _UNRELATED if self.is_repeated and not (is_worse or is_better) else _REFUSED


class AdaptiveLimit:
    """A limiter with a rate and a concurrency limit that follow the capacity of the dependency.

    A new limiter has no rate limit. The rate is limited after an outage, and as soon as attempts
    are refused; then it stays near the rate that the dependency accepts. Failures that do not
    depend on the rate do not lower it for long. At most `max_in_flight` attempts run at a time; the
    limit starts at 8 and grows with successes, and a time-out halves it. `max_rate` is an upper
    limit of the rate in attempts per second.

    An attempt waits for its turn at the current rate. It is rejected if it would wait longer than
    `max_wait` seconds.
    """

    __slots__ = (
        "_base", "_capacity", "_cusum", "_evidence_from", "_filled_at", "_first_result_at",
        "_hint_until", "_in_flight", "_last_timeout_at", "_latency", "_limit", "_max_in_flight",
        "_max_rate", "_max_wait", "_period", "_rate_before_throttling", "_rate_limited_at",
        "_test", "_tested_at", "_tokens", "_window", "attempts", "rate",
    )  # fmt: skip

    handles_throttling: bool = True
    """The breaker does not count throttled attempts as failures: this limiter reacts to them."""

    def __init__(
        self,
        *,
        max_rate: float | None = None,
        max_in_flight: int = 128,
        max_wait: Seconds = 30.0,
    ) -> None:
        self._max_wait = check_positive("max_wait", to_seconds(max_wait))
        self.rate: float | None = None
        """The current limit in attempts per second; None while the rate is not limited."""
        self._limit = float(_START_LIMIT)
        self._in_flight = 0
        self.attempts: set[int] = set()
        """The ids of attempts with a slot: see `Downstream.forget_attempt`."""
        self._tokens = 0.0  # negative while attempts wait for a token
        self._max_rate = inf
        self._reset_history(0.0)
        self.configure(max_rate=max_rate, max_in_flight=max_in_flight)

    def _reset_history(self, now: float) -> None:
        """Reset everything except the rate and the limit."""
        self._window = SlidingWindow(1.0, 3)
        self._filled_at = now  # tokens were added up to this time; in the future during a pause
        self._evidence_from = -inf  # attempts that started earlier do not count
        self._rate_limited_at = self._last_timeout_at = self._hint_until = -inf
        self._first_result_at = inf
        self._latency = self._cusum = 0.0
        self._base = 0.0
        self._rate_before_throttling: float | None = None
        """The rate before all attempts were throttled; None: not all attempts are throttled."""
        self._capacity: float | None = None  # None in slow start
        self._period = _MIN_PERIOD_S
        self._test: _RateTest | None = None
        self._tested_at = now  # the end of the last test, or the first result

    @property
    def limit(self) -> int:
        """The current limit of attempts at a time."""
        return int(self._limit)

    @property
    def settled_rate(self) -> float | None:
        """The current rate or, during a test, the rate before it; None: the rate is not limited.

        Store this rate, so that a restarted process continues with it.
        """
        if self._test is not None:
            return self._test.old_rate
        return self.rate if self._rate_before_throttling is None else self._rate_before_throttling

    @property
    def phase(self) -> str:
        """The phase of the control loop: unlimited, slow-start, test, probing or waiting."""
        if self._test is not None:
            return "test"
        if self.rate is None:
            return "unlimited"
        if self._rate_before_throttling is not None:
            return "waiting"
        return "slow-start" if self._capacity is None else "probing"

    @property
    def is_full(self) -> bool:
        """Whether as many attempts run as the limit allows."""
        return self._in_flight + 1 > self._limit

    def configure(self, *, max_rate: float | None, max_in_flight: int) -> None:
        """Set the upper limits. A rate that was at the old `max_rate` is set to the new one."""
        self._max_in_flight = check_count("max_in_flight", max_in_flight)
        self._limit = min(self._limit, float(max_in_flight))
        old_maximum = self._max_rate
        self._max_rate = inf if max_rate is None else float(check_positive("max_rate", max_rate))
        if self.rate is None or self.rate >= old_maximum:
            self.rate = None if max_rate is None else self._max_rate
        else:
            self._set_rate(self.rate)

    def restore(self, *, rate: float | None, limit: int) -> None:
        """Continue with the `rate` and `limit` of an earlier process."""
        self._limit = float(min(check_count("limit", limit), self._max_in_flight))
        if rate is not None:
            self._set_rate(check_positive("rate", rate))
            self._capacity = self.rate

    def acquire(self, now: float) -> float | None:
        """Acquire a slot and a token. Return the seconds to wait, or None to reject the attempt."""
        if self._in_flight + 1 > self._limit:
            return None
        rate = self.rate
        if rate is None:
            self._in_flight += 1
            return 0.0
        elapsed = now - self._filled_at  # negative during a pause
        if elapsed < -_MAX_HINT_S:  # the clock was set back
            elapsed, self._filled_at = 0.0, now
        if elapsed > 0:
            self._tokens = min(max(1.0, rate * _BURST_S), self._tokens + elapsed * rate)
            self._filled_at = now
        wait = max(0.0, (1 - self._tokens) / rate) + max(0.0, -elapsed)
        if wait < _CLOCK_ERROR_S:
            wait = 0.0
        else:
            self._rate_limited_at = now + wait
            if wait > self._max_wait:
                return None
        self._tokens -= 1
        self._in_flight += 1
        return wait

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Release the slot and adapt both limits to the outcome."""
        if self._in_flight:  # not an attempt that `forget_attempts` has forgotten
            self._in_flight -= 1
        if outcome is None and duration <= 0:  # the attempt was not sent
            if self.rate is not None:
                self._tokens += 1
            return
        window = self._window
        if not window.bucket_end - _MAX_SET_BACK_S <= now < window.bucket_end:
            window = self._advance_window(now)
        counts = window.current
        counts[_SENT] += 1
        if outcome is None or outcome.kind is _PERMANENT:
            counts[_IGNORED] += 1
            if outcome is not None and self._rate_before_throttling is not None:
                self.on_recovery(now)  # the target has not throttled this attempt
            return
        is_success = outcome.kind is _SUCCESS
        if self._rate_before_throttling is not None:
            self._react_to_single_attempt(outcome, duration, now)
            return
        if is_success:
            limit = self._limit
            if limit < self._max_in_flight and (self._in_flight + 1) * 2 > limit:
                step = 1.0 if self._last_timeout_at == -inf else 1 / limit
                self._limit = min(self._max_in_flight, limit + step)
            if self.rate is None and not self._cusum:
                return  # the usual case: there is no failure to react to
        else:
            counts[_FAILURES] += 1
            self._record_failure(outcome, now - duration, now)
        if now - duration >= self._evidence_from:  # else it started at an earlier rate
            self._adapt_rate(is_success, duration, now)

    def _advance_window(self, now: float) -> SlidingWindow:
        if now < self._window.bucket_end:
            self._reset_history(now)  # the clock was set back, so no stored time is valid
        if self._first_result_at == inf:
            self._first_result_at = self._tested_at = now
        self._window.advance(now)
        return self._window

    def forget_attempts(self) -> None:
        """Free all slots: see `Downstream.forget_attempts`."""
        self._in_flight = 0
        self.attempts.clear()
        self._tokens = max(0.0, self._tokens)

    def count_attempts(self) -> None:
        """Set the number of taken slots to that of `attempts`: see `Downstream.forget_attempt`."""
        self._in_flight = len(self.attempts)

    def on_recovery(self, now: float) -> None:
        """Restart with half of the old rate, at least 10 per second, and 8 attempts at a time."""
        rate_before, base = self.settled_rate or 0.0, self._base
        if self._test is not None:
            base = self._test.old_base
        self._reset_history(now)
        # An outage does not change the share of attempts that always fail.
        self._base = min(base, _MAX_KEPT_BASE)
        self._set_rate(max(_START_RATE, rate_before / 2))
        self._tokens, self._filled_at = 0.0, now
        self._limit = float(min(_START_LIMIT, self._max_in_flight))

    def _set_rate(self, rate: float) -> None:
        self.rate = min(rate, self._max_rate)

    def _record_failure(self, outcome: Outcome, started: float, now: float) -> None:
        if outcome.timeout and started >= self._last_timeout_at:
            # Only time-outs lower the concurrency. Refused attempts are short, and a low limit for
            # them would hide the capacity of the target.
            self._limit = max(1.0, self._limit / 2)
            self._last_timeout_at = now
        if outcome.kind is _THROTTLED:
            if self._test is not None and started >= self._evidence_from:
                self._test.throttled += 1
            if outcome.hint is not None and outcome.hint.delay:
                self._hint_until = now + min(outcome.hint.delay, _MAX_HINT_S)

    def _react_to_single_attempt(self, outcome: Outcome, duration: float, now: float) -> None:
        """Continue to wait, or start again if the target has accepted an attempt."""
        if outcome.kind is _SUCCESS:
            self.on_recovery(now)
            return
        self._record_failure(outcome, now - duration, now)
        self._limit = 1.0
        self._delay_next_attempt(now)

    def _adapt_rate(self, is_success: bool, duration: float, now: float) -> None:  # noqa: FBT001
        self._latency += (duration - self._latency) / 16
        if self._test is not None:
            self._record_test(self._test, is_success, now)
            return
        rate, base, cusum = self.rate, self._base, self._cusum
        if not is_success:
            cusum += 1
        tolerated = _TOLERATED_SHARE
        if rate is not None:
            tolerated = max(tolerated, _TOLERATED_PER_S / rate)
        cusum = cusum - base - tolerated
        self._cusum = cusum if cusum > 0 else 0.0
        # A success raises no alarm, even if `configure` has just lowered the threshold.
        if not is_success and self._cusum > self._alarm_threshold():
            self._cut(now)
            return
        if base > _TOLERATED_SHARE and now > self._tested_at + _MAX_BASE_AGE_S:
            self._base = self._cusum = 0.0
        if is_success and rate is not None and self._rate_limited_at >= now - 1:
            self._raise_rate(rate, now)

    def _alarm_threshold(self) -> float:
        rate, base = self.rate, self._base
        threshold = (
            _UNLIMITED_THRESHOLD if rate is None else max(_MIN_THRESHOLD, _THRESHOLD_S * rate)
        )
        return threshold + _THRESHOLD_PER_VARIANCE * base * (1 - base)

    def _raise_rate(self, rate: float, now: float) -> None:
        capacity = self._capacity
        if capacity is None:
            step = _SLOW_START_STEP / (1 + _LATENCY_WEIGHT * self._latency) / (1 - self._base)
            # Ignored attempts also take tokens. They must not slow down the growth.
            sent = self._window.total(_SENT)
            evidence = sent - self._window.total(_IGNORED)
            self._set_rate(rate + step * min(_MAX_STEP_FACTOR, sent / evidence))
            return
        position = (now - self._tested_at) / self._period - 1
        if position > _MAX_CURVE_POSITION:
            self._capacity = None
        else:
            self._set_rate(max(rate, min(1.1 * rate, capacity * (1 + _CUBIC_SCALE * position**3))))

    def _cut(self, now: float) -> None:
        """Lower the rate after too many failures, and start a test."""
        total = self._window.total
        sent = total(_SENT)
        results = sent - total(_IGNORED)
        successes = results - total(_FAILURES)
        has_history = now - self._first_result_at >= _MIN_HISTORY_S
        rate = max(float(sent), _START_RATE) if self.rate is None else self.rate
        base, self._base = self._base, 0.0
        self._test = test = _RateTest(
            rate=rate, base=base, results=results, successes=successes, has_history=has_history
        )
        test.was_unlimited = self.rate is None
        old_capacity = self._capacity
        is_confirmed = old_capacity is not None and old_capacity < rate < 1.25 * old_capacity
        self._period = _PERIOD_GROWTH * self._period if is_confirmed else _MIN_PERIOD_S
        # If attempts failed at a rate below the known capacity, this is probably a false alarm.
        test.old_capacity = 0.0 if old_capacity is None or rate >= old_capacity else old_capacity
        # The accepted attempts of the last second are the best estimate of the capacity. Of these,
        # only the share 1 - base succeeds.
        covered_s = max(0.9, now - self._window.bucket_end + 1)  # the newest bucket is not complete
        accepted = sent * successes / results / (1 - base)
        capacity = min(_MAX_CAPACITY_FACTOR * rate, accepted / covered_s)
        pause = 0.0 if capacity >= 0.8 * rate else _PAUSE_S
        if test.was_unlimited:
            capacity, pause = max(capacity, _START_RATE), _LONG_PAUSE_S
        else:
            min_factor = _MIN_CUT_FACTOR if has_history else _MIN_EARLY_CUT_FACTOR
            capacity = max(capacity, rate * min_factor)
        self._lower_rate(capacity, pause, successes / results, now)

    def _lower_rate(self, capacity: float, pause: float, share: float, now: float) -> None:
        if share < _MOST_REFUSED_SHARE:  # a single `Retry-After` delays only its own task
            pause = max(pause, self._hint_until - now)
        self._hint_until = -inf
        self._capacity = max(_MIN_RATE, capacity)
        self._set_rate(_TEST_RATE_FACTOR * self._capacity)
        self._tokens = min(self._tokens, 0.0)
        self._filled_at = now + pause
        self._evidence_from = now + (pause or _SETTLING_S)

    def _record_test(self, test: _RateTest, is_success: bool, now: float) -> None:  # noqa: FBT001
        rate = self.rate or _MIN_RATE
        verdict = test.record(is_success, now - self._evidence_from, rate)
        if verdict == _PASSED:
            if not test.is_certain:
                self._capacity = None
            elif not (test.is_repeated or test.is_better):
                known_capacity = _MAX_CAPACITY_FACTOR * test.old_capacity
                self._capacity = max(self._capacity or 0.0, known_capacity)
            # A small share of failures becomes the base, so that it does not cause another test.
            old_base = test.old_base
            if test.share > 1 - old_base + 2 * sqrt(old_base * (1 - old_base) / test.results):
                old_base = min(old_base, _MAX_SMALL_BASE)  # fewer attempts fail now
            failures = _BASE_WEIGHT * old_base + test.results - test.successes
            self._finish_test(failures / (test.results + _BASE_WEIGHT), now)
        elif verdict == _REFUSED:
            share = test.share
            is_dead = share < _DEAD_SHARE
            test.has_improved |= test.is_better
            accepted_share = min(1.0, share / (1 - test.old_base))
            capacity = rate * (_MIN_CUT_FACTOR if is_dead else accepted_share)
            test.is_repeated = True
            test.restart(rate, has_history=not is_dead)
            self._lower_rate(capacity, _PAUSE_S, share, now)
            if share < _MOST_REFUSED_SHARE:
                self._evidence_from += _TARGET_WINDOW_S
        elif verdict == _CHANGED:  # the results before the change do not count
            test.has_changed = True
            test.discard_results()
            self._evidence_from = now
        elif verdict == _DEAD:
            self._wait_for_success(test.old_rate, now)
        elif verdict == _UNRELATED:  # restore a rate, and tolerate this share of failures
            if test.has_improved:
                # The rate before the first cut was too high, but not the rate before the last one.
                self._capacity = test.rate_before
                self._set_rate(test.rate_before)
                self._finish_test(1 - test.share, now)
                return
            self._capacity = test.old_rate if test.old_capacity else None
            self._set_rate(test.old_rate)
            if test.was_unlimited and self._max_rate == inf:
                self.rate = None
            self._finish_test(1 - test.total_share, now)

    def _wait_for_success(self, rate_before: float, now: float) -> None:
        """Start one attempt at a time, because the target throttles all of them.

        Each attempt waits for the end of the last `Retry-After`, at least a second.
        """
        self._rate_before_throttling = rate_before
        self._test = None
        self._set_rate(_MIN_RATE)
        self._limit = 1.0
        self._delay_next_attempt(now)

    def _delay_next_attempt(self, now: float) -> None:
        self._tokens = 0.0
        self._filled_at = max(now, self._hint_until - 1 / _MIN_RATE)

    def _finish_test(self, base: float, now: float) -> None:
        self._test = None
        self._base, self._cusum, self._tested_at = min(base, _MAX_BASE), 0.0, now
        if self._capacity is not None:
            shortest = min(_MAX_FIRST_PERIOD_S, _MIN_PERIOD_RESULTS / self._capacity)
            self._period = min(_MAX_PERIOD_S, max(self._period, shortest))
