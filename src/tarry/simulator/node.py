"""Servers at work: each takes a request and says when it is answered, and how.

A server that works by itself knows that the moment a request arrives, because its queue is
first come, first served. So a request costs two events, its arrival and its answer. A relay,
which calls another server, answers when that call ends.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tarry.core.outcome import SUCCESS, Kind, Outcome, outcome_of_status
from tarry.core.verdict import Reason, is_final
from tarry.policyfile.defence import Defence
from tarry.simulator.scenario import ERROR_STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.verdict import Stop
    from tarry.simulator.event_loop import World
    from tarry.simulator.metrics import Meter
    from tarry.simulator.scenario import Failure, Server

REFUSED = Outcome(Kind.TRANSIENT, detail="connection refused")
DROPPED = Outcome(Kind.TRANSIENT, detail="connection reset")
TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True, detail="timeout")
ERROR = outcome_of_status(500, now=0.0)
UNAVAILABLE = outcome_of_status(503, now=0.0)
GAVE_UP = UNAVAILABLE.replace(retried=True)
"""What a relay answers whose own call failed: it has retried already."""

_MOST_ANSWERED = 1000
"""So many requests that were answered a fragile server remembers before it forgets them."""

Ended: TypeAlias = "Callable[[float, float, Stop | None, int], None]"
"""Told when a call began, when it ended, why it failed if it did, and after how many attempts."""


class Requester(Protocol):
    """Who waits for an answer."""

    def answer(self, now: float, number: int, outcome: Outcome) -> None:
        """Take the answer to attempt `number`, which leaves the server now."""
        ...

    def hold(self, number: int) -> int:
        """Forget the answer that was planned for the attempt; return what to call it now."""
        ...


_Request: TypeAlias = tuple[Requester, int]
"""Who waits, and for the answer to which attempt."""


class Node:
    """One server: what all have in common, which is how they fail."""

    __slots__ = (
        "_dice",
        "_held",
        "_most",
        "_reject",
        "_room",
        "_server",
        "_up_at",
        "_world",
        "crashes",
        "meter",
        "name",
    )

    def __init__(self, name: str, server: Server, world: World) -> None:
        self.name: str = name
        self._server = server
        self._world = world
        self._room: float = inf
        if server.concurrency is not None and server.queue is not None:
            self._room = server.concurrency + server.queue
        self._most: float = min(self._room, server.crash_above or inf)
        self._reject = _answer(server.reject_status, server.retry_after)
        self._held: dict[Failure, list[_Request]] = {}
        self._dice = world.dice(f"failures of {name}")
        self._up_at: float = 0.0
        self.crashes: int = 0
        self.meter: Meter | None = None
        """Counts what arrives, on the last server of the path."""
        for failure in server.failures:
            if failure.kind == "refuse" and failure.rate >= 1:
                world.at(failure.start, self._dies, failure)
            if failure.kind == "freeze":
                world.at(failure.start, self._freezes, failure)
                world.at(failure.end, self._thaws, failure)

    def take(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Return when the request is answered, and how; None when that is not known yet."""
        if self.meter is not None:
            self.meter.request(now)
        if now < self._up_at:
            return now, REFUSED
        for failure in self._server.failures:
            if failure.start <= now < failure.end and (
                failure.rate >= 1 or self._dice.random() < failure.rate
            ):
                return self._failed(now, failure, requester, number)
        return self.accept(now, requester, number)

    def overloaded(self, now: float, load: int) -> tuple[float, Outcome]:
        """Turn a request away because there are too many, or die of it."""
        if load >= self._room:
            return now, self._reject
        self.crashes += 1
        self._up_at = now + self._server.restart_after
        self.drop_all(now, self._up_at)
        return now, DROPPED

    def in_progress(self, now: float) -> int:
        """Return how many requests wait for an answer."""
        return self.load(now) + sum(map(len, self._held.values()))

    def load(self, now: float) -> int:
        """Return the requests that it works on, queued ones included."""
        raise NotImplementedError

    def accept(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Work on a request."""
        raise NotImplementedError

    def open(self, now: float) -> list[_Request]:
        """Return who waits for an answer."""
        raise NotImplementedError

    def restart(self, until: float) -> None:
        """Begin with nothing in progress; the new process is there from `until` on."""
        raise NotImplementedError

    def drop_all(self, now: float, until: float) -> None:
        """Lose the requests in progress, and start anew."""
        dropped = self.open(now)
        for held in self._held.values():
            dropped += held
            held.clear()
        self.restart(until)
        for requester, number in dropped:
            requester.answer(now, number, DROPPED)

    def _failed(
        self, now: float, failure: Failure, requester: Requester, number: int
    ) -> tuple[float, Outcome] | None:
        if failure.kind == "error":
            return now, _answer(failure.status, failure.retry_after)
        if failure.kind == "refuse":
            return now, REFUSED
        if failure.kind == "freeze":
            self._held.setdefault(failure, []).append((requester, number))
        return None

    def _dies(self, now: float, failure: Failure) -> None:
        self.drop_all(now, failure.end)

    def _freezes(self, now: float, failure: Failure) -> None:
        """Hold what is in progress; what arrives from now on is added."""
        if failure.rate >= 1:
            going = self.open(now)
            self.restart(failure.end)
            held = self._held.setdefault(failure, [])
            held.extend((requester, requester.hold(number)) for requester, number in going)

    def _thaws(self, now: float, failure: Failure) -> None:
        for other in self._held:
            if other is not failure and other.rate >= 1 and other.start <= now < other.end:
                self._held[other] += self._held.pop(failure)  # nothing leaves it yet
                return
        for requester, number in self._held.pop(failure, []):
            requester.answer(now, number, DROPPED)


class Worker(Node):
    """A server that works by itself."""

    __slots__ = ("_booted", "_cold", "_draw", "_ends", "_fragile", "_free", "_open")

    def __init__(self, name: str, server: Server, world: World) -> None:
        super().__init__(name, server, world)
        self._draw = world.sampler(server.latency, f"latency of {name}")
        self._ends: list[float] = []
        self._free = [0.0] * (server.concurrency or 0)
        self._booted: float = 0.0
        self._cold: bool = False
        self._fragile = server.crash_above is not None or bool(server.failures)
        self._open: list[tuple[float, Requester, int]] = []
        """Who waits for an answer; some of a fragile server's have had theirs."""

    def load(self, now: float) -> int:
        """Count the requests whose end lies ahead."""
        ends = self._ends
        while ends and ends[0] <= now:
            heappop(ends)
        return len(ends)

    def accept(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Give the request to the worker that is free first."""
        server, free, ends = self._server, self._free, self._ends
        while ends and ends[0] <= now:
            heappop(ends)
        load = len(ends)
        if load >= self._most:
            return self.overloaded(now, load)
        takes = self._draw() + server.slowdown * load
        begins = max(now, free[0]) if free else now
        if self._cold:
            takes *= self._slower(begins)
        end = begins + takes
        if free:
            heapreplace(free, end)
        heappush(ends, end)
        if self._fragile:
            self._remember(now, load, (end, requester, number))
        if server.failure_rate and self._dice.random() < server.failure_rate:
            return end, ERROR
        return end, SUCCESS

    def open(self, now: float) -> list[_Request]:
        """Return them in the order in which they came."""
        return [(requester, number) for end, requester, number in self._open if end > now]

    def restart(self, until: float) -> None:
        """Begin with free workers and cold caches."""
        until = max(until, self._booted)
        self._open.clear()
        self._ends.clear()
        self._free = [until] * len(self._free)
        self._booted, self._cold = until, self._server.warmup > 0

    def _remember(self, now: float, load: int, entry: tuple[float, Requester, int]) -> None:
        self._open.append(entry)
        if len(self._open) > 2 * load + _MOST_ANSWERED:
            self._open = [entry for entry in self._open if entry[0] > now]

    def _slower(self, begins: float) -> float:
        """Return how much longer a request takes while caches are cold."""
        warm = (begins - self._booted) / self._server.warmup
        self._cold = warm < 1
        return self._server.cold + (1 - self._server.cold) * min(1.0, warm)


class Relay(Node):
    """A server that answers by a call of its own."""

    __slots__ = ("_begin", "_draw", "_max_attempts", "_queue", "_running", "_workers")

    def __init__(
        self,
        name: str,
        server: Server,
        world: World,
        begin: Callable[[float, int, Ended], Stop | None],
    ) -> None:
        super().__init__(name, server, world)
        self._begin = begin
        self._draw = world.sampler(server.latency, f"latency of {name}")
        self._workers: float = inf if server.concurrency is None else server.concurrency
        self._running: dict[_Request, None] = {}
        self._queue: deque[_Request] = deque()
        defence = server.defence or Defence()
        self._max_attempts = (defence.hedging or defence.policy).max_attempts

    def load(self, now: float) -> int:  # noqa: ARG002 - its requests end when they end
        """Count the requests whose call still runs, or waits for its turn."""
        return len(self._running) + len(self._queue)

    def accept(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Make the call as soon as a worker is free."""
        load = len(self._running) + len(self._queue)
        if load >= self._most:
            return self.overloaded(now, load)
        self._queue.append((requester, number))
        self._take_next(now)
        return None

    def open(self, now: float) -> list[_Request]:  # noqa: ARG002
        """Return them in the order in which they came."""
        return [*self._running, *self._queue]

    def restart(self, until: float) -> None:  # noqa: ARG002 - it is never cold
        """Forget them; what they have called for goes on without anybody who waits for it."""
        self._running.clear()
        self._queue.clear()

    def _take_next(self, now: float) -> None:
        if self._queue and len(self._running) < self._workers:
            request = self._queue.popleft()
            self._running[request] = None
            self._world.at(now + self._draw(), self._call, request)

    def _call(self, now: float, request: _Request) -> None:
        if request not in self._running:
            return
        failure_rate = self._server.failure_rate
        if failure_rate and self._dice.random() < failure_rate:
            self._end(now, request, ERROR)
            return

        def ended(_begun: float, now: float, stop: Stop | None, attempts: int) -> None:
            if request not in self._running:
                return
            if stop is None:
                self._end(now, request, SUCCESS)
            else:
                below = stop.reason is Reason.RETRIED_BELOW  # a mark stays where it was made
                final = below or is_final(stop, attempts, self._max_attempts)
                self._end(now, request, GAVE_UP if final else UNAVAILABLE)

        self._begin(now, 0, ended)

    def _end(self, now: float, request: _Request, outcome: Outcome) -> None:
        del self._running[request]
        requester, number = request
        requester.answer(now, number, outcome)
        self._take_next(now)


def _answer(status: int, retry_after: float | None) -> Outcome:
    said = {} if retry_after is None else {"retry-after-ms": f"{retry_after * 1000:.0f}"}
    # All are worth a retry as far as the server knows; a caller's policy may know better.
    return outcome_of_status(status, said, now=0.0, retryable=ERROR_STATUSES)
