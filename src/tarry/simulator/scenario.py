"""A scenario, the description of a simulation: clients, a network, and servers.

The constructors check all values, so that every `Scenario` object can be run. A `Defence` is what a
caller uses against failures: a policy or hedging, with optional breaker, retry budget and limiter.
Times are in seconds. Times of events (`start`, `end`) count from the start of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from tarry.core.checks import (
    check_at_least,
    check_count,
    check_number,
    check_one_of,
    check_positive,
    check_ratio,
)
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Distribution, Fixed

ARRIVAL_KINDS = ("at-once", "poisson", "closed", "backlog")
FAILURE_KINDS = ("error", "refuse", "hang", "freeze")

ERROR_STATUSES = frozenset(range(400, 600))
"""The HTTP statuses with which a server can fail."""

_MAX_BUCKETS = 1_000_000
_MAX_CLIENTS = 10_000_000
_MAX_CALLS = 100_000_000
_MAX_INSTANCES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Surge:
    """A period in which calls start at `rate` per second instead of the rate of the clients."""

    start: float
    end: float
    rate: float

    def __post_init__(self) -> None:
        _check_period(self.start, self.end)
        check_at_least("rate", self.rate, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A period in which requests to a server fail: all, or the share `rate` (0 to 1) of them.

    kind:
        error: the server responds with `status`.
        refuse: the server refuses connections.
        hang: the server never responds to requests that arrive in the period.
        freeze: the server does not respond until the period ends. Then it restarts and drops all
            connections.
    """

    start: float = 0.0
    end: float
    kind: str = "refuse"
    rate: float = 1.0
    status: int = 503
    """The status of an `error`."""
    retry_after: float | None = None
    """The Retry-After hint of an `error`, in seconds."""

    def __post_init__(self) -> None:
        _check_period(self.start, self.end)
        _check_error_status("status", self.status)
        check_one_of("kind", self.kind, FAILURE_KINDS)
        check_ratio("rate", self.rate)
        if self.retry_after is not None:
            check_at_least("retry_after", self.retry_after, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A simulated server. It works, and then calls the server that `calls` names, if any.

    latency: the time that the work takes.
    concurrency: the number of requests that can run at the same time, including those that wait for
        a call to another server; None for no limit.
    queue: the number of requests that can wait to run; None for no limit. When the queue is full,
        a request is rejected with `reject_status` (429 counts as throttling) and `retry_after`.
    rate_limit: the number of requests that the server accepts within any second; None for no limit.
        A further request is rejected, as when the queue is full.
    slowdown: seconds by which each request that is running or queued delays an arriving request.
    crash_above: with more running and queued requests than this, the server crashes, drops them
        all and restarts after `restart_after` seconds; None for no crashes.
    cold_factor: after a restart, requests take this many times as long. The factor decreases to 1
        over `warmup` seconds.
    failure_rate: the share of requests that fail with status 500, in addition to `failures`.
    calls: the name of the server that this server calls; None: this server calls no other server.
    defence: applies to the calls that this server makes to another server.
    """

    latency: Distribution = field(default_factory=lambda: Fixed(0.0))
    concurrency: int | None = None
    queue: int | None = None
    rate_limit: float | None = None
    slowdown: float = 0.0
    failure_rate: float = 0.0
    reject_status: int = 503
    retry_after: float | None = None
    crash_above: int | None = None
    restart_after: float = 5.0
    warmup: float = 0.0
    cold_factor: float = 1.0
    failures: tuple[Failure, ...] = ()
    calls: str | None = None
    defence: Defence | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            check_count("concurrency", self.concurrency)
        if self.queue is not None:
            check_count("queue", self.queue, 0)
            if self.concurrency is None:
                raise ConfigurationError(
                    "queue needs concurrency: without a limit no request waits"
                )
        _check_distribution("latency", self.latency)
        _check_error_status("reject_status", self.reject_status)
        if self.rate_limit is not None:
            check_at_least("rate_limit", self.rate_limit, 1)
        check_at_least("slowdown", self.slowdown, 0)
        if not 0 <= check_number("failure_rate", self.failure_rate) <= 1:
            raise ConfigurationError("failure_rate", "must be from 0 to 1", self.failure_rate)
        if self.retry_after is not None:
            check_at_least("retry_after", self.retry_after, 0)
        if self.crash_above is not None:
            check_count("crash_above", self.crash_above)
        check_positive("restart_after", self.restart_after)
        check_at_least("warmup", self.warmup, 0)
        check_at_least("cold_factor", self.cold_factor, 1)
        if self.crash_above is not None and self.queue is not None and self.concurrency is not None:
            max_load = self.concurrency + self.queue
            if self.crash_above >= max_load:
                rule = f"must be below concurrency + queue ({max_load}), or it never crashes"
                raise ConfigurationError("crash_above", rule)
        if self.calls is not None and (self.warmup or self.slowdown):
            name = "warmup" if self.warmup else "slowdown"
            msg = f"{name} has no effect on a server that calls another: leave out {name} or calls"
            raise ConfigurationError(msg)
        _check_defence(self.defence or Defence())
        if self.defence is not None and self.calls is None:
            msg = "defence needs calls: it applies to the calls that this server makes"
            raise ConfigurationError(msg)

    @property
    def capacity(self) -> float | None:
        """The number of requests per second that the server can process; None for no limit."""
        capacity = inf if self.rate_limit is None else self.rate_limit
        if self.concurrency is not None:
            duration = self.latency.mean + self.slowdown * (self.concurrency - 1)
            capacity = min(capacity, self.concurrency / duration if duration else inf)
        elif self.slowdown:
            capacity = min(capacity, 1 / self.slowdown)
        return None if capacity == inf else capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The clients: which server they call (`calls`), when, and with which defence.

    arrivals:
        poisson: calls start at random times, `rate` per second in total.
        at-once: `count` clients make one call each at the start.
        closed: a closed loop. Each of `count` clients makes a call, waits for its end, pauses for
            a time drawn from `think`, and calls again.
        backlog: `count` calls wait and start as soon as breaker, budget and limiter admit them.
    instances: the number of processes in which the clients run. Each process has its own breaker,
        budget and limiter.
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
        check_one_of("arrivals", self.arrivals, ARRIVAL_KINDS)
        _check_distribution("think", self.think)
        _check_defence(self.defence)
        if check_count("count", self.count) > _MAX_CLIENTS:
            rule = f"must be at most {_MAX_CLIENTS:,}, got {self.count:,}"
            raise ConfigurationError("count", rule)
        check_positive("rate", self.rate)
        if check_count("instances", self.instances) > _MAX_INSTANCES:
            rule = f"must be at most {_MAX_INSTANCES:,}, got {self.instances:,}"
            raise ConfigurationError("instances", rule)
        if self.surges and self.arrivals != "poisson":
            raise ConfigurationError(f"surges need arrivals = 'poisson', got {self.arrivals!r}")
        for earlier, later in pairwise(sorted(self.surges, key=lambda surge: surge.start)):
            if later.start < earlier.end:
                rule = f"must not overlap: one ends at {earlier.end:g}, after {later.start:g}"
                raise ConfigurationError("surges", rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Clients, servers and a network to simulate for `duration` seconds."""

    servers: dict[str, Server]
    clients: Clients = field(default_factory=Clients)
    network: Distribution = field(default_factory=lambda: Fixed(0.001))
    """The one-way delay of each message between clients and servers."""
    duration: float = 60.0
    bucket: float = 1.0
    """The interval of the time series: the seconds that one point covers."""

    def __post_init__(self) -> None:
        check_positive("duration", self.duration)
        _check_distribution("network", self.network)
        if self.duration / check_positive("bucket", self.bucket) > _MAX_BUCKETS:
            rule = f"must be at least duration / {_MAX_BUCKETS:,}, got {self.bucket:g}"
            raise ConfigurationError("bucket", rule)
        max_expected_calls = self.clients.rate * self.duration + sum(
            surge.rate * max(0.0, min(surge.end, self.duration) - surge.start)
            for surge in self.clients.surges
        )
        if self.clients.arrivals == "poisson" and max_expected_calls > _MAX_CALLS:
            rule = f"must make {_MAX_CALLS:,} calls at most, got up to {max_expected_calls:,.0f}"
            raise ConfigurationError(f"clients.rate and surges {rule}")
        if not self.servers:
            raise ConfigurationError("servers", "must have at least one server")
        check_one_of("clients.calls", self.clients.calls, self.servers)
        for name, server in self.servers.items():
            if server.calls is not None:
                check_one_of(f"servers.{name}.calls", server.calls, self.servers)
        self.path()  # raises if servers call each other in a circle

    def path(self) -> list[str]:
        """Return the names of the servers that a call reaches, from the first to the last."""
        path: list[str] = []
        name: str | None = self.clients.calls
        while name is not None:
            if name in path:
                rule = f"must not call in a circle: {' -> '.join([*path, name])}"
                raise ConfigurationError("servers", rule)
            path.append(name)
            name = self.servers[name].calls
        return path

    def disruption(self) -> tuple[float, float] | None:
        """Return the first start and the last end of surges and failures on the path, if any."""
        periods: list[Failure | Surge] = [*self.clients.surges]
        for name in self.path():
            periods.extend(self.servers[name].failures)
        periods = [period for period in periods if period.start < self.duration]
        if not periods:
            return None
        return min(period.start for period in periods), max(period.end for period in periods)


def _check_error_status(field: str, status: object) -> None:
    if check_count(field, status) not in ERROR_STATUSES:
        raise ConfigurationError(field, f"must be from 400 to 599, got {status}")


def _check_distribution(field: str, value: object) -> None:
    if not hasattr(value, "sampler"):
        raise ConfigurationTypeError(field, "must be a distribution such as Fixed(0.1)", value)


def _check_defence(value: object) -> None:
    if not isinstance(value, Defence):
        raise ConfigurationTypeError("defence", "must be a Defence(policy)", value)


def _check_period(start: float, end: float) -> None:
    check_at_least("start", start, 0)
    if check_positive("end", end) <= start:
        raise ConfigurationError("end", f"must be later than start ({start:g}), got {end:g}")
