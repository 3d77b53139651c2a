"""Clients that contend for one row: the 2015 AWS study "Exponential Backoff And Jitter".

Every client reads the version of one row and writes it back; the write succeeds only if the
version is still the same. A write is a call, a read is not counted. Times and rules are those
of the study: hops of |N(10 ms, 2 ms)|, base 5 ms, cap 2,000 ms, and ceilings 5 * 2**n from
n = 1 on, so that the first ceiling is 10 ms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.core.call import Call
from tarry.core.checks import check_count, check_one_of
from tarry.core.outcome import TRANSIENT
from tarry.core.policy import Policy
from tarry.core.verdict import Wait
from tarry.simulator.distributions import Normal
from tarry.simulator.event_loop import World, seed_of
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from collections.abc import Callable

_HOP = Normal(0.010, 0.002)
_BASE, _CAP = 0.005, 2.0
_FOR_EVER = 1_000_000_000


def _at_once(_k: int) -> float:
    return 0.0


def _draw_clamped(_ceiling: float, previous: float, u: float) -> float:
    """Return the AWS form of decorrelated jitter, whose draws pile up at the cap."""
    return min(_CAP, _BASE + u * (3 * previous - _BASE))


_POLICIES: dict[str, dict[str, Any]] = {
    "none": {"initial_delay": 2 * _BASE, "backoff": _at_once, "jitter": "none"},
    "exponential": {"initial_delay": 2 * _BASE, "jitter": "none"},
    "full": {"initial_delay": 2 * _BASE, "jitter": "full"},
    "equal": {"initial_delay": 2 * _BASE, "jitter": "equal"},
    "decorrelated": {"initial_delay": _BASE, "jitter": "decorrelated"},
    "decorrelated-aws": {"initial_delay": _BASE, "jitter": _draw_clamped},
}


class Contention(NamedTuple):
    """What one trial came to."""

    calls: int
    """Writes until every client had one that succeeded."""
    time_ms: float
    """When the last client learned of its success."""

    def metrics(self) -> dict[str, float]:
        """Return both by name; the time in seconds, as all scenarios do."""
        return {"calls": float(self.calls), "time": self.time_ms / 1000}


def contention(
    *, jitter: str = "full", clients: int = 100, trials: int = 1, seed: int = 0
) -> list[Contention]:
    """Run the study: "none" is no backoff at all, "exponential" is backoff without jitter."""
    check_one_of("jitter", jitter, _POLICIES)
    check_count("clients", clients)
    policy = Policy(max_attempts=_FOR_EVER, max_delay=_CAP, **_POLICIES[jitter])
    return [
        _trial(policy, clients, World(seed_of(seed, trial)))
        for trial in range(check_count("trials", trials))
    ]


class _Row:
    """The row, and what all its writers share."""

    __slots__ = ("at", "calls", "draw", "hop", "last", "version")

    def __init__(self, world: World) -> None:
        self.at: Callable[..., None] = world.at
        self.hop: Callable[[], float] = world.sampler(_HOP, "network")
        self.draw: Callable[[], float] = world.dice("jitter").random
        self.version = 0
        self.calls = 0
        self.last = 0.0


class _Writer:
    __slots__ = ("_call", "_row")

    def __init__(self, row: _Row, policy: Policy) -> None:
        self._row = row
        self._call = Call(policy)

    def start(self, now: float) -> None:
        """Send the read."""
        self._call.start(now)
        self._row.at(now + self._row.hop(), self._reads)

    def _reads(self, now: float, _: object) -> None:
        row = self._row
        row.at(now + row.hop() + row.hop(), self._writes, row.version)

    def _writes(self, now: float, version: int) -> None:
        row = self._row
        row.calls += 1
        known = now + row.hop()
        if version == row.version:
            row.version += 1
            row.last = max(row.last, known)
            self._call.record_success(known, 0.0)
            return
        verdict = self._call.record_failure(TRANSIENT, known, row.draw())
        if isinstance(verdict, Wait):
            self.start(known + verdict.delay)


def _trial(policy: Policy, clients: int, world: World) -> Contention:
    row = _Row(world)
    for _ in range(clients):
        _Writer(row, policy).start(0.0)
    world.run(float("inf"))
    return Contention(row.calls, row.last * 1000)


STUDY = Study(
    name="contention",
    question="Many clients write to one row. Which backoff gets all done with the fewest calls?",
    lesson=(
        "Without backoff, calls grow with the square of the clients. Backoff without jitter only "
        "moves the crowd; it is jitter that breaks it up. Full and equal jitter make the fewest "
        "calls, and full is done sooner; of the jitters, decorrelated is the quickest, for more "
        "calls."
    ),
    run=contention,
    knob="jitter",
    variants=tuple(_POLICIES),
    columns=(Column("calls", "calls"), Column("time", "time", "ms")),
    plots=(
        Plot("lines", "calls", "Writes until all are done", x="clients", y_title="calls", log=True),
        Plot("lines", "time", "Time until all are done", x="clients", y_title="s", log=True),
    ),
    parameters={"clients": 100},
    trials=20,
    sweep={"clients": (10, 20, 50, 100, 150, 200)},
)
