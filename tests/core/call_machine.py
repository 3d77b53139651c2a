"""A stateful test: many concurrent calls through one downstream, driven by hypothesis."""

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
ENDINGS: list[Outcome | None] = [
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
"""All outcomes of an attempt; None is a cancellation."""
PLAIN = Policy(jitter="none", initial_delay=1)

draws = st.floats(0, 1, exclude_max=True)


class Behind(NamedTuple):
    """A downstream with its breaker, budget and limiter."""

    downstream: Downstream
    breaker: Breaker
    budget: TokenBudget
    cap: InFlight

    @property
    def balance(self) -> float:
        """The tokens in the budget."""
        return self.budget.balance(NOW)

    @property
    def running(self) -> int:
        """Number of attempts in flight."""
        return self.cap._in_flight

    def call(self, policy: Policy = PLAIN, deadline: float | None = None) -> Call:
        """Return a call that starts now."""
        return Call(policy, self.downstream, NOW, deadline)


def behind(
    preset: str = "classic", capacity: float = 500, at_once: int = 9, **breaker: Any
) -> Behind:
    """Return a downstream with a breaker, a budget and an in-flight limit."""
    parts = Breaker(spread=0, **breaker), TokenBudget(preset, capacity=capacity), InFlight(at_once)
    made = Downstream("payments", breaker=parts[0], budget=parts[1], limiter=parts[2])
    return Behind(made, *parts)


class Waiting(NamedTuple):
    """A call between two attempts, and the time at which the next one is due."""

    call: Call
    due: float


class Calls(RuleBasedStateMachine):
    """Concurrent calls on one downstream that end with every outcome at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.there = behind(
            "aws-2020", CAPACITY, 3, min_calls=4, failure_rate=0.7, open_for=5, probes=2
        )
        self.now = NOW
        self.waiting: list[Waiting] = []
        self.running: list[Call] = []

    @rule(
        most=st.sampled_from([4, 1, 5]),
        total=st.sampled_from([None, None, 5.0, 20.0]),
        left=st.sampled_from([None, None, 2.5, 15.0]),
    )
    def arrive(self, most: int, total: float | None, left: float | None) -> None:
        """Start a new call."""
        policy = Policy(max_attempts=most, initial_delay=1, total_budget=total)
        deadline = None if left is None else self.now + left
        call = Call(policy, self.there.downstream, self.now, deadline)
        self.begin(call)

    @rule(seconds=st.sampled_from([0.5, 2.0, 8.0]))
    def pass_time(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99), late=st.sampled_from([0.0, 0.0, 3.0]))
    def finish_wait(self, which: int, late: float) -> None:
        """End the wait of a call, on time or late."""
        call, due = self.waiting.pop(which % len(self.waiting))
        self.now = max(self.now, due + late)
        command = self.begin(call)
        if (
            isinstance(command, Stop) and self.now == due
        ):  # decide() schedules no wait that cannot be followed by an attempt
            assert command.reason in {Reason.BREAKER_OPEN, Reason.LIMIT}

    def begin(self, call: Call) -> Attempt | Stop:
        """Start the next attempt of a call, unless it is rejected."""
        now = self.now
        before, owed, made = self.there.balance, call._paid, call.attempts
        admits, room = self.there.breaker.would_admit(now), self.there.cap.limit(now)
        command = call.start(now)
        if isinstance(command, Attempt):
            assert admits
            assert len(self.running) < room
            assert made + 1 == call.attempts == command.number <= call.policy.max_attempts
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
            assert (min(CAPACITY, before + owed), 0) == (self.there.balance, call._paid)
            assert made == call.attempts
        return command

    @precondition(lambda self: self.running)
    @rule(
        which=st.integers(0, 2),
        ending=st.sampled_from(ENDINGS),
        took=st.sampled_from([0.0, 0.25, 2.0]),
        random_number=draws,
    )
    def end(self, which: int, ending: Outcome | None, took: float, random_number: float) -> None:
        """End an attempt."""
        call = self.running.pop(which % len(self.running))
        self.now += took
        if ending is None:
            self.cancel(call)
        elif ending is SUCCESS:
            self.succeed(call, random_number)
        else:
            self.fail(call, ending, random_number)

    @rule(random_number=draws)
    def outage(self, random_number: float) -> None:
        """Record a failure of every running attempt."""
        while self.running:
            self.fail(self.running.pop(), TRANSIENT, random_number)

    def fail(self, call: Call, outcome: Outcome, random_number: float) -> None:
        """Record a failed attempt; the call then waits or ends."""
        before = self.there.balance
        verdict = call.record_failure(outcome, self.now, random_number)
        if isinstance(verdict, Wait):
            due = self.now + verdict.delay
            assert call.attempts < call.policy.max_attempts
            assert call.deadline is None or due <= call.deadline
            if call.policy.total_budget is not None:
                assert due - call.started <= call.policy.total_budget
            if outcome.hint is not None and outcome.hint.delay is not None:
                assert verdict.delay >= outcome.hint.delay
            assert before - self.there.budget.cost(outcome) == self.there.balance
            self.waiting.append(Waiting(call, due))
        else:
            assert (before, 0) == (self.there.balance, call._paid)
        assert verdict == call.steps[-1].verdict

    def succeed(self, call: Call, random_number: float) -> None:
        """Record a successful attempt, which refills the budget."""
        before = self.there.balance
        call.record_success(self.now, random_number)
        assert before <= self.there.balance
        assert 0 == call._paid

    def cancel(self, call: Call) -> None:
        """Cancel an attempt, which is not counted."""
        before, counts = self.there.balance, self.there.breaker.counts(self.now)
        call.cancel_attempt(self.now)
        assert (before, counts) == (self.there.balance, self.there.breaker.counts(self.now))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def abandon(self, which: int) -> None:
        """End a call during its wait."""
        call, before = self.waiting.pop(which % len(self.waiting)).call, self.there.balance
        owed = call._paid
        call.refund_retry(self.now)
        assert (min(CAPACITY, before + owed), 0) == (self.there.balance, call._paid)

    @invariant()
    def holds(self) -> None:
        """The number in flight is correct, and the budget stays within its bounds."""
        assert len(self.running) == self.there.running <= 3
        assert 0 <= self.there.balance <= CAPACITY
        assert len(self.there.breaker._running_probes) <= 2
        assert all(call.attempts <= call.policy.max_attempts for call in self.running)

    def teardown(self) -> None:
        """After all calls have ended, no slot is taken and the breaker can close again."""
        for call in self.running:
            call.cancel_attempt(self.now)
        assert 0 == self.there.running
        assert self.there.breaker.would_admit(self.now + 1_000)
