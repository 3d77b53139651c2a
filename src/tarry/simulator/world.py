"""Virtual time: what happens next, and the one source of dice. One seed is one run."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.simulator.distributions import Distribution, Sampler

Act: TypeAlias = "Callable[[float, Any], None]"


class World:
    """Events in the order of their time; those of the same moment in the order they were made."""

    __slots__ = ("_moments", "_times", "at", "dice")

    def __init__(self, seed: int | str) -> None:
        self.dice: Random = Random(seed)
        self._times: list[float] = []
        self._moments: dict[float, list[tuple[Act, Any]]] = {}
        self.at: Callable[..., None] = _scheduler(self._times, self._moments)
        """`at(when, act, about=None)` has `act(when, about)` called at that time."""

    def sampler(self, distribution: Distribution) -> Sampler:
        """Return a function that draws from the distribution with this world's dice."""
        return distribution.sampler(self.dice)

    def run(self, until: float) -> None:
        """Let everything happen that comes before `until`, or all there is."""
        times, moment = self._times, self._moments.pop
        while times and times[0] < until:
            now = heappop(times)
            for act, about in moment(now):
                act(now, about)


def seed_of(seed: int, trial: int) -> str:
    """Return the seed of one trial of several; trials of different seeds have nothing in common."""
    return f"{seed}/{trial}"


def _scheduler(
    times: list[float], moments: dict[float, list[tuple[Act, Any]]]
) -> Callable[..., None]:
    """Return `at`; a closure, because it runs three times in every attempt.

    The heap holds bare floats, which compare in half the time that tuples take.
    """
    push = heappush

    def at(when: float, act: Act, about: Any = None) -> None:
        if when in moments:
            moments[when].append((act, about))
        else:
            moments[when] = [(act, about)]
            push(times, when)

    return at
