"""Leases that are renewed while their requests run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tarry.idempotency.loops import in_background, running_loop
from tarry.runtime.clocks import system

if TYPE_CHECKING:
    from tarry.idempotency.lease import Lease


class Renewals:
    """Renews each lease after a third of its time, and so on, while its request runs.

    Most requests end before the first time. So all of a loop share one timer, which runs while
    there are any and looks twice as often for those that are due: a request pays for no timer and
    no task of its own.
    """

    def __init__(self, lease: float) -> None:
        self._every = lease / 3
        self._pause = min(1.0, lease / 30)
        """Before another try, when the store has failed."""
        self._shared: Shared | None = None

    def begin(self, lease: Lease) -> dict[Lease, float]:
        """Renew a lease from now on, until it is taken out of the dict that this returns.

        A renewal that is on its way then ends by itself.
        """
        loop = running_loop()
        shared = self._shared
        if shared is None or shared.loop is not loop:
            shared = self._shared = Shared(loop, self._every, self._pause)
        clock = system.now
        shared.due[lease] = clock() + self._every
        if not shared.ticks:
            shared.ticks = True
            in_background(shared.tick)
        return shared.due


class Shared:
    """The leases of one loop, and their timer."""

    def __init__(self, loop: object, every: float, pause: float) -> None:
        self.loop: object = loop
        self._every = every
        self._pause = pause
        self.due: dict[Lease, float] = {}
        """When to renew each one next."""
        self.ticks: bool = False

    async def tick(self) -> None:
        """Look for leases that are due, as long as there are any."""
        try:
            while self.due:
                await system.async_sleep(self._every / 2)
                now = system.now()
                for lease, due in tuple(self.due.items()):
                    if due <= now:
                        self.due[lease] = float("inf")
                        in_background(partial(self._renew, lease))
        finally:
            self.ticks = False

    async def _renew(self, lease: Lease) -> None:
        """Renew one lease, and try again soon if the store fails."""
        while lease in self.due:
            begun = system.now()
            held = await lease.extend()
            if held is None:
                await system.async_sleep(self._pause)
                continue
            if held and lease in self.due:
                self.due[lease] = begun + self._every
            return
