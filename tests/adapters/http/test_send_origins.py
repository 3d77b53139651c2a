"""`OriginRegistry`: the downstream and the retry configurations of each origin."""

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
    """Requests to the same origin share a downstream; another origin has its own."""
    registry = make_registry()

    first, same, other = (
        registry.downstream(name) for name in ("http://a", "http://a", "http://b")
    )

    assert first is same is not other
    assert ("http://a", "http://b") == (first.name, other.name)


def test_default_downstream() -> None:
    """By default an origin has a breaker and a budget."""
    downstream = default_downstream("http://a")

    assert (tarry.BreakerState.CLOSED, 500.0) == (downstream.state, downstream.balance)


def test_downstream_function_is_called_once() -> None:
    calls: list[str] = []

    def make_downstream(origin: str) -> Downstream:
        calls.append(origin)
        return Downstream("payments")

    registry = make_registry(make_downstream)

    assert registry.downstream("http://a") is registry.downstream("http://a")
    assert ["http://a"] == calls


def test_one_downstream_for_all_origins() -> None:
    """A downstream given as argument is used for every origin."""
    payments = Downstream("payments")
    registry = make_registry(payments)

    assert {payments} == {registry.downstream("http://a"), registry.downstream("http://b")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("payments", None), "downstream must be a tarry.Downstream"), ((None, 4), "policy must be")],
)
def test_invalid_argument_raises(arguments: tuple[Any, Any], message: str) -> None:
    """An invalid argument raises when the registry is created."""
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
    """The registry keeps an origin that is used again, and drops an unused one."""
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
    """A new configuration of an origin shares the downstream of a configuration still in use."""
    registry = make_registry()
    existing = registry.retry_config("GET", "http://a", repeatable=True)

    for number in range(2000):
        registry.retry_config("GET", f"http://{number}", repeatable=True)

    assert (
        existing.downstream is registry.retry_config("PUT", "http://a", repeatable=True).downstream
    )


def test_concurrent_threads_share_a_downstream() -> None:
    """Threads that create the downstream of an origin concurrently use the same one."""
    barrier = threading.Barrier(4)

    def make_downstream(origin: str) -> Downstream:
        barrier.wait(10)
        return Downstream(origin)

    registry = make_registry(make_downstream)
    with ThreadPoolExecutor(4) as pool:
        downstreams = set(pool.map(registry.downstream, ["http://a"] * 4))

    assert 1 == len(downstreams)


@pytest.mark.parametrize("result", [None, "payments"])
def test_invalid_result_of_a_downstream_function_raises(result: Any) -> None:
    """If the function does not return a downstream, the error names the origin."""
    with pytest.raises(tarry.ConfigurationError, match=r"must return a .*for http://a"):
        make_registry(lambda _: result).downstream("http://a")


@pytest.mark.parametrize("repeatable", [True, False])
def test_repeatable_applies_to_errors_and_timeouts(repeatable: bool) -> None:
    """The outcome of an error or a timeout has the `repeatable` of the configuration."""
    config = make_registry().retry_config("POST", "http://a", repeatable=repeatable)

    outcomes = [
        config.classify_error(error, 0).repeatable for error in (OSError(), AttemptTimeout())
    ]

    assert [repeatable] * 2 == outcomes


def test_response_is_classified_by_the_policy() -> None:
    """The classifier gets the policy of the adapter."""
    config = make_registry(policy=Policy(max_attempts=7)).retry_config(
        "GET", "http://a", repeatable=True
    )

    assert config.classify_result is not None
    assert "7" == config.classify_result(None).detail
