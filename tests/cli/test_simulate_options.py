"""`name=value`, lists and ranges on the command line."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.cli.simulate_options import settings, sweeps, value_of, values_of
from tarry.errors import ConfigurationError

KNOWN = {"clients.rate": 10.0, "jitter": "full"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10", 10),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("true", True),
        ("none", "none"),
        ('"10"', "10"),
        ("[1, 2]", [1, 2]),
        ("full+budget", "full+budget"),
        ("1\nb = 2", "1\nb = 2"),
    ],
)
def test_value_is_what_toml_would_read(text: str, expected: object) -> None:
    """And everything else is text."""
    assert expected == value_of(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,10,100", [1, 10, 100]),
        ("none, full", ["none", "full"]),
        ("7", [7]),
        ("10..40:10", [10, 20, 30, 40]),
        ("10..45:10", [10, 20, 30, 40]),
        ("1..3", [1, 2, 3]),
        ("0.1..0.4:0.1", [0.1, 0.2, 0.3, 0.4]),
        ("1..2:0.5", [1.0, 1.5, 2.0]),
        ("-1..1", [-1, 0, 1]),
    ],
)
def test_values_are_a_list_or_a_range(text: str, expected: list[Any]) -> None:
    """A range has both of its ends, without errors of rounding."""
    assert expected == values_of(text)


@pytest.mark.parametrize("text", ["1..x", "3..1", "1..3:0", "1..3:-1", "1..inf", "nan..3"])
def test_range_that_makes_no_sense_is_refused(text: str) -> None:
    """The message shows how one is written."""
    with pytest.raises(ConfigurationError, match=r"a range is written first\.\.last:step"):
        values_of(text)


@pytest.mark.parametrize("text", ["1..1000000000", "0..1:0.0000001"])
def test_sweep_is_bounded(text: str) -> None:
    """A slip of the finger does not run for days."""
    with pytest.raises(ConfigurationError, match="a sweep has at most 1000 values"):
        values_of(text)


def test_pairs_are_read_by_name() -> None:
    """Spaces around the sign do not matter."""
    assert {"clients.rate": 3, "jitter": "none"} == settings(
        ["clients.rate=3", "jitter = none"], KNOWN
    )
    assert {"clients.rate": [1, 2]} == sweeps(["clients.rate=1,2"], KNOWN)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["rate"], "--set is written name=value, got 'rate'"),
        (["jitter="], "--set is written name=value, got 'jitter='"),
        (["jiter=3"], "--set: no parameter 'jiter'; did you mean 'jitter'?"),
        (["x=3"], "--set: no parameter 'x'; it has clients.rate, jitter"),
        (["clients.rat=3"], "--set: no parameter 'clients.rat'; did you mean clients.rate?"),
        (["clients.budget.rate=3"], "--set: no parameter 'clients.budget.rate'; clients has rate"),
        (["servers.rate=3"], "--set: no parameter 'servers.rate'; it has clients.rate, jitter"),
        (["jitter=3", "jitter=4"], "--set: jitter is given twice"),
    ],
)
def test_mistakes_are_refused(texts: list[str], words: str) -> None:
    """Each names the option."""
    with pytest.raises(ConfigurationError) as caught:
        settings(texts, KNOWN)

    assert words == str(caught.value)


def test_two_parameters_are_swept_at_most() -> None:
    """A table of three is read by nobody."""
    with pytest.raises(ConfigurationError, match="--sweep can be given 2 times at most, got 3"):
        sweeps(["a=1", "b=1", "c=1"], KNOWN)
