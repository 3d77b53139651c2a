"""The state of a dependency that calls share: the core's `Downstream` with a lock.

The lock is held while the core computes, and never while user code runs: not the called function,
a listener or a jitter function. The exception is a budget or limiter that the user wrote, whose
methods are called under the lock.
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

MAX_ABANDONED_PERMITS = 10_000

MAX_UNCOUNTED_SUCCESSES = 32
"""Entries that a driver may leave in `uncounted_successes` before it calls `settle`."""

_downstreams: WeakSet[Downstream] = WeakSet()


def _replace_locks_after_fork() -> None:
    # A lock that another thread of the parent held would stay locked for ever in the child.
    for downstream in list(_downstreams):
        downstream._lock = threading.Lock()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_locks_after_fork)


def live_downstreams() -> list[Downstream]:
    """Return all downstreams of the process that are still referenced, sorted by name."""
    while True:
        try:
            return sorted(_downstreams, key=lambda downstream: downstream.name)
        except RuntimeError:  # another thread added one during the iteration
            continue


class LockedDownstream(core.Downstream):
    """The core's state of a dependency, each step of it under a lock.

    Drivers call these methods. The methods for users are in `Downstream`.
    """

    __slots__ = ("__weakref__", "_lock", "abandoned_permits", "uncounted_successes")

    closed = BreakerState.CLOSED
    """For drivers, which compare states without importing the breaker's module."""

    def __init__(
        self,
        name: str,
        *,
        breaker: Breaker | None,
        budget: Budget | None,
        limiter: Limiter | None,
        max_in_flight: int | None,
    ) -> None:
        super().__init__(
            name, breaker=breaker, budget=budget, limiter=limiter, max_in_flight=max_in_flight
        )
        self._lock = threading.Lock()
        self.abandoned_permits: deque[int] = deque(maxlen=MAX_ABANDONED_PERMITS)
        """Permits of attempts that were garbage collected. Their finalizers may run in a thread
        that holds the lock, so they only append here; the next `admit` returns the permits."""
        self.uncounted_successes: deque[tuple[int, float, float]] = deque()
        """Successful first attempts that changed nothing but counts: permit, start and end. Each
        method that reads the counts adds them first. Counting them in bulk saves a lock and three
        calls for each call that succeeds."""

    def admit(self, now: float) -> int | DelayedPermit | Stop:
        """Return a permit for an attempt, a permit with a delay, or why none may start."""
        with self._lock:
            self._settle()
            while self.abandoned_permits:
                super().release(self.abandoned_permits.popleft(), 0.0, now)
            answer = super().admit(now)
        if self.transitions:
            self._emit_transitions()
        return answer

    def settle(self) -> None:
        """Count the entries of `uncounted_successes`."""
        with self._lock:
            self._settle()
        if self.transitions:
            self._emit_transitions()

    def _settle(self) -> None:
        successes = self.uncounted_successes
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
        """Count an attempt that ended."""
        with self._lock:
            self._settle()
            super().record(permit, outcome, duration, now, u, paid)
        if self.transitions:
            self._emit_transitions()

    def release(self, permit: int, duration: float, now: float) -> None:
        """Return the permit of an attempt that ended without an outcome."""
        with self._lock:
            super().release(permit, duration, now)

    def check_retry(self, outcome: Outcome, now: float) -> Stop | None:
        """Return why no retry may follow `outcome`, or None; changes nothing."""
        with self._lock:
            self._settle()
            return super().check_retry(outcome, now)

    def withdraw(self, outcome: Outcome, now: float) -> float | None:
        """Withdraw the cost of a retry from the budget; None if the balance is too low."""
        with self._lock:
            self._settle()
            return super().withdraw(outcome, now)

    def deposit(self, paid: float, now: float) -> None:
        """Refund the cost of a retry that never started."""
        with self._lock:
            super().deposit(paid, now)

    def status(self, now: float) -> tuple[str | None, float | None]:
        """Return the breaker's state and the budget's balance."""
        with self._lock:
            self._settle()
            return super().status(now)

    def expected_duration(self) -> float:
        """Return the median duration of the latest calls."""
        with self._lock:
            self._settle()
            return super().expected_duration()

    def hedge_delay(self, quantile: float, min_samples: int) -> float | None:
        """Return a quantile of the latency, or None while there are too few samples."""
        with self._lock:
            self._settle()
            return super().hedge_delay(quantile, min_samples)

    def add_hedge_credit(self, share: float) -> None:
        """Add one call's share to the credit that pays for hedges."""
        with self._lock:
            super().add_hedge_credit(share)

    def take_hedge_credit(self, amount: float = 1.0) -> bool:
        """Take one hedge from the credit; -1 refunds one."""
        with self._lock:
            return super().take_hedge_credit(amount)

    def _emit_transitions(self) -> None:
        """Emit the breaker's state changes, outside the lock: listeners are user code."""
        while True:
            try:
                transition = self.transitions.popleft()
            except IndexError:  # all emitted, perhaps by another thread
                return
            if bus.is_observed():
                bus.emit(BreakerMoved("", self.name, transition.before, transition.after))


class Downstream(LockedDownstream):
    """One dependency, shared by every call to it: `Downstream("payments", breaker=Breaker())`.

    breaker: stops calls while the dependency fails.
    budget: limits retries to a share of the calls.
    limiter: limits the rate or the concurrency of calls, adaptively.
    max_in_flight: a fixed limit of concurrent calls.
    """

    __slots__ = ()

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
        _check_method("breaker", breaker, "admit", "a tarry.Breaker()")
        _check_method("budget", budget, "withdraw", "a tarry.TokenBudget() or another budget")
        _check_method("limiter", limiter, "acquire", "a tarry.AIMD() or another limiter")
        super().__init__(
            name, breaker=breaker, budget=budget, limiter=limiter, max_in_flight=max_in_flight
        )
        _downstreams.add(self)

    @property
    def state(self) -> BreakerState | None:
        """The breaker's state; None without a breaker."""
        return None if self.breaker is None else self.breaker.state

    @property
    def balance(self) -> float | None:
        """The retry budget's balance; None without a budget."""
        with self._lock:
            self._settle()
            return None if self.budget is None else self.budget.balance(system.now())

    def quantile(self, q: float) -> float | None:
        """Return the duration that the share `q` of the latest calls did not exceed."""
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
        self._emit_transitions()

    def __repr__(self) -> str:
        """Show the name and the breaker's state."""
        return f"Downstream({self.name!r}, state={self.state})"


def _check_method(field: str, value: object, method: str, expected: str) -> None:
    if value is not None and (isinstance(value, type) or not hasattr(value, method)):
        raise ConfigurationTypeError(field, f"must be {expected}", value)
