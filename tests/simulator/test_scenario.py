"""Scenarios: invalid values, and values derived from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry import Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Exponential, Fixed
from tarry.simulator.scenario import (
    FAILURE_KINDS,
    Clients,
    Failure,
    Scenario,
    Server,
    Surge,
)
from tests.core.invalid_values import invalid_values, keyword


def single_server(**server: Any) -> Scenario:
    """Return a scenario with one server."""
    return Scenario(servers={"server": Server(**server)})


def chain(*names: str) -> dict[str, Server]:
    """Return servers that call each other in this order."""
    calls = (*names[1:], None)
    return {name: Server(calls=call) for name, call in zip(names, calls, strict=True)}


# --- invalid values -------------------------------------------------------------------------------

SURGE: dict[str, Any] = {"start": 1.0, "end": 2.0, "rate": 3.0}
FIELDS: list[tuple[type, dict[str, Any], dict[str, str]]] = [
    (Surge, SURGE, {"start": "at least 0", "end": "positive", "rate": "at least 0"}),
    (
        Failure,
        {"end": 2.0},
        {"start": "at least 0", "end": "positive", "rate": "ratio", "retry_after": "at least 0"},
    ),
    (
        Server,
        {},
        {
            "concurrency": "count",
            "rate_limit": "at least 1",
            "slowdown": "at least 0",
            "retry_after": "at least 0",
            "crash_above": "count",
            "restart_after": "positive",
            "warmup": "at least 0",
            "cold_factor": "at least 1",
        },
    ),
    (Clients, {}, {"count": "count", "rate": "positive", "instances": "count"}),
    (Scenario, {"servers": {"server": Server()}}, {"duration": "positive", "bucket": "positive"}),
]


@pytest.mark.parametrize(
    ("make", "required", "field", "value", "message"),
    [
        pytest.param(make, required, *case.values, id=f"{make.__name__}-{case.id}")
        for make, required, rules in FIELDS
        for case in invalid_values(**rules)
    ],
)
def test_invalid_value_is_rejected_with_its_field(
    make: Callable[..., object], required: dict[str, Any], field: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**required | keyword(field, value))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Surge(start=2.0, end=1.0, rate=1.0),
            r"^end must be later than start \(2\), got 1",
        ),
        (
            lambda: Surge(start=1.0, end=1.0, rate=1.0),
            r"^end must be later than start \(1\), got 1",
        ),
        (lambda: Failure(start=3.0, end=1.0), r"^end must be later than start \(3\), got 1$"),
        (
            lambda: Failure(end=1.0, kind="explode"),
            "^kind must be one of error, freeze, hang, refuse, got 'explode'$",
        ),
        (lambda: Server(concurrency=1, queue=-1), "^queue must be at least 0, got -1$"),
        (lambda: Server(queue=5), "^queue needs concurrency"),
        (lambda: Server(failure_rate=1.5), "^failure_rate must be from 0 to 1, got 1"),
        (lambda: Server(failure_rate=-0.5), "^failure_rate must be from 0 to 1, got -"),
        (
            lambda: Server(concurrency=2, queue=3, crash_above=5),
            r"^crash_above must be below concurrency \+ queue \(5\), or it never crashes$",
        ),
        (
            lambda: Server(calls="next", warmup=1.0),
            "^warmup has no effect on a server that calls another: leave out warmup or calls$",
        ),
        (
            lambda: Server(calls="next", slowdown=1.0),
            "^slowdown has no effect on a server that calls another: leave out slowdown or calls$",
        ),
        (
            lambda: Server(calls="next", **keyword("defence", "careful")),
            r"^defence must be a Defence\(policy\), got 'careful'$",
        ),
        (lambda: Server(**keyword("latency", 0.1)), "^latency must be a distribution such"),
        (lambda: Clients(**keyword("think", 1)), "^think must be a distribution such as"),
        (
            lambda: Scenario(servers={"server": Server()}, **keyword("network", None)),
            "^network must be a distribution such as",
        ),
        (
            lambda: Clients(**keyword("defence", Policy())),
            r"^defence must be a Defence\(policy\), got Policy",
        ),
        (lambda: Server(defence=Defence()), "^defence needs calls"),
        (
            lambda: Clients(arrivals="never"),
            "^arrivals must be one of at-once, backlog, closed, poisson, got 'never'$",
        ),
        (
            lambda: Clients(arrivals="closed", surges=(Surge(**SURGE),)),
            "^surges need arrivals = 'poisson', got 'closed'$",
        ),
        (lambda: Clients(count=10**8), "^count must be at most 10,000,000, got 100,000,000$"),
        (
            lambda: Scenario(servers={"server": Server()}, duration=1e3, bucket=1e-9),
            "^bucket must be at least duration / 1,000,000, got 1e-09$",
        ),
        (
            lambda: Scenario(servers={"server": Server()}, clients=Clients(rate=1e9)),
            (
                "^clients.rate and surges must make 100,000,000 calls at most, "
                "got up to 60,000,000,000$"
            ),
        ),
        (
            lambda: Scenario(
                servers={"server": Server()},
                clients=Clients(surges=(Surge(start=0.0, end=1.0, rate=1e9),)),
            ),
            (
                "^clients.rate and surges must make 100,000,000 calls at most, "
                "got up to 1,000,000,600$"
            ),
        ),
        (
            lambda: Clients(
                surges=(Surge(start=2.0, end=4.0, rate=1.0), Surge(start=1.0, end=3.0, rate=1.0))
            ),
            "^surges must not overlap: one ends at 3, after 2$",
        ),
        (lambda: Clients(instances=100_001), "^instances must be at most 100,000, got 100,001$"),
        (lambda: Scenario(servers={}), "^servers must have at least one server$"),
        (
            lambda: Scenario(servers={"api": Server(), "db": Server()}),
            "^clients.calls must be one of api, db, got 'server'$",
        ),
        (
            lambda: single_server(calls="db"),
            "^servers.server.calls must be one of server, got 'db'$",
        ),
        (
            lambda: single_server(calls="server"),
            "^servers must not call in a circle: server -> server$",
        ),
    ],
)
def test_invalid_combination_is_rejected(make: Callable[[], object], message: str) -> None:
    """Values that are invalid, alone or together, are rejected with a message about the rule."""
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("value", [1.5, "3", True])
def test_queue_must_be_a_whole_number(value: object) -> None:
    """A queue that is not an integer is rejected."""
    with pytest.raises(ConfigurationTypeError, match=r"^queue must be a whole number"):
        Server(concurrency=1, **keyword("queue", value))


@pytest.mark.parametrize("value", [True, "0.5", float("nan")])
def test_failure_rate_must_be_a_number(value: object) -> None:
    """A failure rate that is not a finite number is rejected."""
    with pytest.raises(ConfigurationError, match=r"^failure_rate must be"):
        Server(**keyword("failure_rate", value))


@pytest.mark.parametrize(
    ("servers", "circle"),
    [
        ({**chain("a", "b", "c"), "c": Server(calls="a")}, "a -> b -> c -> a"),
        ({**chain("a", "b", "c"), "c": Server(calls="b")}, "a -> b -> c -> b"),
        ({"a": Server(calls="b"), "b": Server(calls="b")}, "a -> b -> b"),
    ],
)
def test_circle_is_rejected_with_its_path(servers: dict[str, Server], circle: str) -> None:
    """Servers that call each other in a circle are listed in their order."""
    with pytest.raises(ConfigurationError, match=f"^servers must not call in a circle: {circle}$"):
        Scenario(servers=servers, clients=Clients(calls="a"))


def test_server_with_an_unknown_target_is_named() -> None:
    """The message names the server whose `calls` is wrong."""
    servers = chain("a", "b") | {"b": Server(calls="c")}

    with pytest.raises(
        ConfigurationError, match=r"^servers\.b\.calls must be one of a, b, got 'c'$"
    ):
        Scenario(servers=servers, clients=Clients(calls="a"))


def test_unreached_server_must_call_a_known_server() -> None:
    """The `calls` of a server that no client reaches must name an existing server, too."""
    servers = {"server": Server(), "other": Server(calls="unknown")}

    with pytest.raises(ConfigurationError, match=r"^servers\.other\.calls must be one of"):
        Scenario(servers=servers)


# --- valid values --------------------------------------------------------------------------------


def test_smallest_values_are_accepted() -> None:
    Surge(start=0, end=1e-9, rate=0)
    Failure(end=1e-9, rate=1, retry_after=0)
    Server(concurrency=1, queue=0, slowdown=0, failure_rate=1, warmup=0, cold_factor=1)
    Server(concurrency=1, queue=1, crash_above=1)
    Server(calls="next", concurrency=1, queue=0)
    Clients(surges=(Surge(start=1, end=2, rate=1), Surge(start=0, end=1, rate=1)))
    single_server(failure_rate=0.0)


@pytest.mark.parametrize("kind", FAILURE_KINDS)
def test_every_kind_of_failure_is_accepted(kind: str) -> None:
    """Each kind of failure is accepted, and applies to all requests from the start by default."""
    failure = Failure(kind=kind, end=1.0)

    assert (kind, 1.0, 0.0) == (failure.kind, failure.rate, failure.start)


def test_a_relay_may_have_a_defence() -> None:
    """A server that calls another may have a defence."""
    defence = Defence(Policy(max_attempts=2))

    assert defence == Server(calls="next", defence=defence).defence


# --- derived values ------------------------------------------------------------------------------


@given(st.permutations(["a", "b", "c", "d", "e"]), st.integers(0, 4))
def test_path_leads_from_the_clients_to_the_last_server(names: list[str], first: int) -> None:
    """The path follows `calls` and leaves out other servers."""
    scenario = Scenario(servers=chain(*names), clients=Clients(calls=names[first]))

    assert names[first:] == scenario.path()


def test_circle_off_the_path_is_accepted() -> None:
    """Servers that no call reaches may call each other in a circle."""
    servers = {"server": Server(), "a": Server(calls="b"), "b": Server(calls="a")}

    assert ["server"] == Scenario(servers=servers).path()


def test_disruption_lasts_from_the_first_to_the_last_failure_or_surge() -> None:
    """The disruption spans the surges and the failures of servers on the path."""
    servers = {
        "server": Server(calls="leaf", failures=(Failure(start=2.0, end=3.0),)),
        "leaf": Server(failures=(Failure(start=4.0, end=7.0), Failure(start=3.0, end=5.0))),
        "aside": Server(failures=(Failure(end=50.0),)),
    }
    surges = (Surge(start=1.0, end=2.0, rate=5.0), Surge(start=5.0, end=9.0, rate=50.0))

    assert (2.0, 7.0) == Scenario(servers=servers).disruption()
    assert (1.0, 9.0) == Scenario(servers=servers, clients=Clients(surges=surges)).disruption()


def test_disruption_after_the_run_is_ignored() -> None:
    """A failure that starts after the run is ignored; one that ends after it is not."""
    late = Server(failures=(Failure(start=60.0, end=70.0),))
    long = Server(failures=(Failure(start=50.0, end=70.0),))

    assert Scenario(servers={"server": late}).disruption() is None
    assert (50.0, 70.0) == Scenario(servers={"server": long}).disruption()


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (Server(), None),
        (Server(latency=Fixed(0.1)), None),
        (Server(concurrency=5), None),
        (Server(latency=Fixed(0.1), concurrency=5), 50.0),
        (Server(latency=Exponential(0.5), concurrency=1, queue=3), 2.0),
        (Server(rate_limit=30.0), 30.0),
        (Server(latency=Fixed(0.1), concurrency=5, rate_limit=30.0), 30.0),
        (Server(latency=Fixed(0.1), concurrency=2, rate_limit=30.0), 20.0),
        (Server(slowdown=0.01), 100.0),
        (Server(latency=Fixed(0.1), slowdown=0.01), 100.0),
        (Server(concurrency=5, slowdown=0.01), 125.0),
        (Server(latency=Fixed(0.1), concurrency=5, slowdown=0.025), 25.0),
    ],
)
def test_capacity_of_a_server(server: Server, expected: float | None) -> None:
    """The capacity follows from workers and latency, or from the slowdown, or is unlimited."""
    assert (None if expected is None else pytest.approx(expected)) == server.capacity


def test_scenarios_compare_by_value() -> None:
    """Two scenarios with the same values are equal."""
    assert single_server(latency=Fixed(1.0)) == single_server(latency=Fixed(1.0))
    assert single_server(latency=Fixed(1.0)) != single_server(latency=Fixed(2.0))
