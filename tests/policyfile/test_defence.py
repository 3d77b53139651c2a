"""Tests for `Defence`: its dict form, equality, validation and downstreams.

A defence is a policy or hedging, optionally with a breaker, a budget and a limiter.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.adaptive_limit import AdaptiveLimit
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
def test_dict_form_round_trips(
    attempts: int, budget: Any, limiter: Any, breaker: dict[str, Any] | None
) -> None:
    """`from_dict` turns the output of `to_dict`, sent through JSON, into an equal defence."""
    policy = Policy(max_attempts=attempts, attempt_timeout=0.5)
    defence = Defence(policy, breaker=breaker, budget=budget, limiter=limiter)

    assert defence == Defence.from_dict(json.loads(json.dumps(defence.to_dict())))


@pytest.mark.parametrize(
    "hedging",
    [Hedging(after=0.1), Hedging(after="p95", max_attempts=3)],
    ids=["fixed", "percentile"],
)
def test_dict_form_of_hedging_round_trips(hedging: Hedging) -> None:
    """The dict form has the key `hedging` instead of policy fields; `from_dict` restores it."""
    defence = Defence(hedging=hedging)

    assert ["hedging"] == list(defence.to_dict())
    assert defence == Defence.from_dict(defence.to_dict())


def test_empty_dict_is_the_default_policy() -> None:
    """An empty dict is a defence with the default policy and no components."""
    assert Defence(Policy()) == Defence.from_dict({}) == Defence()


def test_preset_sets_the_missing_fields() -> None:
    """A preset sets the fields that the dict does not have."""
    defence = Defence.from_dict({"preset": "interactive", "max_attempts": 2})

    assert Policy.preset("interactive").replace(max_attempts=2) == defence.policy


def test_every_preset_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_dict` accepts every preset in `PRESETS`, also one that is added later."""
    monkeypatch.setitem(PRESETS, "custom", Policy(max_attempts=2))

    for name, policy in PRESETS.items():
        assert policy == Defence.from_dict({"preset": name}).policy


@pytest.mark.parametrize(
    ("component_name", "fields", "component_type"),
    [
        ("breaker", {"consecutive": 2}, Breaker),
        ("budget", {"kind": "token"}, TokenBudget),
        ("budget", {"kind": "ratio", "ratio": 0.3}, RatioBudget),
        ("budget", {"kind": "throttle", "max_tokens": 7}, ThrottleBudget),
        ("limiter", {"kind": "in-flight", "limit": 3}, InFlight),
        ("limiter", {"kind": "aimd"}, AIMD),
        ("limiter", {"kind": "adaptive"}, AdaptiveRate),
        ("limiter", {"kind": "adaptive-limit", "max_rate": 50}, AdaptiveLimit),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_each_downstream_has_a_new_component(
    component_name: str, fields: dict[str, Any], component_type: type[object]
) -> None:
    """Each call of `downstream` builds a new component of the configured type."""
    defence = Defence.from_dict({component_name: fields})
    first, second = (defence.downstream("payments") for _ in range(2))

    assert "payments" == first.name
    first_component, second_component = (
        downstream._limiters[0]
        if component_name == "limiter"
        else getattr(downstream, component_name)
        for downstream in (first, second)
    )
    assert isinstance(first_component, component_type)
    assert first_component is not second_component


COMPONENTS: dict[str, Any] = {
    "breaker": {"consecutive": 3},
    "budget": {"kind": "ratio", "ratio": 0.2},
    "limiter": {"kind": "in-flight", "limit": 7},
}


@pytest.mark.parametrize("component_name", COMPONENTS)
def test_fields_are_copied(component_name: str) -> None:
    """A defence does not change when its source dict or the output of `to_dict` changes."""
    fields = dict(COMPONENTS[component_name])
    defence = Defence.from_dict({component_name: fields})

    fields.clear()
    defence.to_dict()[component_name].clear()
    with pytest.raises(TypeError, match="does not support item assignment"):
        getattr(defence, component_name)["consecutive"] = 0

    assert COMPONENTS[component_name] == getattr(defence, component_name)


@pytest.mark.parametrize(
    "defence",
    [Defence(), Defence(Policy(max_attempts=2), **COMPONENTS), Defence(hedging=Hedging(after=0.1))],
    ids=["default", "components", "hedging"],
)
def test_defence_is_a_value(defence: Defence) -> None:
    """A defence can be pickled and hashed, and its repr evaluates to an equal defence."""
    unpickled = pickle.loads(pickle.dumps(defence))  # noqa: S301 - pickled by this test
    names = {each.__name__: each for each in (Defence, Policy, Hedging)}

    assert defence == unpickled == eval(repr(defence), names)  # noqa: S307 - a repr of tarry
    assert {defence} == {unpickled}


def test_equality_depends_on_the_fields() -> None:
    """Defences with equal fields, in any order, are equal and have the same hash."""
    defence = Defence(breaker={"consecutive": 3, "open_for": 1})
    same = Defence(breaker={"open_for": 1.0, "consecutive": 3})

    assert 1 == len({defence, same})
    assert defence != Defence(breaker={"consecutive": 4, "open_for": 1})


def test_policy_with_hedging_is_rejected() -> None:
    """A defence has a policy or hedging, not both, as in gRFC A6."""
    with pytest.raises(ConfigurationError, match="a policy or hedging, not both"):
        Defence.from_dict({"max_attempts": 3, "hedging": {"after": 0.1}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"preset": "fast"}, "^preset must be one of default, interactive"),
        ({"preset": 7}, "^preset must be one of"),
        ({"attempts": 3}, "^a policy has no field 'attempts'; did you mean 'max_attempts'"),
        ({"breaker": {"rate": 1}}, "^breaker has no field 'rate'; did you mean"),
        ({"breaker": {"open_for": 0}}, r"^breaker\.open_for must be greater than 0"),
        ({"budget": {"kind": "ratio", "ratio": -1}}, r"^budget\.ratio must be"),
        ({"hedging": {}}, "^after or max_extra_load must be given"),
        ({"budget": {}}, r"^budget\.kind must be one of ratio, throttle, token, got None"),
        ({"budget": {"kind": "token", "x": 1}}, "^budget has no field 'x'; it has preset"),
        (
            {"limiter": {"kind": "none"}},
            r"^limiter\.kind must be one of adaptive, adaptive-limit, aimd",
        ),
        ({"limiter": {"kind": "in-flight"}}, "^limiter needs the field 'limit'"),
        ({"hedging": {"before": 1}}, "^hedging has no field 'before'; it has after"),
    ],
    ids=repr,
)
def test_invalid_field_is_rejected_early(data: dict[str, Any], message: str) -> None:
    """`from_dict` rejects an invalid field and names it, before any call is made."""
    with pytest.raises(ConfigurationError, match=message):
        Defence.from_dict(data)


def test_component_that_is_not_a_table_is_rejected() -> None:
    """The error for a breaker or budget that is not a table names the component."""
    with pytest.raises(ConfigurationTypeError, match=r"^breaker must be a table of its fields"):
        Defence.from_dict({"breaker": True})
    with pytest.raises(ConfigurationTypeError, match=r"^budget must be a table of its fields"):
        Defence(budget="token")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
