"""Tests for Policy: defaults, rules, delays, and conversion to dict and back."""

from __future__ import annotations

import copy
import json
import pickle
from enum import Enum
from math import inf, nan
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.backoff import BACKOFFS, JITTERS, Schedule
from tarry.core.policy import PRESETS, Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr

PUBLIC = list(Policy._fields)


class Counted(Random):
    """A random source that counts its calls."""

    thrown = 0

    def random(self) -> float:
        """Return a random number and count the call."""
        self.thrown += 1
        return super().random()


jitters: st.SearchStrategy[Any] = st.sampled_from(sorted(JITTERS))
backoffs: st.SearchStrategy[Any] = st.sampled_from(
    [*sorted(BACKOFFS), Schedule((5, 0.5, 70)), Schedule((0,))]
)
ranges = st.tuples(st.floats(1e-3, 1e4), st.floats(1e-3, 1e4)).map(sorted)


@st.composite
def schedules(draw: st.DrawFn) -> Policy:
    """Policies with all sorts of delays."""
    initial, maximum = draw(ranges)
    return Policy(
        max_attempts=draw(st.integers(1, 60)),
        initial_delay=initial,
        multiplier=draw(st.floats(1, 100)),
        max_delay=maximum,
        throttled_delay=draw(st.floats(1e-3, 1e4)),
        backoff=draw(backoffs),
        jitter=draw(jitters),
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any policy that has a dict form."""
    some_seconds = st.none() | st.floats(1e-3, 1e6)
    return draw(schedules()).replace(
        total_budget=draw(some_seconds),
        attempt_timeout=draw(some_seconds),
        retryable_statuses=draw(st.sampled_from([(), (503,), (429, 500, 404)])),
        retryable_codes=draw(st.sampled_from([(), ("ABORTED", "UNAVAILABLE")])),
        max_hint=draw(st.floats(0, 1e6)),
        ignore_retried_below=draw(st.booleans()),
    )


# --- defaults and presets ------------------------------------------------------------------------


def test_defaults() -> None:
    """The defaults are those of the design."""
    policy = Policy()
    expected = {
        "max_attempts": 4,
        "initial_delay": 0.1,
        "multiplier": 2.0,
        "max_delay": 30.0,
        "total_budget": None,
        "attempt_timeout": None,
        "backoff": "exponential",
        "jitter": "full",
        "retryable_statuses": {408, 425, 429, 500, 502, 503, 504},
        "retryable_codes": {"UNAVAILABLE", "RESOURCE_EXHAUSTED"},
        "throttled_delay": 1.0,
        "max_hint": 120.0,
        "ignore_retried_below": False,
    }
    assert expected == {name: getattr(policy, name) for name in PUBLIC}


def test_presets() -> None:
    """Four presets have names, and `default` is what `Policy()` gives."""
    assert {"default", "interactive", "webhook", "patient"} == PRESETS.keys()
    assert Policy() == Policy.preset("default")


@pytest.mark.parametrize(
    ("name", "attempts", "delays", "total", "hint"),
    [
        ("default", 4, (0.1, 30), None, 120),
        ("interactive", 3, (0.05, 0.5), 2, 120),
        ("webhook", 10, (5, 24 * 3600), None, 24 * 3600),
        ("patient", 100, (1, 3600), 24 * 3600, 6 * 3600),
    ],
)
def test_values_of_the_presets(
    name: str, attempts: int, delays: tuple[float, float], total: float | None, hint: float
) -> None:
    """Each preset has its documented attempts, delays and times."""
    policy = Policy.preset(name)
    assert (attempts, total, hint) == (policy.max_attempts, policy.total_budget, policy.max_hint)
    assert delays == (policy.initial_delay, policy.max_delay)
    assert max(policy.ceiling(k) for k in range(1, attempts)) <= policy.max_delay


def test_webhook_follows_the_schedule_of_standard_webhooks() -> None:
    """Ten attempts over 75 h 35 min 5 s, step by step as Standard Webhooks 1.0.0 has them."""
    policy = Policy.preset("webhook")
    expected = [5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400]
    actual = [policy.ceiling(k) for k in range(1, policy.max_attempts)]
    assert expected == actual
    assert 75 * 3600 + 35 * 60 + 5 == sum(actual)
    assert 10 == policy.max_attempts


def test_a_patient_policy_is_not_out_of_attempts_before_its_day_is_over() -> None:
    """A hundred calls that always fail reach 24 hours, with attempts to spare."""
    policy = Policy.preset("patient")
    assert min(sum(policy.delays(Random(seed))) for seed in range(100)) > 24 * 3600


@pytest.mark.parametrize("name", ["", "Default", "aws", 1, None])
def test_unknown_presets(name: Any) -> None:
    """An unknown preset is rejected with the names of the known ones."""
    with pytest.raises(ConfigurationError) as caught:
        Policy.preset(name)
    known = "preset must be one of default, interactive, patient, webhook"
    assert f"{known}, got {name!r}" == str(caught.value)


# --- validation ----------------------------------------------------------------------------------

HUGE = 10**400
POSITIVE = ["initial_delay", "max_delay", "total_budget", "attempt_timeout", "throttled_delay"]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *((field, value, "greater than 0") for field in POSITIVE for value in (0, -0.0, -1)),
        *(
            (field, value, "finite")
            for field in [*POSITIVE, "multiplier", "max_hint"]
            for value in (nan, inf, -inf, HUGE)
        ),
        ("max_attempts", 0, "at least 1"),
        ("max_attempts", -1, "at least 1"),
        ("multiplier", 0, "at least 1"),
        ("multiplier", 0.999, "at least 1"),
        ("multiplier", -2, "at least 1"),
        ("max_hint", -1, "at least 0"),
        ("backoff", "expo", "one of exponential, fixed, linear"),
        ("backoff", "", "one of exponential, fixed, linear"),
        ("jitter", "ful", "one of decorrelated, equal, full, none"),
        ("jitter", "FULL", "one of decorrelated, equal, full, none"),
    ],
    ids=str,
)
def test_values_that_break_a_rule(field: str, value: float | str, rule: str) -> None:
    """A value that breaks a rule is rejected with the field, the rule and the value."""
    values: dict[str, Any] = {field: value}
    with pytest.raises(ConfigurationError) as caught:
        Policy(**values)
    assert f"{field} must be {rule}, got {short_repr(value)}" == str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *(
            (field, value, "a number")
            for field in [*POSITIVE, "multiplier", "max_hint"]
            for value in (True, "1", b"1", [1], 1j)
        ),
        *((field, None, "a number") for field in ("initial_delay", "max_delay", "multiplier")),
        *(("max_attempts", value, "a whole number") for value in (True, 4.0, nan, inf, "4", None)),
        *(
            (field, value, "a name or a callable")
            for field in ("backoff", "jitter")
            for value in (None, 1, b"full", ["full"])
        ),
        *(
            (field, value, "a collection")
            for field in ("retryable_statuses", "retryable_codes")
            for value in (503, "503", b"503", None)
        ),
        *(("ignore_retried_below", value, "True or False") for value in (0, 1, None, "yes")),
    ],
    ids=repr,
)
def test_values_of_the_wrong_type(field: str, value: Any, rule: str) -> None:
    """A value of the wrong type is rejected with the field, the rule and the value."""
    with pytest.raises(ConfigurationTypeError) as caught:
        Policy(**{field: value})
    assert f"{field} must be {rule}, got {value!r}" == str(caught.value)


@pytest.mark.parametrize("status", ["503", 503.0, True])
def test_statuses_of_the_wrong_type(status: Any) -> None:
    """A status in the collection that is no whole number is named."""
    with pytest.raises(ConfigurationTypeError) as caught:
        Policy(retryable_statuses=[503, status])
    assert f"retryable_statuses[1] must be a whole number, got {status!r}" == str(caught.value)


class Code(Enum):
    """Codes as gRPC's own package has them."""

    ABORTED = 10


@pytest.mark.parametrize(("code", "name"), [(Code.ABORTED, "ABORTED"), (14, "UNAVAILABLE")])
def test_codes_of_the_wrong_type(code: Any, name: str) -> None:
    """A code that is no text is rejected with the name to write for it, or an example."""
    with pytest.raises(ConfigurationTypeError) as caught:
        Policy(retryable_codes=[code])
    text = f'retryable_codes[0] must be the name of a code as a string ("{name}"), got {code!r}'
    assert text == str(caught.value)


def test_the_maximum_is_not_below_the_initial_delay() -> None:
    """The two may be equal; a lower maximum is rejected, also against a default."""
    assert 5.0 == Policy(initial_delay=5, max_delay=5).max_delay
    with pytest.raises(ConfigurationError) as caught:
        Policy(initial_delay=60)
    assert "max_delay must be at least initial_delay (60), got 30" == str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        Policy(max_delay=0.05)
    assert "max_delay must be at least initial_delay (0.1), got 0.05" == str(caught.value)


@pytest.mark.parametrize("status", [1, 99, 600, 1_000])
def test_statuses_out_of_range(status: int) -> None:
    """A status that HTTP does not have is rejected."""
    with pytest.raises(ConfigurationError) as caught:
        Policy(retryable_statuses=[503, status])
    assert f"retryable_statuses[1] must be from 100 to 599, got {status}" == str(caught.value)


@pytest.mark.parametrize("code", ["unavailable", "NOT_A_CODE", ""])
def test_unknown_codes(code: str) -> None:
    """A code that gRPC does not have is rejected with the names it has."""
    with pytest.raises(ConfigurationError) as caught:
        Policy(retryable_codes=frozenset({code}))
    assert str(caught.value).startswith("retryable_codes[0] must be one of ABORTED, ")
    assert str(caught.value).endswith(f", got {code!r}")


def test_values_have_one_form() -> None:
    """Whole numbers become floats and collections frozen sets, so that equal policies are equal."""
    loose: dict[str, Any] = {
        "initial_delay": 1,
        "multiplier": 2,
        "max_delay": 30,
        "total_budget": 60,
        "max_hint": 0,
        "retryable_statuses": [503, 503, 429],
        "retryable_codes": ("UNAVAILABLE",),
    }
    policy = Policy(**loose)
    strict = Policy(
        initial_delay=1.0,
        total_budget=60.0,
        max_hint=0.0,
        retryable_statuses=frozenset({429, 503}),
        retryable_codes=frozenset({"UNAVAILABLE"}),
    )
    assert (strict, hash(strict)) == (policy, hash(policy))
    assert [float] * 5 == [type(getattr(policy, name)) for name in list(loose)[:5]]
    assert isinstance(policy.retryable_statuses, frozenset)
    assert isinstance(policy.retryable_codes, frozenset)


def test_extremes_that_are_fine() -> None:
    """One attempt, any number of attempts, the smallest delay and empty tables are all policies."""
    assert [] == Policy(max_attempts=1).delays(Random(1))
    assert 10**9 == Policy(max_attempts=10**9).max_attempts
    assert 5e-324 == Policy(initial_delay=5e-324).initial_delay
    assert frozenset() == Policy(retryable_statuses=frozenset()).retryable_statuses
    assert frozenset() == Policy(retryable_codes=frozenset()).retryable_codes


def test_policies_are_immutable() -> None:
    """No field can be set, none can be added, and none is given by position."""
    policy = Policy()
    assert not hasattr(policy, "__dict__")
    with pytest.raises(TypeError):
        Policy(4)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        policy.max_attempts = 5


# --- the schedule --------------------------------------------------------------------------------


@given(schedules(), st.integers(1, 10_000))
def test_ceiling_is_the_backoff(policy: Policy, k: int) -> None:
    """The ceiling of a retry is that of the formula or the schedule, for any k."""
    backoff = policy.backoff
    if isinstance(backoff, str):
        values = policy.initial_delay, policy.multiplier, policy.max_delay
        assert BACKOFFS[backoff](k, *values) == policy.ceiling(k)
    else:
        assert backoff(k) == policy.ceiling(k)


@given(schedules(), st.integers(1, 10_000))
def test_throttled_ceilings_are_never_lower(policy: Policy, k: int) -> None:
    """After throttling the base is slower, within the same maximum."""
    plain, throttled = policy.ceiling(k), policy.ceiling(k, throttled=True)
    assert plain <= throttled
    if isinstance(policy.backoff, str):
        assert throttled <= policy.max_delay


def test_throttled_ceilings() -> None:
    """A throttled attempt starts from `throttled_delay` and grows like any other."""
    policy = Policy()
    assert [1.0, 2.0, 4.0, 8.0] == [policy.ceiling(k, throttled=True) for k in range(1, 5)]
    assert 0.5 == Policy(max_delay=0.5).ceiling(1, throttled=True)
    listed = Policy(backoff=Schedule((0.1, 3.0)))
    assert [1.0, 3.0] == [listed.ceiling(k, throttled=True) for k in (1, 2)]


@given(schedules(), st.integers(0, 2**32))
def test_delays_are_the_formulas(policy: Policy, seed: int) -> None:
    """`delays` is ceiling, then jitter, with one draw each, and each delay feeds the next."""
    dice, previous, expected = Random(seed), policy.initial_delay, []
    assert isinstance(policy.jitter, str)
    for k in range(1, policy.max_attempts):
        arguments = policy.ceiling(k), previous, dice.random()
        previous = JITTERS[policy.jitter](*arguments, policy.initial_delay, policy.max_delay)
        expected.append(previous)
    counted = Counted(seed)
    assert expected == policy.delays(counted)
    assert policy.max_attempts - 1 == counted.thrown


def test_delays_replay() -> None:
    """One seed gives one run, and another seed another."""
    policy = Policy(max_attempts=10)
    assert policy.delays(Random(7)) == policy.delays(Random(7))
    assert policy.delays(Random(7)) != policy.delays(Random(8))


@pytest.mark.parametrize("backoff", sorted(BACKOFFS))
@pytest.mark.parametrize("jitter", sorted(JITTERS))
def test_ten_thousand_attempts(backoff: Any, jitter: Any) -> None:
    """Ten thousand attempts give as many finite delays within the maximum, less one."""
    delays = Policy(max_attempts=10_000, backoff=backoff, jitter=jitter).delays(Random(1))
    assert 9_999 == len(delays)
    assert 0 <= min(delays) <= max(delays) <= 30.0


def test_the_standard_mode_of_aws() -> None:
    """Three attempts with U(0, 1) * min(2**i, 20 s) are two values of a policy."""
    policy = Policy(max_attempts=3, initial_delay=1, max_delay=20)
    dice = Random(3)
    assert [dice.random() * min(2**i, 20) for i in range(2)] == policy.delays(Random(3))


def test_a_jitter_is_any_callable() -> None:
    """A callable gets ceiling, last delay and u: the 20 % of gRPC are one line."""
    seen: list[tuple[float, float, float]] = []

    def grpc(ceiling: float, previous: float, u: float) -> float:
        seen.append((ceiling, previous, u))
        return ceiling * (0.8 + 0.4 * u)

    policy = Policy(max_attempts=3, initial_delay=1, jitter=grpc)
    dice = Random(5)
    u, v = dice.random(), dice.random()
    first, second = 0.8 + 0.4 * u, 2 * (0.8 + 0.4 * v)
    assert [first, second] == policy.delays(Random(5))
    assert [(1.0, 1.0, u), (2.0, first, v)] == seen


def test_a_backoff_is_any_callable() -> None:
    """A callable gets the number of the retry and gives the ceiling."""
    policy = Policy(max_attempts=5, backoff=lambda k: k * k, jitter="none")
    assert [1.0, 4.0, 9.0, 16.0] == policy.delays(Random(1))


def test_callables_may_give_nothing() -> None:
    """A callable may say not to wait at all, and its answer comes back as a float."""
    policy = Policy(backoff=lambda _k: 0, jitter=lambda c, _p, _u: int(c))
    assert "[0.0, 0.0, 0.0]" == repr(policy.delays(Random(1)))


@pytest.mark.parametrize("result", [-1, nan, inf, None, "1", True])
@pytest.mark.parametrize("field", ["backoff", "jitter"])
def test_callables_that_give_no_delay(field: str, result: Any) -> None:
    """A callable that does not give a delay is named in the error."""
    callables: dict[str, Any] = {field: lambda *_: result}
    policy = Policy(**callables)
    with pytest.raises(ConfigurationError, match=f"^the result of {field} must be .*{result}"):
        policy.delays(Random(1))


# --- other forms ---------------------------------------------------------------------------------


@given(policies())
def test_dict_round_trip(policy: Policy) -> None:
    """A policy comes back from its dict, also through JSON; what is None is left out."""
    plain = policy.to_dict()
    assert [name for name in PUBLIC if getattr(policy, name) is not None] == list(plain)
    assert policy == Policy.from_dict(plain) == Policy.from_dict(json.loads(json.dumps(plain)))


@given(policies())
def test_policies_travel(policy: Policy) -> None:
    """A copy or a pickle of a policy is equal to it, keeps its hash and draws the same delays."""
    for other in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):  # noqa: S301
        assert (policy, hash(policy)) == (other, hash(other))
        assert policy.delays(Random(1)) == other.delays(Random(1))


