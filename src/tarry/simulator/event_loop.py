"""Virtual time: an event loop whose clock jumps from event to event, and seeded random sources."""

from __future__ import annotations

import gc
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.simulator.distributions import Distribution, Sampler

Callback: TypeAlias = "Callable[[float, Any], None]"
"""Called with the current virtual time, in seconds since the start of the run, and an argument."""


class EventLoop:
    """Runs callbacks at their times. Callbacks of the same time run in the order of scheduling."""

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
        """Return a new random source, which depends on the seed of the loop and on this name.

        Arrivals and latencies have their own sources, so that they stay the same if a policy draws
        more random numbers for jitter.
        """
        return Random(f"{self._seed}/{name}")

    def sampler(self, distribution: Distribution, name: str) -> Sampler:
        """Return a function that draws from the distribution, with a new source of this name."""
        return distribution.sampler(self.random_source(name))

    def run(self, until: float) -> None:
        """Run all callbacks that are due before `until`, also those that other callbacks add."""
        times, pop_callbacks = self._times, self._callbacks.pop
        gc_was_enabled = gc.isenabled()
        # Callbacks create no reference cycles, and the collector would double the time of a run.
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
    """Return the seed of the trial with index `trial`; `seed` is the same for all trials."""
    return f"{seed}/{trial}"
