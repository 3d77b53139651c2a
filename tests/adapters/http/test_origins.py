"""One dependency for each server, made when it is first called."""

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


def origins(downstream: Any = None, policy: Policy | None = None) -> OriginRegistry:
    """Return the origins of an adapter whose every failure is transient."""
    return OriginRegistry(
        policy,
        downstream,
        lambda _, repeatable: Outcome(Kind.TRANSIENT, safe=repeatable),
        lambda policy, _, __: Outcome(Kind.SUCCESS, detail=f"{policy.max_attempts}"),
        lambda _: None,
    )


def test_each_origin_has_its_own_dependency() -> None:
    """Two requests to one server share a dependency, those to another have another."""
    made = origins()

    one, again, other = (made.downstream(name) for name in ("http://a", "http://a", "http://b"))

    assert one is again is not other
    assert ("http://a", "http://b") == (one.name, other.name)


def test_default_dependency_is_protected() -> None:
    """Where nothing is said, an origin has a breaker and a budget."""
    made = default_downstream("http://a")

    assert (tarry.BreakerState.CLOSED, 500.0) == (made.state, made.balance)


def test_dependency_by_function() -> None:
    """A function makes the dependency of an origin, once."""
    calls: list[str] = []

    def make(origin: str) -> Downstream:
        calls.append(origin)
        return Downstream("payments")

    made = origins(make)

    assert made.downstream("http://a") is made.downstream("http://a")
    assert ["http://a"] == calls


def test_one_dependency_for_all() -> None:
    """A dependency that was given is that of every origin."""
    payments = Downstream("payments")
    made = origins(payments)

    assert {payments} == {made.downstream("http://a"), made.downstream("http://b")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("payments", None), "downstream must be a tarry.Downstream"), ((None, 4), "policy must be")],
)
def test_wrong_arguments(arguments: tuple[Any, Any], says: str) -> None:
    """A mistake is named at once."""
    with pytest.raises(tarry.ConfigurationError, match=says):
        origins(*arguments)


def test_loop_is_made_once() -> None:
    """Requests of one method to one server share a loop, if they are alike in safety too."""
    made = origins()

    loop = made.retry_config("GET", "http://a", repeatable=True)

    assert loop is made.retry_config("GET", "http://a", repeatable=True)
    assert loop is not made.retry_config("GET", "http://a", repeatable=False)
    assert loop is not made.retry_config("PUT", "http://a", repeatable=True)
    assert "GET http://a" == loop.operation


def test_origins_that_are_not_used_are_forgotten() -> None:
    """A client that follows links to everywhere keeps those that it goes back to."""
    made = origins()
    used = made.retry_config("GET", "http://used", repeatable=True)
    made.retry_config("GET", "http://unused", repeatable=True)

    for number in range(2000):
        made.retry_config("GET", f"http://{number}", repeatable=True)
        assert used is made.retry_config("GET", "http://used", repeatable=True)

    gc.collect()
    assert "http://unused" not in made._downstreams
    assert 1000 >= len(made._downstreams)


def test_no_second_dependency_while_the_first_is_known() -> None:
    """A loop that has its dependency shares it with a new one, however many came between."""
    made = origins()
    held = made.retry_config("GET", "http://a", repeatable=True)

    for number in range(2000):
        made.retry_config("GET", f"http://{number}", repeatable=True)

    assert held.downstream is made.retry_config("PUT", "http://a", repeatable=True).downstream


def test_one_dependency_for_threads_that_come_together() -> None:
    """If several make the dependency of an origin at once, all use the same."""
    together = threading.Barrier(4)

    def make(origin: str) -> Downstream:
        together.wait(10)
        return Downstream(origin)

    made = origins(make)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(made.downstream, ["http://a"] * 4))

    assert 1 == len(found)


@pytest.mark.parametrize("wrong", [None, "payments"])
def test_function_that_makes_no_dependency(wrong: Any) -> None:
    """The error says what it made, and for which origin."""
    with pytest.raises(tarry.ConfigurationError, match=r"must return a .*for http://a"):
        origins(lambda _: wrong).downstream("http://a")


@pytest.mark.parametrize("repeatable", [True, False])
def test_safety_reaches_every_failure(repeatable: bool) -> None:
    """What may not be repeated is not after an error, nor after a timeout of the loop itself."""
    loop = origins().retry_config("POST", "http://a", repeatable=repeatable)

    safe = [loop.classify_error(error, 0).safe for error in (OSError(), AttemptTimeout())]

    assert [repeatable] * 2 == safe


def test_judge_knows_the_policy() -> None:
    """An answer is judged by the policy of the adapter."""
    loop = origins(policy=Policy(max_attempts=7)).retry_config("GET", "http://a", repeatable=True)

    assert loop.classify_result is not None
    assert "7" == loop.classify_result(None).detail
