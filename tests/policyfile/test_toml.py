"""Tests for the TOML writer; `tomllib` reads its output."""

from __future__ import annotations

import tomllib
from math import inf, isnan, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.policy import PRESETS
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.policyfile import toml
from tarry.policyfile.defence import Defence

scalars = st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans()
keys = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["a", "b", "a.b", "", "é"]
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
)


@given(st.dictionaries(keys, values, max_size=6))
def test_round_trip_keeps_the_values(data: dict[str, Any]) -> None:
    """`tomllib` reads any written values back unchanged."""
    assert data == tomllib.loads(toml.dumps(data))


def test_values_come_before_tables() -> None:
    """Values come first, then tables, each after an empty line; simple keys have no quotes."""
    data = {
        "max_attempts": 4,
        "backoff": {"schedule": [5.0, 300.0]},
        "jitter": "full",
        "ignore_retried_below": False,
        "breaker": {"consecutive": 5, "odd key": "a\tb"},
    }
    expected = """\
max_attempts = 4
jitter = "full"
ignore_retried_below = false

[backoff]
schedule = [5.0, 300.0]

[breaker]
consecutive = 5
"odd key" = "a\\tb"
"""

    assert expected == toml.dumps(data)


def test_empty_dict_is_an_empty_string() -> None:
    assert "" == toml.dumps({})


def test_nested_tables_have_dotted_headers() -> None:
    """The header of a nested table has both names, quoted if necessary."""
    assert '[a]\n\n[a."b.c"]\nd = 1\n' == toml.dumps({"a": {"b.c": {"d": 1}}})


def test_tables_in_a_list_are_inline() -> None:
    assert 'a = [{ b = 1, c = "x" }, {}]\n' == toml.dumps({"a": [{"b": 1, "c": "x"}, {}]})


def test_control_characters_are_escaped() -> None:
    """Characters that TOML does not allow in a string are escaped."""
    assert 'a = "\\u0000\\r\\n\\"\\\\\\u007fé"\n' == toml.dumps({"a": '\0\r\n"\\\x7fé'})


def test_numbers_that_are_not_finite_survive() -> None:
    """Infinity and NaN are written as TOML's `inf` and `nan`."""
    read = tomllib.loads(toml.dumps({"a": [inf, -inf], "b": nan}))

    assert [inf, -inf] == read["a"]
    assert isnan(read["b"])


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_survive_a_round_trip(preset: str) -> None:
    """Every preset is unchanged after it is written to TOML and read."""
    defence = Defence(PRESETS[preset], breaker={"consecutive": 5})

    assert defence == Defence.from_dict(tomllib.loads(toml.dumps(defence.to_dict())))


def test_none_is_rejected() -> None:
    """None is rejected with its path, because TOML has no null."""
    with pytest.raises(ConfigurationError, match=r"^breaker\.consecutive is None"):
        toml.dumps({"breaker": {"consecutive": None}})


def test_unsupported_type_is_rejected() -> None:
    """A value of a type that TOML does not have is rejected with its path."""
    with pytest.raises(ConfigurationTypeError, match=r"^a\.b must be a string, .* got <object"):
        toml.dumps({"a": {"b": object()}})


@pytest.mark.parametrize("data", [{1: 2}, {"a": {1: 2}}, {"a": [{1: 2}]}], ids=repr)
def test_key_that_is_no_string_is_rejected(data: dict[str, Any]) -> None:
    """A key that is not a string is rejected at any depth."""
    with pytest.raises(ConfigurationTypeError, match="key of TOML must be a string, got 1"):
        toml.dumps(data)
