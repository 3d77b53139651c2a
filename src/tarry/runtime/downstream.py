"""The state of a dependency, shared by all calls to it: the core's `Downstream` with a lock.

The lock is held while the core computes. It is not held while user code runs, such as the called
function, a listener or a jitter function. The only exceptions are the methods of budgets and
limiters that users wrote.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakSet

from tarry.core.checks import check_ratio, reject_unknown_arguments
from tarry.core.downstream import Downstream as CoreDownstream
from tarry.core.outcome import SUCCESS, Kind
from tarry.errors import ConfigurationError, ConfigurationTypeError, ResultNotAccepted
from tarry.runtime.effects import effects
from tarry.runtime.error_record import RECORD_ATTRIBUTE
from tarry.runtime.events import bus
from tarry.runtime.forks import after_fork

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never

    from tarry.core.breaker import Breaker, BreakerState
    from tarry.core.budget import Budget
    from tarry.core.events import Event
    from tarry.core.limiter import Limiter
    from tarry.core.outcome import Outcome
    from tarry.core.verdict import DelayedPermit, Stop

MAX_ABANDONED_PERMITS = 10_000
"""The maximum size of `abandoned_permits`. If there are more, the oldest are never released."""

MAX_UNCOUNTED_SUCCESSES = 32
"""If `uncounted_successes` becomes longer, its entries are counted."""

_OTHER_ARGUMENT_NAMES = {
    "circuit_breaker": "breaker", "retry_budget": "budget", "max_concurrency": "max_in_flight",
}  # fmt: skip
"""Usual names of the arguments of `Downstream`."""

_downstreams: WeakSet[Downstream] = WeakSet()


@after_fork
def _reset_all() -> None:
    for downstream in list(_downstreams):
        downstream.reset_after_fork()


def live_downstreams() -> list[Downstream]:
    """Return the downstreams of the program that are still referenced, sorted by name.

    Those of tarry itself, which have their own listener, are left out.
    """
    while True:
        try:
            downstreams = [item for item in _downstreams if item.listener is None]
        except RuntimeError:  # another thread added a downstream during the iteration
            continue
        return sorted(downstreams, key=lambda downstream: downstream.name)


class LockedDownstream(CoreDownstream):
    """The core's state of a dependency, with methods that acquire a lock.

    The drivers, which make the attempts of calls, use these methods. The subclass `Downstream` adds
    the methods for users.
    """

    __slots__ = (
        "__weakref__", "_lock", "abandoned_permits", "last_error", "listener",
        "uncounted_successes",
    )  # fmt: skip

    def _create_lock_and_queues(self) -> None:
        """Create the lock, and the two queues to which other code appends without the lock."""
        self._lock = threading.Lock()
        self.abandoned_permits: deque[tuple[int | None, int]] = deque(maxlen=MAX_ABANDONED_PERMITS)
        """Permits (None if not known) and ids of attempts that were garbage collected. Their
        finalizers append them here: a finalizer may run in a thread that holds the lock. The next
        `admit` releases the permits."""
        self.uncounted_successes: deque[tuple[int, float, float]] = deque()
        """The permit, start and end of successful first attempts that are not counted yet. Each
        method that uses the counts first counts these attempts. Counting in bulk saves a lock and
        three function calls for each successful call."""
        self.last_error: Exception | None = None
        """A copy of the last error while the breaker is open or half-open: the cause of a
        `BreakerOpen`."""
        self.listener: Callable[[Event], None] | None = None
        """Called with all events of the downstream and its calls instead of the log and the
        listeners of the program. Set for the calls of tarry itself, such as those of the service's
        client, so that they do not appear in the metrics of the program."""

    def reset_after_fork(self) -> None:
        """Forget, in a forked child, the lock and the attempts of the threads of the parent."""
        self._lock = threading.Lock()
        self.abandoned_permits.clear()
        self.uncounted_successes.clear()
        self.forget_attempts()

    def admit(self, now: float, attempt_id: int = 0) -> int | DelayedPermit | Stop:
        """Return a permit for an attempt, possibly with a delay, or a `Stop` to reject it."""
        with self._lock:
            self._count_successes_locked()
            while self.abandoned_permits:
                permit, abandoned_id = self.abandoned_permits.popleft()
                if permit is not None:
                    super().release(permit, 0.0, now, attempt_id=abandoned_id)
                elif abandoned_id:
                    super().forget_attempt(abandoned_id)
            permit_or_stop = super().admit(now, attempt_id)
        if self.transitions:
            self._emit_transitions()
        return permit_or_stop

    def success_counter(self) -> Callable[[int, float, float], None]:
        """Return a function that counts a successful first attempt: its permit, start and end.

        If the breaker has counted no recent failure, the function acquires no lock: it appends the
        attempt to `uncounted_successes`, whose entries are counted in bulk. A method would read
        these attributes in each call, which would add 5 % to the time of a successful call.
        """
        breaker, successes, limit = self.breaker, self.uncounted_successes, MAX_UNCOUNTED_SUCCESSES
        append = successes.append

        def count_success(permit: int, started: float, ended: float) -> None:
            if breaker is not None and not breaker.can_count_success:
                self.record(permit, SUCCESS, ended - started, ended, effects.draw_random())
                return
            append((permit, started, ended))
            if len(successes) > limit:
                with self._lock:
                    self._count_successes_locked()
                if self.transitions:
                    self._emit_transitions()

        return count_success

    def _count_successes_locked(self) -> None:
        successes = self.uncounted_successes
        while successes:
            permit, started, ended = successes.popleft()
            # False if the success may change the breaker's state or a limiter.
            if not self.try_record_success(permit, ended - started, ended):
                super().record(permit, SUCCESS, ended - started, ended, effects.draw_random())

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
        """Count an attempt that ended.

        `random_number` is from [0, 1), and varies how long the breaker stays open. `paid` is the
        amount that `withdraw` returned for the attempt. The limiters ignore the outcome of a
        `suspect` attempt. `is_retry`: it is not the first attempt of its call.
        """
        with self._lock:
            self._count_successes_locked()
            super().record(
                permit,
                outcome,
                duration,
                now,
                random_number,
                paid,
                suspect=suspect,
                is_retry=is_retry,
                attempt_id=attempt_id,
            )
        if self.transitions:
            self._emit_transitions()

    def keep_last_error(self, error: Exception, outcome: Outcome) -> None:
        """Keep a copy of the error of a failed attempt, if the breaker is open or half-open."""
        breaker = self.breaker
        if breaker is not None and breaker.is_tripped and outcome.kind is not Kind.PERMANENT:
            self.last_error = _copy_error(error)

    def release(
        self,
        permit: int,
        duration: float,
        now: float,
        token: int | None = None,
        attempt_id: int = 0,
    ) -> None:
        """Release the permit of an attempt without an outcome, such as a cancelled attempt."""
        with self._lock:
            super().release(permit, duration, now, token, attempt_id)

    def forget_attempt(self, attempt_id: int) -> None:
        """Release the slots of an attempt that was interrupted; no effect if it has none."""
        with self._lock:
            super().forget_attempt(attempt_id)

    def remaining_wait(self, token: int, now: float) -> float:
        """Return the seconds until a token of the rate limiter is available at its current rate."""
        with self._lock:
            self._count_successes_locked()
            return super().remaining_wait(token, now)

    def check_retry(self, outcome: Outcome, now: float) -> Stop | None:
        """Return a `Stop` if no retry may follow `outcome`, else None; change nothing."""
        with self._lock:
            self._count_successes_locked()
            return super().check_retry(outcome, now)

    def withdraw(self, outcome: Outcome, now: float) -> float | None:
        """Take the cost of a retry from the budget; return it, or None if it is not covered."""
        with self._lock:
            self._count_successes_locked()
            return super().withdraw(outcome, now)

    def refund(self, paid: float, now: float) -> None:
        """Refund to the budget the cost of a retry that never started."""
        with self._lock:
            super().refund(paid, now)

    def status(self, now: float) -> tuple[str | None, float | None]:
        """Return the breaker's state and the budget's balance; None in place of a missing one."""
        with self._lock:
            self._count_successes_locked()
            return super().status(now)

    def expected_duration(self) -> float:
        """Return the median duration of the latest successful attempts; 0 if there are none."""
        with self._lock:
            self._count_successes_locked()
            return super().expected_duration()

    def hedge_delay(self, quantile: float, min_samples: int) -> float | None:
        """Return a quantile of the latest durations; None if there are fewer than `min_samples`."""
        with self._lock:
            self._count_successes_locked()
            return super().hedge_delay(quantile, min_samples)

    def add_hedge_credit(self, amount: float) -> None:
        """Add the credit that one call earns; a hedge (a second attempt in parallel) costs 1."""
        with self._lock:
            super().add_hedge_credit(amount)

    def take_hedge_credit(self) -> bool:
        """Take the cost of a hedge if the credit is high enough; return whether it was."""
        with self._lock:
            return super().take_hedge_credit()

    def return_hedge_credit(self) -> None:
        """Refund the cost of a hedge that was not sent."""
        with self._lock:
            super().return_hedge_credit()

    def _emit_transitions(self) -> None:
        """Emit the breaker's changes of state, without the lock: listeners are user code."""
        # Imported late, so that `import tarry` stays fast.
        from tarry.core.events import BreakerStateChanged

        if self.breaker is not None and not self.breaker.is_tripped:
            self.last_error = None
        while True:
            try:
                transition = self.transitions.pop(0)
            except IndexError:  # all emitted, perhaps by another thread
                return
            if bus.is_observed():
                emit = self.listener or bus.emit
                states = transition.before, transition.after
                now = effects.unix_time()
                emit(BreakerStateChanged("", self.name, *states, time=now))


