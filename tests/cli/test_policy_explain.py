"""`tarry policy explain` and `tarry policy check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tarry.core.hedging import Hedging
from tarry.core.policy import PRESETS
from tarry.policyfile.defence import Defence
from tarry.policyfile.explain import explain
from tests.cli.test_policy import error_of, run


def write_policy(folder: Path, data: dict[str, Any]) -> Path:
    """Write a policy file and return its path."""
    path = folder / "policy.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    "defence",
    [
        Defence(),
        Defence(breaker={"consecutive": 5}, budget={"kind": "ratio", "ratio": 0.5}),
        Defence(hedging=Hedging(after="p95"), limiter={"kind": "aimd"}),
    ],
    ids=repr,
)
def test_explain_describes_the_file(tmp_path: Path, defence: Defence) -> None:
    """`explain` prints the description of the whole file, and nothing else."""
    path = write_policy(tmp_path, defence.to_dict())

    assert f"{explain(defence)}\n" == run("explain", path).stdout


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "up to 4 attempts (all fields have their defaults)"),
        ({"max_attempts": 1}, "1 attempt"),
        ({"breaker": {}, "budget": {"kind": "token"}}, "up to 4 attempts, breaker, budget"),
        ({"hedging": {"after": 0.1}}, "up to 2 attempts, hedged"),
    ],
    ids=repr,
)
def test_check_summarizes_a_valid_file(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    """`check` prints a one-line summary of a valid file without warnings."""
    path = write_policy(tmp_path, data)

    result = run("check", path)

    assert (f"{path}: ok: {message}\n", "") == (result.stdout, result.stderr)


def test_check_warns(tmp_path: Path) -> None:
    """`check` prints warnings on standard error; the file is still valid."""
    path = write_policy(tmp_path, {"retryable_statuses": [200, 404], "total_budget": 0.05})

    result = run("check", path)

    assert f"{path}: ok: up to 4 attempts\n" == result.stdout
    assert ["retryable_statuses has 200", "retryable_statuses has 404", "total_budget = 0.05"] == [
        line.removeprefix(f"{path}: warning: ").partition(":")[0].partition(" may ")[0]
        for line in result.stderr.splitlines()
    ]


def test_check_of_milliseconds(tmp_path: Path) -> None:
    """A file with only an initial delay in milliseconds gets an error with the value in seconds."""
    path = write_policy(tmp_path, {"initial_delay": 500})

    message = error_of("check", path)

    assert "got 30 (the default); for 500 ms, write initial_delay = 0.5" in message


@pytest.mark.parametrize("command", [["check"], ["explain"], ["export", "--to", "grpc"]])
def test_unknown_name_lists_the_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    expected = f"'webhok' is neither a file nor a preset; the presets are {', '.join(PRESETS)}"
    assert expected == error_of(*command, "webhok")
