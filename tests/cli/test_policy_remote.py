"""`tarry policy list`, `show` and `apply`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tarry.client import Client
from tarry.wire.policies import SERVICE_PRESETS
from tests.cli.harness import CommandResult

RunCli = Callable[..., CommandResult]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A policy file."""
    path = tmp_path / "checkout.toml"
    path.write_text("max_attempts = 3\ntotal_budget = 2.5\n[breaker]\nconsecutive = 5\n")
    return path


def test_apply_creates_versions(run_cli: RunCli, client: Client, file: Path) -> None:
    """The policy has the name of the file; a new version is stored only for new content."""
    first, again = run_cli("policy", "apply", file), run_cli("policy", "apply", file)
    file.write_text("max_attempts = 4\n")
    changed = run_cli("policy", "apply", file, "--json")

    assert (0, "checkout: version 1 stored\n") == (first.code, first.out)
    assert f"{file}: [breaker] is ignored: the service has its own breaker\n" == first.err
    assert first.out == again.out
    assert (2, 4) == (changed.json["version"], changed.json["maxAttempts"])
    assert (3, 2500) == (
        client.policy("checkout", 1).max_attempts,
        client.policy("checkout", 1).total_budget_ms,
    )


def test_apply_reports_ignored_fields(run_cli: RunCli, client: Client, file: Path) -> None:
    """A field without effect is reported; missing fields get the defaults of the service."""
    file.write_text("max_attempts = 3\nignore_retried_below = true\n")
    applied = run_cli("policy", "apply", file, "--name", "as-file", "--json")
    put = client.put_policy("as-json", {"maxAttempts": 3})

    effect = "has no effect, because the service does not see the retries of other layers"
    assert f"{file}: ignore_retried_below {effect}\n" == applied.err
    assert (86_400_000, 3) == (applied.json["maxHintMs"], applied.json["maxAttempts"])
    assert put.max_hint_ms == applied.json["maxHintMs"]


@pytest.mark.parametrize("option", [(), ("--json",)], ids=["toml", "json"])
@pytest.mark.parametrize("name", sorted(SERVICE_PRESETS))
def test_show_output_can_be_applied(
    run_cli: RunCli, client: Client, tmp_path: Path, name: str, option: tuple[str, ...]
) -> None:
    """The output of `show` can be applied without loss, schedules included."""
    file = tmp_path / f"copy-of-{name}{'.json' if option else '.toml'}"
    file.write_text(run_cli("policy", "show", name, *option).out)

    applied = run_cli("policy", "apply", file, "--json")

    document = run_cli("policy", "show", name, "--json").json
    version_fields = {"policyId", "version", "createdAt"}
    assert 0 == applied.code, applied.err
    assert {field: document[field] for field in document if field not in version_fields} == {
        field: value for field, value in applied.json.items() if field not in version_fields
    }


def test_show_prints_classes_of_statuses(run_cli: RunCli, file: Path) -> None:
    """A complete class of statuses is shown by name, and not as a hundred numbers."""
    file.write_text('retryable_statuses = ["5xx", 429, 404]\n')
    run_cli("policy", "apply", file, "--name", "classes")

    shown = run_cli("policy", "show", "classes").out
    assert 'retryable_statuses = [404, 429, "5xx"]' in shown.splitlines()


def test_list_has_stored_and_built_in_policies(run_cli: RunCli, file: Path) -> None:
    run_cli("policy", "apply", file, "--name", "listed")

    rows = {line.split()[0]: line for line in run_cli("policy", "list").out.splitlines()}
    names = [policy["policyId"] for policy in run_cli("policy", "list", "--json").json["items"]]

    assert "  2.5 s  " in rows["listed"]
    assert "built in" in rows["webhook"]
    assert {"listed", "webhook"} <= set(names)


def test_version_can_be_chosen(run_cli: RunCli, file: Path) -> None:
    """An older version can be shown."""
    run_cli("policy", "apply", file, "--name", "versions")
    file.write_text("max_attempts = 9\n")
    run_cli("policy", "apply", file, "--name", "versions")

    assert "max_attempts = 3\n" in run_cli("policy", "show", "versions", "--version", "1").out
    assert "max_attempts = 9\n" in run_cli("policy", "show", "versions").out


def test_unknown_policy_exits_with_3(run_cli: RunCli) -> None:
    assert 3 == run_cli("policy", "show", "none").code


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[hedging]\nafter = 0.1\n", ": the service does not support hedging"),
        ("max_attempts = 0\n", ":1: max_attempts must be"),
        ("attempt_timeout = 7200.0\n", ": attempt_timeout: attemptTimeoutMs must be"),
        ("attemptTimeoutMs = 7200000\n", ": attempt_timeout: attemptTimeoutMs must be"),
        ("[backoff]\nschedule = [1e14]\n", ": backoff.schedule: scheduleMs must be"),
    ],
    ids=[
        "hedging",
        "found locally",
        "found by the service",
        "name of the API",
        "table found by the service",
    ],
)
def test_invalid_file_is_reported(run_cli: RunCli, tmp_path: Path, text: str, message: str) -> None:
    """An error names the file and the field, whether found locally or by the service."""
    path = tmp_path / "invalid.toml"
    path.write_text(text)

    result = run_cli("policy", "apply", path)

    assert 2 == result.code
    assert result.err.startswith(f"error: {path}{message}")


def test_invalid_name_is_reported_as_option(run_cli: RunCli, file: Path) -> None:
    result = run_cli("policy", "apply", file, "--name", "a b")

    assert 2 == result.code
    assert "error: --name: policyId must be" in result.err


def test_unknown_version_names_the_newest(run_cli: RunCli, tmp_path: Path) -> None:
    file = tmp_path / "versioned.toml"
    file.write_text("max_attempts = 3\n")
    run_cli("policy", "apply", file)

    result = run_cli("policy", "show", "versioned", "--version", "9")
    built_in = run_cli("policy", "show", "webhook", "--version", "9")
    unknown = run_cli("policy", "show", "nowhere", "--version", "9")

    assert (3, "", "error: versioned has no version 9: the newest is 1\n") == result
    assert "error: webhook has no version 9: a built-in policy has no versions\n" == built_in.err
    assert unknown.err.startswith("error: There is no such policy")
