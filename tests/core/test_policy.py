"""Tests for Policy: defaults, validation, delays, and conversion to dict and back."""

from __future__ import annotations

import copy
import json
import pickle
from datetime import timedelta
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

FIELD_NAMES = list(Policy._fields)


class CountingRandom(Random):
    """A random source that counts its calls."""

    calls = 0

    def random(self) -> float:
        """Return a random number and count the call."""
        self.calls += 1
        return super().random()


jitters: st.SearchStrategy[Any] = st.sampled_from(sorted(JITTERS))
backoffs: st.SearchStrategy[Any] = st.sampled_from(
    [*sorted(BACKOFFS), Schedule((5, 0.5, 70)), Schedule((0,))]
)
ranges = st.tuples(st.floats(1e-3, 1e4), st.floats(1e-3, 1e4)).map(sorted)


@st.composite
def policies_with_delays(draw: st.DrawFn) -> Policy:
    """Generate policies with different delays, backoffs and jitters."""
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
    """Generate policies without callables, which can be converted to a dict."""
    optional_seconds = st.none() | st.floats(1e-3, 1e6)
    return draw(policies_with_delays()).replace(
        total_budget=draw(optional_seconds),
        attempt_timeout=draw(optional_seconds),
        retryable_statuses=draw(st.sampled_from([(), (503,), (429, 500, 404)])),
        retryable_codes=draw(st.sampled_from([(), ("ABORTED", "UNAVAILABLE")])),
        max_hint=draw(st.floats(0, 1e6)),
        ignore_retried_below=draw(st.booleans()),
        idempotency_key_header=draw(st.sampled_from(["Idempotency-Key", "X-Request-Id"])),
        idempotency_key_format=draw(st.sampled_from(["plain", "quoted"])),
    )


# --- defaults and presets ------------------------------------------------------------------------


def test_defaults() -> None:
    """A policy without arguments has the documented defaults."""
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
        "retryable_statuses": {408, 425, 429, 500, 502, 503, 504, 507, 509, *range(512, 600)},
        "retryable_codes": {"UNAVAILABLE", "RESOURCE_EXHAUSTED"},
        "throttled_delay": 1.0,
        "max_hint": 120.0,
        "ignore_retried_below": False,
        "idempotency_key_header": "Idempotency-Key",
        "idempotency_key_format": "plain",
    }
    assert expected == {name: getattr(policy, name) for name in FIELD_NAMES}


def test_presets() -> None:
    """There are five presets, and `default` is equal to `Policy()`."""
    assert {"default", "interactive", "webhook", "patient", "quick"} == PRESETS.keys()
    assert Policy() == Policy.preset("default")


@pytest.mark.parametrize(
    ("name", "attempts", "delays", "total", "hint"),
    [
        ("default", 4, (0.1, 30), None, 120),
        ("interactive", 3, (0.05, 0.5), 2, 120),
        ("webhook", 10, (5, 24 * 3600), None, 24 * 3600),
        ("patient", 100, (1, 3600), 24 * 3600, 6 * 3600),
        ("quick", 5, (0.1, 30), None, 120),
    ],
)
def test_values_of_the_presets(
    name: str, attempts: int, delays: tuple[float, float], total: float | None, hint: float
) -> None:
    """Each preset has its documented attempts, delays, total budget and longest hint."""
    policy = Policy.preset(name)
    assert (attempts, total, hint) == (policy.max_attempts, policy.total_budget, policy.max_hint)
    assert delays == (policy.initial_delay, policy.max_delay)
    assert max(policy.ceiling(k) for k in range(1, attempts)) <= policy.max_delay


def test_webhook_follows_the_schedule_of_standard_webhooks() -> None:
    """The webhook preset has the ten attempts of Standard Webhooks 1.0.0, over 75 h 35 min 5 s."""
    policy = Policy.preset("webhook")
    expected = [5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400]
    actual = [policy.ceiling(k) for k in range(1, policy.max_attempts)]
    assert expected == actual
    assert 75 * 3600 + 35 * 60 + 5 == sum(actual)
    assert 10 == policy.max_attempts


