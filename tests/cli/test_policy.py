"""`tarry policy export` and `import`: output and errors."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tarry.cli.policy import _read_documents, app
from tarry.core.policy import POLICY_FIELDS, PRESETS, Policy
from tarry.errors import ConfigurationError, MissingExtra
from tarry.policyfile import toml
from tarry.policyfile.defence import Defence
from tarry.policyfile.grpc import to_grpc
from tarry.policyfile.istio import to_istio
from tests.simulator.file_builders import write_file

DEFENCE = Defence(
    Policy(max_attempts=3, total_budget=2.0),
    breaker={"consecutive": 5},
    budget={"kind": "throttle", "max_tokens": 10, "token_ratio": 0.1},
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A policy file."""
    path = tmp_path / "policy.toml"
    path.write_text(toml.dumps(DEFENCE.to_dict()), encoding="utf-8")
    return path


def run(*arguments: object) -> Any:
    """Run a command that must succeed."""
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert 0 == result.exit_code, result.output
    return result


def error_of(*arguments: object) -> str:
    """Run a command that must fail, and return its error message."""
    with pytest.raises(ConfigurationError) as caught:
        CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    return str(caught.value)


@pytest.mark.parametrize("to", ["istio", "envoy", "gateway-api"])
def test_yaml_has_differences_as_comments(file: Path, to: str) -> None:
    """Differences are comments in the YAML on standard output, and lines on standard error."""
    result = run("export", file, "--to", to, "--host", "payments")

    documents = list(yaml.safe_load_all(result.stdout))
    comments = [line for line in result.stdout.splitlines() if line.startswith("# ")]
    assert 2 == len(documents) == result.stdout.count("\n---\n") + 1
    assert f"# Written by `tarry policy export --to {to}`." == comments[0]
    assert [line.partition(": ")[2] for line in comments[1:]] == [
        line.partition(": ")[2] for line in result.stderr.splitlines()
    ]
    assert f"different in {to}: max_hint = 120: " in result.stderr
    assert result.stderr.startswith(f"different in {to}: repeatable = per call: ")


def test_documents_equal_those_of_the_library(file: Path) -> None:
    """The printed documents equal those of `to_istio`."""
    result = run("export", file, "--to", "istio", "--host", "payments.prod", "--name", "retry")

    expected = to_istio(DEFENCE, host="payments.prod", name="retry").documents
    assert [*expected] == list(yaml.safe_load_all(result.stdout))


def test_grpc_is_json_without_comments(file: Path) -> None:
    """JSON has no comments, so the differences are only on standard error."""
    result = run("export", file, "--to", "grpc", "--service", "a.B", "--method", "C")

    expected = to_grpc(DEFENCE, service="a.B", method="C")
    assert expected.documents[0] == json.loads(result.stdout)
    assert [
        f"different in grpc: {difference}" for difference in expected.differences
    ] == result.stderr.splitlines()


