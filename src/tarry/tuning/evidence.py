"""Compute statistics of an attempt log: durations, success rates, outages and estimated hedges.

Attempts are *healthy* when they lie outside outages. A *call* consists of the attempts of one task
with increasing attempt numbers. A replayed task keeps its id, so a new call of the same task starts
where the number does not increase. If the first attempt of a call is not in the log, its other
attempts are counted as attempts, but the call is not counted.

To find outages, the attempts are ordered by start time and divided into blocks with 20 first
attempts of calls. An outage is a sequence of blocks in which at least a quarter of the first
attempts failed, if in two neighbouring blocks of the sequence at least half failed. The reasons:

* A block is a number of attempts and not of seconds, because an open breaker or a quiet night
  leaves periods without data.
* Only first attempts count. A few tasks that always fail would otherwise, with their retries, be
  the larger part of a block.
* Half must fail in two blocks, because in one block half can fail by chance if a fifth of all
  tasks always fails.
* In the other blocks a quarter is enough, so that an unstable service has one outage and not ten.

An outage lasts from the start of its first failed attempt to the start of its last failed attempt.
The end of that attempt would be wrong: if it hung, it ended long after the recovery. Permanent
failures are ignored, because the request causes them and not the dependency, and so are throttled
attempts: a dependency that limits the rate of its clients works.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10, sqrt
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.outcome import Kind
from tarry.errors import ConfigurationError
from tarry.simulator.metrics import quantile
from tarry.tuning.attempt_log import OUTCOME_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tarry.tuning.attempt_log import AttemptLog


HEDGE_PERCENTILES = ("p50", "p75", "p90", "p95", "p99")
TAIL_QUANTILE = 0.999
BLOCK_ATTEMPTS = 20

Z_SCORE = 1.96
"""The z-score of the confidence level 95 %, which all intervals have."""
MIN_SAMPLES_BEYOND = 5
"""The number of values that must lie above a quantile, so that the sample contains the upper bound
of the quantile's confidence interval."""
_ROUNDING_ERROR = 1e-12
_SIGNIFICANT_DIGITS = 2
_SUCCESS, _PERMANENT = OUTCOME_KINDS.index(Kind.SUCCESS), OUTCOME_KINDS.index(Kind.PERMANENT)
_THROTTLED = OUTCOME_KINDS.index(Kind.THROTTLED)
_NO_SIGN_OF_OUTAGE = frozenset({_PERMANENT, _THROTTLED})
_MIN_CORE_FAILURE_SHARE = 0.5
"""The lowest share of failures in two neighbouring blocks of an outage."""
_MIN_FAILURE_SHARE = 0.25
"""The lowest share of failures in every block of an outage."""


class Outage(NamedTuple):
    """A period in which many attempts failed. Times are seconds since the epoch."""

    start: float
    end: float
    first: int
    """The index of the outage's first attempt in the log."""
    stop: int
    """The index after the outage's last attempt."""
    share: float
    """The share of the outage's attempts that failed."""
    median_failure_duration: float

    @property
    def length(self) -> float:
        """Seconds from the first failure to the last."""
        return self.end - self.start


class AttemptSuccessRate(NamedTuple):
    """How often the attempts with one attempt number succeeded."""

    number: int
    attempts: int
    successes: int
    low: float
    high: float
    """`low` and `high` are the bounds of the 95 % interval of `share`."""

    @property
    def share(self) -> float:
        """The share of the attempts that succeeded."""
        return self.successes / self.attempts


