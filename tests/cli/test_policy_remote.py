"""`tarry policy list`, `show` and `apply`: policies go to a service and come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tarry.client import Client
from tests.cli.harness import CommandResult

Ask = Callable[..., CommandResult]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A policy file."""
    path = tmp_path / "checkout.toml"
    path.write_text("max_attempts = 3\ntotal_budget = 2.5\n[breaker]\nconsecutive = 5\n")
    return path


def test_apply_registers_and_replaces(ask: Ask, client: Client, file: Path) -> None:
    """The name is the file's; the same again is the same version, another content the next."""
    first, again = ask("policy", "apply", file), ask("policy", "apply", file)
    file.write_text("max_attempts = 4\n")
    changed = ask("policy", "apply", file, "--json")

    assert (0, "checkout: version 1 stored\n") == (first.code, first.out)
    assert f"{file}: [breaker] is ignored: the service has its own\n" == first.err
    assert first.out == again.out
    assert (2, 4) == (changed.json["version"], changed.json["maxAttempts"])
    assert (3, 2500) == (
        client.policy("checkout", 1).max_attempts,
        client.policy("checkout", 1).total_budget_ms,
    )


def test_apply_leaves_the_rest_to_the_service(ask: Ask, client: Client, file: Path) -> None:
    """As `PUT` does; what the service cannot hold is said."""
    file.write_text("max_attempts = 3\nretry_marked = true\n")
    applied = ask("policy", "apply", file, "--name", "as-file", "--json")
    put = client.put_policy("as-json", {"maxAttempts": 3})

    assert f"{file}: retry_marked is ignored: it has no effect in the service\n" == applied.err
    assert (86_400_000, 3) == (applied.json["maxHintMs"], applied.json["maxAttempts"])
    assert put.max_hint_ms == applied.json["maxHintMs"]


@pytest.mark.parametrize("name", ["default", "interactive", "patient", "webhook"])
def test_show_prints_a_file_that_apply_takes(
    ask: Ask, client: Client, tmp_path: Path, name: str
) -> None:
    """From the service to a file and back, nothing is lost; schedules neither."""
    file = tmp_path / f"copy-of-{name}.toml"
    file.write_text(ask("policy", "show", name).out)

    applied = ask("policy", "apply", file, "--json")

    told = ask("policy", "show", name, "--json").json
    own = {"policyId", "version", "createdAt"}
    assert 0 == applied.code, applied.err
    assert {field: told[field] for field in told if field not in own} == {
        field: value for field, value in applied.json.items() if field not in own
    }


def test_list_has_own_policies_and_built_in_ones(ask: Ask, file: Path) -> None:
    """Each with its numbers."""
    ask("policy", "apply", file, "--name", "listed")

    rows = {line.split()[0]: line for line in ask("policy", "list").out.splitlines()}
    names = [policy["policyId"] for policy in ask("policy", "list", "--json").json]

    assert "  2.5 s  " in rows["listed"]
    assert "built in" in rows["webhook"]
    assert {"listed", "webhook"} <= set(names)


def test_version_can_be_chosen(ask: Ask, file: Path) -> None:
    """What was in force before can be seen."""
    ask("policy", "apply", file, "--name", "versions")
    file.write_text("max_attempts = 9\n")
    ask("policy", "apply", file, "--name", "versions")

    assert "max_attempts = 3\n" in ask("policy", "show", "versions", "--version", "1").out
    assert "max_attempts = 9\n" in ask("policy", "show", "versions").out


def test_unknown_policy_ends_with_3(ask: Ask) -> None:
    """As all that is not there."""
    assert 3 == ask("policy", "show", "none").code


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[hedging]\nafter = 0.1\n", ": the service does not support hedging"),
        ("max_attempts = 0\n", ":1: max_attempts must be"),
        ("attempt_timeout = 7200.0\n", ": attempt_timeout: attemptTimeoutMs must be"),
        ("[backoff]\nschedule = [1e14]\n", ": backoff.schedule: scheduleMs must be"),
    ],
    ids=["hedging", "wrong here", "wrong there", "wrong there, in a table"],
)
def test_mistake_in_a_file_is_named(ask: Ask, tmp_path: Path, text: str, said: str) -> None:
    """With the file and its own name for the field, whether found here or by the service."""
    path = tmp_path / "wrong.toml"
    path.write_text(text)

    done = ask("policy", "apply", path)

    assert 2 == done.code
    assert done.err.startswith(f"error: {path}{said}")


def test_name_that_the_service_refuses_is_the_option_s(ask: Ask, file: Path) -> None:
    """It does not stand in the file."""
    done = ask("policy", "apply", file, "--name", "a b")

    assert 2 == done.code
    assert "error: --name: policyId must have" in done.err


def test_version_that_is_not_there_is_told_from_the_policy(ask: Ask, tmp_path: Path) -> None:
    """The policy is there, so its newest version is named."""
    file = tmp_path / "versioned.toml"
    file.write_text("max_attempts = 3\n")
    ask("policy", "apply", file)

    done = ask("policy", "show", "versioned", "--version", "9")
    built_in = ask("policy", "show", "webhook", "--version", "9")
    unknown = ask("policy", "show", "nowhere", "--version", "9")

    assert (3, "", "error: versioned has no version 9: the newest is 1\n") == done
    assert "error: webhook has no version 9: a built-in policy has no versions\n" == built_in.err
    assert unknown.err.startswith("error: There is no such policy")
