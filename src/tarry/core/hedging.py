"""Hedging: a second copy of a call that takes too long, and the first answer wins.

A call has a retry policy or a hedging policy, never both (gRFC A6).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.checks import check_at_least, check_count, check_share, duration_or_none
from tarry.core.latency import MAX_SAMPLES
from tarry.core.outcome import SUCCESS, TRANSIENT, Kind
from tarry.core.verdict import Attempt, DelayedPermit, Reason, Stop
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from tarry.core.downstream import Downstream
    from tarry.core.outcome import Outcome

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hedging:
    """When to send another copy, and how many at most.

    `after` is a number of seconds or a live percentile such as "p95". `max_extra_load=0.05` sets
    both: the percentile (p95) and a cap, so that copies never add more than 5 % to the calls.
    """

    after: float | str | None = None
    max_extra_load: float | None = None
    max_attempts: int = 2
    min_samples: int = 100
    """A percentile is not used before so many calls have been seen."""
    max_hint: float = 120.0
    """The longest wait that a server may ask for; a longer one ends the call."""

    def __post_init__(self) -> None:
        """Check every field."""
        if self.after is None and self.max_extra_load is None:
            msg = 'after or max_extra_load must be given, such as after="p95"'
            raise ConfigurationError(msg)
        if isinstance(self.after, str):
            if not _PERCENTILE.fullmatch(self.after) or not self.quantile:
                rule = 'must be seconds or a percentile such as "p95"'
                raise ConfigurationError("after", rule, self.after)
        elif self.after is not None:
            object.__setattr__(self, "after", check_at_least("after", self.after, 0))
        if self.max_extra_load is not None:
            check_share("max_extra_load", self.max_extra_load)
        check_count("max_attempts", self.max_attempts, 2)
        check_at_least("max_hint", self.max_hint, 0)
        check_count("min_samples", self.min_samples)
        if self.min_samples > MAX_SAMPLES:
            rule = f"must be at most {MAX_SAMPLES}, got {self.min_samples}"
            raise ConfigurationError("min_samples", rule)

    @property
    def quantile(self) -> float | None:
        """The live quantile to hedge at, or None for a fixed delay."""
        if isinstance(self.after, str):
            return float(self.after[1:]) / 100
        if self.after is None and self.max_extra_load is not None:
            return 1 - self.max_extra_load
        return None

    def delay(self, downstream: Downstream) -> float | None:
        """Return the seconds to wait before a copy is sent, or None: no copy yet."""
        if isinstance(self.after, float):
            return self.after
        return downstream.hedge_delay(self.quantile or 0.0, self.min_samples)


class _Copy(NamedTuple):
    permit: int
    begun: float
    paid: float


class HedgedCall:
    """The state of one hedged call: the copies that run side by side, by their numbers."""

    __slots__ = (
        "_delay",
        "_downstream",
        "_hedging",
        "_running",
        "attempts",
        "next_hedge_at",
    )

    def __init__(self, hedging: Hedging, downstream: Downstream) -> None:
        self._hedging = hedging
        self._downstream = downstream
        self._delay: float | None = None
        self._running: dict[int, _Copy] = {}
        self.attempts: int = 0
        self.next_hedge_at: float | None = None
        """The moment to call `hedge`, or None when no further copy is due by time."""

    def start(self, now: float) -> Attempt | Stop:
        """Send the first copy."""
        attempt = self._launch(now, paid=0.0)
        if isinstance(attempt, Attempt):
            if self._hedging.max_extra_load is not None:
                self._downstream.add_hedge_credit(self._hedging.max_extra_load)
            self._delay = self._hedging.delay(self._downstream)
            self._plan(now + attempt.delay)
        return attempt

    def hedge(self, now: float) -> Attempt | Stop | None:
        """Send another copy now, unless the dependency or the hedge budget says no.

        None means to go on waiting for those that run, `Stop` that none runs any more.
        """
        self.next_hedge_at = None
        refusal = Stop(Reason.ATTEMPTS)
        if self.attempts < self._hedging.max_attempts:
            answer = self._another(now)
            if isinstance(answer, Attempt):
                self._plan(now + answer.delay)
                return answer
            refusal = answer
        return None if self._running else refusal

    def _another(self, now: float) -> Attempt | Stop:
        downstream, capped = self._downstream, self._hedging.max_extra_load is not None
        refusal = downstream.check_retry(TRANSIENT, now)
        if refusal is not None:
            return refusal
        if capped and not downstream.take_hedge_credit():
            return Stop(Reason.BUDGET_EMPTY)
        paid = downstream.withdraw(TRANSIENT, now)
        answer = Stop(Reason.BUDGET_EMPTY) if paid is None else self._launch(now, paid)
        if isinstance(answer, Stop):
            downstream.deposit(paid or 0.0, now)
            if capped:
                downstream.take_hedge_credit(-1.0)
        return answer

    def record_success(self, number: int, now: float, u: float) -> None:
        """Learn that one copy has won; the others are cancelled.

        How long a loser has run so far is a lower bound of its latency. Where that is longer
        than the winner took, it is remembered, or the percentile would sink below the delay that
        cut the losers off.
        """
        winner = self._running[number].begun
        self._end(number, SUCCESS, now, u)
        for copy in self._running.values():
            if copy.begun < winner:
                self._downstream.latency.add(now - copy.begun)
        self.cancel(now)

    def record_failure(
        self, number: int, outcome: Outcome, now: float, u: float
    ) -> Attempt | Stop | None:
        """Learn that one copy failed: send the next at once, go on waiting (None), or stop.

        What may not be repeated is the answer. After anything else, the next copy need not wait
        for its time, unless the server has named one (gRFC A6).
        """
        self._end(number, outcome, now, u)
        hint = outcome.hint
        wait = None if hint is None else duration_or_none(hint.delay)
        if outcome.kind not in (Kind.TRANSIENT, Kind.THROTTLED):
            overloaded = outcome.kind is Kind.OVERLOADED
            answer = Stop(Reason.OVERLOADED if overloaded else Reason.PERMANENT, wait, hint)
        elif not outcome.safe:
            answer = Stop(Reason.UNSAFE)
        elif outcome.retried:
            answer = Stop(Reason.RETRIED_BELOW)
        elif wait and wait > self._hedging.max_hint:
            answer = Stop(Reason.HINT_TOO_LONG, wait, hint)
        elif wait and self.attempts < self._hedging.max_attempts:
            self.next_hedge_at = now + wait
            return None
        else:
            return self.hedge(now)
        self.cancel(now)
        return answer

    def record_unsent(self, number: int, now: float) -> bool:
        """Learn that a copy could not be started after all; say whether others still run."""
        copy = self._running.pop(number)
        self._downstream.release(copy.permit, 0.0, now)
        self._downstream.deposit(copy.paid, now)
        if self._hedging.max_extra_load is not None:
            self._downstream.take_hedge_credit(-1.0)
        self.next_hedge_at = None
        return bool(self._running)

    def cancel(self, now: float) -> None:
        """Give back the permits of the copies that still run; nothing is counted."""
        first: BaseException | None = None
        while self._running:
            _, copy = self._running.popitem()
            try:
                self._downstream.release(copy.permit, now - copy.begun, now)
                if now < copy.begun:  # it was still waiting for its turn
                    self._downstream.deposit(copy.paid, now)
            except BaseException as error:  # noqa: BLE001 - of a limiter: the others go on
                first = first or error
        if first is not None:
            raise first

    def _launch(self, now: float, paid: float) -> Attempt | Stop:
        answer = self._downstream.admit(now)
        if isinstance(answer, Stop):
            return answer
        permit, delay = answer if isinstance(answer, DelayedPermit) else (answer, 0.0)
        self.attempts += 1
        self._running[self.attempts] = _Copy(permit, now + delay, paid)
        return Attempt(self.attempts, delay=delay)

    def _plan(self, begun: float) -> None:
        if self._delay is not None and self.attempts < self._hedging.max_attempts:
            self.next_hedge_at = begun + self._delay

    def _end(self, number: int, outcome: Outcome, now: float, u: float) -> None:
        copy = self._running.pop(number)
        self._downstream.record(copy.permit, outcome, now - copy.begun, now, u, copy.paid)