class HedgeEstimate(NamedTuple):
    """The estimated effect of a hedge: a second copy of a healthy attempt, after `delay` seconds.

    The estimate assumes that the durations of both copies are independent.
    """

    percentile: str
    """The percentile of the durations that is used as `delay`, such as "p95"."""
    delay: float
    tail: float
    """The p99.9 of the durations with the second copy."""
    saving: float
    """The reduction of the p99.9, as a share of the p99.9 without the second copy."""
    load: float
    """Additional requests per call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The statistics of a log. Times are in seconds, sequences of durations are sorted."""

    attempts: int  # the number of attempts
    calls: int  # the number of calls
    start: float
    """The earliest start of an attempt, in seconds since the epoch."""
    span: float
    """The time from `start` to the latest end of an attempt."""
    success_durations: Sequence[float]
    """The durations of healthy attempts that succeeded."""
    failure_durations: Sequence[float]
    """The durations of healthy attempts that failed, without permanent failures."""
    call_durations: Sequence[float]
    """The durations of successful calls, including the waits between attempts."""
    attempt_success_rates: tuple[AttemptSuccessRate, ...]
    """The success rate of each attempt number, over all attempts."""
    healthy_attempt_success_rates: tuple[AttemptSuccessRate, ...]
    """The success rate of each attempt number, over healthy attempts."""
    healthy_calls: int
    """The number of calls that started outside outages."""
    healthy_retries: int
    """The number of retries of the calls that started outside outages."""
    failed_calls_by_retries: Mapping[int, int]
    """Calls that started outside outages and did not succeed, by their number of retries."""
    retries: int  # the number of retries of all calls
    throttled: int
    """The number of throttled attempts."""
    accepted_rate: float
    """Successful attempts per second, in the seconds in which an attempt was throttled."""
    max_concurrency: int
    """The highest number of healthy attempts that ran at the same time and succeeded."""
    outages: tuple[Outage, ...]
    hedges: tuple[HedgeEstimate, ...]

    @property
    def rate(self) -> float:
        """Calls per second."""
        return max(1, self.calls) / max(self.span, 0.001)

    @property
    def success_rate(self) -> float:
        """The share of calls that succeeded."""
        return len(self.call_durations) / max(1, self.calls)

    @property
    def attempts_per_call(self) -> float:
        """The mean number of attempts of the calls whose first attempt is in the log."""
        return 1 + self.retries / max(1, self.calls)

    @property
    def failure_rate(self) -> float:
        """The share of healthy attempts that failed."""
        failed = len(self.failure_durations)
        return failed / max(1, failed + len(self.success_durations))

    @property
    def healthy_retry_ratio(self) -> float:
        """Retries per call outside outages."""
        return self.healthy_retries / max(1, self.healthy_calls)

    def failed_call_retry_ratio(self, max_attempts: float) -> float:
        """Retries of failed calls per call outside outages, with at most this many attempts."""
        counts = self.failed_calls_by_retries.items()
        retries = sum(min(retries, max_attempts - 1) * count for retries, count in counts)
        return retries / max(1, self.healthy_calls)


class _Block(NamedTuple):
    """Consecutive attempts: the index of the first one, and the index after the last one."""

    first: int
    stop: int
    failure_share: float


def analyze_log(log: AttemptLog) -> Evidence:
    """Compute the statistics that a proposal is based on."""
    if not len(log):
        raise ConfigurationError("the log must have at least one attempt, got none")
    outages = find_outages(log)
    in_outage = bytearray(len(log))
    for outage in outages:
        in_outage[outage.first : outage.stop] = b"\1" * (outage.stop - outage.first)
    success_durations = _durations(log, in_outage, failed=False)
    percentiles = HEDGE_PERCENTILES if success_durations else ()
    call_durations: array[float] = array("d")
    failed_calls_by_retries: Counter[int] = Counter()
    calls = retries = healthy_calls = healthy_retries = 0
    for first, last, retries_of_call in _group_calls(log):
        calls += 1
        retries += retries_of_call
        if not in_outage[first]:
            healthy_calls += 1
            healthy_retries += retries_of_call
            failed_calls_by_retries[retries_of_call] += log.kinds[last] != _SUCCESS
        if log.kinds[last] == _SUCCESS:
            end = log.starts[last] + log.durations[last]
            call_durations.append(end - log.starts[first])
    return Evidence(
        attempts=len(log),
        calls=calls,
        start=log.starts[0],
        span=max(map(float.__add__, log.starts, log.durations)) - log.starts[0],
        success_durations=success_durations,
        failure_durations=_durations(log, in_outage, failed=True),
        call_durations=array("d", sorted(call_durations)),
        attempt_success_rates=_success_rates(log, excluded=bytes(len(log))),
        healthy_attempt_success_rates=_success_rates(log, excluded=in_outage),
        healthy_calls=healthy_calls,
        healthy_retries=healthy_retries,
        failed_calls_by_retries=failed_calls_by_retries,
        retries=retries,
        throttled=log.kinds.count(_THROTTLED),
        accepted_rate=_accepted_rate(log),
        max_concurrency=_max_concurrency(log, in_outage),
        outages=outages,
        hedges=tuple(estimate_hedge(success_durations, name) for name in percentiles),
    )


