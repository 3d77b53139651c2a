"""A stateful test: any sequence of events, compared with a simple model of the breaker."""

from __future__ import annotations

from typing import NamedTuple

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
MANUAL = {
    "open": "forced-open",
    "closed": "closed",
    "disabled": "disabled",
    "metrics-only": "metrics-only",
}


class Ticket(NamedTuple):
    """An admitted call."""

    number: int
    permit: int
    generation: int


class Result(NamedTuple):
    """The result of a call."""

    second: int
    failed: bool
    slow: bool


class Model:
    """A simple model of the breaker. Times are quarters of a second, so that sums are exact."""

    def __init__(
        self, min_calls: int, rate: float, consecutive: int | None, probes: int, growth: float
    ) -> None:
        self.min_calls, self.rate, self.consecutive = min_calls, rate, consecutive
        self.limit, self.growth = probes, growth
        self.openings = self.generation = 0
        self.until = 0.0
        self.move("closed")

    def move(self, state: str) -> None:
        """Start a new generation: earlier calls and counts are ignored."""
        self.state = state
        self.generation += 1
        self.results: list[Result] = []
        self.streak = self.good_probes = 0
        self.probes: dict[int, float] = {}

    def open(self, now: float, random_number: float) -> None:
        """Open for longer than the last time."""
        length = min(MAX_OPEN, OPEN_FOR * self.growth**self.openings)
        self.until = now + length + length * SPREAD * random_number
        self.openings += 1
        self.move("open")

    def lose_probes(self, now: float) -> None:
        """Drop probes that have run for an open period."""
        self.probes = {n: began for n, began in self.probes.items() if now - began < OPEN_FOR}

    def admits(self, now: float) -> bool:
        """Return whether a call is admitted."""
        if self.state == "open":
            return now >= self.until
        if self.state == "half-open":
            return len(self.probes) < self.limit
        return self.state != "forced-open"

    def admit(self, number: int, now: float) -> None:
        """Admit a call."""
        if self.state == "open":
            self.move("half-open")
        if self.state == "half-open":
            self.probes[number] = now

    def young(self, now: float) -> list[Result]:
        """Return the results of the last ten seconds, the present one included."""
        return [result for result in self.results if result.second > int(now) - 10]

    def finish(
        self, ticket: Ticket, *, failed: bool, slow: bool, now: float, random_number: float
    ) -> None:
        """Record the result of a call of the current generation."""
        if ticket.generation != self.generation or self.state == "disabled":
            return
        if self.state == "half-open":
            del self.probes[ticket.number]
            if failed or slow:
                self.open(now, random_number)
                return
            self.good_probes += 1
            if self.good_probes == self.limit:
                self.openings = 0
                self.move("closed")
            return
        self.results.append(Result(int(now), failed, slow))
        self.streak = self.streak + 1 if failed else 0
        if self.state == "closed" and self.is_broken(now):
            self.open(now, random_number)

    def is_broken(self, now: float) -> bool:
        """Return whether a closed breaker opens."""
        if self.consecutive is not None and self.streak >= self.consecutive:
            return True
        young = self.young(now)
        if len(young) < self.min_calls:
            return False
        failures = sum(result.failed for result in young)
        slow = sum(result.slow for result in young)
        return max(failures, slow) / len(young) >= self.rate


