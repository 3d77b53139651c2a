"""A limiter that finds the capacity of a dependency: a rate and a concurrency limit that adapt.

Theory of operation
===================

The *capacity* is the rate, in attempts per second, above which the dependency (the target) refuses
attempts. The limiter keeps the rate of attempts as high as possible, but below the capacity.

What is estimated
-----------------

Attempts fail for two reasons, and a single result does not show which one applies:

* The rate is above the capacity. The target then accepts the same number of attempts per second,
  whatever the rate, so the success share (successes / results) falls as the rate rises.
* Some attempts fail at any rate, for example because of the data of some tasks. Their share of all
  attempts is the *unrelated failure share*. Below the capacity, the success share is 1 minus this
  share.

So there are two unknowns: the capacity and the unrelated failure share. One success share cannot
tell a low capacity from a high unrelated failure share. Two success shares at different rates can.
Therefore the limiter lowers the rate when too many attempts fail, and compares the success share
before and after: this is a *test*.

Observations
------------

* Each result is a success or a failure. Permanent failures (such as a 404) and cancelled attempts
  are ignored: the target has not refused them, but they took a token of the rate.
* After the rate was lowered, the results of attempts that started before do not count. The target
  refused them, or not, because of the earlier rate.
* A sliding window of one second has the numbers of sent attempts, ignored attempts and failures.
  Its successes per second are the estimate of the capacity.
* `_excess_failures` is the cumulative sum (CUSUM) of failures above the tolerated failure share. It
  exceeds `_alarm_threshold` when too many attempts fail. This starts a test.
* Time-outs halve the concurrency limit, at most once for the attempts that ran at the same time.
  Successes raise the limit.

Phases
------

The property `phase` has these names. `rate` is None while it is unlimited.

    unlimited, slow-start, probing ──too many failures──▶ test
    test ──passed, capacity found──▶ probing
    test ──passed, capacity not found──▶ slow-start
    test ──refused──▶ test, at a lower rate
    test ──capacity dropped──▶ test, from the beginning
    test ──failures are unrelated──▶ unlimited, slow-start or probing, at a rate before the test
    test ──all throttled──▶ waiting
    waiting ──the first attempt that is not throttled──▶ slow-start
    probing ──no failures for 2.5 periods of the curve──▶ slow-start
    any phase ──the breaker closes after an outage──▶ slow-start

* Slow start: the capacity is not known. The rate doubles about every half second while calls
  succeed.
* Test: the rate was lowered to the estimated capacity (a *cut*). The results at the lower rate lead
  to one of the verdicts below.
* Probing: the rate follows a cubic curve as in TCP CUBIC (RFC 9438). It returns quickly to the
  capacity that was found, stays there for a while, and then probes for more.
* Waiting: the target throttled (429) all attempts of a test. One attempt at a time is started,
  after the time of the last `Retry-After`. After the first one that is not throttled, slow start
  begins at half of the old rate, with the old unrelated failure share. (If all attempts fail in
  another way, the breaker opens.)

Verdicts of a test
------------------

Wald's sequential test compares two hypotheses: the success share at the lower rate is as high as it
is below the capacity, or it is still the success share before the cut.

* `_PASSED`, the first: the rate before the cut was above the capacity, and the rate now is below.
* `_REFUSED`, the second, or a success share between both: the rate is lowered again.
* `_UNRELATED`, the second, although the rate was lowered more than once and the success share is
  still the same: the failures do not depend on the rate. The rate before the test is restored, and
  the failure share is the unrelated failure share for a minute. If one of several cuts has raised
  the success share, only the last cut is undone: the rate before the first cut was refused.
* `_CAPACITY_DROPPED`: the results first supported a passed test, and then clearly did not. The test
  starts again at the same rate.
* `_ALL_THROTTLED`: no estimate is possible; the limiter waits.

Constants
---------

They were chosen in simulations of targets with capacities of 20 to 2,000 calls per second and
latencies of 2 to 500 ms; tests/core/limiter_model.py has the model. The comments have the reasons.
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
_MAX_RETRY_AFTER_S = 60.0  # longest `Retry-After` that delays all attempts, not only its own task
_MAX_SET_BACK_S = 1.0  # if the clock was set back further, the limiter is reset
_CLOCK_ERROR_S = 1e-6  # rounding errors of times in epoch seconds

# Slow start. A success adds 1.4 attempts per second, so the rate grows by the factor e in 0.7 s.
# The step shrinks with the latency L of results, because the rate exceeds the capacity for at least
# L before a failure shows it.
_SLOW_START_STEP = 1.4  # attempts per second
_LATENCY_WEIGHT = 6.0  # 1 / s
_LATENCY_SMOOTHING = 16  # each result has a weight of 1/16 in the smoothed latency
_MAX_STEP_FACTOR = 2.0  # if some attempts are ignored, see `_raise_rate`

# Probing. Two periods after the test, the curve is 7 % above the capacity.
_CUBIC_SCALE = 0.07
_MIN_PERIOD_S, _MAX_PERIOD_S = 2.0, 20.0
_PERIOD_GROWTH = 2.0  # factor, each time a cut confirms the capacity
_MAX_CONFIRMING_FACTOR = 1.25  # a cut from up to this multiple of the capacity confirms it
# A period is long enough for this many results at the capacity. With 40, a capacity of 20 per
# second was exceeded by 25 % and more: the rate was far above it when two attempts were refused.
_MIN_PERIOD_RESULTS = 80.0
_MAX_FIRST_PERIOD_S = 4.0  # upper bound of a period while only one cut has measured the capacity
_MAX_CURVE_GROWTH = 1.1  # factor for each success
# In periods. Without a cut by then (1.24 x the capacity), the estimate was too low: slow start
# again.
_MAX_CURVE_POSITION = 1.5

# Detection of too many failures. At a rate of up to 88 per second two consecutive failures exceed
# the threshold; at a higher rate, about 20 ms of refused attempts do. The threshold grows with the
# variance of unrelated failures: with a share of 25 % there is one false alarm in about 10,000
# results.
_TOLERATED_FAILURE_SHARE = 0.06
_TOLERATED_FAILURES_PER_S = 1.5  # at low rates, where tests take long
_MIN_ALARM_FAILURES = 1.75
_ALARM_S = 0.02  # or as many failures as there are attempts in this time at the current rate
_UNLIMITED_ALARM_FAILURES = 6.0  # while the rate is not limited
_ALARM_FAILURES_PER_VARIANCE = 36.0

# Cuts
_TEST_RATE_FACTOR = 0.93  # rate of a test, relative to the estimated capacity
_MAX_CAPACITY_FACTOR = 0.97  # upper bound of the capacity, relative to the rate of refused attempts
_MIN_CUT_FACTOR = 0.5  # a cut at most halves the rate, because it is based on few results
_MIN_EARLY_CUT_FACTOR = 0.9  # in the first `_MIN_HISTORY_S`, with even fewer results
_MIN_HISTORY_S = 0.7  # a slow start from half of the capacity reaches the capacity in 0.95 s
_MIN_COVERED_S = 0.9  # of the window's second; its newest tenth is not complete
_DEEP_CUT_FACTOR = 0.8  # a cut to less than this, relative to the rate, is followed by a pause
_PAUSE_S = 0.2  # after a deep cut, until the queues and windows of the target are empty
_LONG_PAUSE_S = 0.5  # after a burst without a rate limit
_SETTLING_S = 0.25  # after a small cut: attempts that start in this time do not count for the test
_TARGET_WINDOW_S = 1.0  # a target that counts calls per second refuses calls until this has passed

# Tests
_MIN_TEST_S = 1.0  # at least one window of a target that counts calls per second
_MAX_TEST_S = 4.0  # at a low rate, if there are at least `_MIN_TEST_RESULTS`
_MIN_TEST_RESULTS = 8
_MIN_PASSED_RESULTS = 24  # results that confirm a capacity
_DECISION_LEVEL = 4.0  # log likelihood ratio of Wald's sequential test: 2 % of wrong decisions
_BELOW_CAPACITY_SUCCESS_SHARE = 0.97  # expected below the capacity, without unrelated failures
_PASSING_SUCCESS_SHARE = 0.94  # with a lower one the rate is still above the capacity
_MAX_SUCCESS_SHARE_BEFORE_CUT = 0.9  # a test against a higher one takes too long
_MOSTLY_REFUSED_SUCCESS_SHARE = 0.5  # below it, most attempts were refused
_DOWN_SUCCESS_SHARE = 0.1  # below it, the capacity cannot be estimated: the target may be down
_MIN_DOWN_RESULTS = 32  # fewer results do not show that a target is down
_SIGNIFICANCE = 2  # standard deviations by which two success shares must differ
_MIN_RISE = 0.02  # in addition, by which the success share must have risen

# The unrelated failure share
_MAX_UNRELATED_FAILURE_SHARE = 0.85  # keeps the success share above `_DOWN_SUCCESS_SHARE`
_MAX_UNRELATED_FAILURE_SHARE_AFTER_OUTAGE = 0.5
_MAX_UNRELATED_FAILURE_SHARE_AFTER_RISE = 0.06  # after a passed test in which fewer attempts failed
_OLD_UNRELATED_WEIGHT = 64.0  # of the old share after a passed test, in results
_MAX_UNRELATED_AGE_S = 60.0  # the share is then measured again: the target may have recovered

_PASSED, _REFUSED, _UNRELATED, _CAPACITY_DROPPED, _ALL_THROTTLED = range(5)
"""The verdicts of a test, see above."""


class _RateTest:
    """The results of attempts at a lowered rate, and the state before the rate was lowered.

    A test has one cut or more. Each cut lowers the rate and starts to count results again.
    """

    __slots__ = (
        "capacity_before_test", "earlier_results", "earlier_successes", "had_capacity_drop",
        "has_cut_helped", "log_likelihood_ratio", "max_log_likelihood_ratio", "measures_capacity",
        "rate_before_cut", "rate_before_test", "results", "results_before_cut",
        "success_share_before_cut", "successes", "throttled", "unrelated_failure_share",
        "was_cut_again", "was_unlimited",
    )  # fmt: skip

    capacity_before_test: float  # 0: not known, or refuted by the failures
    was_unlimited: bool

    def __init__(
        self,
        *,
        rate: float,
        unrelated_failure_share: float,
        results: int,
        successes: int,
        measures_capacity: bool,
    ) -> None:
        """Start a test at a lower rate than `rate`, at which there were these results."""
        self.rate_before_test = rate
        self.unrelated_failure_share = unrelated_failure_share  # before the test
        self.earlier_results = self.earlier_successes = 0  # before the last cut
        self.was_cut_again = False  # whether the rate was lowered more than once
        self.had_capacity_drop = False  # whether there was a verdict `_CAPACITY_DROPPED`
        self.has_cut_helped = False  # whether a cut has raised the success share
        self.results, self.successes = results, successes
        self.cut(rate, measures_capacity=measures_capacity)

    def cut(self, rate: float, *, measures_capacity: bool) -> None:
        """Count results from the beginning, at a lower rate than `rate`.

        `measures_capacity`: the results so far are enough to estimate the capacity.
        """
        self.measures_capacity = measures_capacity
        self.rate_before_cut, self.results_before_cut = rate, self.results
        highest = _MAX_SUCCESS_SHARE_BEFORE_CUT * (1 - self.unrelated_failure_share)
        self.success_share_before_cut = max(_DOWN_SUCCESS_SHARE, min(highest, self.success_share))
        self.earlier_results += self.results
        self.earlier_successes += self.successes
        self.discard_results()

    def discard_results(self) -> None:
        """Count results from the beginning, at the same rate."""
        self.results = self.successes = self.throttled = 0
        self.log_likelihood_ratio = 0.0  # above 0: the success share is as below the capacity
        self.max_log_likelihood_ratio = 0.0

    @property
    def success_share(self) -> float:
        """The success share at the current rate."""
        return self.successes / self.results

    @property
    def total_success_share(self) -> float:
        """The success share, including the results before the last cut."""
        total = self.successes + self.earlier_successes
        return total / (self.results + self.earlier_results)

    @property
    def has_success_share_risen(self) -> bool:
        """Whether the success share is significantly higher than before the last cut."""
        before, results = self.success_share_before_cut, self.results
        deviation = sqrt(before * (1 - before) * (1 / results + 1 / self.results_before_cut))
        return self.success_share > before + _SIGNIFICANCE * deviation + _MIN_RISE

    @property
    def has_found_capacity(self) -> bool:
        """Whether a passed test has found the capacity."""
        has_results = self.results >= _MIN_PASSED_RESULTS and self.measures_capacity
        return has_results and self.log_likelihood_ratio >= _DECISION_LEVEL

    @property
    def has_dropped_since_peak(self) -> bool:
        """Whether the evidence once favoured a passed test, and has lost two levels since."""
        level = max(_DECISION_LEVEL, self.log_likelihood_ratio + 2 * _DECISION_LEVEL)
        return self.max_log_likelihood_ratio >= level

    def record(self, is_success: bool, elapsed: float, rate: float) -> int | None:  # noqa: FBT001
        """Count a result at `rate`. Return the verdict, or None if more results are needed.

        `elapsed`: the seconds since attempts count for this test. All shares in this method are
        success shares.
        """
        self.results += 1
        self.successes += is_success
        results, share_before = self.results, self.success_share_before_cut
        share_below_capacity = _BELOW_CAPACITY_SUCCESS_SHARE * (1 - self.unrelated_failure_share)
        self.log_likelihood_ratio += (
            log(share_below_capacity / share_before)
            if is_success
            else log((1 - share_below_capacity) / (1 - share_before))
        )
        self.max_log_likelihood_ratio = max(
            self.max_log_likelihood_ratio, self.log_likelihood_ratio
        )
        can_drop = not (self.had_capacity_drop or self.was_cut_again)
        if can_drop and self.has_dropped_since_peak:
            return _CAPACITY_DROPPED
        if elapsed < _MIN_TEST_S:
            return None
        if self.throttled == results and results >= _MIN_TEST_RESULTS:
            return _ALL_THROTTLED
        is_time_over = elapsed >= _MAX_TEST_S and results >= _MIN_TEST_RESULTS
        if not is_time_over and abs(self.log_likelihood_ratio) < _DECISION_LEVEL:
            return None
        if self.log_likelihood_ratio > 0:
            if not is_time_over and results < _MIN_PASSED_RESULTS:
                return None
            passing_share = _PASSING_SUCCESS_SHARE * (1 - self.unrelated_failure_share)
            return _PASSED if self.success_share >= passing_share else _REFUSED
        if self.total_success_share < _DOWN_SUCCESS_SHARE:
            is_down = results + self.earlier_results >= _MIN_DOWN_RESULTS
            return _REFUSED if is_down else None
        # The success share before the first cut is not comparable, because the rate was rising.
        if not self.was_cut_again:
            return _REFUSED
        # If the success share has changed, the failures depend on the rate.
        deviation = sqrt(share_before * (1 - share_before) / results)
        is_lower = self.success_share < share_before - _SIGNIFICANCE * deviation
        # Above the capacity, the accepted calls per second stay the same, so their share rises.
        share_above_capacity = min(share_below_capacity, share_before * self.rate_before_cut / rate)
        is_higher = (
            results >= 2 * _MIN_TEST_RESULTS
            and self.success_share > (share_before + share_above_capacity) / 2
        )
        return _REFUSED if is_lower or is_higher else _UNRELATED


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
        "_capacity", "_excess_failures", "_first_counted_start", "_first_result_at", "_in_flight",
        "_last_delayed_start", "_last_timeout_at", "_latency_s", "_limit", "_max_in_flight",
        "_max_rate", "_max_wait", "_period_s", "_rate_before_throttling", "_retry_after_until",
        "_settled_at", "_test", "_tokens", "_tokens_added_until", "_unrelated_failure_share",
        "_window", "attempts", "rate",
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
        self._limit = float(_START_LIMIT)  # attempts at a time; fractions add up
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
        self._tokens_added_until = now  # in the future during a pause
        self._first_counted_start = -inf  # earlier attempts started at another rate
        self._last_delayed_start = -inf  # of an attempt that had to wait for a token
        self._last_timeout_at = self._retry_after_until = -inf
        self._first_result_at = inf
        self._latency_s = self._excess_failures = 0.0
        self._unrelated_failure_share = 0.0
        self._rate_before_throttling: float | None = None
        """The rate before all attempts were throttled; None: not all attempts are throttled."""
        self._capacity: float | None = None  # attempts per second; None in slow start
        self._period_s = _MIN_PERIOD_S  # of the cubic curve
        self._test: _RateTest | None = None
        self._settled_at = now  # the end of the last test, or the first result

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
            return self._test.rate_before_test
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
        elapsed = now - self._tokens_added_until  # negative during a pause
        if elapsed < -_MAX_RETRY_AFTER_S:  # no pause is that long: the clock was set back
            elapsed, self._tokens_added_until = 0.0, now
        if elapsed > 0:
            self._tokens = min(max(1.0, rate * _BURST_S), self._tokens + elapsed * rate)
            self._tokens_added_until = now
        wait = max(0.0, (1 - self._tokens) / rate) + max(0.0, -elapsed)
        if wait < _CLOCK_ERROR_S:
            wait = 0.0
        else:
            self._last_delayed_start = now + wait
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
            # The limit grows only if at least half of it is used.
            if limit < self._max_in_flight and (self._in_flight + 1) * 2 > limit:
                # Until the first time-out, the limit doubles for each round of attempts.
                step = 1.0 if self._last_timeout_at == -inf else 1 / limit
                self._limit = min(self._max_in_flight, limit + step)
            if self.rate is None and not self._excess_failures:
                return  # the usual case: there is no failure to react to
        else:
            counts[_FAILURES] += 1
            self._record_failure(outcome, now - duration, now)
        if now - duration >= self._first_counted_start:
            self._adapt_rate(is_success, duration, now)

    def _advance_window(self, now: float) -> SlidingWindow:
        if now < self._window.bucket_end:
            self._reset_history(now)  # the clock was set back, so no stored time is valid
        if self._first_result_at == inf:
            self._first_result_at = self._settled_at = now
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
        rate_before, failure_share = self.settled_rate or 0.0, self._unrelated_failure_share
        if self._test is not None:
            failure_share = self._test.unrelated_failure_share
        self._reset_history(now)
        # An outage does not change the share of attempts that always fail.
        self._unrelated_failure_share = min(
            failure_share, _MAX_UNRELATED_FAILURE_SHARE_AFTER_OUTAGE
        )
        self._set_rate(max(_START_RATE, rate_before / 2))
        self._tokens, self._tokens_added_until = 0.0, now
        self._limit = float(min(_START_LIMIT, self._max_in_flight))

    def _set_rate(self, rate: float) -> None:
        self.rate = min(rate, self._max_rate)

    def _record_failure(self, outcome: Outcome, started: float, now: float) -> None:
        """Lower the concurrency limit after a time-out; note that an attempt was throttled."""
        if outcome.timeout and started >= self._last_timeout_at:
            # Only time-outs lower the concurrency. Refused attempts are short, and a low limit for
            # them would hide the capacity of the target.
            self._limit = max(1.0, self._limit / 2)
            self._last_timeout_at = now
        if outcome.kind is _THROTTLED:
            if self._test is not None and started >= self._first_counted_start:
                self._test.throttled += 1
            if outcome.hint is not None and outcome.hint.delay:
                self._retry_after_until = now + min(outcome.hint.delay, _MAX_RETRY_AFTER_S)

    def _react_to_single_attempt(self, outcome: Outcome, duration: float, now: float) -> None:
        """Continue to wait, or start again if the target has accepted an attempt."""
        if outcome.kind is _SUCCESS:
            self.on_recovery(now)
            return
        self._record_failure(outcome, now - duration, now)
        self._limit = 1.0
        self._delay_next_attempt(now)

    def _adapt_rate(self, is_success: bool, duration: float, now: float) -> None:  # noqa: FBT001
        """Continue a test, start one after too many failures, or raise the rate."""
        self._latency_s += (duration - self._latency_s) / _LATENCY_SMOOTHING
        if self._test is not None:
            self._record_test(self._test, is_success, now)
            return
        rate, unrelated = self.rate, self._unrelated_failure_share
        excess = self._excess_failures
        if not is_success:
            excess += 1
        tolerated = _TOLERATED_FAILURE_SHARE
        if rate is not None:
            tolerated = max(tolerated, _TOLERATED_FAILURES_PER_S / rate)
        excess = excess - unrelated - tolerated
        self._excess_failures = excess if excess > 0 else 0.0
        # A success raises no alarm, even if `configure` has just lowered the threshold.
        if not is_success and self._excess_failures > self._alarm_threshold():
            self._start_test(now)
            return
        if unrelated > _TOLERATED_FAILURE_SHARE and now > self._settled_at + _MAX_UNRELATED_AGE_S:
            self._unrelated_failure_share = self._excess_failures = 0.0
        # Without a recent attempt that had to wait, the rate does not limit the attempts.
        if is_success and rate is not None and self._last_delayed_start >= now - 1:
            self._raise_rate(rate, now)

    def _alarm_threshold(self) -> float:
        """Return the number of excess failures above which a test starts."""
        rate, unrelated = self.rate, self._unrelated_failure_share
        threshold = (
            _UNLIMITED_ALARM_FAILURES if rate is None else max(_MIN_ALARM_FAILURES, _ALARM_S * rate)
        )
        return threshold + _ALARM_FAILURES_PER_VARIANCE * unrelated * (1 - unrelated)

    def _raise_rate(self, rate: float, now: float) -> None:
        """Raise the rate after a success: in slow start, or along the cubic curve."""
        capacity = self._capacity
        if capacity is None:
            latency_divisor = 1 + _LATENCY_WEIGHT * self._latency_s
            step = _SLOW_START_STEP / latency_divisor / (1 - self._unrelated_failure_share)
            # Ignored attempts also take tokens. They must not slow down the growth.
            sent = self._window.total(_SENT)
            results = sent - self._window.total(_IGNORED)
            self._set_rate(rate + step * min(_MAX_STEP_FACTOR, sent / results))
            return
        position = (now - self._settled_at) / self._period_s - 1  # 0: at the capacity
        if position > _MAX_CURVE_POSITION:
            self._capacity = None
        else:
            curve_rate = capacity * (1 + _CUBIC_SCALE * position**3)
            self._set_rate(max(rate, min(_MAX_CURVE_GROWTH * rate, curve_rate)))

    def _start_test(self, now: float) -> None:
        """Lower the rate after too many failures, and start a test."""
        total = self._window.total
        sent = total(_SENT)
        results = sent - total(_IGNORED)
        successes = results - total(_FAILURES)
        has_history = now - self._first_result_at >= _MIN_HISTORY_S
        rate = max(float(sent), _START_RATE) if self.rate is None else self.rate
        unrelated, self._unrelated_failure_share = self._unrelated_failure_share, 0.0
        self._test = test = _RateTest(
            rate=rate,
            unrelated_failure_share=unrelated,
            results=results,
            successes=successes,
            measures_capacity=has_history,
        )
        test.was_unlimited = self.rate is None
        old_capacity = self._capacity
        is_confirmed = (
            old_capacity is not None and old_capacity < rate < _MAX_CONFIRMING_FACTOR * old_capacity
        )
        self._period_s = _PERIOD_GROWTH * self._period_s if is_confirmed else _MIN_PERIOD_S
        # If attempts failed at a rate below the known capacity, this is probably a false alarm.
        is_refuted = old_capacity is None or rate >= old_capacity
        test.capacity_before_test = 0.0 if old_capacity is None or is_refuted else old_capacity
        # The attempts that the target accepted in the last second are the best estimate of the
        # capacity. Of these, only the share `1 - unrelated` succeeds.
        covered_s = max(_MIN_COVERED_S, now - self._window.bucket_end + 1)
        accepted = sent * successes / results / (1 - unrelated)
        capacity = min(_MAX_CAPACITY_FACTOR * rate, accepted / covered_s)
        pause = 0.0 if capacity >= _DEEP_CUT_FACTOR * rate else _PAUSE_S
        if test.was_unlimited:
            capacity, pause = max(capacity, _START_RATE), _LONG_PAUSE_S
        else:
            min_factor = _MIN_CUT_FACTOR if has_history else _MIN_EARLY_CUT_FACTOR
            capacity = max(capacity, rate * min_factor)
        self._lower_rate(capacity, pause, successes / results, now)

    def _lower_rate(self, capacity: float, pause: float, success_share: float, now: float) -> None:
        """Set the rate of a test of this capacity, and start no attempt during the pause.

        `success_share` is that at the rate before.
        """
        # A single `Retry-After` delays only its own task.
        if success_share < _MOSTLY_REFUSED_SUCCESS_SHARE:
            pause = max(pause, self._retry_after_until - now)
        self._retry_after_until = -inf
        self._capacity = max(_MIN_RATE, capacity)
        self._set_rate(_TEST_RATE_FACTOR * self._capacity)
        self._tokens = min(self._tokens, 0.0)
        self._tokens_added_until = now + pause
        self._first_counted_start = now + (pause or _SETTLING_S)

    def _record_test(self, test: _RateTest, is_success: bool, now: float) -> None:  # noqa: FBT001
        """Count a result for the test, and act on the verdict if there is one."""
        rate = self.rate or _MIN_RATE
        verdict = test.record(is_success, now - self._first_counted_start, rate)
        if verdict == _PASSED:
            self._end_passed_test(test, now)
        elif verdict == _REFUSED:
            self._cut_again(test, rate, now)
        elif verdict == _CAPACITY_DROPPED:  # the results before the drop do not count
            test.had_capacity_drop = True
            test.discard_results()
            self._first_counted_start = now
        elif verdict == _ALL_THROTTLED:
            self._wait_for_success(test.rate_before_test, now)
        elif verdict == _UNRELATED:
            self._restore_rate(test, now)

    def _end_passed_test(self, test: _RateTest, now: float) -> None:
        """Continue at the rate of the test: probing if it has found the capacity."""
        if not test.has_found_capacity:
            self._capacity = None
        elif not (test.was_cut_again or test.has_success_share_risen):
            known_capacity = _MAX_CAPACITY_FACTOR * test.capacity_before_test
            self._capacity = max(self._capacity or 0.0, known_capacity)
        # A small failure share counts as unrelated, so that it does not cause another test.
        old_share = test.unrelated_failure_share
        deviation = sqrt(old_share * (1 - old_share) / test.results)
        if test.success_share > 1 - old_share + _SIGNIFICANCE * deviation:
            old_share = min(old_share, _MAX_UNRELATED_FAILURE_SHARE_AFTER_RISE)
        failures = _OLD_UNRELATED_WEIGHT * old_share + test.results - test.successes
        self._end_test(failures / (test.results + _OLD_UNRELATED_WEIGHT), now)

    def _cut_again(self, test: _RateTest, rate: float, now: float) -> None:
        """Lower the rate of the test, because most failures continue."""
        success_share = test.success_share
        is_down = success_share < _DOWN_SUCCESS_SHARE
        test.has_cut_helped |= test.has_success_share_risen
        accepted_share = min(1.0, success_share / (1 - test.unrelated_failure_share))
        capacity = rate * (_MIN_CUT_FACTOR if is_down else accepted_share)
        test.was_cut_again = True
        test.cut(rate, measures_capacity=not is_down)
        self._lower_rate(capacity, _PAUSE_S, success_share, now)
        if success_share < _MOSTLY_REFUSED_SUCCESS_SHARE:
            self._first_counted_start += _TARGET_WINDOW_S

    def _restore_rate(self, test: _RateTest, now: float) -> None:
        """Restore a rate before the test, and tolerate the failure share that was measured."""
        if test.has_cut_helped:
            # The rate before the first cut was too high, but not the rate before the last one.
            self._capacity = test.rate_before_cut
            self._set_rate(test.rate_before_cut)
            self._end_test(1 - test.success_share, now)
            return
        self._capacity = test.rate_before_test if test.capacity_before_test else None
        self._set_rate(test.rate_before_test)
        if test.was_unlimited and self._max_rate == inf:
            self.rate = None
        self._end_test(1 - test.total_success_share, now)

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
        """Let the next attempt wait for the end of the last `Retry-After`, at least a second."""
        self._tokens = 0.0
        self._tokens_added_until = max(now, self._retry_after_until - 1 / _MIN_RATE)

    def _end_test(self, unrelated_failure_share: float, now: float) -> None:
        self._test = None
        self._unrelated_failure_share = min(unrelated_failure_share, _MAX_UNRELATED_FAILURE_SHARE)
        self._excess_failures, self._settled_at = 0.0, now
        if self._capacity is not None:
            shortest = min(_MAX_FIRST_PERIOD_S, _MIN_PERIOD_RESULTS / self._capacity)
            self._period_s = min(_MAX_PERIOD_S, max(self._period_s, shortest))