def test_patient_policy_has_attempts_for_a_day() -> None:
    """With each of a hundred seeds the delays of the patient preset exceed 24 hours."""
    policy = Policy.preset("patient")
    assert min(sum(policy.delays(Random(seed))) for seed in range(100)) > 24 * 3600


@pytest.mark.parametrize("name", ["", "Default", "aws", 1, None])
def test_unknown_presets(name: Any) -> None:
    """An unknown preset raises an error that lists the presets."""
    with pytest.raises(ConfigurationError) as caught:
        Policy.preset(name)
    known = "preset must be one of default, interactive, patient, quick, webhook"
    assert f"{known}, got {name!r}" == str(caught.value)


def test_delays_may_shrink_and_be_zero() -> None:
    """A multiplier below 1 shrinks the delays; a `max_delay` of 0 retries at once."""
    shrinking = Policy(multiplier=0.5, jitter="none")
    assert [0.1, 0.05, 0.025] == shrinking.delays(Random(7))
    assert [0.0, 0.0, 0.0] == Policy(max_delay=0).delays(Random(7))


# --- validation ----------------------------------------------------------------------------------

TOO_LARGE_FOR_A_FLOAT = 10**400
HEADER_RULE = "the name of a header: a token (RFC 9110) of 1 to 64 characters"
POSITIVE_FIELDS = [
    "multiplier",
    "total_budget",
    "attempt_timeout",
    "throttled_delay",
]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *((field, value, "greater than 0") for field in POSITIVE_FIELDS for value in (0, -0.0, -1)),
        *(
            (field, value, "finite")
            for field in [*POSITIVE_FIELDS, "initial_delay", "max_delay", "max_hint"]
            for value in (nan, inf, -inf, TOO_LARGE_FOR_A_FLOAT)
        ),
        ("max_attempts", 0, "at least 1"),
        ("max_attempts", -1, "at least 1"),
        ("max_delay", -1, "at least 0"),
        ("max_hint", -1, "at least 0"),
        ("initial_delay", -0.1, "at least 0"),
        ("backoff", "expo", "one of exponential, fixed, linear"),
        ("backoff", "", "one of exponential, fixed, linear"),
        ("jitter", "ful", "one of decorrelated, equal, full, none"),
        ("jitter", "FULL", "one of decorrelated, equal, full, none"),
        *(("idempotency_key_header", value, HEADER_RULE) for value in ("", "a b", "a\n", "a" * 65)),
        *(("idempotency_key_format", value, "one of plain, quoted") for value in ("PLAIN", None)),
        ("idempotency_key_format", str, "one of plain, quoted"),
    ],
    ids=str,
)
def test_invalid_values(field: str, value: float | str, rule: str) -> None:
    """An invalid value raises an error with the field, the rule and the value."""
    values: dict[str, Any] = {field: value}
    with pytest.raises(ConfigurationError) as caught:
        Policy(**values)
    assert f"{field} must be {rule}, got {short_repr(value)}" == str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *(
            (field, value, "a number")
            for field in [*POSITIVE_FIELDS, "initial_delay", "max_delay", "max_hint"]
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
        *(("idempotency_key_header", value, HEADER_RULE) for value in (None, 7, b"X-Key")),
    ],
    ids=repr,
)
def test_values_of_the_wrong_type(field: str, value: Any, rule: str) -> None:
    """A value of the wrong type raises an error with the field, the rule and the value."""
    with pytest.raises(ConfigurationTypeError) as caught:
        Policy(**{field: value})
    assert f"{field} must be {rule}, got {value!r}" == str(caught.value)


def test_classes_of_statuses() -> None:
    """The text "5xx" stands for all statuses from 500 to 599; it can be mixed with numbers."""
    policy = Policy(retryable_statuses=[429, "5xx"])
    assert {429, *range(500, 600)} == policy.retryable_statuses
    assert {*range(300, 500)} == Policy(retryable_statuses=("3xx", "4xx")).retryable_statuses
    assert policy == Policy.from_dict({"retryable_statuses": ["5xx", 429]})
    assert policy == Policy.from_dict(policy.to_dict())


