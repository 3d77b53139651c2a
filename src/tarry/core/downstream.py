"""The state of one dependency: its breaker, retry budget, limits and latency.

Not locked: whoever shares one between threads guards every method (see `runtime/`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.checks import check_count
from tarry.core.latency import Latency
from tarry.core.limiter import InFlight
from tarry.core.outcome import SUCCESS, Kind
from tarry.core.verdict import DelayedPermit, Reason, Stop

if TYPE_CHECKING:
    from tarry.core.breaker import Breaker, BreakerState
    from tarry.core.budget import Budget
    from tarry.core.limiter import Limiter
    from tarry.core.outcome import Outcome

_SUCCESS, _PERMANENT = Kind.SUCCESS, Kind.PERMANENT
_MOST_MOVES = 100
_MOST_CREDIT = 10.0


class BreakerTransition(NamedTuple):
    """A breaker went from one state to another."""

    before: BreakerState
    after: BreakerState


class Downstream:
    """Everything known about one dependency."""

    __slots__ = (
        "_credit",
        "_limiters",
        "breaker",
        "budget",
        "has_limiters",
        "latency",
        "name",
        "transitions",
    )

    def __init__(
        self,
        name: str,
        *,
        breaker: Breaker | None = None,
        budget: Budget | None = None,
        limiter: Limiter | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        self.name: str = name
        self.breaker: Breaker | None = breaker
        self.budget: Budget | None = budget
        self.latency: Latency = Latency()
        self.transitions: deque[BreakerTransition] = deque(maxlen=_MOST_MOVES)
        """What the breaker did since somebody last looked; bounded, the oldest go first."""
        caps: tuple[Limiter, ...] = ()
        if max_in_flight is not None:
            caps = (InFlight(check_count("max_in_flight", max_in_flight)),)
        self._limiters: tuple[Limiter, ...] = caps if limiter is None else (*caps, limiter)
        self.has_limiters: bool = bool(self._limiters)
        """Whether anything but the breaker can hold an attempt back."""
        self._credit = 0.0

    def admit(self, now: float) -> int | DelayedPermit | Stop:
        """Let an attempt through with a permit, perhaps later, or say why not."""
        permit = 0
        breaker = self.breaker
        if breaker is not None:
            before = breaker.state
            answer = breaker.admit(now)
            if breaker.state is not before:
                self._moved(before, now)
            if answer is None:
                return Stop(Reason.BREAKER_OPEN, breaker.retry_after(now))
            permit = answer
        return self._limited(permit, now) if self._limiters else permit

    def try_record_success(self, permit: int, duration: float, now: float) -> bool:
        """Count a first attempt's success where that can change nothing, else say False."""
        if self._limiters or (
            self.breaker is not None and not self.breaker.try_count_success(permit, now)
        ):
            return False
        if self.budget is not None:
            self.budget.record(SUCCESS, 0.0, now)
        remember = self.latency.add
        remember(duration)
        return True

    def record(
        self,
        permit: int,
        outcome: Outcome,
        duration: float,
        now: float,
        u: float,
        paid: float = 0.0,
    ) -> None:
        """Learn from an attempt that ended; `paid` is what the retry budget took for it."""
        if outcome.local:  # nobody was asked
            Downstream.release(self, permit, duration, now)
            return
        for limiter in self._limiters:  # first: whatever happens next, the place is free
            limiter.release(outcome, duration, now)
        kind, breaker = outcome.kind, self.breaker
        if breaker is not None and not (
            kind is _SUCCESS and breaker.is_fault_free and breaker.try_count_success(permit, now)
        ):
            before = breaker.state
            if kind is _PERMANENT:  # says nothing about the dependency, good or bad
                breaker.release(permit)
            else:
                breaker.record(permit, kind is not _SUCCESS, duration, now, u)
            if breaker.state is not before:
                self._moved(before, now)
        if self.budget is not None:
            self.budget.record(outcome, paid, now)
        if kind is _SUCCESS:
            self.latency.add(duration)

    def release(self, permit: int, duration: float, now: float) -> None:
        """Take back a permit whose attempt came to no result; nothing is counted."""
        if self.breaker is not None:
            self.breaker.release(permit)
        for limiter in self._limiters:
            limiter.release(None, duration, now)

    def check_retry(self, outcome: Outcome, now: float) -> Stop | None:
        """Say why a retry after `outcome` may not go, and change nothing."""
        breaker, budget = self.breaker, self.budget
        if breaker is not None and not breaker.would_admit(now):
            return Stop(Reason.BREAKER_OPEN, breaker.retry_after(now))
        if budget is not None and budget.balance(now) < budget.cost(outcome):
            return Stop(Reason.BUDGET_EMPTY)
        return None

    def withdraw(self, outcome: Outcome, now: float) -> float | None:
        """Pay for a retry; return what it cost, or None: somebody else took what was left."""
        if self.budget is None:
            return 0.0
        cost = self.budget.cost(outcome)
        return cost if self.budget.withdraw(cost, now) else None

    def deposit(self, paid: float, now: float) -> None:
        """Give back what was paid for a retry that never started."""
        if self.budget is not None and paid:
            self.budget.deposit(paid, now)

    def status(self, now: float) -> tuple[str | None, float | None]:
        """Return the breaker's state and the budget's balance, for the decision record."""
        breaker = None if self.breaker is None else self.breaker.state._value_
        balance = None if self.budget is None else self.budget.balance(now)
        return breaker, balance

    def expected_duration(self) -> float:
        """Return the median of the last calls, 0 while there is none."""
        return self.latency.quantile(0.5) or 0.0

    def add_hedge_credit(self, share: float) -> None:
        """Add one call's part to the credit that hedges are paid from."""
        self._credit = min(_MOST_CREDIT, self._credit + share)

    def take_hedge_credit(self, amount: float = 1.0) -> bool:
        """Take one hedge from the credit, if it is there; -1 gives it back."""
        if self._credit < amount:
            return False
        self._credit -= amount
        return True

    def hedge_delay(self, quantile: float, min_samples: int) -> float | None:
        """Return a live quantile of the latency, or None while too few calls were seen."""
        return None if len(self.latency) < min_samples else self.latency.quantile(quantile)

    def force(self, state: str) -> None:
        """Set the breaker's state by hand."""
        if self.breaker is not None:
            before = self.breaker.state
            self.breaker.force(state)
            if self.breaker.state is not before:
                self.transitions.append(BreakerTransition(before, self.breaker.state))

    def on_recovery(self, now: float) -> None:
        """Open up, slowly, where somebody else has seen the dependency recover."""
        if self.breaker is not None:
            self.breaker.force("closed")
        for limiter in self._limiters:
            limiter.on_recovery(now)

    def _limited(self, permit: int, now: float) -> int | DelayedPermit | Stop:
        delay = 0.0
        acquired = 0
        try:
            for limiter in self._limiters:
                answer = limiter.acquire(now)
                if answer is None:
                    self._undo(permit, acquired, now)
                    return Stop(Reason.LIMIT)
                acquired += 1
                if answer:
                    delay = max(delay, answer)
        except BaseException:  # of a limiter of the user's
            self._undo(permit, acquired, now)
            raise
        return DelayedPermit(permit, delay) if delay else permit

    def _undo(self, permit: int, acquired: int, now: float) -> None:
        for limiter in self._limiters[:acquired]:
            limiter.release(None, 0.0, now)
        if self.breaker is not None:
            self.breaker.release(permit)

    def _moved(self, before: BreakerState, now: float) -> None:
        after = self.breaker.state if self.breaker is not None else before
        self.transitions.append(BreakerTransition(before, after))
        if before == "half-open" and after == "closed":
            for limiter in self._limiters:
                limiter.on_recovery(now)