def test_from_dict_fills_in_defaults() -> None:
    """Fields that are left out have their defaults."""
    assert Policy() == Policy.from_dict({})
    assert Policy(max_attempts=2) == Policy.from_dict({"max_attempts": 2})


@pytest.mark.parametrize("field", ["backoff", "jitter"])
def test_callables_have_no_dict_form(field: str) -> None:
    """A policy with a callable cannot be converted to a dict."""
    callables: dict[str, Any] = {field: lambda *_: 1.0}
    policy = Policy(**callables)
    with pytest.raises(
        ConfigurationError, match=f"^{field} is a callable, which cannot be written to a dict"
    ):
        policy.to_dict()


@pytest.mark.parametrize(
    ("backoff", "message"),
    [
        ({}, "backoff as a table must be {'schedule': [...]}, got {}"),
        ({"delays": [1]}, "backoff as a table must be {'schedule': [...]}, got {'delays': [1]}"),
        ({"schedule": 5}, "schedule must be a collection, got 5"),
        ({"schedule": []}, "delays must contain at least one delay, got none"),
        ({"schedule": [1, "x"]}, "delays[1] must be a number, got 'x'"),
    ],
)
def test_malformed_schedules(backoff: dict[str, Any], message: str) -> None:
    """A schedule that cannot be read is rejected with what is wrong."""
    with pytest.raises(ConfigurationError) as caught:
        Policy.from_dict({"backoff": backoff})
    assert message == str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("attempts", "did you mean 'max_attempts'?"),
        ("maxAttempts", "did you mean 'max_attempts'?"),
        ("_ceilings", f"it has {', '.join(PUBLIC)}"),
    ],
)
def test_unknown_fields(name: str, hint: str) -> None:
    """An unknown field is rejected with the similar one, or with all that a policy has."""
    expected = f"a policy has no field {name!r}; {hint}"
    for build in (Policy.from_dict, lambda changes: Policy().replace(**changes)):
        with pytest.raises(ConfigurationError) as caught:
            build({name: 1})
        assert expected == str(caught.value)