def test_webhook_preset_retries_what_is_not_2xx_or_410() -> None:
    """As Standard Webhooks says, only 2xx is a success and only 410 ends the attempts."""
    statuses = Policy.preset("webhook").retryable_statuses
    assert {*range(300, 600)} - {410} == statuses


@pytest.mark.parametrize("status", ["503", "2xx", "6xx", "5XX", 503.0, True, None])
def test_statuses_of_the_wrong_type(status: Any) -> None:
    """A status that is not an int raises an error with its index in the collection."""
    with pytest.raises(ConfigurationTypeError) as caught:
        Policy(retryable_statuses=[503, status])
    rule = "must be a whole number, '3xx', '4xx' or '5xx'"
    assert f"retryable_statuses[1] {rule}, got {status!r}" == str(caught.value)


class Code(Enum):
    """An enumeration like `grpc.StatusCode`."""

    ABORTED = 10


@pytest.mark.parametrize(("code", "name"), [(Code.ABORTED, "ABORTED"), (14, "UNAVAILABLE")])
def test_codes_of_the_wrong_type(code: Any, name: str) -> None:
    """A code that is not a string raises an error with the name of the member or an example."""
    with pytest.raises(ConfigurationTypeError) as caught:
        Policy(retryable_codes=[code])
    text = f'retryable_codes[0] must be the name of a code as a string ("{name}"), got {code!r}'
    assert text == str(caught.value)


@pytest.mark.parametrize("fields", [{}, {"max_delay": 30}])
def test_max_delay_below_initial_delay(fields: dict[str, Any]) -> None:
    """A max_delay below initial_delay is rejected, and the error says that 30 is the default."""
    assert 5.0 == Policy(initial_delay=5, max_delay=5).max_delay
    with pytest.raises(ConfigurationError) as caught:
        Policy(initial_delay=60, **fields)
    text = "max_delay must be at least initial_delay (60), got 30 (the default)"
    assert text == str(caught.value)
    with pytest.raises(ConfigurationError, match=r"; for 500 ms, write initial_delay = 0\.5"):
        Policy(initial_delay=500, max_delay=200)
    with pytest.raises(ConfigurationError) as caught:
        Policy(max_delay=0.05)
    assert "max_delay must be at least initial_delay (0.1), got 0.05" == str(caught.value)


def test_timedelta_is_not_mistaken_for_milliseconds() -> None:
    """The error for a long initial delay does not suggest milliseconds for a `timedelta`."""
    with pytest.raises(ConfigurationError) as caught:
        Policy(initial_delay=timedelta(minutes=2))
    text = "max_delay must be at least initial_delay (120), got 30 (the default)"
    assert text == str(caught.value)


@pytest.mark.parametrize("backoff", ["fixed", Schedule((1, 2)), lambda k: 9.0 * k])
def test_max_delay_is_not_checked_for_other_backoffs(backoff: Any) -> None:
    """A max_delay, which limits no fixed backoff, schedule or callable, stays as it was given."""
    policy = Policy(backoff=backoff, initial_delay=60, jitter="none")

    assert (60, 30) == (policy.initial_delay, policy.max_delay)
    assert 10 == policy.replace(max_delay=10).max_delay
    assert Policy(backoff=backoff, initial_delay=1, jitter="none") == policy.replace(
        initial_delay=1
    )
    if backoff == "fixed":
        assert [60.0] * 3 == policy.delays(Random(7))
        assert policy == Policy.from_dict(policy.to_dict())
    with pytest.raises(ConfigurationError, match=r"got 30 \(the default\)"):
        Policy(backoff=backoff, initial_delay=60, jitter="decorrelated")


@pytest.mark.parametrize("status", [1, 99, 600, 1_000])
def test_statuses_out_of_range(status: int) -> None:
    """A status below 100 or above 599 is rejected."""
    with pytest.raises(ConfigurationError) as caught:
        Policy(retryable_statuses=[503, status])
    assert f"retryable_statuses[1] must be from 100 to 599, got {status}" == str(caught.value)