def estimate_hedge(durations: Sequence[float], percentile: str) -> HedgeEstimate:
    """Estimate the effect of a second copy that is sent after this percentile of the durations."""
    delay = quantile(durations, float(percentile[1:]) / 100)
    tail = quantile(durations, TAIL_QUANTILE)
    hedged_tail = hedged_quantile(durations, TAIL_QUANTILE, delay)
    saving = 1 - hedged_tail / tail if tail else 0.0
    return HedgeEstimate(percentile, delay, hedged_tail, saving, share_above(durations, delay))


def find_outages(log: AttemptLog) -> tuple[Outage, ...]:
    """Find the outages of a log, in order, by the rule in the docstring of this module."""
    outages: list[Outage] = []
    blocks: list[_Block] = []
    end_marker = _Block(len(log), len(log), failure_share=0.0)  # ends an outage at the log's end
    for block in (*_divide_into_blocks(log), end_marker):
        if block.failure_share >= _MIN_FAILURE_SHARE:
            blocks.append(block)
            continue
        if any(
            min(earlier.failure_share, later.failure_share) >= _MIN_CORE_FAILURE_SHARE
            for earlier, later in pairwise(blocks)
        ):
            outages.append(_make_outage(log, blocks[0].first, blocks[-1].stop))
        blocks = []
    return tuple(outages)


def _divide_into_blocks(log: AttemptLog) -> Iterator[_Block]:
    first = attempt_count = failure_count = 0
    for index, kind in enumerate(log.kinds):
        if log.numbers[index] != 1 or kind in _NO_SIGN_OF_OUTAGE:
            continue
        attempt_count += 1
        failure_count += kind != _SUCCESS
        if attempt_count == BLOCK_ATTEMPTS:
            yield _Block(first, index + 1, failure_count / attempt_count)
            first, attempt_count, failure_count = index + 1, 0, 0
    if attempt_count:  # the missing attempts of an incomplete last block count as successes
        yield _Block(first, len(log), failure_count / BLOCK_ATTEMPTS)


def _make_outage(log: AttemptLog, first: int, stop: int) -> Outage:
    indexes = [index for index in range(first, stop) if log.kinds[index] not in _NO_SIGN_OF_OUTAGE]
    failed_indexes = [index for index in indexes if log.kinds[index] != _SUCCESS]
    return Outage(
        start=log.starts[failed_indexes[0]],
        end=log.starts[failed_indexes[-1]],
        first=first,
        stop=stop,
        share=len(failed_indexes) / len(indexes),
        median_failure_duration=median(log.durations[index] for index in failed_indexes),
    )


def _durations(log: AttemptLog, in_outage: Sequence[int], *, failed: bool) -> array[float]:
    durations: array[float] = array("d")
    for kind, is_in_outage, duration in zip(log.kinds, in_outage, log.durations, strict=True):
        if not is_in_outage and kind != _PERMANENT and (kind != _SUCCESS) is failed:
            durations.append(duration)
    return array("d", sorted(durations))


def _accepted_rate(log: AttemptLog) -> float:
    throttled_seconds: set[int] = set()
    successes: Counter[int] = Counter()
    for kind, start in zip(log.kinds, log.starts, strict=True):
        if kind == _THROTTLED:
            throttled_seconds.add(int(start))
        elif kind == _SUCCESS:
            successes[int(start)] += 1
    accepted = sum(successes[second] for second in throttled_seconds)
    return accepted / max(1, len(throttled_seconds))


def _max_concurrency(log: AttemptLog, in_outage: Sequence[int]) -> int:
    starts: array[float] = array("d")
    ends: array[float] = array("d")
    columns = zip(log.kinds, in_outage, log.starts, log.durations, strict=True)
    for kind, is_in_outage, start, duration in columns:
        if kind == _SUCCESS and not is_in_outage:
            starts.append(start)
            ends.append(start + duration)
    ends = array("d", sorted(ends))
    highest = ended_count = 0
    for started_before, start in enumerate(starts):
        while ended_count < started_before and ends[ended_count] <= start:
            ended_count += 1
        highest = max(highest, started_before + 1 - ended_count)
    return highest