class Downstream(LockedDownstream):
    """One dependency, shared by every call to it: `Downstream("payments", breaker=Breaker())`.

    breaker: rejects attempts while the dependency fails.
    budget: limits retries to a share of the calls.
    limiter: limits the rate or the number of concurrent attempts, and adapts to the dependency.
    max_in_flight: a fixed limit for the number of concurrent attempts.
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
        **unknown: Never,
    ) -> None:
        known = Downstream.__init__.__kwdefaults__ or ()
        reject_unknown_arguments("tarry.Downstream", unknown, known, _OTHER_ARGUMENT_NAMES)
        if not isinstance(name, str) or not name:
            raise ConfigurationTypeError("name", "must be a non-empty string", name)
        _check_method("breaker", breaker, "admit", "a tarry.Breaker()")
        _check_method("budget", budget, "withdraw", "a tarry.TokenBudget() or another budget")
        _check_method("limiter", limiter, "acquire", "a tarry.AIMD() or another limiter")
        super().__init__(
            name, breaker=breaker, budget=budget, limiter=limiter, max_in_flight=max_in_flight
        )
        self._create_lock_and_queues()
        _downstreams.add(self)

    @property
    def state(self) -> BreakerState | None:
        """The breaker's state; None without a breaker."""
        return None if self.breaker is None else self.breaker.state

    @property
    def balance(self) -> float | None:
        """The retry budget's balance; None without a budget."""
        with self._lock:
            self._count_successes_locked()
            return None if self.budget is None else self.budget.balance(effects.now())

    def quantile(self, q: float) -> float | None:
        """Return the quantile `q` (0 to 1) of the latest durations in seconds; None without any."""
        check_ratio("q", q)
        with self._lock:
            self._count_successes_locked()
            return self.latency.quantile(q)

    def force(self, state: str) -> None:
        """Force the breaker into a state, which it keeps until the next `force`.

        "open" rejects all attempts, "disabled" admits all and counts none, "metrics-only" admits
        and counts all. After "closed", the breaker works normally.
        """
        if self.breaker is None:
            msg = f"downstream {self.name!r} has no breaker; pass one with breaker="
            raise ConfigurationError(msg)
        with self._lock:
            self._count_successes_locked()
            super().force(state)
        self._emit_transitions()

    def __repr__(self) -> str:
        return f"Downstream({self.name!r}, state={self.state})"


