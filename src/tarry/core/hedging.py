"""Hedging: when an attempt is slow, another one (a hedge) starts in parallel.

The first result is used. A call has a retry policy or a hedging policy, never both (gRFC A6).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from tarry.core.checks import (
    Seconds,
    check_at_least,
    check_count,
    check_ratio,
    to_seconds,
)
from tarry.core.downstream import MAX_LATENCY_SAMPLES, Downstream
from tarry.core.outcome import SUCCESS, TRANSIENT, Kind, Outcome
from tarry.core.verdict import Attempt, DelayedPermit, Reason, Stop
from tarry.errors import ConfigurationError

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hedging:
    """When a hedge of a call starts, and how many attempts the call has at most.

    `after` is a time in seconds (or a `timedelta`), or a percentile of the measured latency such as
    "p95".
    `max_extra_load=0.05` limits the number of hedges to 5 % of the number of calls. Without
    `after`, `max_extra_load` also sets the percentile: 0.05 means p95.
    """

    after: Seconds | str | None = None
    max_extra_load: float | None = None
    max_attempts: int = 2
    min_samples: int = 100
    """Number of measured calls that a percentile needs; until then a slow call is not hedged."""
    max_hint: float = 120.0
    """Longest wait that a server may ask for. If it asks for a longer wait, the call ends."""

    def __post_init__(self) -> None:
        """Check every field."""
        if self.after is None and self.max_extra_load is None:
            raise ConfigurationError('after or max_extra_load must be given, such as after="p95"')
        if isinstance(self.after, str):
            if not _PERCENTILE.fullmatch(self.after) or not self.quantile:
                rule = 'must be seconds or a percentile such as "p95"'
                raise ConfigurationError("after", rule, self.after)
        elif self.after is not None:
            object.__setattr__(self, "after", check_at_least("after", to_seconds(self.after), 0))
        if self.max_extra_load is not None:
            check_ratio("max_extra_load", self.max_extra_load)
        check_count("max_attempts", self.max_attempts, 2)
        check_at_least("max_hint", self.max_hint, 0)
        check_count("min_samples", self.min_samples)
        if self.min_samples > MAX_LATENCY_SAMPLES:
            rule = f"must be at most {MAX_LATENCY_SAMPLES}"
            raise ConfigurationError("min_samples", rule, self.min_samples)

    @property
    def quantile(self) -> float | None:
        """The quantile of the latency after which a hedge starts; None if `after` is in seconds."""
        if isinstance(self.after, str):
            return float(self.after[1:]) / 100
        if self.after is None and self.max_extra_load is not None:
            return 1 - self.max_extra_load
        return None

    def delay(self, downstream: Downstream) -> float | None:
        """Return the seconds after which a hedge starts; None if too few calls were measured."""
        if isinstance(self.after, float):
            return self.after
        return downstream.hedge_delay(self.quantile or 0.0, self.min_samples)


class _RunningAttempt(NamedTuple):
    """A running attempt of a hedged call; `paid` is what the retry budget charged for it."""

    permit: int
    started: float
    paid: float
    token: int | None
    """The token of a rate limiter for which the attempt waited; None if it did not wait."""
    attempt_id: int


class HedgedCall:
    """The state of one hedged call: its running attempts, by number.

    A driver is the code that runs the attempts. `random_number` is from [0, 1).
    """

    __slots__ = (
        "_attempt_ids", "_delay", "_downstream", "_has_result", "_hedging", "_running", "attempts",
        "next_hedge_at",
    )  # fmt: skip

    def __init__(self, hedging: Hedging, downstream: Downstream) -> None:
        self._hedging = hedging
        self._downstream = downstream
        self._delay: float | None = None  # from the start of an attempt to the next hedge
        self._has_result = False  # whether the result of an attempt was recorded
        self._attempt_ids: list[int] = []  # of all attempts, if the downstream has limiters
        self._running: dict[int, _RunningAttempt] = {}
        self.attempts: int = 0  # the number of attempts started
        self.next_hedge_at: float | None = None
        """The time at which the driver calls `hedge`, or None when no hedge is planned."""

    def start(self, now: float) -> Attempt | Stop:
        """Start the first attempt, or return `Stop` if the downstream rejects it."""
        attempt = self._start_attempt(now, paid=0.0)
        if isinstance(attempt, Attempt):
            if self._hedging.max_extra_load is not None:
                self._downstream.add_hedge_credit(self._hedging.max_extra_load)
            self._delay = self._hedging.delay(self._downstream)
            self._schedule_hedge(now + attempt.delay)
        return attempt

    def hedge(self, now: float) -> Attempt | Stop | None:
        """Start another attempt, if the downstream and the hedge credit allow it.

        The start of a hedged call adds `max_extra_load` to the hedge credit; a hedge costs 1.
        Return None when no attempt starts but others run, and `Stop` when none runs.
        """
        self.next_hedge_at = None
        rejection = Stop(Reason.ATTEMPTS)
        if self.attempts < self._hedging.max_attempts:
            hedge = self._start_hedge(now)
            if isinstance(hedge, Attempt):
                self._schedule_hedge(now + hedge.delay)
                return hedge
            rejection = hedge
        return None if self._running else rejection

    def _start_hedge(self, now: float) -> Attempt | Stop:
        downstream, needs_credit = self._downstream, self._hedging.max_extra_load is not None
        rejection = downstream.check_retry(TRANSIENT, now)
        if rejection is not None:
            return rejection
        if needs_credit and not downstream.take_hedge_credit():
            return Stop(Reason.BUDGET_EMPTY)  # here, the budget is the hedge credit
        paid = downstream.withdraw(TRANSIENT, now)
        hedge = Stop(Reason.BUDGET_EMPTY) if paid is None else self._start_attempt(now, paid)
        if isinstance(hedge, Stop):
            downstream.refund(paid or 0.0, now)
            if needs_credit:
                downstream.return_hedge_credit()
        return hedge

    def record_success(self, number: int, now: float, random_number: float) -> None:
        """Record a success and release the permits of the other attempts. The driver cancels them.

        The time that a cancelled attempt has run so far is a lower bound of its latency. If the
        attempt started before the successful one, a longer one of the measured latencies is added
        for it. Without it, slow calls would never be measured, and the percentile would fall with
        each hedge. With the bound itself, a percentile that is too low would rise only slowly.
        """
        winner_started = self._running[number].started
        self._record(number, SUCCESS, now, random_number)
        for attempt in self._running.values():
            if attempt.started < winner_started:
                latency = self._downstream.latency
                latency.add(latency.longer_than(now - attempt.started, random_number))
        self.cancel(now)

    def record_failure(
        self, number: int, outcome: Outcome, now: float, random_number: float
    ) -> Attempt | Stop | None:
        """Record that an attempt failed. Return the next attempt, `Stop`, or None.

        An outcome that must not be retried ends the call. After any other failure the next attempt
        starts at once, unless the server asked for a wait (gRFC A6). None means that the driver
        waits until a running attempt ends or `next_hedge_at` is reached.
        """
        self._record(number, outcome, now, random_number)
        hint = outcome.hint
        wait = None if hint is None else hint.delay
        if outcome.kind not in (Kind.TRANSIENT, Kind.THROTTLED):
            overloaded = outcome.kind is Kind.OVERLOADED
            stop = Stop(Reason.OVERLOADED if overloaded else Reason.PERMANENT, wait, hint)
        elif not outcome.repeatable:
            stop = Stop(Reason.NOT_REPEATABLE)
        elif outcome.retried_below:
            stop = Stop(Reason.RETRIED_BELOW)
        elif wait and wait > self._hedging.max_hint:
            stop = Stop(Reason.HINT_TOO_LONG, wait, hint)
        elif wait and self.attempts < self._hedging.max_attempts:
            self.next_hedge_at = now + wait
            return None
        else:
            return self.hedge(now)
        self.cancel(now)
        return stop

    def record_unsent(self, number: int, now: float) -> bool:
        """Record that a hedge could not be sent; return whether other attempts still run."""
        attempt = self._running.pop(number)
        self._downstream.release(attempt.permit, 0.0, now, attempt.token, attempt.attempt_id)
        self._downstream.refund(attempt.paid, now)
        if self._hedging.max_extra_load is not None:
            self._downstream.return_hedge_credit()
        self.next_hedge_at = None
        return bool(self._running)

    def cancel(self, now: float) -> None:
        """Release the permits of all running attempts; count no success or failure."""
        first_error: BaseException | None = None
        while self._running:
            _, attempt = self._running.popitem()
            try:
                permit, started, _, token, attempt_id = attempt
                self._downstream.release(permit, now - started, now, token, attempt_id)
                if now < attempt.started:  # the attempt was still waiting for the rate limiter
                    self._downstream.refund(attempt.paid, now)
            except BaseException as error:  # noqa: BLE001 - a limiter may raise: release all first
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def forget_attempts(self) -> None:
        """Release the slots of all attempts after an interrupt: see `Downstream.forget_attempt`."""
        while self._attempt_ids:
            self._downstream.forget_attempt(self._attempt_ids.pop())

    def _start_attempt(self, now: float, paid: float) -> Attempt | Stop:
        attempt_id = 0
        if self._downstream.has_limiters:
            attempt_id = self._downstream.new_attempt_id()
            self._attempt_ids.append(attempt_id)
        admission = self._downstream.admit(now, attempt_id)
        if isinstance(admission, Stop):
            return admission
        if not isinstance(admission, DelayedPermit):
            admission = DelayedPermit(admission, 0.0)
        permit, delay, token, _ = admission
        self.attempts += 1
        self._running[self.attempts] = _RunningAttempt(permit, now + delay, paid, token, attempt_id)
        return Attempt(self.attempts, delay=delay)

    def _schedule_hedge(self, started_at: float) -> None:
        if self._delay is not None and self.attempts < self._hedging.max_attempts:
            self.next_hedge_at = started_at + self._delay

    def _record(self, number: int, outcome: Outcome, now: float, random_number: float) -> None:
        permit, started, paid, _, attempt_id = self._running.pop(number)
        # The breaker counts a call once. That is its first result, which may be that of a hedge.
        is_retry, self._has_result = self._has_result, True
        duration = now - started
        self._downstream.record(
            permit,
            outcome,
            duration,
            now,
            random_number,
            paid,
            is_retry=is_retry,
            attempt_id=attempt_id,
        )
