"""Tests for problem details: members, defaults and invalid arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.wire.http import Problem


def test_a_problem_has_at_least_type_title_and_status() -> None:
    """Members that are not set are omitted; the default type is about:blank."""
    assert {"type": "about:blank", "title": "Not Found", "status": 404} == json.loads(
        Problem(404, "Not Found").to_json()
    )


def test_a_problem_with_all_members() -> None:
    """Members and extensions are members of one JSON object."""
    problem = Problem(
        422, "Wrong", "The sum is off.", "https://example.com/wrong", "/orders/1", {"field": "sum"}
    )

    assert {
        "type": "https://example.com/wrong",
        "title": "Wrong",
        "status": 422,
        "detail": "The sum is off.",
        "instance": "/orders/1",
        "field": "sum",
    } == json.loads(problem.to_json())


def test_any_text_can_be_encoded() -> None:
    """The body is ASCII, so that a lone surrogate in a client's text can be encoded."""
    body = Problem(400, "Bad", "ü\ud800").to_json()

    assert body.isascii()
    assert "ü\ud800" == json.loads(body)["detail"]


def test_problems_are_values() -> None:
    """Two problems with equal members are equal."""
    assert Problem(400, "Bad", extensions={"a": 1}) == Problem(400, "Bad", extensions={"a": 1})
    assert Problem(400, "Bad") != Problem(400, "Bad", "because")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"status": 99}, "status must be at least 100"),
        ({"status": 600}, "status must be at most 599"),
        ({"status": "404"}, "status must be a whole number"),
        ({"extensions": {"title": "twice"}}, "extensions must not contain 'title'"),
    ],
)
def test_invalid_problems(arguments: dict[str, Any], pattern: str) -> None:
    """A status that HTTP does not have and an extension named like a member are rejected."""
    with pytest.raises(ConfigurationError, match=pattern):
        Problem(**{"status": 400, "title": "Bad", **arguments})