def test_repr_is_how_it_was_made() -> None:
    """The fields that a user sets are shown, in an expression that makes the same policy."""
    policy = Policy(max_attempts=2, backoff=Schedule((1.0, 2.0)))
    names = {"Policy": Policy, "Schedule": Schedule}
    assert policy == eval(repr(policy), names)  # noqa: S307


def test_replace() -> None:
    """A copy with changes keeps the rest, is checked like a new one, and works out its ceilings."""
    policy = Policy(max_attempts=5)
    changed = policy.replace(initial_delay=1)
    assert Policy(max_attempts=5, initial_delay=1) == changed
    assert (0.1, 1.0) == (policy.ceiling(1), changed.ceiling(1))
    with pytest.raises(ConfigurationError, match=r"^max_attempts must be at least 1"):
        policy.replace(max_attempts=0)


def test_explain_is_the_one_of_its_module() -> None:
    """A policy explains itself."""
    assert Policy().explain().startswith("4 attempts, exponential backoff, full jitter\n")


@pytest.mark.parametrize("k", [0, -1])
def test_there_is_no_retry_zero(k: int) -> None:
    """Retries are numbered from 1; any other number is rejected, not guessed at."""
    with pytest.raises(ConfigurationError, match="k must be at least 1"):
        Policy().ceiling(k)
