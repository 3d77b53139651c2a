"""The state kept for one dependency: its breaker, retry budget, limiters and latency.

Not thread-safe: `tarry.runtime.downstream` adds a lock around every method.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import count
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.core.checks import check_count
from tarry.core.limiter import AdaptiveRate, InFlight, Limiter
from tarry.core.outcome import SUCCESS, Kind, Outcome
from tarry.core.verdict import DelayedPermit, Reason, Stop

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.breaker import Breaker, BreakerState
    from tarry.core.budget import Budget

_KIND_SUCCESS, _KIND_PERMANENT, _KIND_THROTTLED = Kind.SUCCESS, Kind.PERMANENT, Kind.THROTTLED
_MAX_TRANSITIONS = 100
_MIN_SENT_DURATION_S = 1e-9
_MAX_HEDGE_CREDIT = 10.0  # pays for 10 hedges
MAX_LATENCY_SAMPLES = 512
_MIN_UNSORTED = 32
"""Once 512 durations are sorted, a quantile ignores new durations until 32 have been added."""


class BreakerTransition(NamedTuple):
    """A change of the breaker's state."""

    before: BreakerState
    after: BreakerState


class Latency:
    """The last 512 durations of attempts that succeeded or were overtaken by a hedge.

    The duration of an overtaken attempt is estimated (`HedgedCall.record_success`).
    Durations are sorted when a quantile is read, not when a duration is added, because every call
    adds a duration and few calls read a quantile.
    """

    __slots__ = ("_durations", "_sorted", "_unsorted", "add")

    def __init__(self) -> None:
        self._durations: deque[float] | None = None  # like `_sorted`, but in the order of adding
        self._unsorted: deque[float] = deque(maxlen=MAX_LATENCY_SAMPLES)
        self._sorted: list[float] = []
        self.add: Callable[[float], None] = self._unsorted.append
        """Add one duration: the `append` of the deque itself, which saves a call per attempt."""

    def __len__(self) -> int:
        """Return the number of durations."""
        return min(MAX_LATENCY_SAMPLES, len(self._sorted) + len(self._unsorted))

    def quantile(self, q: float) -> float | None:
        """Return the quantile `q` (0 to 1) of the durations, or None when there are none."""
        unsorted = self._unsorted
        if unsorted and (len(unsorted) >= _MIN_UNSORTED or len(self._sorted) < MAX_LATENCY_SAMPLES):
            if self._durations is None:
                self._durations = deque(maxlen=MAX_LATENCY_SAMPLES)
            self._durations.extend(unsorted)
            unsorted.clear()
            self._sorted = sorted(self._durations)
        if not self._sorted:
            return None
        # The k-th of n durations estimates the quantile k / (n + 1). With n instead of n + 1, the
        # quantile 0.99 of 512 durations would be 0.988, and a hedge at p99 would start too early.
        length = len(self._sorted)
        return self._sorted[min(max(1, ceil(q * (length + 1))), length) - 1]

    def longer_than(self, bound: float, random_number: float) -> float:
        """Return one of the durations that are longer than `bound`, or `bound` if there is none."""
        begin, count = bisect_right(self._sorted, bound), len(self._sorted)
        return (
            self._sorted[begin + int(random_number * (count - begin))] if begin < count else bound
        )


