"""Outages, found in a log.

The attempts, in the order in which they started, are cut into blocks of 20. An outage is the
longest run of blocks in each of which a quarter failed, if it has two blocks side by side in each
of which half did. By attempts and not by seconds, because a breaker or a quiet night leaves
windows of time with nothing in them; two blocks, because one can be chance where a fifth fails at
any time; a quarter, because a service that flaps is in one outage and not in ten.

It begins when its first failed attempt started, and ends when its last one did: an attempt that
hung has ended long after the server was back. Permanent failures are the caller's fault, and count
neither way.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.outcome import Kind
from tarry.tuning.log import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.tuning.log import AttemptLog

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
