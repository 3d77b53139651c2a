"""Stand-ins for the parts of the engine, and what several of its tests ask."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan
from typing import NamedTuple

from tarry.core.outcome import SUCCESS, Outcome
from tarry.core.verdict import Stop
from tarry.simulator.distributions import Dice, Sampler
from tarry.simulator.event_loop import World
from tarry.simulator.metrics import Summary
from tarry.simulator.node import Ended, Node, Requester, Worker
from tarry.simulator.scenario import Server

HELD = 1_000_000
"""Added to the number of a request that is held."""


class Script:
    """A distribution that gives these values one after the other, and the last for ever."""

    def __init__(self, *values: float) -> None:
        self.values = values

    @property
    def mean(self) -> float:
        """The average."""
        return sum(self.values) / len(self.values)

    def sampler(self, dice: Dice) -> Sampler:
        """Draw without dice."""
        left = list(self.values)
        return lambda: left.pop(0) if len(left) > 1 else left[0]


class Answer(NamedTuple):
    """What a requester was told."""

    when: float
    number: int
    outcome: Outcome


class Asker:
    """A requester that writes down what it is told."""

    def __init__(self, told: list[Answer] | None = None) -> None:
        self.answers: list[Answer] = [] if told is None else told

    def answer(self, now: float, number: int, outcome: Outcome) -> None:
        """Write it down."""
        self.answers.append(Answer(now, number, outcome))

    def hold(self, number: int) -> int:
        """Call what is to come by another number, as callers do."""
        return number + HELD


class Replies(Node):
    """A server that answers request after request as it is told to, and then no more.

    A reply is the seconds that it takes, and how it ends; None stands for no answer.
    """

    def __init__(self, world: World, *replies: tuple[float, Outcome] | None) -> None:
        super().__init__("server", Server(), world)
        self.replies = list(replies)
        self.seen: list[tuple[float, int]] = []
        """When each request arrived, and its number."""
        self.requesters: list[Requester] = []

    def take(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Give the next reply."""
        self.seen.append((now, number))
        self.requesters.append(requester)
        reply = self.replies.pop(0) if self.replies else None
        return None if reply is None else (now + reply[0], reply[1])


class Limits:
    """A limiter that lets attempt after attempt through after these seconds, the last for ever."""

    def __init__(self, *waits: float | None) -> None:
        self.waits = list(waits)
        self.released: list[str | None] = []
        """What each attempt came to; None for one that was called off."""

    def acquire(self, now: float) -> float | None:
        """Say the next wait."""
        return self.waits.pop(0) if len(self.waits) > 1 else self.waits[0]

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Write it down."""
        self.released.append(None if outcome is None else outcome.detail)

    def on_recovery(self, now: float) -> None:
        """Nothing changes."""


class End(NamedTuple):
    """How a call ended."""

    begun: float
    now: float
    stop: Stop | None


class Ends:
    """Is told how calls end."""

    def __init__(self) -> None:
        self.told: list[End] = []
        self.attempts: list[int] = []

    def __call__(self, begun: float, now: float, stop: Stop | None, attempts: int) -> None:
        """Write it down."""
        self.told.append(End(begun, now, stop))
        self.attempts.append(attempts)


class Begun(NamedTuple):
    """A call that somebody began."""

    now: float
    client: int
    ended: Ended


class Begins:
    """Begins calls by writing them down; the test ends them, or `refuse` does at once."""

    def __init__(self, refuse: Callable[[float], Stop | None] = lambda _: None) -> None:
        self.refuse = refuse
        self.begun: list[Begun] = []

    def __call__(self, now: float, client: int, ended: Ended) -> Stop | None:
        """Write a call down, or refuse it as a caller does."""
        stop = self.refuse(now)
        if stop is not None:
            ended(now, now, stop, 0)
            return stop
        self.begun.append(Begun(now, client, ended))
        return None


def worker_of(server: Server, seed: int = 0) -> tuple[World, Worker]:
    """Return a server at work, and its world."""
    world = World(seed)
    return world, Worker("server", server, world)


def taken(node: Node, now: float, asker: Asker | None = None, number: int = 1) -> Answer | None:
    """Return the answer that a request gets at once, if any."""
    answer = node.take(now, Asker() if asker is None else asker, number)
    return None if answer is None else Answer(answer[0], number, answer[1])


def ends(node: Node, times: list[float]) -> list[float | str]:
    """Return when each of the requests is answered; what is not a success has its detail."""
    answers = [taken(node, now) for now in times]
    return [
        "never"
        if answer is None
        else answer.when
        if answer.outcome is SUCCESS
        else answer.outcome.detail
        for answer in answers
    ]


def conserves(summary: Summary) -> None:
    """Check that calls, attempts and series add up."""
    assert summary.calls == summary.succeeded + summary.failed + summary.unfinished
    assert summary.unfinished >= 0
    assert summary.failed == sum(summary.reasons.values())
    assert summary.failures + summary.succeeded <= summary.attempts
    for name in ("calls", "requests", "succeeded", "failed"):
        assert getattr(summary, name) == sum(summary.series[name])
    assert 1 == len({len(values) for values in summary.series.values()})
    assert not any(value < 0 for value in summary.metrics().values())
    assert not summary.calls or 0 <= summary.success_rate <= 1
    assert not summary.succeeded or 0 <= summary.p50 <= summary.p99 <= summary.p999 < inf
    if isnan(summary.recovered_after):
        assert isnan(summary.recovered)
    else:
        assert float(summary.recovered_after < inf) == summary.recovered