class Downstream:
    """Breaker, retry budget, limiters and latency of one dependency."""

    __slots__ = (
        "_adaptive_rate", "_attempt_sets", "_handles_throttling", "_hedge_credit", "_limiters",
        "breaker", "budget", "has_limiters", "latency", "name", "transitions",
    )  # fmt: skip

    new_attempt_id: staticmethod[[], int] = staticmethod(count(1).__next__)
    """Return an id for `admit` that is unique in the process."""

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
        self.transitions: list[BreakerTransition] = []
        """The last 100 changes of the breaker's state that no listener has read yet. It is a list,
        because an empty deque takes 0.7 KB, and a service has thousands of downstreams."""
        self._limiters: tuple[Limiter, ...] = () if limiter is None else (limiter,)
        self._adaptive_rate = limiter if isinstance(limiter, AdaptiveRate) else None
        self._handles_throttling: bool = getattr(limiter, "handles_throttling", False)
        if max_in_flight is not None:
            in_flight = InFlight(check_count("max_in_flight", max_in_flight))
            self._limiters = (in_flight, *self._limiters)
        # A limiter of the user may have an attribute `attempts` with another meaning.
        countable: Any = [each for each in self._limiters if hasattr(each, "count_attempts")]
        self._attempt_sets: tuple[set[int], ...] = tuple(each.attempts for each in countable)
        self.has_limiters: bool = bool(self._limiters)
        """Whether a limiter can reject or delay an attempt."""
        self._hedge_credit = 0.0

    def admit(self, now: float, attempt_id: int = 0) -> int | DelayedPermit | Stop:
        """Return a permit for an attempt, at once or after a delay, or `Stop` to reject it.

        With an `attempt_id`, `forget_attempt` can release the slots of the attempt at any time,
        also if an exception of a signal handler interrupted this method or `record`.
        """
        permit: int | None
        breaker = self.breaker
        if breaker is None:
            permit = 0
        elif (permit := breaker.permit_if_closed) is None:
            before = breaker.state
            permit = breaker.admit(now)
            if breaker.state is not before:
                self._on_breaker_change(before, now)
            if permit is None:
                return Stop(Reason.BREAKER_OPEN, breaker.retry_after(now))
        return self._acquire_limiters(permit, now, attempt_id) if self._limiters else permit

    def try_record_success(self, permit: int, duration: float, now: float) -> bool:
        """Record the success of a first attempt if this changes nothing but counters.

        Return whether it was recorded; if not, the caller must use `record`. Nearly every call of a
        healthy dependency ends here, so this method does as little as possible.
        """
        if self._limiters or (
            self.breaker is not None and not self.breaker.try_count_success(permit, now)
        ):
            return False
        if self.budget is not None:
            self.budget.record(SUCCESS, 0.0, now)
        add_latency = self.latency.add
        add_latency(duration)
        return True

    def record(
        self,
        permit: int,
        outcome: Outcome,
        duration: float,
        now: float,
        random_number: float,
        paid: float = 0.0,
        *,
        suspect: bool = False,
        is_retry: bool = False,
        attempt_id: int = 0,
    ) -> None:
        """Record the outcome of an attempt; `paid` is what the retry budget charged for it.

        `is_retry`: not the first attempt of its call, see `Breaker.record`.
        `suspect`: the task has failed before, and perhaps always fails. The limiters ignore its
        outcome, because other attempts show the state of the dependency better.
        """
        if outcome.local:  # the attempt failed before the dependency was called
            # A subclass's release may lock again.
            Downstream.release(self, permit, duration, now, attempt_id=attempt_id)
            return
        for limiter in self._limiters:  # first, so that an error below leaves no slot taken
            if suspect:  # a duration of 0 would mean that the attempt was not sent
                limiter.release(None, max(duration, _MIN_SENT_DURATION_S), now)
            else:
                limiter.release(outcome, duration, now)
        if attempt_id:
            self._discard(attempt_id)
        kind, breaker = outcome.kind, self.breaker
        is_success = kind is _KIND_SUCCESS
        if breaker is not None and not (
            is_success and breaker.try_count_success(permit, now, is_retry)
        ):
            before = breaker.state
            if kind is _KIND_PERMANENT:  # the caller's mistake: no evidence about the dependency
                breaker.release(permit)
            else:
                failed = not is_success
                if kind is _KIND_THROTTLED and self._handles_throttling:
                    failed = False  # the dependency works, and the limiter lowers the rate
                breaker.record(
                    permit,
                    failed,
                    duration,
                    now,
                    random_number,
                    timed_out=outcome.timeout,
                    is_retry=is_retry,
                )
            if breaker.state is not before:
                self._on_breaker_change(before, now)
        if self.budget is not None:
            self.budget.record(outcome, paid, now)
        if is_success:
            self.latency.add(duration)

    def release(
        self,
        permit: int,
        duration: float,
        now: float,
        token: int | None = None,
        attempt_id: int = 0,
    ) -> None:
        """Release the permit of an attempt without a result; count no success or failure.

        `token` is that of its `DelayedPermit`, and returned if the attempt was not sent.
        """
        if self.breaker is not None:
            self.breaker.release(permit)
        for limiter in self._limiters:
            limiter.release(None, duration, now)
        if attempt_id:
            self._discard(attempt_id)
        if token is not None and duration <= 0 and self._adaptive_rate is not None:
            self._adaptive_rate.leave_line(token)

    def remaining_wait(self, token: int, now: float) -> float:
        """Return the seconds until a token of the rate limiter is available at its current rate."""
        return (
            0.0 if self._adaptive_rate is None else self._adaptive_rate.remaining_wait(token, now)
        )

    def check_retry(self, outcome: Outcome, now: float) -> Stop | None:
        """Return a `Stop` if a retry after `outcome` is rejected, else None. Changes no state."""
        breaker, budget = self.breaker, self.budget
        if breaker is not None and not breaker.would_admit(now):
            return Stop(Reason.BREAKER_OPEN, breaker.retry_after(now))
        if budget is not None and budget.balance(now) < budget.cost(outcome):
            return Stop(Reason.BUDGET_EMPTY)
        return None

    def withdraw(self, outcome: Outcome, now: float) -> float | None:
        """Charge the retry budget for a retry; return the cost, or None if it is not covered."""
        if self.budget is None:
            return 0.0
        cost = self.budget.cost(outcome)
        return cost if self.budget.withdraw(cost, now) else None

    def refund(self, paid: float, now: float) -> None:
        """Return to the retry budget what it charged for a retry that never started."""
        if self.budget is not None and paid:
            self.budget.deposit(paid, now)

    def status(self, now: float) -> tuple[str | None, float | None]:
        """Return the breaker's state and the budget's balance; None for one that is not set."""
        state = None if self.breaker is None else self.breaker.state._value_
        return state, None if self.budget is None else self.budget.balance(now)

    def expected_duration(self) -> float:
        """Return the median of the durations in `latency` in seconds; 0 if there are none."""
        return self.latency.quantile(0.5) or 0.0

    def add_hedge_credit(self, amount: float) -> None:
        """Add the credit that one call earns; a hedge costs a credit of 1."""
        self._hedge_credit = min(_MAX_HEDGE_CREDIT, self._hedge_credit + amount)

    def take_hedge_credit(self) -> bool:
        """Take the credit of 1 that a hedge costs; return False if there is less."""
        if self._hedge_credit < 1.0:
            return False
        self._hedge_credit -= 1.0
        return True

    def return_hedge_credit(self) -> None:
        """Refund a hedge that was not sent."""
        self._hedge_credit += 1.0

    def hedge_delay(self, quantile: float, min_samples: int) -> float | None:
        """Return a quantile of the latency, or None with fewer than `min_samples` durations."""
        return None if len(self.latency) < min_samples else self.latency.quantile(quantile)

    def force(self, state: str) -> None:
        """Set the breaker's state, as an operator requests: see `Breaker.force`."""
        if self.breaker is not None:
            before = self.breaker.state
            self.breaker.force(state)
            if self.breaker.state is not before:
                self._add_transition(before, self.breaker.state)

    def on_recovery(self, now: float) -> None:
        """Close the breaker, and let the limits rise from a low value.

        Called when another process has detected that the dependency has recovered.
        """
        if self.breaker is not None:
            self.breaker.force("closed")
        for limiter in self._limiters:
            limiter.on_recovery(now)

    def forget_attempt(self, attempt_id: int) -> None:
        """Release the slots of an attempt that was interrupted; no effect if it has none.

        An exception of a signal handler can be raised between any two instructions of `admit`,
        `record` and `release`, so a limiter may or may not have counted the attempt. Adding an id
        to a set is one instruction. The set contains an attempt from before the first limiter
        counts it until all have released it, so the limiters set their counts to its size.
        """
        self._discard(attempt_id)
        for limiter in self._limiters:
            count_again: Callable[[], None] | None = getattr(limiter, "count_attempts", None)
            if count_again is not None:
                count_again()

    def _discard(self, attempt_id: int) -> None:
        for attempts in self._attempt_sets:
            attempts.discard(attempt_id)

    def forget_attempts(self) -> None:
        """Forget all running attempts, because their results will never be recorded here.

        A forked child calls this: the attempts run in threads of its parent.
        """
        if self.breaker is not None:
            self.breaker.forget_probes()
        for limiter in self._limiters:
            forget = getattr(limiter, "forget_attempts", None)  # optional in a limiter of the user
            if forget is not None:
                forget()

    def _acquire_limiters(
        self, permit: int, now: float, attempt_id: int
    ) -> int | DelayedPermit | Stop:
        delay = 0.0
        acquired_count = 0
        try:
            if attempt_id:
                for attempts in self._attempt_sets:
                    attempts.add(attempt_id)
            for limiter in self._limiters:
                wait = limiter.acquire(now)
                if wait is None:
                    self._release_acquired(permit, acquired_count, now, attempt_id)
                    return Stop(Reason.LIMIT)
                acquired_count += 1
                if wait:
                    delay = max(delay, wait)
        except BaseException:  # raised by a limiter of the user
            self._release_acquired(permit, acquired_count, now, attempt_id)
            raise
        if not delay:
            return permit
        rate = self._adaptive_rate
        if rate is None:
            return DelayedPermit(permit, delay)
        return DelayedPermit(permit, delay, rate.last_token, rate.max_wait)

    def _release_acquired(
        self, permit: int, acquired_count: int, now: float, attempt_id: int
    ) -> None:
        for limiter in self._limiters[:acquired_count]:
            limiter.release(None, 0.0, now)
        if attempt_id:
            self._discard(attempt_id)
        if self.breaker is not None:
            self.breaker.release(permit)

    def _on_breaker_change(self, before: BreakerState, now: float) -> None:
        after = self.breaker.state if self.breaker is not None else before
        self._add_transition(before, after)
        if before == "half-open" and after == "closed":
            for limiter in self._limiters:
                limiter.on_recovery(now)

    def _add_transition(self, before: BreakerState, after: BreakerState) -> None:
        self.transitions.append(BreakerTransition(before, after))
        del self.transitions[:-_MAX_TRANSITIONS]
