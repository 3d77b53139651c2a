"""Virtual time: what happens next, and the one source of dice. One seed is one run."""

from __future__ import annotations

import gc
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.simulator.distributions import Distribution, Sampler

Act: TypeAlias = "Callable[[float, Any], None]"


class World:
    """Events in the order of their time; those of the same moment in the order they were made."""

    __slots__ = ("_moments", "_seed", "_times", "at")

    def __init__(self, seed: int | str) -> None:
        self._seed = seed
        self._times: list[float] = []
        self._moments: dict[float, list[tuple[Act, Any]]] = {}
        self.at: Callable[..., None] = _scheduler(self._times, self._moments)
        """`at(when, act, about=None)` has `act(when, about)` called at that time."""

    def dice(self, of: str) -> Random:
        """Return the dice of one source of chance.

        Each has its own, so that runs with another policy meet the same arrivals and latencies.
        """
        return Random(f"{self._seed}/{of}")

    def sampler(self, distribution: Distribution, of: str) -> Sampler:
        """Return a function that draws from the distribution with the dice of that source."""
        return distribution.sampler(self.dice(of))

    def run(self, until: float) -> None:
        """Let everything happen that comes before `until`, or all there is."""
        times, moment = self._times, self._moments.pop
        collecting = gc.isenabled()
        gc.disable()  # nothing here makes cycles, and looking for them takes half of a large run
        try:
            while times and times[0] < until:
                now = heappop(times)
                for act, about in moment(now):
                    act(now, about)
        finally:
            if collecting:
                gc.enable()


def seed_of(seed: int, trial: int) -> str:
    """Return the seed of one trial of several; trials of different seeds have nothing in common."""
    return f"{seed}/{trial}"


def _scheduler(
    times: list[float], moments: dict[float, list[tuple[Act, Any]]]
) -> Callable[..., None]:
    """Return `at`; a closure, because it runs three times in every attempt.

    The heap holds bare floats, which compare faster than tuples.
    """
    push = heappush

    def at(when: float, act: Act, about: Any = None) -> None:
        if when in moments:
            moments[when].append((act, about))
        else:
            moments[when] = [(act, about)]
            push(times, when)

    return at
