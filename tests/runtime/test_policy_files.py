"""Tests for `load_policy`, which builds a policy and a downstream from a policy file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tarry

CONTENT: dict[str, Any] = {
    "max_attempts": 3,
    "initial_delay": 0.5,
    "budget": {"kind": "ratio", "ratio": 0.05},
}
TOML = """
max_attempts = 3
initial_delay = 0.5

[budget]
kind = "ratio"
ratio = 0.05
"""


@pytest.mark.parametrize("suffix", [".toml", ".json", ".JSON"])
@pytest.mark.parametrize("as_text", [False, True], ids=["path", "text"])
def test_file(suffix: str, as_text: bool, tmp_path: Path) -> None:
    """A TOML or JSON file gives its policy, and a downstream with its budget."""
    path = tmp_path / f"policy{suffix}"
    path.write_text(TOML if suffix == ".toml" else json.dumps(CONTENT))

    policy, downstream = tarry.load_policy(str(path) if as_text else path, "payments")

    assert tarry.Policy(max_attempts=3, initial_delay=0.5) == policy
    assert "payments" == downstream.name
    assert isinstance(downstream.budget, tarry.RatioBudget)
    assert None is downstream.breaker
    assert "done" == tarry.call(lambda: "done", policy=policy, downstream=downstream)


def test_each_downstream_has_its_own_budget() -> None:
    """Two calls with the same content create two budgets."""
    (_, first), (_, second) = (tarry.load_policy(CONTENT, name) for name in ("a", "b"))

    assert first.budget is not second.budget


def test_all_tables_are_used() -> None:
    """Breaker, budget and limiter of the file are in the downstream."""
    tables = {"breaker": {"consecutive": 3}, "budget": {"kind": "token"}}
    limiter = {"limiter": {"kind": "in-flight", "limit": 7}}

    policy, downstream = tarry.load_policy({"preset": "interactive", **tables, **limiter}, "a")

    assert tarry.Policy.preset("interactive") == policy
    assert tarry.BreakerState.CLOSED is downstream.state
    assert isinstance(downstream.budget, tarry.TokenBudget)
    assert downstream.has_limiters


def test_names_of_the_api() -> None:
    """Fields may have the names and units of the service's API."""
    policy, _ = tarry.load_policy({"maxAttempts": 3, "initialDelayMs": 500}, "a")

    assert tarry.Policy(max_attempts=3, initial_delay=0.5) == policy


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.toml", "max_attempts = 0", "max_attempts must be at least 1, got 0"),
        ("p.toml", "max_attempts", "Expected '=' after a key"),
        ("p.toml", "[budget]\nkind = 'token'\ncapacty = 3", "did you mean 'capacity'?"),
        ("p.toml", "budgets = 1", "a policy has no field 'budgets'"),
        ("p.toml", "[hedging]\nafter = 'p95'", "tarry.Hedging(...) or tarry.hedge(...)"),
        ("p.json", "[1]", "a policy file must contain an object, got [1]"),
        ("p.json", "{", "Expecting property name"),
        ("p.json", "[" * 100_000, "the content is nested too deeply"),
        ("p.toml", "a = " + "[" * 100_000, "the content is nested too deeply"),
        ("p.toml", "[breaker]\nopen_for = 0", "breaker.open_for must be greater than 0"),
        ("p.yaml", "", "must end in .toml or .json; for other formats, pass the content as a dict"),
    ],
)
def test_error_names_the_file(name: str, text: str, message: str, tmp_path: Path) -> None:
    """An invalid file raises `ConfigurationError` with the path and the mistake."""
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(tarry.ConfigurationError) as caught:
        tarry.load_policy(path, "payments")

    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_file_that_is_not_utf8(suffix: str, tmp_path: Path) -> None:
    """A file that is not UTF-8 raises `ConfigurationError` with the path."""
    path = tmp_path / f"policy{suffix}"
    path.write_bytes(b"\xff")

    with pytest.raises(tarry.ConfigurationError, match="can't decode byte 0xff") as caught:
        tarry.load_policy(path, "payments")

    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("source", [None, [], b"policy.toml"])
def test_source_of_another_type(source: Any) -> None:
    """A source that is neither a path nor a dict, such as an empty YAML file, is rejected."""
    with pytest.raises(tarry.ConfigurationTypeError, match=r"^source must be the path of a policy"):
        tarry.load_policy(source, "payments")


@pytest.mark.parametrize("key", ["preset", "breaker", "budget", "limiter", "hedging"])
def test_policy_from_dict_names_load_policy(key: str) -> None:
    """`Policy.from_dict` of the content of a policy file says which function to use."""
    with pytest.raises(tarry.ConfigurationError, match=rf"'{key}' is a key.*tarry\.load_policy"):
        tarry.Policy.from_dict({"max_attempts": 3, key: {}})
