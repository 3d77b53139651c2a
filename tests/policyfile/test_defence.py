"""A policy with its breaker, budget and limiter, or a hedging: one value that a file can say."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.breaker import Breaker
from tarry.core.budget import RatioBudget, ThrottleBudget, TokenBudget
from tarry.core.hedging import Hedging
from tarry.core.limiter import AIMD, AdaptiveRate, InFlight
from tarry.core.policy import PRESETS, Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.policyfile.defence import Defence

budgets = st.sampled_from(
    [None, {"kind": "token", "preset": "aws-2026"}, {"kind": "ratio", "ratio": 0.2}]
)
limiters = st.sampled_from([None, {"kind": "in-flight", "limit": 7}, {"kind": "adaptive"}])
breakers = st.sampled_from([None, {}, {"consecutive": 3, "open_for": 1.5}])


@given(st.integers(1, 9), budgets, limiters, breakers)
def test_dict_form_reads_back(
    attempts: int, budget: Any, limiter: Any, breaker: dict[str, Any] | None
) -> None:
    """What `to_dict` gives, also by way of JSON, makes an equal defence."""
    policy = Policy(max_attempts=attempts, attempt_timeout=0.5)
    defence = Defence(policy, breaker=breaker, budget=budget, limiter=limiter)

    assert defence == Defence.from_dict(json.loads(json.dumps(defence.to_dict())))


@pytest.mark.parametrize(
    "hedging", [Hedging(after=0.1), Hedging(after="p95", max_attempts=3)], ids=["fixed", "live"]
)
def test_dict_form_of_hedging_reads_back(hedging: Hedging) -> None:
    """A hedging takes the place of the fields of a policy."""
    defence = Defence(hedging=hedging)

    assert ["hedging"] == list(defence.to_dict())
    assert defence == Defence.from_dict(defence.to_dict())


def test_nothing_is_the_default_policy() -> None:
    """An empty file is the default policy alone."""
    assert Defence(Policy()) == Defence.from_dict({}) == Defence()


def test_preset_is_where_the_fields_start() -> None:
    """A preset gives the fields that the file does not have."""
    defence = Defence.from_dict({"preset": "interactive", "max_attempts": 2})

    assert Policy.preset("interactive").replace(max_attempts=2) == defence.policy


def test_every_preset_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The presets are those of the policy: one that is added there is known here."""
    monkeypatch.setitem(PRESETS, "mine", Policy(max_attempts=2))

    for name, policy in PRESETS.items():
        assert policy == Defence.from_dict({"preset": name}).policy


@pytest.mark.parametrize(
    ("table", "arguments", "kind"),
    [
        ("breaker", {"consecutive": 2}, Breaker),
        ("budget", {"kind": "token"}, TokenBudget),
        ("budget", {"kind": "ratio", "ratio": 0.3}, RatioBudget),
        ("budget", {"kind": "throttle", "max_tokens": 7}, ThrottleBudget),
        ("limiter", {"kind": "in-flight", "limit": 3}, InFlight),
        ("limiter", {"kind": "aimd"}, AIMD),
        ("limiter", {"kind": "adaptive"}, AdaptiveRate),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_downstream_has_what_was_asked_for(
    table: str, arguments: dict[str, Any], kind: type[object]
) -> None:
    """Each call makes a dependency with a fresh state of the right kind."""
    defence = Defence.from_dict({table: arguments})
    one, other = (defence.downstream("payments") for _ in range(2))

    assert "payments" == one.name
    made, again = (
        downstream._limiters[0] if table == "limiter" else getattr(downstream, table)
        for downstream in (one, other)
    )
    assert isinstance(made, kind)
    assert made is not again


PARTS: dict[str, Any] = {
    "breaker": {"consecutive": 3},
    "budget": {"kind": "ratio", "ratio": 0.2},
    "limiter": {"kind": "in-flight", "limit": 7},
}


@pytest.mark.parametrize("table", PARTS)
def test_defence_does_not_change_with_the_dict_it_was_made_of(table: str) -> None:
    """The arguments are copied, and neither they nor what `to_dict` gives lead back to them."""
    given = dict(PARTS[table])
    defence = Defence.from_dict({table: given})

    given.clear()
    defence.to_dict()[table].clear()
    with pytest.raises(TypeError, match="does not support item assignment"):
        getattr(defence, table)["consecutive"] = 0

    assert PARTS[table] == getattr(defence, table)


@pytest.mark.parametrize(
    "defence",
    [Defence(), Defence(Policy(max_attempts=2), **PARTS), Defence(hedging=Hedging(after=0.1))],
    ids=["default", "parts", "hedging"],
)
def test_defence_is_a_value(defence: Defence) -> None:
    """It goes to other processes, into sets and into a text that makes it again."""
    sent = pickle.loads(pickle.dumps(defence))  # noqa: S301 - our own
    known = {kind.__name__: kind for kind in (Defence, Policy, Hedging)}

    assert defence == sent == eval(repr(defence), known)  # noqa: S307 - a text of our own
    assert {defence} == {sent}


def test_other_arguments_are_another_defence() -> None:
    """Equality and hash go by the arguments, whatever their order."""
    one = Defence(breaker={"consecutive": 3, "open_for": 1})
    same = Defence(breaker={"open_for": 1.0, "consecutive": 3})

    assert 1 == len({one, same})
    assert one != Defence(breaker={"consecutive": 4, "open_for": 1})


def test_retries_and_hedging_are_refused() -> None:
    """A call has a policy or a hedging (gRFC A6)."""
    with pytest.raises(ConfigurationError, match="a policy or hedging, not both"):
        Defence.from_dict({"max_attempts": 3, "hedging": {"after": 0.1}})


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ({"preset": "fast"}, "^preset must be one of default, interactive"),
        ({"preset": 7}, "^preset must be one of"),
        ({"attempts": 3}, "^a policy has no field 'attempts'; did you mean 'max_attempts'"),
        ({"breaker": {"rate": 1}}, "^breaker has no field 'rate'; did you mean"),
        ({"breaker": {"open_for": 0}}, "^open_for must be greater than 0"),
        ({"budget": {}}, r"^budget\.kind must be one of ratio, throttle, token, got None"),
        ({"budget": {"kind": "token", "x": 1}}, "^budget has no field 'x'; it has preset"),
        ({"limiter": {"kind": "none"}}, r"^limiter\.kind must be one of adaptive, aimd"),
        ({"limiter": {"kind": "in-flight"}}, "^limiter needs the field 'limit'"),
        ({"hedging": {"before": 1}}, "^hedging has no field 'before'; it has after"),
    ],
    ids=repr,
)
def test_mistakes_are_refused_when_it_is_made(plain: dict[str, Any], words: str) -> None:
    """A bad argument is named at once and not in the middle of a run."""
    with pytest.raises(ConfigurationError, match=words):
        Defence.from_dict(plain)


def test_tables_must_be_tables() -> None:
    """A table that is something else is rejected by its name."""
    with pytest.raises(ConfigurationTypeError, match=r"^breaker must be a table of its arguments"):
        Defence.from_dict({"breaker": True})
    with pytest.raises(ConfigurationTypeError, match=r"^budget must be a table of its arguments"):
        Defence(budget="token")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
