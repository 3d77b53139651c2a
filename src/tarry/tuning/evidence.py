"""What a log says, in numbers; nothing here proposes anything.

Attempts are *healthy* when they lie outside the outages. A *call* is the attempts of one task in
the order of their numbers; it begins anew where the number does not grow, because a task that is
replayed keeps its id. Of a call whose beginning is not in the log, only the attempts are counted.
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
from tarry.tuning.attempt_log import KINDS
from tarry.tuning.estimates import beyond, hedged_quantile, wilson

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.tuning.attempt_log import AttemptLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tarry.tuning.attempt_log import AttemptLog

HEDGES = ("p50", "p75", "p90", "p95", "p99")
TAIL = 0.999


class Odds(NamedTuple):
    """How often attempt `number` succeeded, of those calls that came so far."""

    number: int
    tries: int
    successes: int
    low: float
    high: float
    """Between these lies the truth, 95 times in 100."""

    @property
    def share(self) -> float:
        """The share that succeeded."""
        return self.successes / self.tries


class Hedge(NamedTuple):
    """What a second copy after `delay` would do to healthy attempts.

    It takes the copies as independent: both draw their duration from the recorded ones.
    """

    percentile: str
    delay: float
    tail: float
    """The p99.9 with the second copy."""
    saving: float
    """The share of the p99.9 that is saved."""
    load: float
    """Further requests for each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The numbers of a log. Times are seconds, samples are sorted."""

    attempts: int
    calls: int
    start: float
    span: float
    """From the first start to the last end."""
    healthy: Sequence[float]
    """Durations of healthy attempts that succeeded."""
    faults: Sequence[float]
    """Durations of healthy attempts that failed, permanent failures left out."""
    call_times: Sequence[float]
    """From the first start to the last end of calls that succeeded, waits included."""
    odds: tuple[Odds, ...]
    """Of all attempts, by their numbers."""
    healthy_odds: tuple[Odds, ...]
    """Of those outside outages."""
    healthy_calls: int
    """Calls that began outside outages."""
    healthy_retries: int
    """The retries of these."""
    retries: int
    most_at_once: int
    """Of healthy attempts that succeeded, so many were in progress together: it can bear these."""
    outages: tuple[Outage, ...]
    hedges: tuple[Hedge, ...]

    @property
    def rate(self) -> float:
        """Calls a second."""
        return max(1, self.calls) / max(self.span, 0.001)

    @property
    def success_rate(self) -> float:
        """The share of calls that succeeded."""
        return len(self.call_times) / max(1, self.calls)

    @property
    def attempts_per_call(self) -> float:
        """Attempts for each call whose beginning is in the log."""
        return 1 + self.retries / max(1, self.calls)

    @property
    def fault_share(self) -> float:
        """The share of healthy attempts that failed."""
        failed = len(self.faults)
        return failed / max(1, failed + len(self.healthy))

    @property
    def healthy_retry_ratio(self) -> float:
        """Retries for each call outside outages."""
        return self.healthy_retries / max(1, self.healthy_calls)


class _Call(NamedTuple):
    first: int
    last: int
    retries: int


def gather(log: AttemptLog) -> Evidence:
    """Count everything that a proposal needs."""
    if not len(log):
        raise ConfigurationError("the log must have at least one attempt, got none")
    outages = outages_of(log)
    ill = bytearray(len(log))
    for outage in outages:
        ill[outage.first : outage.behind] = b"\1" * (outage.behind - outage.first)
    healthy = _durations(log, ill, failed=False)
    call_times: array[float] = array("d")
    calls = retries = healthy_calls = healthy_retries = 0
    for call in _calls(log):
        calls += 1
        retries += call.retries
        if not ill[call.first]:
            healthy_calls += 1
            healthy_retries += call.retries
        if log.kinds[call.last] == SUCCESS:
            end = log.starts[call.last] + log.durations[call.last]
            call_times.append(end - log.starts[call.first])
    return Evidence(
        attempts=len(log),
        calls=calls,
        start=log.starts[0],
        span=max(map(float.__add__, log.starts, log.durations)) - log.starts[0],
        healthy=healthy,
        faults=_durations(log, ill, failed=True),
        call_times=_sorted(call_times),
        odds=_odds(log, bytes(len(log))),
        healthy_odds=_odds(log, ill),
        healthy_calls=healthy_calls,
        healthy_retries=healthy_retries,
        retries=retries,
        most_at_once=_most_at_once(log, ill),
        outages=outages,
        hedges=tuple(hedge(healthy, percentile) for percentile in HEDGES) if healthy else (),
    )


def hedge(healthy: Sequence[float], percentile: str) -> Hedge:
    """Work out what a second copy at this percentile does to the tail and to the load."""
    delay = quantile(healthy, float(percentile[1:]) / 100)
    plain, tail = quantile(healthy, TAIL), hedged_quantile(healthy, TAIL, delay)
    saving = 1 - tail / plain if plain else 0.0
    return Hedge(percentile, delay, tail, saving, beyond(healthy, delay))


def _durations(log: AttemptLog, ill: Sequence[int], *, failed: bool) -> array[float]:
    durations: array[float] = array("d")
    for kind, sick, duration in zip(log.kinds, ill, log.durations, strict=True):
        if not sick and kind != PERMANENT and (kind != SUCCESS) is failed:
            durations.append(duration)
    return _sorted(durations)


def _most_at_once(log: AttemptLog, ill: Sequence[int]) -> int:
    starts: array[float] = array("d")
    ends: array[float] = array("d")
    for kind, sick, start, took in zip(log.kinds, ill, log.starts, log.durations, strict=True):
        if kind == SUCCESS and not sick:
            starts.append(start)
            ends.append(start + took)
    ends = _sorted(ends)
    most = done = 0
    for earlier, start in enumerate(starts):
        while done < earlier and ends[done] <= start:
            done += 1
        most = max(most, earlier + 1 - done)
    return most


def _sorted(values: array[float]) -> array[float]:
    return array("d", sorted(values))


def _calls(log: AttemptLog) -> Iterator[_Call]:
    """Group attempts to calls; sorting positions needs far less memory than lists by task."""
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


def _odds(log: AttemptLog, without: Sequence[int]) -> tuple[Odds, ...]:
    tries: Counter[int] = Counter()
    successes: Counter[int] = Counter()
    for number, kind, left_out in zip(log.numbers, log.kinds, without, strict=True):
        if not left_out:
            tries[number] += 1
            successes[number] += kind == SUCCESS
    return tuple(
        Odds(number, tries[number], successes[number], *wilson(successes[number], tries[number]))
        for number in sorted(tries)
    )


BLOCK = 20
SUCCESS, PERMANENT = KINDS.index(Kind.SUCCESS), KINDS.index(Kind.PERMANENT)
_OPENS, _LASTS = 0.5, 0.25


class Outage(NamedTuple):
    """A time in which much failed. Seconds since the epoch; attempts by their positions."""

    start: float
    end: float
    first: int
    behind: int
    """The attempts from `first` up to, not including, this one belong to it."""
    share: float
    """How many of them failed."""
    failing: float
    """How long a failed attempt took, by the median."""

    @property
    def length(self) -> float:
        """Seconds from the first failure to the last."""
        return self.end - self.start


class _Block(NamedTuple):
    first: int
    behind: int
    share: float


def outages_of(log: AttemptLog) -> tuple[Outage, ...]:
    """Find the outages of a log, in order."""
    found: list[Outage] = []
    run: list[_Block] = []
    end = _Block(len(log), len(log), 0.0)
    for block in (*_blocks(log), end):
        if block.share >= _LASTS:
            run.append(block)
            continue
        if any(a.share >= _OPENS <= b.share for a, b in pairwise(run)):
            found.append(_outage(log, run[0].first, run[-1].behind))
        run = []
    return tuple(found)


def _blocks(log: AttemptLog) -> Iterator[_Block]:
    first = counted = failed = 0
    for position, kind in enumerate(log.kinds):
        if kind == PERMANENT:
            continue
        counted += 1
        failed += kind != SUCCESS
        if counted == BLOCK:
            yield _Block(first, position + 1, failed / counted)
            first, counted, failed = position + 1, 0, 0
    if counted:  # an unfinished one speaks as if the rest of it had gone well
        yield _Block(first, len(log), failed / BLOCK)


def _outage(log: AttemptLog, first: int, behind: int) -> Outage:
    counted = [at for at in range(first, behind) if log.kinds[at] != PERMANENT]
    failed = [at for at in counted if log.kinds[at] != SUCCESS]
    return Outage(
        log.starts[failed[0]],
        log.starts[failed[-1]],
        first,
        behind,
        len(failed) / len(counted),
        median(log.durations[at] for at in failed),
    )
