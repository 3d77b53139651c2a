"""Tests for the parser of `--set` and `--sweep`."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.cli.simulate import parse_parameters, parse_sweeps, parse_value, parse_values
from tarry.errors import ConfigurationError

PARAMETERS = {"clients.rate": 10.0, "jitter": "full"}


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
def test_value_is_parsed_as_toml(text: str, expected: object) -> None:
    """A value is parsed as TOML; text that is not TOML stays a string."""
    assert expected == parse_value(text)


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
def test_sweep_values_are_a_list_or_a_range(text: str, expected: list[Any]) -> None:
    """The values of a sweep are a list or an inclusive range, without rounding errors."""
    assert expected == parse_values(text)


@pytest.mark.parametrize("text", ["1..x", "3..1", "1..3:0", "1..3:-1", "1..inf", "nan..3"])
def test_invalid_range_is_rejected(text: str) -> None:
    """The error for an invalid range shows the format."""
    with pytest.raises(ConfigurationError, match=r"a range has the format first\.\.last:step"):
        parse_values(text)


@pytest.mark.parametrize("text", ["1..1000000000", "0..1:0.0000001"])
def test_number_of_values_is_limited(text: str) -> None:
    """A range with more than 1000 values is rejected."""
    with pytest.raises(ConfigurationError, match="a sweep has at most 1000 values"):
        parse_values(text)


def test_pairs_are_parsed() -> None:
    """Pairs of name and value are parsed to a dict; spaces around `=` are ignored."""
    assert {"clients.rate": 3, "jitter": "none"} == parse_parameters(
        ["clients.rate=3", "jitter = none"], PARAMETERS
    )
    assert {"clients.rate": [1, 2]} == parse_sweeps(["clients.rate=1,2"], PARAMETERS)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["rate"], "--set must have the format name=value, got 'rate'"),
        (["jitter="], "--set must have the format name=value, got 'jitter='"),
        (["jiter=3"], "--set: there is no parameter 'jiter'; did you mean 'jitter'?"),
        (["x=3"], "--set: there is no parameter 'x'; the parameters are clients.rate, jitter"),
        (
            ["clients.rat=3"],
            "--set: there is no parameter 'clients.rat'; did you mean clients.rate?",
        ),
        (
            ["clients.budget.rate=3"],
            (
                "--set: there is no parameter 'clients.budget.rate'; "
                "the parameters of clients are rate"
            ),
        ),
        (
            ["servers.rate=3"],
            "--set: there is no parameter 'servers.rate'; the parameters are clients.rate, jitter",
        ),
        (["jitter=3", "jitter=4"], "--set sets jitter twice"),
    ],
)
def test_invalid_pairs_are_rejected(texts: list[str], message: str) -> None:
    """The error for an invalid pair names the option."""
    with pytest.raises(ConfigurationError) as caught:
        parse_parameters(texts, PARAMETERS)

    assert message == str(caught.value)


def test_at_most_two_parameters_are_swept() -> None:
    with pytest.raises(ConfigurationError, match="--sweep can be used at most 2 times, got 3"):
        parse_sweeps(["a=1", "b=1", "c=1"], PARAMETERS)
