"""Lengths of time in the forms of other systems."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.errors import ConfigurationError
from tarry.policyfile.documents import (
    format_gateway_duration,
    format_proto_duration,
    parse_duration,
    parse_proto_duration,
    round_to_ms,
)

GATEWAY = re.compile(r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.1, "0.1s"), (30.0, "30s"), (1.5, "1.5s"), (0.0, "0s"), (1e-9, "0.000000001s")],
)
def test_proto(seconds: float, expected: str) -> None:
    """proto3 JSON has seconds with as many decimals as it takes."""
    assert expected == format_proto_duration("field", seconds)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.1, "100ms"), (90.0, "1m30s"), (3661.001, "1h1m1s1ms"), (0.0, "0s"), (7200.0, "2h")],
)
def test_gateway(seconds: float, expected: str) -> None:
    """The Gateway API has whole numbers of units, the large ones first."""
    assert expected == format_gateway_duration("field", seconds)


@given(st.integers(0, 10**11))
def test_gateway_form_is_valid_and_reads_back(ms: int) -> None:
    """Whole milliseconds come back as they were, in a form that the API takes."""
    text = format_gateway_duration("field", ms / 1000)

    assert GATEWAY.fullmatch(text)
    assert pytest.approx(ms / 1000) == parse_duration("field", text)


@given(st.floats(1e-9, 1e9))
def test_proto_form_reads_back(seconds: float) -> None:
    """A duration comes back to the nanosecond."""
    text = format_proto_duration("field", seconds)

    assert pytest.approx(seconds, rel=1e-11, abs=1e-9) == parse_proto_duration("field", text)


@pytest.mark.parametrize(
    ("text", "right"),
    [("50ms", "0.05s"), ("1m", "60s"), ("1h30m", "5400s"), (".5s", "0.5s"), ("3us", "0.000003s")],
)
def test_proto_has_seconds_only(text: str, right: str) -> None:
    """What Go reads and proto3 JSON does not is rejected, with the form that is right."""
    with pytest.raises(
        ConfigurationError, match=rf'^a\.b must be .* got {text!r}: write "{right}"'
    ):
        parse_proto_duration("a.b", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100ms", 0.1), ("1h30m", 5400.0), ("1.5h", 5400.0), (".5s", 0.5), ("3us", 3e-6), ("0s", 0.0)],
)
def test_forms_of_go_are_read(text: str, expected: float) -> None:
    """Istio takes what Go takes, so that is read, too."""
    assert expected == parse_duration("field", text)


@pytest.mark.parametrize("text", ["", "1", "s", "-1s", "1 s", "1d", "1s ", "1s,", None, 3, 1.5])
def test_what_is_no_duration_is_refused(text: Any) -> None:
    """The message has the path, the form and the value."""
    with pytest.raises(ConfigurationError, match=r'^a\.b must be a duration such as "0\.1s", got'):
        parse_duration("a.b", text)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.1, 0.1), (0.0001, 0.001), (0.0014, 0.001), (1.0016, 1.002)]
)
def test_milliseconds(seconds: float, expected: float) -> None:
    """Proxies count whole milliseconds, and at least one."""
    assert expected == round_to_ms(seconds)


def test_lengths_that_no_format_holds_are_refused() -> None:
    """What is too long is rejected by the name of the field."""
    with pytest.raises(ConfigurationError, match=r"^max_delay must be at most 315,576,000,000 s"):
        format_proto_duration("max_delay", 1e12)
    with pytest.raises(ConfigurationError, match=r"^total_budget must be less than 100,000 h"):
        format_gateway_duration("total_budget", 4e8)