def test_yaml_needs_its_extra(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyYAML the error has the install command; JSON does not need it."""
    monkeypatch.setitem(sys.modules, "yaml", None)

    assert run("export", file, "--to", "grpc").stdout
    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[sim\]'"):
        run("export", file, "--to", "envoy", "--host", "payments")


def test_export_of_a_preset() -> None:
    """A preset can be exported by its name."""
    result = run("export", "interactive", "--to", "grpc")

    expected = to_grpc(Defence(PRESETS["interactive"])).documents[0]
    assert expected == json.loads(result.stdout)


def test_file_takes_precedence_over_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patient").write_text("max_attempts = 2")

    assert "patient: the name must end in" in error_of("explain", "patient")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "nginx"], "--to must be one of envoy, gateway-api, grpc, istio, got 'nginx'"),
        (["--to", "istio"], "--host is required for --to istio"),
        (["--to", "grpc", "--method", "M"], "method requires service"),
        (["--to", "gateway-api", "--host", "a.b"], "host must be the name of a Service"),
        (
            ["--to", "grpc", "--host", "a"],
            "--host cannot be used with --to grpc: use --service and --method",
        ),
        (["--to", "grpc", "--name", "a"], "--name cannot be used with --to grpc: use --service"),
        (["--to", "grpc", "--port", "80"], "--port cannot be used with --to grpc: use --service"),
        (
            ["--to", "istio", "--service", "a"],
            "--service cannot be used with --to istio: use --host",
        ),
        (["--to", "envoy", "--method", "a"], "--method cannot be used with --to envoy: use --host"),
        (
            ["--to", "envoy", "--host", "a", "--port", "80"],
            "--port cannot be used with --to envoy: only",
        ),
        (["--to", "grpc", "--out", "no/such/folder/a.json"], "a.json cannot be written: No such"),
    ],
    ids=" ".join,
)
def test_invalid_options_are_rejected(file: Path, arguments: list[str], message: str) -> None:
    """The error names the invalid option and the rule."""
    assert message in error_of("export", file, *arguments)


def test_invalid_file_is_rejected_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("max_attempts = 3\ninitial_delay = -1\n")

    for command in (["check"], ["explain"], ["export", "--to", "grpc"]):
        assert f"{path}:2: initial_delay" in error_of(*command, path)


@pytest.mark.parametrize("command", ["check", "explain"])
def test_scenario_instead_of_a_policy_is_rejected(command: str) -> None:
    """The error for a scenario file names the key of its policy."""
    scenario = Path(__file__).parents[2] / "examples" / "checkout.toml"

    expected = f"{scenario} is a scenario, not a policy: its policy is the value of clients.defence"
    assert expected == error_of(command, scenario)


def test_import_of_grpc_prints_toml(file: Path, tmp_path: Path) -> None:
    """An exported gRPC config is imported as the same policy, as far as gRPC supports it."""
    config = tmp_path / "config.json"
    run("export", file, "--to", "grpc", "--out", config)

    result = run("import", config, "--from", "grpc")

    imported = Defence.from_dict(tomllib.loads(result.stdout))
    assert "retryable_statuses" not in result.stdout  # a service config has no HTTP statuses
    expected = DEFENCE.policy.replace(jitter="equal", throttled_delay=0.1, attempt_timeout=2.0)
    assert (expected, DEFENCE.budget) == (imported.policy, imported.budget)
    assert result.stdout.startswith("# Written by `tarry policy import --from grpc`.\n# Different")
    assert "different in tarry: methodConfig[0].retryPolicy = jitter of 20 %: " in result.stderr


def test_import_of_istio_reads_several_documents(file: Path, tmp_path: Path) -> None:
    """A VirtualService and a DestinationRule become one policy with a breaker."""
    exported, out = tmp_path / "exported.yaml", tmp_path / "imported.json"
    run("export", file, "--to", "istio", "--host", "payments", "--out", exported)

    result = run("import", exported, "--from", "istio", "--out", out)

    imported = Defence.from_dict(json.loads(out.read_text(encoding="utf-8")))
    assert "" == result.stdout
    assert (3, 5) == (imported.policy.max_attempts, (imported.breaker or {})["consecutive"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json:1: not JSON: "),
        ("a.yaml", "a: [", "a.yaml:1: not YAML: "),
        ("a.yaml", "a: &x 1\nb: *x\n", "a.yaml:2: write the value out instead of an alias"),
        ("a.yaml", "---\n", "a.yaml: the file is empty"),
        ("a.json", "null", "a.json: the file is empty"),
        ("a.json", "[" * 100_000, "a.json: nested too deeply"),
        ("a.json", "[]", "a.json: the document must be an object, got []"),
        ("a.yaml", "a: 1\n---\nb: 2\n", "a.yaml: a service config must be one document, got 2"),
        (
            "a.yaml",
            "kind: Gateway\n",
            "a.yaml: this is not a gRPC service config: it has kind, and",
        ),
        (
            "a.json",
            '{"methodConfig": [{"retryPolicy": {"maxAttempts": 1}}]}',
            "a.json: methodConfig[0].retryPolicy.maxAttempts must be at least 2, got 1",
        ),
    ],
)
def test_invalid_document_is_rejected(tmp_path: Path, name: str, text: str, message: str) -> None:
    """The error has the file, and the line or path in it."""
    path = tmp_path / name
    path.write_text(text)

    assert message in error_of("import", path, "--from", "grpc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "envoy"], "--from must be one of grpc, istio, got 'envoy'"),
        (
            ["--from", "grpc", "--out", "a.yaml"],
            "--out must be a file name that ends in .json or .toml",
        ),
        (["--from", "grpc"], "there is no such file"),
        (
            ["--from", "istio", "--service", "a"],
            "--service cannot be used with --from istio: the first route",
        ),
    ],
    ids=" ".join,
)
def test_invalid_import_options_are_rejected(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    """The error names the invalid option and the rule."""
    assert message in error_of("import", tmp_path / "none.json", *arguments)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "---\na: 1\n---\n---\nb: [2]\n", [{"a": 1}, {"b": [2]}]),
        ("a.txt", '{"a": 1}', [{"a": 1}]),
        ("a.json", '[{"a": 1}]', [[{"a": 1}]]),
    ],
)
def test_documents_are_read(tmp_path: Path, name: str, text: str, expected: list[object]) -> None:
    """A YAML file can have several documents; empty ones are skipped. JSON has one document."""
    assert expected == _read_documents(write_file(tmp_path, name, text))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "a: 1\n---\nb: &b 2\nc: *b\n", ":4: write the value out instead of an alias"),
        ("a.yaml", "a: 1\n---\nb: 1\nb: 2\n", ":4: the key 'b' appears twice, first on line 3"),
        ("a.yaml", "a: 1\n---\n8080: 1\n", ":3: a key must be a plain name or a quoted string"),
        ("a.json", '{"a": 1,\n"a": 2}', ":2: the key 'a' appears twice in one table"),
        ("a.json", f'{{"a": {"9" * 5000}}}', ": not JSON: Exceeds the limit"),
        ("a.yaml", "#" * 1_000_001, ": too large; at most 1,000,000 bytes are allowed"),
    ],
)
def test_syntax_error_names_its_line(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """A syntax error is reported with its line, in any document of the file."""
    path = write_file(tmp_path, name, text)

    with pytest.raises(ConfigurationError) as caught:
        _read_documents(path)

    assert str(caught.value).startswith(f"{path}{expected}")


@pytest.mark.parametrize("command", ["check", "apply"])
def test_help_lists_the_fields_of_a_policy(command: str) -> None:
    """The help shows each field with its meaning, unit, bounds and default."""
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [command, "--help"])

    for field in POLICY_FIELDS:
        assert re.search(rf"^{field.name} +{re.escape(field.help)} \(", result.stdout, re.MULTILINE)
    for text in (
        "including the first. (whole number >= 1; 4)",
        "0 retries at once). (seconds >= 0; 0.1)",
        "Time for one attempt. (seconds > 0; none)",
        "with each retry. (fixed, linear, exponential; exponential)",
        "(list of 100 to 599, or a class such as 5xx; 408, 425, 429, 500, 502-504, 507, 509, 512",
        "that are retried. (list of code names; RESOURCE_EXHAUSTED, UNAVAILABLE)",
        "multiplies attempts. (true, false; false)",
        "A field can also have its name and unit in the API: initialDelayMs = 50",
    ):
        assert text in result.stdout
