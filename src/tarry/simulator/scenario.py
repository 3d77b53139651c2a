"""What is simulated: clients, a network, and servers that may call each other. Plain values.

Every check that needs more than one field stands here, so that a scenario that exists can run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from tarry.core.checks import (
    check_at_least,
    check_count,
    check_number,
    check_one_of,
    check_positive,
    check_share,
)
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Distribution, Fixed

ARRIVALS = ("at-once", "poisson", "closed", "backlog")
FAILURES = ("error", "refuse", "hang", "freeze")

ERROR_STATUSES = frozenset(range(400, 600))

_MOST_BUCKETS = 1_000_000
_MOST_CLIENTS = 10_000_000
_MOST_CALLS = 100_000_000
_MOST_INSTANCES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Surge:
    """Another rate of calls for a while."""

    start: float
    end: float
    rate: float

    def __post_init__(self) -> None:
        _window(self.start, self.end)
        check_at_least("rate", self.rate, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A time in which a server fails requests, or the share `rate` of them.

    error: it answers with a failure. refuse: it is dead, and no connection is made. hang: it
    never answers. freeze: nothing leaves it any more; when the time is over it starts anew and
    drops all that it holds.
    """

    start: float = 0.0
    end: float
    kind: str = "refuse"
    rate: float = 1.0
    status: int = 503
    """What an `error` is answered with."""
    retry_after: float | None = None
    """What an `error` tells its clients to wait, in seconds."""

    def __post_init__(self) -> None:
        _window(self.start, self.end)
        _error_status("status", self.status)
        check_one_of("kind", self.kind, FAILURES)
        check_share("rate", self.rate)
        if self.retry_after is not None:
            check_at_least("retry_after", self.retry_after, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One node. It answers by itself, or by a call of its own to the node named in `calls`.

    concurrency: requests it works on at a time, those whose call it waits for included; more
        wait in `queue`, and what finds that full is rejected with `reject_status` (429 says
        that the client is too fast) and `retry_after`. Without concurrency it takes all at
        once, without queue all may wait.
    slowdown: seconds added to a request for each other one in progress when it arrives.
    crash_above: with more than so many requests in progress it dies, drops them all, and is
        back after `restart_after` seconds, cold: at first `cold` times as slow, and less so
        for `warmup` seconds.
    failure_rate: the share of requests that fail at any time.
    """

    latency: Distribution = field(default_factory=lambda: Fixed(0.0))
    concurrency: int | None = None
    queue: int | None = None
    slowdown: float = 0.0
    failure_rate: float = 0.0
    reject_status: int = 503
    retry_after: float | None = None
    crash_above: int | None = None
    restart_after: float = 5.0
    warmup: float = 0.0
    cold: float = 1.0
    failures: tuple[Failure, ...] = ()
    calls: str | None = None
    defence: Defence | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            check_count("concurrency", self.concurrency)
        if self.queue is not None:
            check_count("queue", self.queue, 0)
            if self.concurrency is None:
                msg = "queue needs concurrency: without it nothing ever waits"
                raise ConfigurationError(msg)
        _distribution("latency", self.latency)
        _error_status("reject_status", self.reject_status)
        check_at_least("slowdown", self.slowdown, 0)
        if not 0 <= check_number("failure_rate", self.failure_rate) <= 1:
            raise ConfigurationError("failure_rate", "must be from 0 to 1", self.failure_rate)
        if self.retry_after is not None:
            check_at_least("retry_after", self.retry_after, 0)
        if self.crash_above is not None:
            check_count("crash_above", self.crash_above)
        check_positive("restart_after", self.restart_after)
        check_at_least("warmup", self.warmup, 0)
        check_at_least("cold", self.cold, 1)
        if self.crash_above is not None and self.queue is not None and self.concurrency is not None:
            most = self.concurrency + self.queue
            if self.crash_above >= most:
                rule = f"must be below concurrency + queue ({most}), or it never crashes"
                raise ConfigurationError("crash_above", rule)
        if self.calls is not None and (self.warmup or self.slowdown):
            name = "warmup" if self.warmup else "slowdown"
            msg = f"{name} is for a server that works by itself: leave out {name} or calls"
            raise ConfigurationError(msg)
        _defence(self.defence or Defence())
        if self.defence is not None and self.calls is None:
            msg = "defence needs calls: it stands around the calls that this server makes"
            raise ConfigurationError(msg)

    @property
    def capacity(self) -> float | None:
        """Requests a second that it can answer, or None: without a bound."""
        if self.concurrency is None:
            return 1 / self.slowdown if self.slowdown else None
        takes = self.latency.mean + self.slowdown * (self.concurrency - 1)
        return self.concurrency / takes if takes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """Who calls, when, and behind which defence.

    at-once: `count` clients make one call each at the start. poisson: calls come at `rate` a
    second in all, whatever becomes of them. closed: each of `count` clients makes a call, thinks,
    makes the next. backlog: `count` calls wait to be made as soon as the dependency lets them.
    `instances` is the number of processes that the clients share: each has a breaker, a budget
    and limits of its own.
    """

    calls: str = "server"
    arrivals: str = "poisson"
    count: int = 1
    rate: float = 10.0
    surges: tuple[Surge, ...] = ()
    think: Distribution = field(default_factory=lambda: Fixed(1.0))
    instances: int = 1
    defence: Defence = field(default_factory=Defence)

    def __post_init__(self) -> None:
        check_one_of("arrivals", self.arrivals, ARRIVALS)
        _distribution("think", self.think)
        _defence(self.defence)
        if check_count("count", self.count) > _MOST_CLIENTS:
            rule = f"must be at most {_MOST_CLIENTS:,}, got {self.count:,}"
            raise ConfigurationError("count", rule)
        check_positive("rate", self.rate)
        if check_count("instances", self.instances) > _MOST_INSTANCES:
            rule = f"must be at most {_MOST_INSTANCES:,}, got {self.instances:,}"
            raise ConfigurationError("instances", rule)
        if self.surges and self.arrivals != "poisson":
            msg = f"surges need arrivals = 'poisson', got {self.arrivals!r}"
            raise ConfigurationError(msg)
        for before, after in pairwise(sorted(self.surges, key=_start)):
            if after.start < before.end:
                rule = f"must not overlap: one ends at {before.end:g}, after {after.start:g}"
                raise ConfigurationError("surges", rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A world to run for `duration` seconds."""

    servers: dict[str, Server]
    clients: Clients = field(default_factory=Clients)
    network: Distribution = field(default_factory=lambda: Fixed(0.001))
    """One way between any two nodes."""
    duration: float = 60.0
    bucket: float = 1.0
    """The width of one point in the time series, in seconds."""

    def __post_init__(self) -> None:
        check_positive("duration", self.duration)
        _distribution("network", self.network)
        if self.duration / check_positive("bucket", self.bucket) > _MOST_BUCKETS:
            rule = f"must be at least duration / {_MOST_BUCKETS:,}, got {self.bucket:g}"
            raise ConfigurationError("bucket", rule)
        calls = self.clients.rate * self.duration + sum(
            surge.rate * max(0.0, min(surge.end, self.duration) - surge.start)
            for surge in self.clients.surges
        )
        if self.clients.arrivals == "poisson" and calls > _MOST_CALLS:
            msg = (
                f"clients.rate and surges must make {_MOST_CALLS:,} calls at most, got {calls:,.0f}"
            )
            raise ConfigurationError(msg)
        if not self.servers:
            raise ConfigurationError("servers", "must have at least one server")
        check_one_of("clients.calls", self.clients.calls, self.servers)
        for name, server in self.servers.items():
            if server.calls is not None:
                check_one_of(f"servers.{name}.calls", server.calls, self.servers)
        self.path()

    def path(self) -> list[str]:
        """Return the servers from the first that clients call to the last: the leaf."""
        path: list[str] = []
        name: str | None = self.clients.calls
        while name is not None:
            if name in path:
                rule = f"must not call in a circle: {' -> '.join([*path, name])}"
                raise ConfigurationError("servers", rule)
            path.append(name)
            name = self.servers[name].calls
        return path

    def trouble(self) -> tuple[float, float] | None:
        """Return when the first failure or surge that calls can meet begins and the last ends."""
        windows: list[Failure | Surge] = [*self.clients.surges]
        for name in self.path():
            windows.extend(self.servers[name].failures)
        windows = [window for window in windows if window.start < self.duration]
        if not windows:
            return None
        return min(window.start for window in windows), max(window.end for window in windows)


def _error_status(field: str, value: object) -> None:
    if check_count(field, value) not in ERROR_STATUSES:
        raise ConfigurationError(field, f"must be from 400 to 599, got {value}")


def _distribution(field: str, value: object) -> None:
    if not hasattr(value, "sampler"):
        raise ConfigurationTypeError(field, "must be a distribution such as Fixed(0.1)", value)


def _defence(value: object) -> None:
    if not isinstance(value, Defence):
        raise ConfigurationTypeError("defence", "must be a Defence(policy)", value)


def _start(surge: Surge) -> float:
    return surge.start


def _window(start: float, end: float) -> None:
    check_at_least("start", start, 0)
    if check_positive("end", end) <= start:
        raise ConfigurationError("end", f"must be later than start ({start:g}), got {end:g}")
