"""Problem details: members, defaults and what is rejected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.wire.http import Problem


def test_a_problem_says_at_least_its_type_title_and_status() -> None:
    """Missing members are left out; a problem without a type is about:blank."""
    assert {"type": "about:blank", "title": "Not Found", "status": 404} == json.loads(
        Problem(404, "Not Found").to_json()
    )


def test_a_problem_says_all_it_knows() -> None:
    """Every member and every extension stands in one object."""
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


def test_any_text_can_be_told() -> None:
    """The body is ASCII, so that text of a client, broken surrogates included, cannot break it."""
    body = Problem(400, "Bad", "ü\ud800").to_json()

    assert body.isascii()
    assert "ü\ud800" == json.loads(body)["detail"]


def test_problems_are_values() -> None:
    """Two problems that say the same are equal."""
    assert Problem(400, "Bad", extensions={"a": 1}) == Problem(400, "Bad", extensions={"a": 1})
    assert Problem(400, "Bad") != Problem(400, "Bad", "because")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"status": 99}, "status must be at least 100"),
        ({"status": 600}, "status must be at most 599"),
        ({"status": "404"}, "status must be a whole number"),
        ({"extensions": {"title": "twice"}}, "extensions must not contain 'title'"),
    ],
)
def test_what_is_no_problem_is_refused(arguments: dict[str, Any], words: str) -> None:
    """A status is one of HTTP, and an extension cannot replace a member."""
    with pytest.raises(ConfigurationError, match=words):
        Problem(**{"status": 400, "title": "Bad", **arguments})
