"""Tests for well-formed, malformed and long `RateLimit` fields."""

from __future__ import annotations

import pytest

from tarry.core.hints import Hint, hint_from_headers
from tests.core.header_strategies import NOW


def delay_from_rate_limit(*lines: str) -> float | None:
    """Return the delay of a `RateLimit` field with these lines."""
    hint = hint_from_headers([("RateLimit", line) for line in lines], NOW)
    assert hint is None or hint == Hint(hint.delay, source="ratelimit")
    return None if hint is None else hint.delay


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('"default";r=50;t=30', None),  # the draft's example, with quota left
        ('"default";r=0;t=30', 30.0),
        ('"default";t=30;r=0', 30.0),
        ('"default";r=0;t=0', 0.0),
        ('"default";r=00;t=007', 7.0),
        ('"default";r=0', None),
        ('"default";  r=0;  t=30', 30.0),
        ('  "default";r=0;t=30  ', 30.0),
        ('"default";r=0;t=30, "daily";r=0;t=3600', 3600.0),
        ('"daily";r=0;t=3600 \t,\t "default";r=0;t=30', 3600.0),
        ('"default";r=0;t=30,"daily";r=9;t=3600', 30.0),
        ('"default";r=0,"daily";r=0;t=3600', 3600.0),
        ('"";r=0;t=30', 30.0),
        (r'"a \"b\" \\, c; r=1";r=0;t=30', 30.0),
        ('"default";r=0;t=999999999999999', 999_999_999_999_999.0),
        ('"default";r=1;r=0;t=5;t=6', 6.0),  # the last of two equal parameters wins
        ('"default";r=0;r=1;t=5', None),
    ],
)
def test_rate_limit(line: str, expected: float | None) -> None:
    """The delay is the longest reset time of the exhausted quotas."""
    assert expected == delay_from_rate_limit(line)


@pytest.mark.parametrize(
    "bare_item",
    [
        *(":cHsdIHk=:", "::", "a", "*a:/b", "A'%", '"x;t=9"', '"\\"\\\\"', "?0", "?1", "1", "-1"),
        *("1.5", "-123456789012.125", "@1659578233", "@-1", '%"f%c3%bc"', '%""'),
    ],
)
def test_unknown_parameters(bare_item: str) -> None:
    """Parameters that the draft does not define can have any type and are ignored."""
    line = f'"default";pk={bare_item};r=0;*x-1_.;t=30;z={bare_item}'
    assert 30.0 == delay_from_rate_limit(line)


@pytest.mark.parametrize(
    "line",
    [
        # invalid lists
        *("", ",", '"default";r=0;t=30,', ',"default";r=0;t=30', '"a";r=0;t=1,,"b";r=0;t=2'),
        *('"a";r=0;t=1 "b";r=0;t=2', '"a";r=0;t=1;', '"a";r=0;t=1 x'),
        # invalid items
        *("default;r=0;t=30", "'default';r=0;t=30", '"default;r=0;t=30', '("default");r=0;t=30'),
        *(
            '"a\\b";r=0;t=30',
            '"a\tb";r=0;t=30',
            '"\u00fc";r=0;t=30',
            '"\x7f";r=0;t=30',
            "1;r=0;t=3",
        ),
        *("limit=100, remaining=0, reset=50", "100", '"a\\'),
        # invalid parameters
        *('"a" ;r=0;t=30', '"a";R=0;t=30', '"a";r =0;t=30', '"a";r= 0;t=30', '"a";;r=0;t=30'),
        *('"a";r=;t=30', '"a";=0;t=30', '"a";1r=0;r=0;t=30', '"a";\tr=0;t=30'),
        # values of types that the draft does not allow
        *('"a"', '"a";t=30', '"a";r;t=30', '"a";r=0;t', '"a";r=-1;t=30', '"a";r=0;t=-1'),
        *('"a";r=0.0;t=30', '"a";r=0;t=30.0', '"a";r="0";t=30', '"a";r=0;t="30"', '"a";r=?0;t=30'),
        *('"a";r=@0;t=30', '"a";r=none;t=30', '"a";r=0;t=:MzA=:'),
        *('"a";r=0;t=1234567890123456', '"a";r=0;t=\u0663'),
        # malformed values
        *('"a";x=1.;r=0;t=1', '"a";x=1.2345;r=0;t=1', '"a";x=1234567890123.1;r=0;t=1'),
        *('"a";x=?2;r=0;t=1', '"a";x=:#:;r=0;t=1', '"a";x=:a;r=0;t=1', '"a";x=--1;r=0;t=1'),
        *('"a";x=%"%FF";r=0;t=1', '"a";x=%a;r=0;t=1', '"a";x=(1);r=0;t=1', '"a";x=@1.5;r=0;t=1'),
    ],
)
def test_malformed_rate_limit(line: str) -> None:
    """A syntax error anywhere makes the complete field invalid, including its valid lines."""
    assert None is delay_from_rate_limit(line)
    assert None is delay_from_rate_limit(line, '"default";r=0;t=30')


def test_rate_limit_lines_are_one_list() -> None:
    """Lines of the same name are joined before they are parsed."""
    assert 60.0 == delay_from_rate_limit('"a";r=0;t=30', '"b";r=0;t=60')


def test_rate_limit_of_a_cached_response() -> None:
    """The RateLimit of a cached response is ignored."""
    pairs = [("RateLimit", '"default";r=0;t=30'), ("Age", "0")]
    assert None is hint_from_headers(pairs, NOW)
    assert Hint(5.0, source="retry-after") == hint_from_headers([*pairs, ("Retry-After", "5")], NOW)


@pytest.mark.parametrize(
    ("prefix", "repeated", "suffix"),
    [
        ('"', "a", ""),
        ('"', "\\", "x"),
        ('"a"', ";r=0", "="),
        ("", '"a";r=0, ', ""),
        ('"a";', " ", ""),
        ('"a";x="', '\\"', ""),
    ],
)
def test_long_rate_limits(prefix: str, repeated: str, suffix: str) -> None:
    """A long malformed field is parsed in linear time."""
    assert None is delay_from_rate_limit(prefix + repeated * 30_000 + suffix)
