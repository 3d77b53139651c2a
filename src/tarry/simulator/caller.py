"""Calls at work: the core's `Call` and `HedgedCall`, obeyed on virtual time.

These are drivers like those of the runtime: they carry out what the core says and decide
nothing. What a driver's clock, sleep and cancellation are there, events are here.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tarry.core.call import Call
from tarry.core.outcome import SUCCESS, Kind
from tarry.core.verdict import Attempt, Stop, Wait
from tarry.simulator.node import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.downstream import Downstream
    from tarry.core.hedging import HedgedCall
    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy
    from tarry.simulator.distributions import Sampler
    from tarry.simulator.event_loop import World
    from tarry.simulator.metrics import Meter
    from tarry.simulator.node import Ended, Node


_ANOTHER = 1 << 32
"""Far enough from the number of any attempt."""


class Line:
    """What the callers of one node share: the way there, and who counts."""

    __slots__ = ("at", "draw", "hop", "meter", "node", "permanent")

    def __init__(self, world: World, node: Node, hop: Sampler, meter: Meter | None) -> None:
        self.at: Callable[..., None] = world.at
        self.draw: Callable[[], float] = world.dice(f"jitter before {node.name}").random
        self.hop: Sampler = hop
        self.node: Node = node
        self.meter: Meter | None = meter
        self.permanent: frozenset[str] = frozenset()
        """The statuses that the callers' policy does not retry."""


class Caller:
    """One call that is retried."""

    __slots__ = ("_call", "_deadline", "_ended", "_line", "_running")

    def __init__(
        self,
        line: Line,
        policy: Policy,
        downstream: Downstream | None,
        now: float,
        ended: Ended,
    ) -> None:
        self._line = line
        self._call = Call(policy, downstream, now)
        self._ended = ended
        self._running = 0
        """What the attempt that runs waits for: its number, or a later `hold` of it. Whatever
        was planned for something else comes too late."""
        self._deadline = inf

    def start(self, now: float, _: object = None) -> Stop | None:
        """Make the next attempt, or end."""
        attempt = self._call.start(now)
        if isinstance(attempt, Stop):
            self._ended(self._call.started, now, attempt, self._call.attempts)
            return attempt
        line = self._line
        self._running = number = attempt.number
        if line.meter is not None:
            line.meter.attempts += 1
        sent = now + attempt.delay
        arrival = sent + line.hop()
        if attempt.timeout is not None:
            self._deadline = sent + attempt.timeout
            if arrival > self._deadline:
                line.at(self._deadline, self._times_out, number)
        line.at(arrival, self._arrives, number)
        return None

    def hold(self, number: int) -> int:
        """Wait for another answer than the one that was planned; return what it is called."""
        if number != self._running:
            return number
        self._running = another = number + _ANOTHER
        if self._deadline < inf:
            self._line.at(self._deadline, self._times_out, another)
        return another

    def answer(self, now: float, number: int, outcome: Outcome) -> None:
        """Take an answer that leaves the server now, in place of any that was planned."""
        if number == self._running:
            self._running = another = number + _ANOTHER
            self._answered(now + self._line.hop(), another, outcome)

    def _arrives(self, now: float, number: int) -> None:
        line = self._line
        answer = line.node.take(now, self, number)
        if number != self._running:  # it has given up, but the server does not know
            return
        if answer is None:
            if self._deadline < inf:
                line.at(self._deadline, self._times_out, number)
            return
        when, outcome = answer
        when += line.hop()
        if outcome is SUCCESS and when <= self._deadline:  # as below, for what is most of all
            line.at(when, self._succeeds, number)
        else:
            self._answered(when, number, outcome)

    def _answered(self, when: float, number: int, outcome: Outcome) -> None:
        if when > self._deadline:
            self._line.at(self._deadline, self._times_out, number)
        elif outcome is SUCCESS:
            self._line.at(when, self._succeeds, number)
        else:
            self._line.at(when, self._fails, (number, outcome))

    def _succeeds(self, now: float, number: int) -> None:
        if number == self._running:
            self._running = 0
            call = self._call
            call.record_success(now, self._line.draw())
            self._ended(call.started, now, None, call.attempts)

    def _times_out(self, now: float, number: int) -> None:
        self._fails(now, (number, TIMEOUT))

    def _fails(self, now: float, about: tuple[int, Outcome]) -> None:
        number, outcome = about
        if number != self._running:
            return
        self._running = 0
        line = self._line
        if line.meter is not None:
            line.meter.failure(now)
        if outcome.detail in line.permanent:
            outcome = outcome.replace(kind=Kind.PERMANENT)
        verdict = self._call.record_failure(outcome, now, line.draw())
        if isinstance(verdict, Wait):
            line.at(now + verdict.delay, self.start)
        else:
            self._ended(self._call.started, now, verdict, self._call.attempts)


class HedgedCaller:
    """One call that is hedged."""

    __slots__ = ("_begun", "_call", "_ended", "_line", "_running")

    def __init__(self, line: Line, call: HedgedCall, now: float, ended: Ended) -> None:
        self._line = line
        self._call = call
        self._begun = now
        self._ended = ended
        self._running: dict[int, int] = {}
        """The copies that run, and how often another answer took the place of a planned one."""

    def start(self, now: float, _: object = None) -> Stop | None:
        """Send the first copy, or end."""
        attempt = self._call.start(now)
        self._obey(now, attempt)
        return attempt if isinstance(attempt, Stop) else None

    def hold(self, number: int) -> int:
        """Wait for another answer than the one that was planned."""
        if number in self._running:
            self._running[number] += 1
        return number

    def answer(self, now: float, number: int, outcome: Outcome) -> None:
        """Take an answer that leaves the server now, in place of any that was planned."""
        if number in self._running:
            self._running[number] += 1
            self._answered(now, number, outcome)

    def _answered(self, leaves: float, number: int, outcome: Outcome) -> None:
        about = (number, self._running[number], outcome)
        self._line.at(leaves + self._line.hop(), self._ends, about)

    def _obey(self, now: float, step: Attempt | Stop | None) -> None:
        line = self._line
        if isinstance(step, Stop):
            self._running.clear()
            self._call.next_hedge_at = None
            self._ended(self._begun, now, step, self._call.attempts)
            return
        if step is not None:
            self._running[step.number] = 0
            if step.delay:
                line.at(now + step.delay, self._sends, step.number)
            else:
                self._sends(now, step.number)
        if self._call.next_hedge_at is not None:
            line.at(self._call.next_hedge_at, self._hedges)

    def _sends(self, now: float, number: int) -> None:
        line = self._line
        if number in self._running:  # else the call was over before its turn came
            if line.meter is not None:
                line.meter.attempts += 1
            line.at(now + line.hop(), self._arrives, number)

    def _arrives(self, now: float, number: int) -> None:
        answer = self._line.node.take(now, self, number)
        if answer is not None and number in self._running:
            self._answered(answer[0], number, answer[1])

    def _hedges(self, now: float, _: object) -> None:
        if self._call.next_hedge_at == now:
            self._obey(now, self._call.hedge(now))

    def _ends(self, now: float, about: tuple[int, int, Outcome]) -> None:
        number, planned, outcome = about
        if self._running.get(number) != planned:
            return
        del self._running[number]
        if outcome is SUCCESS:
            self._running.clear()
            self._call.record_success(number, now, self._line.draw())
            self._call.next_hedge_at = None
            self._ended(self._begun, now, None, self._call.attempts)
            return
        if self._line.meter is not None:
            self._line.meter.failure(now)
        self._obey(now, self._call.record_failure(number, outcome, now, self._line.draw()))