@pytest.mark.parametrize("code", ["unavailable", "NOT_A_CODE", ""])
def test_unknown_codes(code: str) -> None:
    """A code that gRPC does not have raises an error that lists the codes."""
    with pytest.raises(ConfigurationError) as caught:
        Policy(retryable_codes=frozenset({code}))
    assert str(caught.value).startswith("retryable_codes[0] must be one of ABORTED, ")
    assert str(caught.value).endswith(f", got {code!r}")


def test_values_are_normalized() -> None:
    """Ints become floats and collections frozen sets, so that equal policies are equal."""
    arguments: dict[str, Any] = {
        "initial_delay": 1,
        "multiplier": 2,
        "max_delay": 30,
        "total_budget": 60,
        "max_hint": 0,
        "retryable_statuses": [503, 503, 429],
        "retryable_codes": ("UNAVAILABLE",),
    }
    policy = Policy(**arguments)
    normalized = Policy(
        initial_delay=1.0,
        total_budget=60.0,
        max_hint=0.0,
        retryable_statuses=frozenset({429, 503}),
        retryable_codes=frozenset({"UNAVAILABLE"}),
    )
    assert (normalized, hash(normalized)) == (policy, hash(policy))
    assert [float] * 5 == [type(getattr(policy, name)) for name in list(arguments)[:5]]
    assert isinstance(policy.retryable_statuses, frozenset)
    assert isinstance(policy.retryable_codes, frozenset)


@pytest.mark.parametrize("backoff", ["fixed", "linear", "exponential"])
@pytest.mark.parametrize("jitter", ["none", "full", "equal", "decorrelated"])
def test_initial_delay_of_zero(backoff: Any, jitter: Any) -> None:
    """With an initial delay of 0, all retries start at once, except after a throttled attempt."""
    policy = Policy(initial_delay=0, backoff=backoff, jitter=jitter, max_attempts=10_000)

    assert {0.0} == set(policy.delays(Random(1)))
    assert {0.0} == {policy.ceiling(k) for k in (1, 2, 1_000, 9_999)}
    assert 1.0 == policy.ceiling(1, throttled=True)


def test_durations_may_be_timedeltas() -> None:
    """A `timedelta` is accepted wherever seconds are, and stored as seconds."""
    policy = Policy(
        initial_delay=timedelta(milliseconds=250),
        max_delay=timedelta(minutes=1),
        total_budget=timedelta(hours=1),
        attempt_timeout=timedelta(seconds=2),
        throttled_delay=timedelta(seconds=3),
        max_hint=timedelta(0),
        backoff=Schedule([timedelta(seconds=5), 10]),
    )

    assert (0.25, 60.0, 3600.0) == (policy.initial_delay, policy.max_delay, policy.total_budget)
    assert (2.0, 3.0, 0.0) == (policy.attempt_timeout, policy.throttled_delay, policy.max_hint)
    assert (5.0, 10.0) == (policy.ceiling(1), policy.ceiling(2))
    assert policy == Policy.from_dict(policy.to_dict())


def test_invalid_timedeltas() -> None:
    """A `timedelta` has the same bounds as a number."""
    with pytest.raises(ConfigurationError, match="total_budget must be greater than 0, got"):
        Policy(total_budget=timedelta(0))
    with pytest.raises(
        ConfigurationError, match=r"max_delay must be at least initial_delay \(0.1\)"
    ):
        Policy(max_delay=timedelta(milliseconds=1))


def test_extreme_values() -> None:
    """One attempt, a billion attempts, the smallest float and empty sets are valid."""
    assert [] == Policy(max_attempts=1).delays(Random(1))
    assert 10**9 == Policy(max_attempts=10**9).max_attempts
    assert 5e-324 == Policy(initial_delay=5e-324).initial_delay
    assert frozenset() == Policy(retryable_statuses=frozenset()).retryable_statuses
    assert frozenset() == Policy(retryable_codes=frozenset()).retryable_codes


def test_policies_are_immutable() -> None:
    """Fields cannot be set or added, and the constructor has no positional arguments."""
    policy = Policy()
    assert not hasattr(policy, "__dict__")
    with pytest.raises(TypeError):
        Policy(4)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        policy.max_attempts = 5


# --- delays --------------------------------------------------------------------------------------


