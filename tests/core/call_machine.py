"""A hypothesis state machine that runs many concurrent calls through one downstream."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tarry.core.breaker import Breaker
from tarry.core.budget import TokenBudget
from tarry.core.call import Call
from tarry.core.downstream import Downstream
from tarry.core.hints import Hint
from tarry.core.limiter import InFlight
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Kind, Outcome
from tarry.core.policy import Policy
from tarry.core.verdict import Attempt, Reason, Stop, Wait

NOW = 1_000.0
CAPACITY = 12
OUTCOMES: list[Outcome | None] = [
    TRANSIENT,
    TRANSIENT,
    Outcome(Kind.TRANSIENT, timeout=True),
    Outcome(Kind.TRANSIENT, hint=Hint(0.5)),
    Outcome(Kind.TRANSIENT, hint=Hint(3.0, exact=True)),
    Outcome(Kind.TRANSIENT, hint=Hint(200.0)),
    Outcome(Kind.THROTTLED),
    Outcome(Kind.OVERLOADED),
    PERMANENT,
    SUCCESS,
    None,
]
"""The possible outcomes of an attempt; None is a cancellation."""
NO_JITTER = Policy(jitter="none", initial_delay=1)

random_numbers = st.floats(0, 1, exclude_max=True)


class DownstreamParts(NamedTuple):
    """A downstream with its breaker, budget and limiter."""

    downstream: Downstream
    breaker: Breaker
    budget: TokenBudget
    limiter: InFlight

    @property
    def balance(self) -> float:
        """The tokens in the budget."""
        return self.budget.balance(NOW)

    @property
    def in_flight(self) -> int:
        """Number of attempts in flight."""
        return self.limiter._in_flight

    def new_call(self, policy: Policy = NO_JITTER, deadline: float | None = None) -> Call:
        """Return a call that starts at NOW."""
        return Call(policy, self.downstream, NOW, deadline)


def make_downstream(
    preset: str = "classic", capacity: float = 500, max_in_flight: int = 9, **breaker_options: Any
) -> DownstreamParts:
    """Return a downstream with a breaker, a budget and an in-flight limit."""
    breaker = Breaker(spread=0, **breaker_options)
    budget = TokenBudget(preset, capacity=capacity)
    limiter = InFlight(max_in_flight)
    downstream = Downstream("payments", breaker=breaker, budget=budget, limiter=limiter)
    return DownstreamParts(downstream, breaker, budget, limiter)


class WaitingCall(NamedTuple):
    """A call between two attempts, and the time at which the next attempt is due."""

    call: Call
    due: float


class CallMachine(RuleBasedStateMachine):
    """Concurrent calls on one downstream whose attempts end with any outcome at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = make_downstream(
            "aws-2020",
            CAPACITY,
            max_in_flight=3,
            min_calls=4,
            min_span=0,
            failure_rate=0.7,
            open_for=5,
            probes=2,
        )
        self.now = NOW
        self.waiting: list[WaitingCall] = []
        self.running: list[Call] = []

    @rule(
        max_attempts=st.sampled_from([4, 1, 5]),
        total_budget=st.sampled_from([None, None, 5.0, 20.0]),
        time_left=st.sampled_from([None, None, 2.5, 15.0]),
    )
    def start_call(
        self, max_attempts: int, total_budget: float | None, time_left: float | None
    ) -> None:
        """Start a new call."""
        policy = Policy(max_attempts=max_attempts, initial_delay=1, total_budget=total_budget)
        deadline = None if time_left is None else self.now + time_left
        call = Call(policy, self.parts.downstream, self.now, deadline)
        self.start_attempt(call)

    @rule(seconds=st.sampled_from([0.5, 2.0, 8.0]))
    def advance_clock(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99), lateness=st.sampled_from([0.0, 0.0, 3.0]))
    def finish_wait(self, index: int, lateness: float) -> None:
        """End the wait of a call, on time or late."""
        call, due = self.waiting.pop(index % len(self.waiting))
        self.now = max(self.now, due + lateness)
        command = self.start_attempt(call)
        if isinstance(command, Stop) and self.now == due:
            # decide() schedules no wait that ends after the deadline or the total budget.
            assert command.reason in {Reason.BREAKER_OPEN, Reason.LIMIT}

    def start_attempt(self, call: Call) -> Attempt | Stop:
        """Start the next attempt of a call, or check why the downstream rejects it."""
        now = self.now
        balance, paid, attempts = self.parts.balance, call._paid, call.attempts
        admits, limit = self.parts.breaker.would_admit(now), self.parts.limiter.limit(now)
        command = call.start(now)
        if isinstance(command, Attempt):
            assert admits
            assert len(self.running) < limit
            assert attempts + 1 == call.attempts == command.number <= call.policy.max_attempts
            if call.deadline is not None:
                assert now < call.deadline
                assert command.timeout == call.deadline - now
            self.running.append(call)
        else:
            too_late = command.reason in {Reason.DEADLINE, Reason.TOTAL_BUDGET}
            assert too_late or admits == (command.reason is Reason.LIMIT)
            if command.reason is Reason.DEADLINE:
                assert call.deadline is not None
                assert now >= call.deadline
            assert (min(CAPACITY, balance + paid), 0) == (self.parts.balance, call._paid)
            assert attempts == call.attempts
        return command

    @precondition(lambda self: self.running)
    @rule(
        index=st.integers(0, 2),
        outcome=st.sampled_from(OUTCOMES),
        duration=st.sampled_from([0.0, 0.25, 2.0]),
        random_number=random_numbers,
    )
    def finish_attempt(
        self, index: int, outcome: Outcome | None, duration: float, random_number: float
    ) -> None:
        """End an attempt with an outcome, or cancel it."""
        call = self.running.pop(index % len(self.running))
        self.now += duration
        if outcome is None:
            self.cancel(call)
        elif outcome is SUCCESS:
            self.succeed(call, random_number)
        else:
            self.fail(call, outcome, random_number)

    @rule(random_number=random_numbers)
    def fail_all_attempts(self, random_number: float) -> None:
        """Record a failure of every attempt in flight."""
        while self.running:
            self.fail(self.running.pop(), TRANSIENT, random_number)

    def fail(self, call: Call, outcome: Outcome, random_number: float) -> None:
        """Record a failed attempt; the call then waits or ends."""
        before = self.parts.balance
        verdict = call.record_failure(outcome, self.now, random_number)
        if isinstance(verdict, Wait):
            due = self.now + verdict.delay
            assert call.attempts < call.policy.max_attempts
            assert call.deadline is None or due <= call.deadline
            if call.policy.total_budget is not None:
                assert due - call.started <= call.policy.total_budget
            if outcome.hint is not None and outcome.hint.delay is not None:
                assert verdict.delay >= outcome.hint.delay
            assert before - self.parts.budget.cost(outcome) == self.parts.balance
            self.waiting.append(WaitingCall(call, due))
        else:
            assert (before, 0) == (self.parts.balance, call._paid)
        assert verdict == call.steps[-1].verdict

    def succeed(self, call: Call, random_number: float) -> None:
        """Record a successful attempt, which refills the budget."""
        before = self.parts.balance
        call.record_success(self.now, random_number)
        assert before <= self.parts.balance
        assert 0 == call._paid

    def cancel(self, call: Call) -> None:
        """Cancel an attempt, which is not counted."""
        before, counts = self.parts.balance, self.parts.breaker.counts(self.now)
        call.cancel_attempt(self.now)
        assert (before, counts) == (self.parts.balance, self.parts.breaker.counts(self.now))

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99))
    def abandon(self, index: int) -> None:
        """End a call during its wait, which refunds the price of the next retry."""
        call, before = self.waiting.pop(index % len(self.waiting)).call, self.parts.balance
        paid = call._paid
        call.refund_retry(self.now)
        assert (min(CAPACITY, before + paid), 0) == (self.parts.balance, call._paid)

    @invariant()
    def counts_and_balance_are_valid(self) -> None:
        """The number in flight is correct, and the budget stays within its bounds."""
        assert len(self.running) == self.parts.in_flight <= 3
        assert 0 <= self.parts.balance <= CAPACITY
        assert len(self.parts.breaker._running_probes) <= 2
        assert all(call.attempts <= call.policy.max_attempts for call in self.running)

    def teardown(self) -> None:
        """Check that after all calls no slot is taken and the breaker admits calls again."""
        for call in self.running:
            call.cancel_attempt(self.now)
        assert 0 == self.parts.in_flight
        assert self.parts.breaker.would_admit(self.now + 1_000)
