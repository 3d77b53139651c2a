"""The command `tarry policy`: what it prints where, and how it refuses."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tarry.cli.policy_local import app
from tarry.core.policy import PRESETS, Policy
from tarry.errors import ConfigurationError, MissingExtra
from tarry.policyfile import toml
from tarry.policyfile.defence import Defence
from tarry.policyfile.export import to_grpc, to_istio

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


def refused(*arguments: object) -> str:
    """Run a command that must be refused, and return why."""
    with pytest.raises(ConfigurationError) as info:
        CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    return str(info.value)


@pytest.mark.parametrize("to", ["istio", "envoy", "gateway-api"])
def test_yaml_goes_to_stdout_and_losses_to_both(file: Path, to: str) -> None:
    """Standard output is YAML with the losses as comments; they are on standard error, too."""
    result = run("export", file, "--to", to, "--host", "payments")

    documents = list(yaml.safe_load_all(result.stdout))
    comments = [line for line in result.stdout.splitlines() if line.startswith("# ")]
    assert 2 == len(documents) == result.stdout.count("\n---\n") + 1
    assert f"# Written by `tarry policy export --to {to}`." == comments[0]
    assert [line.partition(": ")[2] for line in comments[1:]] == [
        line.partition(": ")[2] for line in result.stderr.splitlines()
    ]
    assert f"{to} differs: max_hint = 120: " in result.stderr
    assert result.stderr.startswith(f"{to} differs: safe = per call: ")


def test_documents_are_those_of_the_export(file: Path) -> None:
    """The command adds nothing to what the library makes of the policy."""
    result = run("export", file, "--to", "istio", "--host", "payments.prod", "--name", "retry")

    expected = to_istio(DEFENCE, host="payments.prod", name="retry").documents
    assert [*expected] == list(yaml.safe_load_all(result.stdout))


def test_grpc_is_json_without_comments(file: Path) -> None:
    """JSON has no comments, so the losses are on standard error alone."""
    result = run("export", file, "--to", "grpc", "--service", "a.B", "--method", "C")

    expected = to_grpc(DEFENCE, service="a.B", method="C")
    assert expected.documents[0] == json.loads(result.stdout)
    assert [f"grpc differs: {loss}" for loss in expected.losses] == result.stderr.splitlines()


def test_yaml_needs_its_extra(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyYAML the message has the line that installs it; JSON needs nothing."""
    monkeypatch.setitem(sys.modules, "yaml", None)

    assert run("export", file, "--to", "grpc").stdout
    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[sim\]'"):
        run("export", file, "--to", "envoy", "--host", "payments")


def test_preset_takes_the_place_of_a_file() -> None:
    """A preset can be exported by its name."""
    result = run("export", "interactive", "--to", "grpc")

    expected = to_grpc(Defence(PRESETS["interactive"])).documents[0]
    assert expected == json.loads(result.stdout)


def test_file_named_like_a_preset_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there is what is meant, also when it is no policy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patient").write_text("max_attempts = 2")

    assert "patient: the name must end in" in refused("explain", "patient")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "nginx"], "--to must be one of envoy, gateway-api, grpc, istio, got 'nginx'"),
        (["--to", "istio"], "--host is required for --to istio"),
        (["--to", "grpc", "--method", "M"], "method needs service"),
        (["--to", "gateway-api", "--host", "a.b"], "host must be the plain name of a Service"),
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
def test_bad_use_is_refused(file: Path, arguments: list[str], message: str) -> None:
    """Each refusal names the option and what it should have been."""
    assert message in refused("export", file, *arguments)


def test_file_that_is_wrong_is_refused_with_its_line(tmp_path: Path) -> None:
    """The line of the mistake is in the message."""
    path = tmp_path / "policy.toml"
    path.write_text("max_attempts = 3\ninitial_delay = -1\n")

    for command in (["check"], ["explain"], ["export", "--to", "grpc"]):
        assert f"{path}:2: initial_delay" in refused(*command, path)


def test_import_of_grpc_prints_toml(file: Path, tmp_path: Path) -> None:
    """An exported config comes back as a policy file that reads as it was, as far as it goes."""
    config = tmp_path / "config.json"
    run("export", file, "--to", "grpc", "--out", config)

    result = run("import", config, "--from", "grpc")

    read = Defence.from_dict(tomllib.loads(result.stdout))
    assert "retryable_statuses" not in result.stdout  # of which a service config says nothing
    expected = DEFENCE.policy.replace(jitter="equal", throttled_delay=0.1, attempt_timeout=2.0)
    assert (expected, DEFENCE.budget) == (read.policy, read.budget)
    assert result.stdout.startswith("# Written by `tarry policy import --from grpc`.\n# Differs")
    assert "tarry differs: methodConfig[0].retryPolicy = jitter: " in result.stderr


def test_import_of_istio_reads_several_documents(file: Path, tmp_path: Path) -> None:
    """A file with a VirtualService and a DestinationRule is one policy with its breaker."""
    rules, out = tmp_path / "rules.yaml", tmp_path / "back.json"
    run("export", file, "--to", "istio", "--host", "payments", "--out", rules)

    result = run("import", rules, "--from", "istio", "--out", out)

    read = Defence.from_dict(json.loads(out.read_text(encoding="utf-8")))
    assert "" == result.stdout
    assert (3, 5) == (read.policy.max_attempts, (read.breaker or {})["consecutive"])


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
def test_document_that_is_wrong_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    """The file, the line or the path of the mistake is in the message."""
    path = tmp_path / name
    path.write_text(text)

    assert message in refused("import", path, "--from", "grpc")


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
def test_bad_use_of_import_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Each refusal names the option and what it should have been."""
    assert message in refused("import", tmp_path / "none.json", *arguments)
