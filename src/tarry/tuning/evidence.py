"""What an attempt log shows, in numbers: durations, success rates, outages and estimated hedges.

Attempts are *healthy* when they lie outside outages. A *call* is the attempts of one task in the
order of their numbers. A new call begins where the number does not increase, because a replayed
task keeps its id. If the first attempt of a call is not in the log, the other attempts are counted
but the call is not.

Outages are found in blocks of 20 attempts, in the order of their start. An outage is a run of
blocks that each have a quarter of failures, if two neighbouring blocks each have half. The reasons:

* Attempts and not seconds, because an open breaker or a quiet night leaves periods without data.
* Two blocks, because where a fifth of the attempts always fails, one block can be chance.
* A quarter, so that a service that flaps has one outage and not ten.

An outage lasts from the start of its first failed attempt to the start of its last one, because an
attempt that hung may have ended long after the recovery. Permanent failures are ignored: they are
caused by the request.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.outcome import Kind
from tarry.errors import ConfigurationError
from tarry.simulator.metrics import quantile
from tarry.tuning.attempt_log import OUTCOME_KINDS
from tarry.tuning.estimates import hedged_quantile, share_above, wilson_interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tarry.tuning.attempt_log import AttemptLog

HEDGE_PERCENTILES = ("p50", "p75", "p90", "p95", "p99")
TAIL_QUANTILE = 0.999
BLOCK_ATTEMPTS = 20

_SUCCESS, _PERMANENT = OUTCOME_KINDS.index(Kind.SUCCESS), OUTCOME_KINDS.index(Kind.PERMANENT)
_OUTAGE_CORE_FAILURES = 0.5
"""The share of failures that two neighbouring blocks of an outage have."""
_OUTAGE_FAILURES = 0.25
"""The share of failures that each block of an outage has."""


class Outage(NamedTuple):
    """A period in which many attempts failed. Times are seconds since the epoch."""

    start: float
    end: float
    first: int
    """The position of its first attempt in the log."""
    stop: int
    """The position after its last attempt."""
    share: float
    """The share of its attempts that failed."""
    median_failure_duration: float

    @property
    def length(self) -> float:
        """Seconds from the first failure to the last."""
        return self.end - self.start


class AttemptOdds(NamedTuple):
    """How often the attempt with this number succeeded, of all calls that made it."""

    number: int
    tries: int
    successes: int
    low: float
    high: float
    """The bounds of the 95 % interval."""

    @property
    def share(self) -> float:
        """The share that succeeded."""
        return self.successes / self.tries


class HedgeEstimate(NamedTuple):
    """The estimated effect of a second copy after `delay` on healthy attempts.

    It assumes that both copies draw their durations independently from the logged durations.
    """

    percentile: str
    delay: float
    tail: float
    """The p99.9 with the second copy."""
    saving: float
    """The share of the p99.9 that is saved."""
    load: float
    """Additional requests per call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The numbers of a log. Times are in seconds, sequences are sorted."""

    attempts: int
    calls: int
    start: float
    span: float
    """From the start of the first attempt to the end of the last one."""
    success_durations: Sequence[float]
    """Of healthy attempts that succeeded."""
    failure_durations: Sequence[float]
    """Of healthy attempts that failed, without permanent failures."""
    call_durations: Sequence[float]
    """Of successful calls, waits included."""
    odds: tuple[AttemptOdds, ...]
    """Of all attempts, by attempt number."""
    healthy_odds: tuple[AttemptOdds, ...]
    """Of healthy attempts, by attempt number."""
    healthy_calls: int
    """Calls that started outside outages."""
    healthy_retries: int
    """The retries of those calls."""
    retries: int
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
        """Attempts per call, of calls whose first attempt is in the log."""
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


class _Call(NamedTuple):
    first: int
    last: int
    retries: int


class _Block(NamedTuple):
    first: int
    stop: int
    share: float


def analyze_log(log: AttemptLog) -> Evidence:
    """Compute the numbers that a proposal is based on."""
    if not len(log):
        raise ConfigurationError("the log must have at least one attempt, got none")
    outages = find_outages(log)
    in_outage = bytearray(len(log))
    for outage in outages:
        in_outage[outage.first : outage.stop] = b"\1" * (outage.stop - outage.first)
    success_durations = _durations(log, in_outage, failed=False)
    call_durations: array[float] = array("d")
    calls = retries = healthy_calls = healthy_retries = 0
    for call in _calls(log):
        calls += 1
        retries += call.retries
        if not in_outage[call.first]:
            healthy_calls += 1
            healthy_retries += call.retries
        if log.kinds[call.last] == _SUCCESS:
            end = log.starts[call.last] + log.durations[call.last]
            call_durations.append(end - log.starts[call.first])
    return Evidence(
        attempts=len(log),
        calls=calls,
        start=log.starts[0],
        span=max(map(float.__add__, log.starts, log.durations)) - log.starts[0],
        success_durations=success_durations,
        failure_durations=_durations(log, in_outage, failed=True),
        call_durations=_sorted(call_durations),
        odds=_count_odds(log, bytes(len(log))),
        healthy_odds=_count_odds(log, in_outage),
        healthy_calls=healthy_calls,
        healthy_retries=healthy_retries,
        retries=retries,
        max_concurrency=_max_concurrency(log, in_outage),
        outages=outages,
        hedges=tuple(
            estimate_hedge(success_durations, percentile) for percentile in HEDGE_PERCENTILES
        )
        if success_durations
        else (),
    )


def estimate_hedge(durations: Sequence[float], percentile: str) -> HedgeEstimate:
    """Estimate the effect of a second copy at this percentile."""
    delay = quantile(durations, float(percentile[1:]) / 100)
    tail = quantile(durations, TAIL_QUANTILE)
    hedged_tail = hedged_quantile(durations, TAIL_QUANTILE, delay)
    saving = 1 - hedged_tail / tail if tail else 0.0
    return HedgeEstimate(percentile, delay, hedged_tail, saving, share_above(durations, delay))


def find_outages(log: AttemptLog) -> tuple[Outage, ...]:
    """Find the outages of a log, in order; the module docstring has the rule."""
    outages: list[Outage] = []
    run: list[_Block] = []
    end = _Block(len(log), len(log), 0.0)
    for block in (*_blocks(log), end):
        if block.share >= _OUTAGE_FAILURES:
            run.append(block)
            continue
        if any(
            first.share >= _OUTAGE_CORE_FAILURES and second.share >= _OUTAGE_CORE_FAILURES
            for first, second in pairwise(run)
        ):
            outages.append(_make_outage(log, run[0].first, run[-1].stop))
        run = []
    return tuple(outages)


def _blocks(log: AttemptLog) -> Iterator[_Block]:
    first = attempts = failed = 0
    for position, kind in enumerate(log.kinds):
        if kind == _PERMANENT:
            continue
        attempts += 1
        failed += kind != _SUCCESS
        if attempts == BLOCK_ATTEMPTS:
            yield _Block(first, position + 1, failed / attempts)
            first, attempts, failed = position + 1, 0, 0
    if attempts:  # the missing attempts of an incomplete last block count as successes
        yield _Block(first, len(log), failed / BLOCK_ATTEMPTS)


def _make_outage(log: AttemptLog, first: int, stop: int) -> Outage:
    attempts = [at for at in range(first, stop) if log.kinds[at] != _PERMANENT]
    failed = [at for at in attempts if log.kinds[at] != _SUCCESS]
    return Outage(
        log.starts[failed[0]],
        log.starts[failed[-1]],
        first,
        stop,
        len(failed) / len(attempts),
        median(log.durations[at] for at in failed),
    )


def _durations(log: AttemptLog, in_outage: Sequence[int], *, failed: bool) -> array[float]:
    durations: array[float] = array("d")
    for kind, is_excluded, duration in zip(log.kinds, in_outage, log.durations, strict=True):
        if not is_excluded and kind != _PERMANENT and (kind != _SUCCESS) is failed:
            durations.append(duration)
    return _sorted(durations)


def _max_concurrency(log: AttemptLog, in_outage: Sequence[int]) -> int:
    starts: array[float] = array("d")
    ends: array[float] = array("d")
    columns = zip(log.kinds, in_outage, log.starts, log.durations, strict=True)
    for kind, is_excluded, start, duration in columns:
        if kind == _SUCCESS and not is_excluded:
            starts.append(start)
            ends.append(start + duration)
    ends = _sorted(ends)
    highest = ended = 0
    for started, start in enumerate(starts):
        while ended < started and ends[ended] <= start:
            ended += 1
        highest = max(highest, started + 1 - ended)
    return highest


def _sorted(values: array[float]) -> array[float]:
    return array("d", sorted(values))


def _calls(log: AttemptLog) -> Iterator[_Call]:
    """Group attempts into calls. Sorting positions needs far less memory than lists by task."""
    order = sorted(range(len(log)), key=log.tasks.__getitem__)
    first: int | None = None
    last = retries = 0
    task, number = -1, 0
    for at in order:
        if log.tasks[at] != task or log.numbers[at] <= number:
            if first is not None:
                yield _Call(first, last, retries)
            first, retries = (at if log.numbers[at] == 1 else None), 0
        else:
            retries += 1
        task, number, last = log.tasks[at], log.numbers[at], at
    if first is not None:
        yield _Call(first, last, retries)


def _count_odds(log: AttemptLog, excluded: Sequence[int]) -> tuple[AttemptOdds, ...]:
    tries: Counter[int] = Counter()
    successes: Counter[int] = Counter()
    for number, kind, is_excluded in zip(log.numbers, log.kinds, excluded, strict=True):
        if not is_excluded:
            tries[number] += 1
            successes[number] += kind == _SUCCESS
    return tuple(
        AttemptOdds(
            number,
            tries[number],
            successes[number],
            *wilson_interval(successes[number], tries[number]),
        )
        for number in sorted(tries)
    )