def _copy_error(error: Exception) -> Exception | None:
    """Return a copy of an error without its traceback, or None if its class cannot be copied.

    The traceback would keep the local variables of the failed call and its callers in memory. The
    result of a `ResultNotAccepted` is dropped, because it may be a response with a connection.
    """
    if isinstance(error, ResultNotAccepted):
        return ResultNotAccepted(*error.args)
    error_class = type(error)
    try:
        # Not `copy.copy`, which calls `__init__`: many classes need other arguments than `args`.
        duplicate = error_class.__new__(error_class, *error.args)
        object.__setattr__(duplicate, "args", error.args)
        vars(duplicate).update(vars(error))
        vars(duplicate).pop(RECORD_ATTRIBUTE, None)  # the record belongs to another call
    except Exception:  # raised by `__new__` of a class of the user
        return None
    return duplicate


def _check_method(field: str, value: object, method: str, expected: str) -> None:
    if value is not None and (isinstance(value, type) or not hasattr(value, method)):
        raise ConfigurationTypeError(field, f"must be {expected}", value)


def internal_downstream(name: str) -> Downstream:
    """Return a downstream for retries of tarry itself, of which the program gets no events."""
    downstream = Downstream(name)
    downstream.listener = _ignore_event
    return downstream


def _ignore_event(_event: Event) -> None:
    pass
