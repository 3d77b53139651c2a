"""Nodes, the simulated servers: they handle requests and return the time and outcome of responses.

A leaf node does the work itself. Its queue is first come, first served, so it can compute the
response when the request arrives. A request thus costs only two events: arrival and response. A
relay node calls another node and responds when that call ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tarry.core.outcome import SUCCESS, Kind, Outcome, outcome_of_status
from tarry.core.verdict import Reason, forbids_outer_retry
from tarry.policyfile.defence import Defence
from tarry.simulator.scenario import ERROR_STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.verdict import Stop
    from tarry.simulator.event_loop import EventLoop
    from tarry.simulator.metrics import MetricsRecorder
    from tarry.simulator.scenario import Failure, Server

REFUSED = Outcome(Kind.TRANSIENT, detail="connection refused")
DROPPED = Outcome(Kind.TRANSIENT, detail="connection reset")
TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True, detail="timeout")
INTERNAL_ERROR = outcome_of_status(500, now=0.0)
UNAVAILABLE = outcome_of_status(503, now=0.0)
UNAVAILABLE_RETRIED = UNAVAILABLE.replace(retried_below=True)
"""The response of a relay node whose own call failed after retries, or was rejected by its breaker,
limiter or budget. Callers do not retry an outcome that is marked as `retried_below`."""

_MAX_ANSWERED_ENTRIES = 1000
"""A leaf node removes answered requests from its list once there are about this many of them."""

OnCallEnd: TypeAlias = "Callable[[float, float, Stop | None, int], None]"
"""`on_end(started_at, now, stop, attempt_count)` runs when a call ends; `stop` None is success."""
StartCall: TypeAlias = "Callable[[float, int, OnCallEnd], Stop | None]"
"""`start_call(now, client, on_end)` starts a call of the client with this index. It returns None,
or a `Stop` if the call ended at once because breaker, limiter or budget rejected its attempt."""


class Requester(Protocol):
    """A caller that waits for the response to an attempt; `number` tells its responses apart."""

    def on_response(self, now: float, number: int, outcome: Outcome) -> None:
        """Called when the node sends the response with this number."""

    def discard_response(self, number: int) -> int:
        """Make the response with this number invalid; return the number of its replacement."""
        ...


_Request: TypeAlias = tuple[Requester, int]
"""The requester, and the number of the response that it waits for."""


class Node(ABC):
    """Base class of simulated servers. It implements their failures, crashes and rejections."""

    def __init__(self, name: str, server: Server, loop: EventLoop) -> None:
        self.name: str = name
        self._server = server
        self._loop = loop
        self._max_requests: float = inf
        """The highest number of running and queued requests; further requests are rejected."""
        if server.concurrency is not None and server.queue is not None:
            self._max_requests = server.concurrency + server.queue
        self._max_load: float = min(self._max_requests, server.crash_above or inf)
        """With this many requests, the next request is rejected or crashes the server."""
        self._rejection = _error_outcome(server.reject_status, server.retry_after)
        self._accepted_at: deque[float] = deque()
        """With a rate limit: the times at which requests were accepted within the last second."""
        self._frozen_requests: dict[Failure, list[_Request]] = {}
        """For each failure of the kind "freeze": the requests without a response until its end."""
        self._random = loop.random_source(f"failures of {name}")
        self._draw_latency = loop.sampler(server.latency, f"latency of {name}")
        self._up_at: float = 0.0
        """The time until which the server refuses connections, because it has crashed."""
        self.crash_count: int = 0
        self.metrics: MetricsRecorder | None = None
        """Counts the requests that reach this node; None for a relay node."""
        for failure in server.failures:
            if failure.kind == "refuse" and failure.rate >= 1:
                loop.schedule(failure.start, self.drop_all, failure.end)
            if failure.kind == "freeze":
                loop.schedule(failure.start, self._start_freeze, failure)
                loop.schedule(failure.end, self._end_freeze, failure)

    def handle(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Return the time and outcome of the response; None if the node responds later or never."""
        if self.metrics is not None:
            self.metrics.record_request(now)
        if now < self._up_at:
            return now, REFUSED
        for failure in self._server.failures:
            if failure.start <= now < failure.end and (
                failure.rate >= 1 or self._random.random() < failure.rate
            ):
                return self._apply_failure(now, failure, requester, number)
        if self._server.rate_limit is not None and not self._is_within_rate(
            now, self._server.rate_limit
        ):
            return now, self._rejection
        return self.accept(now, requester, number)

    def _is_within_rate(self, now: float, rate_limit: float) -> bool:
        """Return whether the rate limit admits a request, and count the request."""
        accepted_at = self._accepted_at
        while accepted_at and accepted_at[0] <= now - 1:
            accepted_at.popleft()
        if len(accepted_at) + 1 > rate_limit:
            return False
        accepted_at.append(now)
        return True

    def reject_or_crash(self, now: float, load: int) -> tuple[float, Outcome]:
        """Reject a request because the node is full, or crash because the load is too high."""
        if load >= self._max_requests:
            return now, self._rejection
        self.crash_count += 1
        self._up_at = now + self._server.restart_after
        self.drop_all(now, self._up_at)
        return now, DROPPED

    def in_progress_at(self, now: float) -> int:
        """Return the number of requests that run, are queued or are frozen."""
        return self.load_at(now) + sum(map(len, self._frozen_requests.values()))

    @abstractmethod
    def load_at(self, now: float) -> int:
        """Return the number of requests that run or are queued."""

    @abstractmethod
    def accept(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Process a request that no failure affects; the return value is that of `handle`."""

    @abstractmethod
    def pending_requests(self, now: float) -> list[_Request]:
        """Return the requests that run or are queued, in the order of their arrival."""

    @abstractmethod
    def remove_requests(self, up_at: float) -> None:
        """Remove all requests without a response. The server is up again at `up_at`."""

    def drop_all(self, now: float, up_at: float) -> None:
        """Reset the connections of all requests. The server is up again at `up_at`."""
        dropped = self.pending_requests(now)
        for requests in self._frozen_requests.values():
            dropped += requests
            requests.clear()
        self.remove_requests(up_at)
        for requester, number in dropped:
            requester.on_response(now, number, DROPPED)

    def _apply_failure(
        self, now: float, failure: Failure, requester: Requester, number: int
    ) -> tuple[float, Outcome] | None:
        if failure.kind == "error":
            return now, _error_outcome(failure.status, failure.retry_after)
        if failure.kind == "refuse":
            return now, REFUSED
        if failure.kind == "freeze":
            self._frozen_requests.setdefault(failure, []).append((requester, number))
        return None

    def _start_freeze(self, now: float, failure: Failure) -> None:
        """Freeze running and queued requests; `_apply_failure` freezes those that arrive later."""
        if failure.rate >= 1:
            pending = self.pending_requests(now)
            self.remove_requests(failure.end)
            frozen = self._frozen_requests.setdefault(failure, [])
            for requester, number in pending:
                frozen.append((requester, requester.discard_response(number)))

    def _end_freeze(self, now: float, failure: Failure) -> None:
        for other in self._frozen_requests:
            if other is not failure and other.rate >= 1 and other.start <= now < other.end:
                # The requests stay frozen until the end of another freeze that still lasts.
                self._frozen_requests[other] += self._frozen_requests.pop(failure, [])
                return
        for requester, number in self._frozen_requests.pop(failure, []):
            requester.on_response(now, number, DROPPED)


class LeafNode(Node):
    """A server that does the work itself."""

    def __init__(self, name: str, server: Server, loop: EventLoop) -> None:
        super().__init__(name, server, loop)
        self._end_times: list[float] = []
        """Heap of the times at which the running and queued requests end."""
        self._free_at = [0.0] * (server.concurrency or 0)
        """Heap of the times at which each worker becomes free."""
        self._restarted_at: float = 0.0
        """The time of the last restart: the caches warm up from then on."""
        self._is_cold: bool = False
        self._may_drop_requests = server.crash_above is not None or bool(server.failures)
        self._recent_requests: list[tuple[float, Requester, int]] = []
        """End time, requester and response number of each request; empty if the node never drops
        requests. Answered requests are removed only from time to time."""

    def load_at(self, now: float) -> int:
        """Return the number of requests whose end time is in the future."""
        end_times = self._end_times
        while end_times and end_times[0] <= now:
            heappop(end_times)
        return len(end_times)

    def accept(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Assign the request to the worker that becomes free first."""
        server, free_at, end_times = self._server, self._free_at, self._end_times
        while end_times and end_times[0] <= now:  # `load_at`, inlined: this runs for each request
            heappop(end_times)
        load = len(end_times)
        if load >= self._max_load:
            return self.reject_or_crash(now, load)
        duration = self._draw_latency() + server.slowdown * load
        start = max(now, free_at[0]) if free_at else now
        if self._is_cold:
            duration *= self._cold_factor_at(start)
        end = start + duration
        if free_at:
            heapreplace(free_at, end)
        heappush(end_times, end)
        if self._may_drop_requests:
            self._recent_requests.append((end, requester, number))
            if len(self._recent_requests) > 2 * load + _MAX_ANSWERED_ENTRIES:
                self._recent_requests = [entry for entry in self._recent_requests if entry[0] > now]
        if server.failure_rate and self._random.random() < server.failure_rate:
            return end, INTERNAL_ERROR
        return end, SUCCESS

    def pending_requests(self, now: float) -> list[_Request]:
        """Return the requests that run or are queued, in the order of their arrival."""
        return [
            (requester, number) for end, requester, number in self._recent_requests if end > now
        ]

    def remove_requests(self, up_at: float) -> None:
        """Remove all requests. At `up_at`, all workers are free and the caches are cold."""
        up_at = max(up_at, self._restarted_at)
        self._recent_requests.clear()
        self._end_times.clear()
        self._free_at = [up_at] * len(self._free_at)
        self._restarted_at, self._is_cold = up_at, self._server.warmup > 0

    def _cold_factor_at(self, start: float) -> float:
        """Return how many times as long a request takes that starts at `start` with cold caches."""
        progress = (start - self._restarted_at) / self._server.warmup
        self._is_cold = progress < 1
        return self._server.cold_factor + (1 - self._server.cold_factor) * min(1.0, progress)


class RelayNode(Node):
    """A server that handles a request by calling another node."""

    def __init__(self, name: str, server: Server, loop: EventLoop, start_call: StartCall) -> None:
        super().__init__(name, server, loop)
        self._start_call = start_call
        self._concurrency: float = inf if server.concurrency is None else server.concurrency
        self._running_requests: dict[_Request, None] = {}
        self._queue: deque[_Request] = deque()
        defence = server.defence or Defence()
        self._max_attempts = (defence.hedging or defence.policy).max_attempts

    def load_at(self, now: float) -> int:  # noqa: ARG002 - a parameter of the base class
        """Return the number of requests that run or are queued."""
        return len(self._running_requests) + len(self._queue)

    def accept(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Queue the request; its call starts once a worker is free."""
        load = len(self._running_requests) + len(self._queue)
        if load >= self._max_load:
            return self.reject_or_crash(now, load)
        self._queue.append((requester, number))
        self._start_next_request(now)
        return None

    def pending_requests(self, now: float) -> list[_Request]:  # noqa: ARG002 - as in `load_at`
        """Return the requests that run or are queued, in the order of their arrival."""
        return [*self._running_requests, *self._queue]

    def remove_requests(self, up_at: float) -> None:  # noqa: ARG002 - a relay has no cold caches
        """Remove all requests. Their calls to the next node continue, but results are ignored."""
        self._running_requests.clear()
        self._queue.clear()

    def _start_next_request(self, now: float) -> None:
        if self._queue and len(self._running_requests) < self._concurrency:
            request = self._queue.popleft()
            self._running_requests[request] = None
            self._loop.schedule(now + self._draw_latency(), self._call_next_node, request)

    def _call_next_node(self, now: float, request: _Request) -> None:
        if request not in self._running_requests:  # `remove_requests` was called meanwhile
            return
        failure_rate = self._server.failure_rate
        if failure_rate and self._random.random() < failure_rate:
            self._respond(now, request, INTERNAL_ERROR)
            return

        def on_end(_started_at: float, now: float, stop: Stop | None, attempts: int) -> None:
            if request not in self._running_requests:
                return
            if stop is None:
                self._respond(now, request, SUCCESS)
            else:
                # A node that did not retry, because a node below had retried, passes the mark on.
                is_marked = stop.reason is Reason.RETRIED_BELOW
                is_marked |= forbids_outer_retry(stop, attempts, self._max_attempts)
                self._respond(now, request, UNAVAILABLE_RETRIED if is_marked else UNAVAILABLE)

        self._start_call(now, 0, on_end)

    def _respond(self, now: float, request: _Request, outcome: Outcome) -> None:
        del self._running_requests[request]
        requester, number = request
        requester.on_response(now, number, outcome)
        self._start_next_request(now)


def _error_outcome(status: int, retry_after: float | None) -> Outcome:
    headers = {} if retry_after is None else {"retry-after-ms": f"{retry_after * 1000:.0f}"}
    # Every status is retryable here, because the caller checks which statuses its policy retries.
    return outcome_of_status(status, headers, now=0.0, retryable=ERROR_STATUSES)
