"""Downstreams and retry configurations by origin."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tarry
from tarry import Downstream, Kind, Outcome, Policy
from tarry.adapters.http.origins import OriginRegistry, default_downstream
from tarry.errors import AttemptTimeout


def make_registry(downstream: Any = None, policy: Policy | None = None) -> OriginRegistry:
    """Return the registry of an adapter whose errors are all transient."""
    return OriginRegistry(
        policy,
        downstream,
        lambda _, repeatable: Outcome(Kind.TRANSIENT, safe=repeatable),
        lambda policy, _, __: Outcome(Kind.SUCCESS, detail=f"{policy.max_attempts}"),
        lambda _: None,
    )


def test_each_origin_has_its_own_downstream() -> None:
    """Requests to one origin share a downstream; another origin has another."""
    made = make_registry()

    one, again, other = (made.downstream(name) for name in ("http://a", "http://a", "http://b"))

    assert one is again is not other
    assert ("http://a", "http://b") == (one.name, other.name)


def test_default_downstream() -> None:
    """By default an origin has a breaker and a budget."""
    made = default_downstream("http://a")

    assert (tarry.BreakerState.CLOSED, 500.0) == (made.state, made.balance)


def test_downstream_function() -> None:
    """A function returns the downstream of an origin, and is called once."""
    calls: list[str] = []

    def make(origin: str) -> Downstream:
        calls.append(origin)
        return Downstream("payments")

    made = make_registry(make)

    assert made.downstream("http://a") is made.downstream("http://a")
    assert ["http://a"] == calls


def test_one_downstream_for_all_origins() -> None:
    """A given downstream is used for every origin."""
    payments = Downstream("payments")
    made = make_registry(payments)

    assert {payments} == {made.downstream("http://a"), made.downstream("http://b")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("payments", None), "downstream must be a tarry.Downstream"), ((None, 4), "policy must be")],
)
def test_invalid_argument_raises(arguments: tuple[Any, Any], says: str) -> None:
    """An invalid argument raises at once."""
    with pytest.raises(tarry.ConfigurationError, match=says):
        make_registry(*arguments)


def test_config_is_created_once() -> None:
    """Requests with the same method, origin and repeatability share a configuration."""
    made = make_registry()

    loop = made.retry_config("GET", "http://a", repeatable=True)

    assert loop is made.retry_config("GET", "http://a", repeatable=True)
    assert loop is not made.retry_config("GET", "http://a", repeatable=False)
    assert loop is not made.retry_config("PUT", "http://a", repeatable=True)
    assert "GET http://a" == loop.operation


def test_unused_origins_are_dropped() -> None:
    """A client that calls many origins keeps those that it uses again."""
    made = make_registry()
    used = made.retry_config("GET", "http://used", repeatable=True)
    made.retry_config("GET", "http://unused", repeatable=True)

    for number in range(2000):
        made.retry_config("GET", f"http://{number}", repeatable=True)
        assert used is made.retry_config("GET", "http://used", repeatable=True)

    gc.collect()
    assert "http://unused" not in made._downstreams
    assert 1000 >= len(made._downstreams)


def test_downstream_lives_as_long_as_its_configs() -> None:
    """A new configuration shares the downstream of an existing one."""
    made = make_registry()
    held = made.retry_config("GET", "http://a", repeatable=True)

    for number in range(2000):
        made.retry_config("GET", f"http://{number}", repeatable=True)

    assert held.downstream is made.retry_config("PUT", "http://a", repeatable=True).downstream


def test_concurrent_threads_share_a_downstream() -> None:
    """Threads that create the downstream of an origin concurrently use the same one."""
    together = threading.Barrier(4)

    def make(origin: str) -> Downstream:
        together.wait(10)
        return Downstream(origin)

    made = make_registry(make)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(made.downstream, ["http://a"] * 4))

    assert 1 == len(found)


@pytest.mark.parametrize("wrong", [None, "payments"])
def test_downstream_function_with_invalid_result(wrong: Any) -> None:
    """The error names the result and the origin."""
    with pytest.raises(tarry.ConfigurationError, match=r"must return a .*for http://a"):
        make_registry(lambda _: wrong).downstream("http://a")


@pytest.mark.parametrize("repeatable", [True, False])
def test_repeatable_applies_to_errors_and_timeouts(repeatable: bool) -> None:
    """A request that is not repeatable is unsafe after an error and after a timeout."""
    loop = make_registry().retry_config("POST", "http://a", repeatable=repeatable)

    safe = [loop.classify_error(error, 0).safe for error in (OSError(), AttemptTimeout())]

    assert [repeatable] * 2 == safe


def test_response_is_classified_by_the_policy() -> None:
    """The classifier gets the policy of the adapter."""
    loop = make_registry(policy=Policy(max_attempts=7)).retry_config(
        "GET", "http://a", repeatable=True
    )

    assert loop.classify_result is not None
    assert "7" == loop.classify_result(None).detail
