"""Virtual time: an event loop whose clock jumps from event to event, and seeded random sources.

The same seed gives the same run.
"""

from __future__ import annotations

import gc
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.simulator.distributions import Distribution, Sampler

Callback: TypeAlias = "Callable[[float, Any], None]"


class EventLoop:
    """Runs callbacks in the order of their times; equal times run in the order of scheduling."""

    __slots__ = ("_callbacks", "_seed", "_times", "schedule")

    def __init__(self, seed: int | str) -> None:
        self._seed = seed
        self._times: list[float] = []
        self._callbacks: dict[float, list[tuple[Callback, Any]]] = {}
        times, callbacks, push = self._times, self._callbacks, heappush

        # A closure is faster than a method, and each attempt calls `schedule` three times. The heap
        # `times` holds floats and not tuples, because floats compare faster.
        def schedule(when: float, callback: Callback, argument: Any = None) -> None:
            if when in callbacks:
                callbacks[when].append((callback, argument))
            else:
                callbacks[when] = [(callback, argument)]
                push(times, when)

        self.schedule: Callable[..., None] = schedule
        """`schedule(when, callback, argument=None)` calls `callback(when, argument)` at `when`."""

    def random_source(self, name: str) -> Random:
        """Return the random source with this name.

        Separate sources let a run with another policy draw the same arrivals and latencies.
        """
        return Random(f"{self._seed}/{name}")

    def sampler(self, distribution: Distribution, name: str) -> Sampler:
        """Return a function that draws from the distribution, using the source with this name."""
        return distribution.sampler(self.random_source(name))

    def run(self, until: float) -> None:
        """Run all callbacks that are due before `until`, also those that callbacks schedule."""
        times, pop_callbacks = self._times, self._callbacks.pop
        gc_was_enabled = gc.isenabled()
        # Callbacks create no cycles, and the collector would double the time of a large run.
        gc.disable()
        try:
            while times and times[0] < until:
                now = heappop(times)
                for callback, argument in pop_callbacks(now):
                    callback(now, argument)
        finally:
            if gc_was_enabled:
                gc.enable()


def trial_seed(seed: int, trial: int) -> str:
    """Return the seed of one trial, which differs for each pair of seed and trial."""
    return f"{seed}/{trial}"
