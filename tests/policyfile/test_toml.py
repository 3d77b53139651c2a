"""The writer of TOML, held against the reader of the standard library."""

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
def test_reads_back_as_the_same_values(plain: dict[str, Any]) -> None:
    """Whatever plain values go in, the reader of the standard library gives them back."""
    assert plain == tomllib.loads(toml.dumps(plain))


def test_is_written_as_a_person_would() -> None:
    """Values come first, then tables, each after an empty line, and bare keys stay bare."""
    plain = {
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

    assert expected == toml.dumps(plain)


def test_nothing_is_an_empty_text() -> None:
    """No values give no text."""
    assert "" == toml.dumps({})


def test_nested_tables_have_dotted_headers() -> None:
    """A table in a table has both names in its header, quoted where they need it."""
    assert '[a]\n\n[a."b.c"]\nd = 1\n' == toml.dumps({"a": {"b.c": {"d": 1}}})


def test_tables_in_a_list_are_inline() -> None:
    """A list may hold tables, which have to stay on its line."""
    assert 'a = [{ b = 1, c = "x" }, {}]\n' == toml.dumps({"a": [{"b": 1, "c": "x"}, {}]})


def test_control_characters_are_escaped() -> None:
    """No character that TOML forbids in a text is written as it is."""
    assert 'a = "\\u0000\\r\\n\\"\\\\\\u007fé"\n' == toml.dumps({"a": '\0\r\n"\\\x7fé'})


def test_numbers_that_are_not_finite_survive() -> None:
    """TOML has words for infinity and for what is not a number."""
    read = tomllib.loads(toml.dumps({"a": [inf, -inf], "b": nan}))

    assert [inf, -inf] == read["a"]
    assert isnan(read["b"])


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_survive(preset: str) -> None:
    """Every preset is the same after a way through TOML."""
    defence = Defence(PRESETS[preset], breaker={"consecutive": 5})

    assert defence == Defence.from_dict(tomllib.loads(toml.dumps(defence.to_dict())))


def test_none_is_refused_with_its_place() -> None:
    """TOML has no null: the message says where it stood."""
    with pytest.raises(ConfigurationError, match=r"^breaker\.consecutive is None"):
        toml.dumps({"breaker": {"consecutive": None}})


def test_unknown_values_are_refused_with_their_place() -> None:
    """What has no form in TOML is rejected with the place where it stood."""
    with pytest.raises(ConfigurationTypeError, match=r"^a\.b must be a string, .* got <object"):
        toml.dumps({"a": {"b": object()}})


@pytest.mark.parametrize("plain", [{1: 2}, {"a": {1: 2}}, {"a": [{1: 2}]}], ids=repr)
def test_keys_that_are_no_text_are_refused(plain: dict[str, Any]) -> None:
    """A key is text, at any depth."""
    with pytest.raises(ConfigurationTypeError, match="key of TOML must be a string, got 1"):
        toml.dumps(plain)
