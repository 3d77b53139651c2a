"""A stateful test that compares the breaker with a simple model."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tarry.core.breaker import Breaker

WINDOW, SLOW_AFTER, OPEN_FOR, MAX_OPEN, SPREAD = 10.0, 1.0, 30.0, 200.0, 0.5
FORCED_STATES = {
    "open": "forced-open",
    "closed": "closed",
    "disabled": "disabled",
    "metrics-only": "metrics-only",
}


class AdmittedCall(NamedTuple):
    """An admitted call."""

    number: int
    permit: int
    generation: int


class Result(NamedTuple):
    """The result of an attempt."""

    second: int
    failed: bool
    slow: bool
    is_retry: bool


class BreakerModel:
    """A simple breaker. Times are multiples of a quarter of a second, so that sums are exact."""

    def __init__(
        self,
        min_calls: int,
        min_span: float,
        rate: float,
        consecutive: int | None,
        probes: int,
        growth: float,
    ) -> None:
        self.min_span = min_span
        self.min_calls, self.rate, self.consecutive = min_calls, rate, consecutive
        self.limit, self.growth = probes, growth
        self.openings = self.generation = 0
        self.until = 0.0
        self.change_state("closed")

    def change_state(self, state: str) -> None:
        """Start a new generation: earlier calls and counts are ignored."""
        self.state = state
        self.generation += 1
        self.results: list[Result] = []
        self.failed_starts: list[float] = []
        self.failed_ends: list[float] = []
        self.streak = self.good_probes = 0
        self.probes: dict[int, float] = {}

    def open(self, now: float, random_number: float) -> None:
        """Open for `growth` times as long as the last time, but at most MAX_OPEN."""
        length = min(MAX_OPEN, OPEN_FOR * self.growth**self.openings)
        self.until = now + length + length * SPREAD * random_number
        self.openings += 1
        self.change_state("open")

    def drop_hung_probes(self, now: float) -> None:
        """Stop counting probes that have run for OPEN_FOR or longer as running."""
        self.probes = {n: start for n, start in self.probes.items() if now - start < OPEN_FOR}

    def admits(self, now: float) -> bool:
        """Return whether a call is admitted."""
        if self.state == "open":
            return now >= self.until
        if self.state == "half-open":
            return len(self.probes) < self.limit
        return self.state != "forced-open"

    def retry_after(self, now: float) -> float | None:
        """Return the time until a probe is admitted; None unless open or half-open."""
        if self.state not in ("open", "half-open"):
            return None
        if self.admits(now):
            return 0.0
        return (self.until if self.state == "open" else min(self.probes.values()) + OPEN_FOR) - now

    def admit(self, number: int, now: float) -> None:
        """Admit a call."""
        if self.state == "open":
            self.change_state("half-open")
        if self.state == "half-open":
            self.probes[number] = now

    def recent(self, now: float) -> list[Result]:
        """Return the results of the current second and the nine before it."""
        return [result for result in self.results if result.second > int(now) - 10]

    def finish(
        self,
        call: AdmittedCall,
        *,
        failed: bool,
        duration: float,
        is_retry: bool,
        now: float,
        random_number: float,
    ) -> None:
        """Record the result of an attempt of the current generation."""
        slow = duration > SLOW_AFTER
        if call.generation != self.generation or self.state == "disabled":
            return
        if self.state == "half-open":
            self.probes.pop(call.number, None)
            if failed or slow:
                self.open(now, random_number)
                return
            self.good_probes += 1
            if self.good_probes == self.limit:
                self.openings = 0
                self.change_state("closed")
            return
        if failed:
            if not any(result.failed for result in self.recent(now)):
                self.failed_starts, self.failed_ends = [], []
            self.failed_starts.append(now - duration)
            self.failed_ends.append(now)
        self.results.append(Result(int(now), failed, slow, is_retry))
        self.streak = self.streak + 1 if failed else 0
        if self.state == "closed" and self.should_open(now):
            self.open(now, random_number)

    def should_open(self, now: float) -> bool:
        """Return whether a closed breaker opens."""
        if self.consecutive is not None and self.streak >= self.consecutive:
            return True
        results = self.recent(now)
        if sum(not result.is_retry for result in results) < self.min_calls:
            return False
        failures = sum(result.failed for result in results)
        slow = sum(result.slow for result in results)
        if slow / len(results) >= self.rate:
            return True
        has_span = all(
            times and max(times) - min(times) >= self.min_span
            for times in (self.failed_starts, self.failed_ends)
        )
        return has_span and failures / len(results) >= self.rate


class BreakerMachine(RuleBasedStateMachine):
    """Calls, changes of the time and manual states, in any order."""

    @initialize(
        min_calls=st.integers(1, 6),
        min_span=st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]),
        rate=st.sampled_from([0.25, 0.5, 1.0]),
        consecutive=st.sampled_from([None, None, 1, 3]),
        probes=st.integers(1, 4),
        growth=st.sampled_from([1.0, 2.0]),
        now=st.integers(0, 1_000),
    )
    def begin(
        self,
        *,
        min_calls: int,
        min_span: float,
        rate: float,
        consecutive: int | None,
        probes: int,
        growth: float,
        now: int,
    ) -> None:
        """Create the breaker and the model with the same settings."""
        self.model = BreakerModel(min_calls, min_span, rate, consecutive, probes, growth)
        self.breaker = Breaker(
            min_calls=min_calls,
            min_span=min_span,
            failure_rate=rate,
            slow_after=SLOW_AFTER,
            slow_rate=rate,
            consecutive=consecutive,
            window=WINDOW,
            open_for=OPEN_FOR,
            growth=growth,
            max_open=MAX_OPEN,
            spread=SPREAD,
            probes=probes,
        )
        self.now = float(now)
        self.admitted: list[AdmittedCall] = []
        self.calls = 0

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 5.0, 9.75, 10.0, 29.75, 30.0, 1_000.0]))
    def advance_clock(self, seconds: float) -> None:
        """Advance the clock; more probes are admitted in place of those that hang by then."""
        self.now += seconds
        self.model.drop_hung_probes(self.now)

    @precondition(lambda self: self.model.state == "open" and self.model.until > self.now)
    @rule(early=st.sampled_from([0.0, 0.25]))
    def advance_to_end_of_open_period(self, early: float) -> None:
        """Advance the clock to the end of the open period, or to just before."""
        self.now = max(self.now, self.model.until - early)

    @rule(count=st.integers(1, 8))
    def admit_calls(self, count: int) -> None:
        """Each call is admitted or rejected as in the model, and as would_admit() predicted."""
        for _ in range(count):
            self.calls += 1
            expected = self.model.admits(self.now)
            assert expected == self.breaker.would_admit(self.now)
            permit = self.breaker.admit(self.now)
            assert expected == (permit is not None)
            if permit is not None:
                self.model.admit(self.calls, self.now)
                self.admitted.append(AdmittedCall(self.calls, permit, self.model.generation))

    @precondition(lambda self: self.admitted)
    @rule(
        index=st.integers(0, 10**6),
        failed=st.booleans(),
        duration=st.sampled_from([0.0, 0.5, 1.0, 1.25]),
        is_retry=st.sampled_from([False, False, True]),
        random_number=st.sampled_from([0.0, 0.5]),
    )
    def finish_call(
        self,
        *,
        index: int,
        failed: bool,
        duration: float,
        random_number: float,
        is_retry: bool = False,
    ) -> None:
        """End an attempt of this or an earlier generation with a result."""
        call = self.admitted.pop(index % len(self.admitted))
        self.breaker.record(
            call.permit,
            failed=failed,
            duration=duration,
            now=self.now,
            random_number=random_number,
            is_retry=is_retry,
        )
        self.model.finish(
            call,
            failed=failed,
            duration=duration,
            is_retry=is_retry,
            now=self.now,
            random_number=random_number,
        )

    @precondition(lambda self: self.admitted)
    @rule(index=st.integers(0, 10**6))
    def cancel_call(self, index: int) -> None:
        """Cancel a call of this or an earlier generation."""
        call = self.admitted.pop(index % len(self.admitted))
        self.breaker.release(call.permit)
        if call.generation == self.model.generation:
            self.model.probes.pop(call.number, None)

    @precondition(lambda self: self.model.state == "closed")
    @rule(random_number=st.sampled_from([0.0, 0.5]))
    def start_outage(self, random_number: float) -> None:
        """Fail calls until the breaker opens and let the open period pass, a rare random path."""
        self.advance_clock(WINDOW)
        while self.model.state == "closed":
            self.admit_calls(1)
            self.finish_call(
                index=len(self.admitted) - 1,
                failed=True,
                duration=0.5,
                random_number=random_number,
            )
            self.advance_clock(0.25)
        self.advance_to_end_of_open_period(0.0)

    @precondition(lambda self: self.model.state == "closed")
    @rule()
    def reset_calls(self) -> None:
        """Fail calls at the same time that started at different times, a rare random path."""
        self.admit_calls(6)
        for duration in (0.0, 0.5, 1.0) * 2:
            index = len(self.admitted) - 1
            self.finish_call(index=index, failed=True, duration=duration, random_number=0.0)

    @precondition(lambda self: self.calls % 4 == 3)
    @rule(state=st.sampled_from(list(FORCED_STATES)))
    def force_state(self, state: str) -> None:
        """Set the state manually."""
        self.breaker.force(state)
        self.model.openings = 0
        self.model.change_state(FORCED_STATES[state])

    @invariant()
    def agrees_with_the_model(self) -> None:
        """State, counts and retry_after are those of the model."""
        model, now = self.model, self.now
        assert model.state == self.breaker.state.value
        assert model.admits(now) == self.breaker.would_admit(now)
        results = model.recent(now)
        assert (
            len(results),
            sum(result.failed for result in results),
            sum(result.slow for result in results),
        ) == self.breaker.counts(now)
        assert model.retry_after(now) == self.breaker.retry_after(now)

    @invariant()
    def probes_are_limited(self) -> None:
        """While half-open, no more calls run than probes are allowed, except calls that hang."""
        if self.model.state == "half-open":
            assert len(self.model.probes) <= self.model.limit


@pytest.mark.long_run
def test_breaker_agrees_with_the_model() -> None:
    """For any sequence of events the breaker has the state of the model."""
    max_examples = settings().max_examples // 2
    run_state_machine_as_test(
        BreakerMachine, settings=settings(max_examples=max_examples, stateful_step_count=50)
    )
