"""The circuit breaker: closed, open, half-open, and the states that an operator sets by hand.

    CLOSED ──too many failures──▶ OPEN ──time is up──▶ HALF_OPEN ──probes succeed──▶ CLOSED
                                   ▲                       │
                                   └────a probe fails──────┘   (open for longer each time)

A call that is let through gets a permit: the breaker's generation at that moment, and each probe
a number of its own above it. The result of a call from an earlier generation says nothing about
the present state and is not counted.
"""

from __future__ import annotations

from enum import StrEnum

from tarry.core.checks import check_at_least, check_count, check_one_of, check_positive, check_share
from tarry.core.sliding_window import SlidingWindow
from tarry.errors import ConfigurationError


class BreakerState(StrEnum):
    """Where a breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    FORCED_OPEN = "forced-open"
    DISABLED = "disabled"
    METRICS_ONLY = "metrics-only"


_CLOSED, _OPEN, _HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
_FORCED_OPEN, _DISABLED = BreakerState.FORCED_OPEN, BreakerState.DISABLED
_MANUAL = {
    "open": _FORCED_OPEN,
    "closed": _CLOSED,
    "disabled": _DISABLED,
    "metrics-only": BreakerState.METRICS_ONLY,
}
_CALLS, _FAILURES, _SLOW = range(3)
_NEXT_GENERATION = 1 << 40
"""So far apart that the numbers of a generation's probes never reach the next."""


