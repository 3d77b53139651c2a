"""A downstream to share: the core's state, each step of it behind a lock.

The lock is held while the core thinks, never while user code runs: not the function, not a
listener, not a jitter of the user's. Only a budget or a limiter of the user's own runs under it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakSet

from tarry.core import downstream as core
from tarry.core.breaker import BreakerState
from tarry.core.checks import check_share
from tarry.core.events import BreakerMoved
from tarry.core.outcome import SUCCESS
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime.clocks import system
from tarry.runtime.events import bus

if TYPE_CHECKING:
    from tarry.core.breaker import Breaker
    from tarry.core.budget import Budget
    from tarry.core.limiter import Limiter
    from tarry.core.outcome import Outcome
    from tarry.core.verdict import DelayedPermit, Stop

_MOST_DROPPED = 10_000
MOST_UNCOUNTED = 32
"""Successes of first attempts that a driver may leave in `successes` before it calls `settle`."""

_known: WeakSet[Downstream] = WeakSet()


def _after_fork() -> None:
    """Renew the locks in a forked child: whoever held one is not there."""
    for downstream in list(_known):
        downstream.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def live() -> list[Downstream]:
    """Return the downstreams that somebody still holds, by name: for metrics that are read."""
    while True:
        try:
            return sorted(_known, key=lambda downstream: downstream.name)
        except RuntimeError:  # another thread made one meanwhile
            continue


class Downstream(core.Downstream):
    """One dependency, shared by every call to it: `Downstream("payments", breaker=Breaker())`."""

    __slots__ = ("__weakref__", "_lock", "dropped", "successes")

    closed = BreakerState.CLOSED

    def __init__(
        self,
        name: str,
        *,
        breaker: Breaker | None = None,
        budget: Budget | None = None,
        limiter: Limiter | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigurationTypeError("name", "must be a text that is not empty", name)
        _has("breaker", breaker, "admit", "a tarry.Breaker()")
        _has("budget", budget, "withdraw", "a tarry.TokenBudget() or another budget")
        _has("limiter", limiter, "acquire", "a tarry.AIMD() or another limiter")
        super().__init__(
            name, breaker=breaker, budget=budget, limiter=limiter, max_in_flight=max_in_flight
        )
        self._lock = threading.Lock()
        self.dropped: deque[int] = deque(maxlen=_MOST_DROPPED)
        """Permits whose owner is gone. The garbage collector may run while the lock is held, so
        a finalizer only leaves them here, and the next who is let through takes them back."""
        self.successes: deque[tuple[int, float, float]] = deque()
        """First attempts that succeeded while that changed nothing but counts: the permit, when
        it started and when it ended. Whoever looks at the counts adds them first: many at once
        cost less than a lock and three calls for each."""
        _known.add(self)

    @property
    def state(self) -> BreakerState | None:
        """Where the breaker stands; None without one."""
        return None if self.breaker is None else self.breaker.state

    @property
    def balance(self) -> float | None:
        """What the retry budget holds; None without one."""
        with self._lock:
            self._settle()
            return None if self.budget is None else self.budget.balance(system.now())

    def quantile(self, q: float) -> float | None:
        """Return the duration that the share `q` of the last calls did not exceed."""
        check_share("q", q)
        with self._lock:
            self._settle()
            return self.latency.quantile(q)

    def force(self, state: str) -> None:
        """Set the breaker by hand: open, closed (automatic again), disabled, metrics-only."""
        if self.breaker is None:
            msg = f"downstream {self.name!r} has no breaker; give it one with breaker="
            raise ConfigurationError(msg)
        with self._lock:
            self._settle()
            super().force(state)
        self._tell()

    # What follows is the core's, with the lock. Drivers call it; users have no need to.

    def admit(self, now: float) -> int | DelayedPermit | Stop:
        """Let an attempt through with a permit, perhaps later, or say why not."""
        with self._lock:
            self._settle()
            while self.dropped:
                super().release(self.dropped.popleft(), 0.0, now)
            answer = super().admit(now)
        if self.transitions:
            self._tell()
        return answer

    def settle(self) -> None:
        """Count the successes of first attempts."""
        with self._lock:
            self._settle()
        if self.transitions:
            self._tell()

    def _settle(self) -> None:
        successes = self.successes
        while successes:
            permit, started, now = successes.popleft()
            if not self.try_record_success(permit, now - started, now):
                super().record(permit, SUCCESS, now - started, now, system.draw())

    def record(
        self,
        permit: int,
        outcome: Outcome,
        duration: float,
        now: float,
        u: float,
        paid: float = 0.0,
    ) -> None:
        """Learn from an attempt that ended."""
        with self._lock:
            self._settle()
            super().record(permit, outcome, duration, now, u, paid)
        if self.transitions:
            self._tell()

    def release(self, permit: int, duration: float, now: float) -> None:
        """Take back a permit whose attempt came to no result."""
        with self._lock:
            super().release(permit, duration, now)

    def check_retry(self, outcome: Outcome, now: float) -> Stop | None:
        """Say why a retry after `outcome` may not go, and change nothing."""
        with self._lock:
            self._settle()
            return super().check_retry(outcome, now)

    def withdraw(self, outcome: Outcome, now: float) -> float | None:
        """Pay for a retry; None when it cannot be paid any more."""
        with self._lock:
            self._settle()
            return super().withdraw(outcome, now)

    def deposit(self, paid: float, now: float) -> None:
        """Give back what was paid for a retry that never started."""
        with self._lock:
            super().deposit(paid, now)

    def status(self, now: float) -> tuple[str | None, float | None]:
        """Return the breaker's state and the budget's balance."""
        with self._lock:
            self._settle()
            return super().status(now)

    def expected_duration(self) -> float:
        """Return the median of the last calls."""
        with self._lock:
            self._settle()
            return super().expected_duration()

    def hedge_delay(self, quantile: float, min_samples: int) -> float | None:
        """Return a live quantile of the latency, once it is known."""
        with self._lock:
            self._settle()
            return super().hedge_delay(quantile, min_samples)

    def add_hedge_credit(self, share: float) -> None:
        """Add one call's part to the credit that hedges are paid from."""
        with self._lock:
            super().add_hedge_credit(share)

    def take_hedge_credit(self, amount: float = 1.0) -> bool:
        """Take one hedge from the credit, or give it back with -1."""
        with self._lock:
            return super().take_hedge_credit(amount)

    def renew_lock(self) -> None:
        """Take a lock that nobody holds."""
        self._lock = threading.Lock()

    def _tell(self) -> None:
        """Tell the listeners what the breaker did. Not under the lock: listeners are user code."""
        while True:
            try:
                move = self.transitions.popleft()
            except IndexError:  # told, perhaps by another thread
                return
            if bus.watched():
                bus.emit(BreakerMoved("", self.name, move.before, move.after))

    def __repr__(self) -> str:
        """Show the name and the breaker's state."""
        return f"Downstream({self.name!r}, state={self.state})"


def _has(field: str, value: object, method: str, wanted: str) -> None:
    if value is not None and (isinstance(value, type) or not hasattr(value, method)):
        raise ConfigurationTypeError(field, f"must be {wanted}", value)