def _group_calls(log: AttemptLog) -> Iterator[tuple[int, int, int]]:
    """Yield the indices of the first and last attempt of each call, and its number of retries."""
    # Sorting the indices by task needs far less memory than a list of attempts for each task.
    order = sorted(range(len(log)), key=log.tasks.__getitem__)
    first: int | None = None
    last = retries = 0
    task, number = -1, 0
    for index in order:
        if log.tasks[index] != task or log.numbers[index] <= number:
            if first is not None:
                yield first, last, retries
            first, retries = (index if log.numbers[index] == 1 else None), 0
        else:
            retries += 1
        task, number, last = log.tasks[index], log.numbers[index], index
    if first is not None:
        yield first, last, retries


def _success_rates(log: AttemptLog, excluded: Sequence[int]) -> tuple[AttemptSuccessRate, ...]:
    attempts: Counter[int] = Counter()
    successes: Counter[int] = Counter()
    for number, kind, is_excluded in zip(log.numbers, log.kinds, excluded, strict=True):
        if not is_excluded:
            attempts[number] += 1
            successes[number] += kind == _SUCCESS
    return tuple(
        AttemptSuccessRate(number, n, successes[number], *wilson_interval(successes[number], n))
        for number, n in sorted(attempts.items())
    )


# Estimates from a sorted sample, the argument `ordered`.


def quantile_interval(ordered: Sequence[float], q: float) -> tuple[float, float]:
    """Return the confidence interval of a quantile.

    The number of values below the true quantile has a binomial distribution with the standard
    deviation sqrt(size * q * (1 - q)). So the bounds are the values `spread` ranks below and above
    the rank of the quantile.
    """
    size = len(ordered)
    spread = Z_SCORE * sqrt(size * q * (1 - q))
    low = max(1, floor(size * q - spread))
    high = min(size, ceil(size * q + spread) + 1)
    return ordered[low - 1], ordered[high - 1]


def required_samples(q: float) -> int:
    """Return the smallest sample size for which the quantile `q` can be estimated."""
    return ceil(MIN_SAMPLES_BEYOND / (1 - q) - _ROUNDING_ERROR / (1 - q))


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's confidence interval of a success rate; it is accurate even near 0 and 1."""
    if not trials:
        return 0.0, 1.0
    share, z_squared = successes / trials, Z_SCORE * Z_SCORE
    centre = share + z_squared / (2 * trials)
    spread = Z_SCORE * sqrt(share * (1 - share) / trials + z_squared / (4 * trials * trials))
    divisor = 1 + z_squared / trials
    return max(0.0, (centre - spread) / divisor), min(1.0, (centre + spread) / divisor)


def share_above(ordered: Sequence[float], value: float) -> float:
    """Return the share of the sample that is greater than `value`."""
    return (len(ordered) - bisect_right(ordered, value)) / len(ordered)


def hedged_quantile(ordered: Sequence[float], q: float, delay: float) -> float:
    """Return the quantile `q` of the duration of a call that sends a second copy after `delay`.

    A call takes longer than t if no copy has ended at t. Let S(t) be the share of the sample above
    t. Before the delay, only the first copy runs, and the probability is S(t). After it, the second
    copy has run for t - delay, and the probability is S(t) * S(t - delay). This product falls only
    where t is a sampled value or a sampled value plus the delay. So the quantile is one of these
    values, and bisection finds it.
    """
    max_share = 1 - q - _ROUNDING_ERROR
    last = len(ordered) - 1

    def is_reached_at(t: float) -> bool:
        second_copy_share = share_above(ordered, t - delay) if t >= delay else 1.0
        return share_above(ordered, t) * second_copy_share <= max_share

    # Equal to is_reached_at(t + delay), except for rounding: (t + delay) - delay need not equal t.
    def is_reached_at_shifted(t: float) -> bool:
        return share_above(ordered, t + delay) * share_above(ordered, t) <= max_share

    index = bisect_left(ordered, 1, hi=last, key=is_reached_at)
    shifted_index = bisect_left(ordered, 1, hi=last, key=is_reached_at_shifted)
    return min(ordered[index], ordered[shifted_index] + delay)


def round_two_digits(value: float, *, up: bool = False) -> float:
    """Round a value to two significant digits: to the nearest, or upwards if `up` is set."""
    if value <= 0:
        return 0.0
    exponent = floor(log10(value)) - _SIGNIFICANT_DIGITS + 1
    scaled = value / 10.0**exponent
    digits = ceil(scaled - _ROUNDING_ERROR * scaled) if up else round(scaled)
    return float(f"{digits}e{exponent}")
