"""Downstreams and retry configurations by origin."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tarry
from tarry import Downstream, Kind, Outcome, Policy
from tarry.adapters.http.send import OriginRegistry, default_downstream
from tarry.errors import AttemptTimeout


def make_registry(downstream: Any = None, policy: Policy | None = None) -> OriginRegistry:
    """Return the registry of an adapter whose errors are all transient."""
    return OriginRegistry(
        policy,
        downstream,
        lambda _, repeatable: Outcome(Kind.TRANSIENT, repeatable=repeatable),
        lambda policy, _, __: Outcome(Kind.SUCCESS, detail=f"{policy.max_attempts}"),
        lambda _: None,
    )


def test_each_origin_has_its_own_downstream() -> None:
    """Requests to one origin share a downstream; another origin has another."""
    registry = make_registry()

    one, again, other = (registry.downstream(name) for name in ("http://a", "http://a", "http://b"))

    assert one is again is not other
    assert ("http://a", "http://b") == (one.name, other.name)


def test_default_downstream() -> None:
    """By default an origin has a breaker and a budget."""
    registry = default_downstream("http://a")

    assert (tarry.BreakerState.CLOSED, 500.0) == (registry.state, registry.balance)


def test_downstream_function() -> None:
    """A function returns the downstream of an origin, and is called once."""
    calls: list[str] = []

    def make(origin: str) -> Downstream:
        calls.append(origin)
        return Downstream("payments")

    registry = make_registry(make)

    assert registry.downstream("http://a") is registry.downstream("http://a")
    assert ["http://a"] == calls


def test_one_downstream_for_all_origins() -> None:
    """A given downstream is used for every origin."""
    payments = Downstream("payments")
    registry = make_registry(payments)

    assert {payments} == {registry.downstream("http://a"), registry.downstream("http://b")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("payments", None), "downstream must be a tarry.Downstream"), ((None, 4), "policy must be")],
)
def test_invalid_argument_raises(arguments: tuple[Any, Any], message: str) -> None:
    """An invalid argument raises at once."""
    with pytest.raises(tarry.ConfigurationError, match=message):
        make_registry(*arguments)


def test_config_is_created_once() -> None:
    """Requests with the same method, origin and repeatability share a configuration."""
    registry = make_registry()

    config = registry.retry_config("GET", "http://a", repeatable=True)

    assert config is registry.retry_config("GET", "http://a", repeatable=True)
    assert config is not registry.retry_config("GET", "http://a", repeatable=False)
    assert config is not registry.retry_config("PUT", "http://a", repeatable=True)
    assert "GET http://a" == config.operation


def test_unused_origins_are_dropped() -> None:
    """A client that calls many origins keeps those that it uses again."""
    registry = make_registry()
    used = registry.retry_config("GET", "http://used", repeatable=True)
    registry.retry_config("GET", "http://unused", repeatable=True)

    for number in range(2000):
        registry.retry_config("GET", f"http://{number}", repeatable=True)
        assert used is registry.retry_config("GET", "http://used", repeatable=True)

    gc.collect()
    assert "http://unused" not in registry._downstreams
    assert 1000 >= len(registry._downstreams)


def test_downstream_lives_as_long_as_its_configs() -> None:
    """A new configuration shares the downstream of an existing one."""
    registry = make_registry()
    existing = registry.retry_config("GET", "http://a", repeatable=True)

    for number in range(2000):
        registry.retry_config("GET", f"http://{number}", repeatable=True)

    assert (
        existing.downstream is registry.retry_config("PUT", "http://a", repeatable=True).downstream
    )


def test_concurrent_threads_share_a_downstream() -> None:
    """Threads that create the downstream of an origin concurrently use the same one."""
    together = threading.Barrier(4)

    def make(origin: str) -> Downstream:
        together.wait(10)
        return Downstream(origin)

    registry = make_registry(make)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(registry.downstream, ["http://a"] * 4))

    assert 1 == len(found)


@pytest.mark.parametrize("wrong", [None, "payments"])
def test_downstream_function_with_invalid_result(wrong: Any) -> None:
    """The error names the result and the origin."""
    with pytest.raises(tarry.ConfigurationError, match=r"must return a .*for http://a"):
        make_registry(lambda _: wrong).downstream("http://a")


@pytest.mark.parametrize("repeatable", [True, False])
def test_repeatable_applies_to_errors_and_timeouts(repeatable: bool) -> None:
    """A request that is not repeatable is unsafe after an error and after a timeout."""
    config = make_registry().retry_config("POST", "http://a", repeatable=repeatable)

    safe = [config.classify_error(error, 0).repeatable for error in (OSError(), AttemptTimeout())]

    assert [repeatable] * 2 == safe


def test_response_is_classified_by_the_policy() -> None:
    """The classifier gets the policy of the adapter."""
    config = make_registry(policy=Policy(max_attempts=7)).retry_config(
        "GET", "http://a", repeatable=True
    )

    assert config.classify_result is not None
    assert "7" == config.classify_result(None).detail