@given(policies_with_delays(), st.integers(1, 10_000))
def test_ceiling(policy: Policy, k: int) -> None:
    """The ceiling of retry k is that of the named backoff or of the schedule."""
    backoff = policy.backoff
    if isinstance(backoff, str):
        values = policy.initial_delay, policy.multiplier, policy.max_delay
        assert BACKOFFS[backoff](k, *values) == policy.ceiling(k)
    else:
        assert backoff(k) == policy.ceiling(k)


@given(policies_with_delays(), st.integers(1, 10_000))
def test_throttled_ceilings_are_never_lower(policy: Policy, k: int) -> None:
    """After throttling the ceiling is not lower, and not above max_delay for a named backoff."""
    normal, throttled = policy.ceiling(k), policy.ceiling(k, throttled=True)
    assert normal <= throttled
    if isinstance(policy.backoff, str):
        assert throttled <= policy.max_delay


@given(policies_with_delays(), st.integers(0, 2**32))
def test_delays(policy: Policy, seed: int) -> None:
    """Each delay is the jitter of its ceiling, the previous delay and one random number."""
    random, previous, expected = Random(seed), policy.initial_delay, []
    assert isinstance(policy.jitter, str)
    for k in range(1, policy.max_attempts):
        arguments = policy.ceiling(k), previous, random.random()
        previous = JITTERS[policy.jitter](*arguments, policy.initial_delay, policy.max_delay)
        expected.append(previous)
    counting_random = CountingRandom(seed)
    assert expected == policy.delays(counting_random)
    assert policy.max_attempts - 1 == counting_random.calls


def test_delays_are_reproducible() -> None:
    """Equal seeds give equal delays, and other seeds other delays."""
    policy = Policy(max_attempts=10)
    assert policy.delays(Random(7)) == policy.delays(Random(7))
    assert policy.delays(Random(7)) != policy.delays(Random(8))


@pytest.mark.parametrize("backoff", sorted(BACKOFFS))
@pytest.mark.parametrize("jitter", sorted(JITTERS))
def test_ten_thousand_attempts(backoff: Any, jitter: Any) -> None:
    """A policy with 10,000 attempts has 9,999 delays, none above max_delay."""
    delays = Policy(max_attempts=10_000, backoff=backoff, jitter=jitter).delays(Random(1))
    assert 9_999 == len(delays)
    assert 0 <= min(delays) <= max(delays) <= 30.0


def test_the_standard_mode_of_aws() -> None:
    """A policy can have the delays of AWS's standard mode, random() * min(2**i, 20 s)."""
    policy = Policy(max_attempts=3, initial_delay=1, max_delay=20)
    random = Random(3)
    assert [random.random() * min(2**i, 20) for i in range(2)] == policy.delays(Random(3))


def test_jitter_as_a_callable() -> None:
    """A jitter can be a callable of ceiling, previous delay and u, such as the 20 % of gRPC."""
    arguments: list[tuple[float, float, float]] = []

    def grpc_jitter(ceiling: float, previous: float, u: float) -> float:
        arguments.append((ceiling, previous, u))
        return ceiling * (0.8 + 0.4 * u)

    policy = Policy(max_attempts=3, initial_delay=1, jitter=grpc_jitter)
    random = Random(5)
    u, v = random.random(), random.random()
    first, second = 0.8 + 0.4 * u, 2 * (0.8 + 0.4 * v)
    assert [first, second] == policy.delays(Random(5))
    assert [(1.0, 1.0, u), (2.0, first, v)] == arguments


def test_backoff_as_a_callable() -> None:
    """A backoff can be a callable that returns the ceiling for the number of a retry."""
    policy = Policy(max_attempts=5, backoff=lambda k: k * k, jitter="none")
    assert [1.0, 4.0, 9.0, 16.0] == policy.delays(Random(1))


def test_callables_can_return_zero() -> None:
    """A callable can return a delay of 0, which is converted to a float."""
    policy = Policy(backoff=lambda _k: 0, jitter=lambda c, _p, _u: int(c))
    assert "[0.0, 0.0, 0.0]" == repr(policy.delays(Random(1)))