class Breaker:
    """When to stop calling a dependency that fails, and how to come back.

    It opens when, of at least `min_calls` calls in the last `window` seconds, the share
    `failure_rate` failed, or the share `slow_rate` took longer than `slow_after` seconds, or
    when `consecutive` calls in a row failed. It stays open for `open_for` seconds, times
    `growth` for each time that it re-opens (`max_open` at most), plus up to the share `spread`
    of that, drawn. Then it lets `probes` calls through at a time, and closes once that many
    have succeeded.
    """

    __slots__ = (
        "_consecutive",
        "_failures_in_a_row",
        "_growth",
        "_last_probe",
        "_looks_further",
        "_max_open",
        "_min_calls",
        "_open_for",
        "_probes",
        "_rate",
        "_slow_after",
        "_slow_rate",
        "_spread",
        "_succeeded",
        "_until",
        "_window",
        "consecutive_opens",
        "generation",
        "is_fault_free",
        "probes",
        "state",
    )

    def __init__(
        self,
        *,
        failure_rate: float = 0.5,
        min_calls: int = 20,
        window: float = 10.0,
        consecutive: int | None = None,
        slow_after: float | None = None,
        slow_rate: float = 0.5,
        open_for: float = 30.0,
        growth: float = 2.0,
        max_open: float = 300.0,
        spread: float = 0.1,
        probes: int = 3,
    ) -> None:
        self._rate = check_share("failure_rate", failure_rate)
        self._min_calls = check_count("min_calls", min_calls)
        self._window = SlidingWindow(check_positive("window", window), 3)
        self._consecutive = None if consecutive is None else check_count("consecutive", consecutive)
        self._slow_after = None if slow_after is None else check_positive("slow_after", slow_after)
        self._slow_rate = check_share("slow_rate", slow_rate)
        self._open_for = check_positive("open_for", open_for)
        self._growth = check_at_least("growth", growth, 1)
        self._max_open = check_positive("max_open", max_open)
        if self._max_open < self._open_for:
            rule = f"must be at least open_for ({open_for:g}), got {max_open:g}"
            raise ConfigurationError("max_open", rule)
        self._spread = check_at_least("spread", spread, 0)
        self.probes: int = check_count("probes", probes)
        """Calls that it lets through at a time while it is half-open."""

        self.state: BreakerState = _CLOSED
        self.generation: int = 0
        self.is_fault_free: bool = self._slow_after is None
        """Whether a success changes nothing but a count."""
        self._looks_further = consecutive is not None or slow_after is not None
        self._failures_in_a_row = 0
        self.consecutive_opens: int = 0
        """How often in a row it has opened."""
        self._until = 0.0
        self._probes: dict[int, float] = {}
        self._last_probe = 0
        self._succeeded = 0

    def admit(self, now: float) -> int | None:
        """Let a call through with a permit, or answer None."""
        state = self.state
        if state is _CLOSED:
            return self.generation
        if state is _OPEN and now >= self._until:
            state = self._move(_HALF_OPEN)
        if state is _HALF_OPEN:
            return self._probe(now)
        if state is _OPEN or state is _FORCED_OPEN:
            return None
        return self.generation

    def would_admit(self, now: float) -> bool:
        """Say what `admit` would answer, and change nothing."""
        state = self.state
        if state is _CLOSED:
            return True
        if state is _HALF_OPEN:
            return self._out(now) < self.probes
        return not (state is _FORCED_OPEN or (state is _OPEN and now < self._until))

    def try_count_success(self, permit: int, now: float) -> bool:
        """Count a success where that can change nothing, or answer False: `record` it.

        This is what nearly every call of a healthy dependency comes to.
        """
        if not self.is_fault_free or permit != self.generation:
            return False
        window = self._window
        if now >= window.bucket_end:
            window.advance(now)
        window.current[_CALLS] += 1
        return True

    def record(
        self,
        permit: int,
        failed: bool,  # noqa: FBT001
        duration: float,
        now: float,
        u: float,
    ) -> None:
        """Count the result of a call that was let through."""
        slow = self._slow_after is not None and duration > self._slow_after
        if self.state is _HALF_OPEN:
            if self._probes.pop(permit, None) is not None:
                self._record_probe(ok=not failed and not slow, now=now, u=u)
            return
        if permit != self.generation or self.state is _DISABLED:
            return
        window = self._window
        if now >= window.bucket_end:
            window.advance(now)
        current = window.current
        current[_CALLS] += 1
        current[_SLOW] += slow
        current[_FAILURES] += failed
        self._failures_in_a_row = self._failures_in_a_row + 1 if failed else 0
        failures = window.past[_FAILURES] + current[_FAILURES]
        self.is_fault_free = self._slow_after is None and not failures
        if not self.is_fault_free and self.state is _CLOSED:
            calls = window.past[_CALLS] + current[_CALLS]
            if (failures >= self._rate * calls and calls >= self._min_calls) or (
                self._looks_further and self._is_broken(calls)
            ):
                self._open(now, u)

    def release(self, permit: int) -> None:
        """Take back a permit whose call came to no result; nothing is counted."""
        self._probes.pop(permit, None)

    def force(self, state: str) -> None:
        """Set a state by hand: open, closed (automatic from there), disabled or metrics-only."""
        check_one_of("state", state, _MANUAL)
        self.consecutive_opens = 0
        self._move(_MANUAL[state])

    def half_open(self, opened: int) -> None:
        """Begin to probe, where another process has seen the dependency fail `opened` times."""
        self.consecutive_opens = opened
        self._move(_HALF_OPEN)

    def retry_after(self, now: float) -> float | None:
        """Return the seconds until the next probe may go, or None where nobody can know."""
        return max(0.0, self._until - now) if self.state is _OPEN else None

    def counts(self, now: float) -> tuple[int, int, int]:
        """Return the calls, failures and slow calls of the window."""
        if now >= self._window.bucket_end:
            self._window.advance(now)
        total = self._window.total
        return total(_CALLS), total(_FAILURES), total(_SLOW)

    def _is_broken(self, calls: int) -> bool:
        if self._consecutive is not None and self._failures_in_a_row >= self._consecutive:
            return True
        if self._slow_after is None or calls < self._min_calls:
            return False
        return self._window.total(_SLOW) >= self._slow_rate * calls

    def _out(self, now: float) -> int:
        """Return how many probes are out.

        One that has not come back for as long as an open period is taken for lost, so that a
        hung call cannot keep the breaker half-open for ever.
        """
        return sum(begun > now - self._open_for for begun in self._probes.values())

    def _probe(self, now: float) -> int | None:
        if self._out(now) >= self.probes:
            return None
        lost = [permit for permit, begun in self._probes.items() if begun <= now - self._open_for]
        for permit in lost:
            del self._probes[permit]
        self._last_probe += 1
        self._probes[self._last_probe] = now
        return self._last_probe

    def _record_probe(self, *, ok: bool, now: float, u: float) -> None:
        if not ok:
            self._open(now, u)
            return
        self._succeeded += 1
        if self._succeeded >= self.probes:
            self.consecutive_opens = 0
            self._move(_CLOSED)

    def _open(self, now: float, u: float) -> None:
        try:
            length = min(self._max_open, self._open_for * self._growth**self.consecutive_opens)
        except OverflowError:
            length = self._max_open
        self.consecutive_opens += 1
        self._until = now + length * (1 + self._spread * u)
        self._move(_OPEN)

    def _move(self, state: BreakerState) -> BreakerState:
        self.state = state
        self.generation = self._last_probe = self.generation + _NEXT_GENERATION
        self._failures_in_a_row = 0
        self._probes.clear()
        self._succeeded = 0
        self._window.clear()
        self.is_fault_free = state is _CLOSED and self._slow_after is None
        return state