class BreakerMachine(RuleBasedStateMachine):
    """Calls, time and an operator, in any order."""

    @initialize(
        min_calls=st.integers(1, 6),
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
        rate: float,
        consecutive: int | None,
        probes: int,
        growth: float,
        now: int,
    ) -> None:
        """Create the breaker and the model with the same rules."""
        self.model = Model(min_calls, rate, consecutive, probes, growth)
        self.breaker = Breaker(
            min_calls=min_calls,
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
        self.tickets: list[Ticket] = []
        self.asked = 0

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 5.0, 9.75, 10.0, 29.75, 30.0, 1_000.0]))
    def time_passes(self, seconds: float) -> None:
        """Advance the clock; probes that are lost by then never return."""
        self.now += seconds
        self.model.lose_probes(self.now)
        if self.model.state == "half-open":
            self.tickets = [
                ticket
                for ticket in self.tickets
                if ticket.generation != self.model.generation or ticket.number in self.model.probes
            ]

    @precondition(lambda self: self.model.state == "open" and self.model.until > self.now)
    @rule(early=st.sampled_from([0.0, 0.25]))
    def open_time_ends(self, early: float) -> None:
        """Advance the clock to the end of the open period, or to just before."""
        self.now = max(self.now, self.model.until - early)

    @rule(callers=st.integers(1, 8))
    def callers_ask(self, callers: int) -> None:
        """Each call is admitted or rejected as in the model, and as would_admit() predicted."""
        for _ in range(callers):
            self.asked += 1
            expected = self.model.admits(self.now)
            assert expected == self.breaker.would_admit(self.now)
            permit = self.breaker.admit(self.now)
            assert expected == (permit is not None)
            if permit is not None:
                self.model.admit(self.asked, self.now)
                self.tickets.append(Ticket(self.asked, permit, self.model.generation))

    @precondition(lambda self: self.tickets)
    @rule(
        which=st.integers(0, 10**6),
        failed=st.booleans(),
        duration=st.sampled_from([0.0, 0.5, 1.0, 1.25]),
        random_number=st.sampled_from([0.0, 0.5]),
    )
    def a_call_ends(self, which: int, failed: bool, duration: float, random_number: float) -> None:
        """A call of this or an earlier generation ends with a result."""
        ticket = self.tickets.pop(which % len(self.tickets))
        self.breaker.record(
            ticket.permit,
            failed=failed,
            duration=duration,
            now=self.now,
            random_number=random_number,
        )
        slow = duration > SLOW_AFTER
        self.model.finish(
            ticket, failed=failed, slow=slow, now=self.now, random_number=random_number
        )

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 10**6))
    def a_call_is_cancelled(self, which: int) -> None:
        """A call of this or an earlier generation is cancelled."""
        ticket = self.tickets.pop(which % len(self.tickets))
        self.breaker.release(ticket.permit)
        if ticket.generation == self.model.generation:
            self.model.probes.pop(ticket.number, None)

    @precondition(lambda self: self.model.state == "closed")
    @rule(random_number=st.sampled_from([0.0, 0.5]))
    def an_outage_begins(self, random_number: float) -> None:
        """Calls fail until it opens, and the open period passes: random steps rarely get here."""
        self.time_passes(WINDOW)
        while self.model.state == "closed":
            self.callers_ask(1)
            self.a_call_ends(
                len(self.tickets) - 1, failed=True, duration=0.5, random_number=random_number
            )
        self.open_time_ends(0.0)

    @precondition(lambda self: self.asked % 4 == 3)
    @rule(state=st.sampled_from(list(MANUAL)))
    def an_operator_decides(self, state: str) -> None:
        """An operator sets the state."""
        self.breaker.force(state)
        self.model.openings = 0
        self.model.move(MANUAL[state])

    @invariant()
    def both_have_the_same_state(self) -> None:
        """State, counts and retry_after are those of the model."""
        model, now = self.model, self.now
        assert model.state == self.breaker.state.value
        assert model.admits(now) == self.breaker.would_admit(now)
        young = model.young(now)
        assert (
            len(young),
            sum(result.failed for result in young),
            sum(result.slow for result in young),
        ) == self.breaker.counts(now)
        if model.state == "open":
            assert max(0.0, model.until - now) == self.breaker.retry_after(now)
        else:
            assert None is self.breaker.retry_after(now)

    @invariant()
    def no_more_probes_than_allowed(self) -> None:
        """While half-open, no more calls run than probes are allowed."""
        if self.model.state == "half-open":
            out = [ticket for ticket in self.tickets if ticket.generation == self.model.generation]
            assert len(out) <= self.model.limit


def test_agrees_with_the_model() -> None:
    """For any sequence of events the breaker has the state of the model."""
    walks = settings().max_examples // 2
    run_state_machine_as_test(
        BreakerMachine, settings=settings(max_examples=walks, stateful_step_count=50)
    )