@pytest.mark.parametrize("result", [-1, nan, inf, None, "1", True])
@pytest.mark.parametrize("field", ["backoff", "jitter"])
def test_callables_that_return_no_delay(field: str, result: Any) -> None:
    """A callable that does not return a valid delay raises an error that names the field."""
    callables: dict[str, Any] = {field: lambda *_: result}
    policy = Policy(**callables)
    with pytest.raises(ConfigurationError, match=f"^the result of {field} must be .*{result}"):
        policy.delays(Random(1))


# --- conversions and copies ----------------------------------------------------------------------


@given(policies())
def test_dict_round_trip(policy: Policy) -> None:
    """from_dict() restores a policy from to_dict(), also through JSON; None is omitted."""
    fields = policy.to_dict()
    assert [name for name in FIELD_NAMES if getattr(policy, name) is not None] == list(fields)
    assert policy == Policy.from_dict(fields) == Policy.from_dict(json.loads(json.dumps(fields)))


@given(policies())
def test_policies_can_be_copied_and_pickled(policy: Policy) -> None:
    """A copied or pickled policy has the same fields, hash and delays."""
    for other in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):  # noqa: S301
        assert (policy, hash(policy)) == (other, hash(other))
        assert policy.delays(Random(1)) == other.delays(Random(1))


def test_from_dict_fills_in_defaults() -> None:
    """Fields that the dict does not contain have their defaults."""
    assert Policy() == Policy.from_dict({})
    assert Policy(max_attempts=2) == Policy.from_dict({"max_attempts": 2})


@pytest.mark.parametrize("field", ["backoff", "jitter"])
def test_callables_cannot_be_converted_to_a_dict(field: str) -> None:
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
    """A malformed schedule raises an error that names the problem."""
    with pytest.raises(ConfigurationError) as caught:
        Policy.from_dict({"backoff": backoff})
    assert message == str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("attempts", "did you mean 'max_attempts'?"),
        ("maxAttempts", "did you mean 'max_attempts'?"),
        ("_ceilings", f"it has {', '.join(FIELD_NAMES)}"),
    ],
)
def test_unknown_fields(name: str, hint: str) -> None:
    """An unknown field raises an error with the most similar field, or else with all fields."""
    expected = f"a policy has no field {name!r}; {hint}"
    for build in (Policy.from_dict, lambda changes: Policy().replace(**changes)):
        with pytest.raises(ConfigurationError) as caught:
            build({name: 1})
        assert expected == str(caught.value)


@pytest.mark.parametrize("name", ["preset", "breaker", "budget", "limiter", "hedging"])
def test_keys_of_policy_files(name: str) -> None:
    """from_dict() rejects other keys of a policy file, and names the function that reads them."""
    with pytest.raises(ConfigurationError, match=rf"^'{name}' is a key of a .*tarry\.load_policy"):
        Policy.from_dict({name: {}})


def test_repr_recreates_the_policy() -> None:
    """The repr of a policy is an expression that creates an equal policy."""
    policy = Policy(max_attempts=2, backoff=Schedule((1.0, 2.0)))
    names = {"Policy": Policy, "Schedule": Schedule}
    assert policy == eval(repr(policy), names)  # noqa: S307


def test_replace() -> None:
    """replace() changes and checks the given fields, keeps the others and updates the ceilings."""
    policy = Policy(max_attempts=5)
    changed = policy.replace(initial_delay=1)
    assert Policy(max_attempts=5, initial_delay=1) == changed
    assert (0.1, 1.0) == (policy.ceiling(1), changed.ceiling(1))
    with pytest.raises(ConfigurationError, match=r"^max_attempts must be at least 1"):
        policy.replace(max_attempts=0)


def test_explain() -> None:
    """explain() starts with a summary of attempts, backoff and jitter."""
    assert Policy().explain().startswith("4 attempts, exponential backoff, full jitter\n")


@pytest.mark.parametrize("k", [0, -1])
def test_ceiling_of_retry_zero(k: int) -> None:
    """Retries are numbered from 1, and a smaller number is rejected."""
    with pytest.raises(ConfigurationError, match="k must be at least 1"):
        Policy().ceiling(k)
