"""Stand-ins for the parts of the engine, so that each can be tested without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tarry.core.outcome import Outcome
from tarry.core.verdict import Stop
from tarry.simulator.distributions import Dice, Sampler
from tarry.simulator.node import Ended, Node, Requester
from tarry.simulator.scenario import Server
from tarry.simulator.world import World


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


class Replies(Node):
    """A server that answers request after request as it is told to, and then no more.

    A reply is the seconds that it takes, and how it ends; None stands for no answer.
    """

    def __init__(self, world: World, *replies: tuple[float, Outcome] | None) -> None:
        super().__init__(Server(), world, None)
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

    def recovered(self, now: float) -> None:
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

    def __call__(self, begun: float, now: float, stop: Stop | None) -> None:
        """Write it down."""
        self.told.append(End(begun, now, stop))


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
            ended(now, now, stop)
            return stop
        self.begun.append(Begun(now, client, ended))
        return None


def at_times(world: World, times: Iterable[float], act: Callable[[float], None]) -> None:
    """Have something done at each of these times."""
    for when in times:
        world.at(when, lambda now, _: act(now))
