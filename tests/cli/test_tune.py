"""`tarry tune`: output, files and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from io import StringIO
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import tarry
from tarry.cli.tune import print_comparison, tune
from tarry.errors import ConfigurationError
from tarry.simulator.files import read_defence
from tarry.tuning.comparison import compare_policies
from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose, to_json
from tests.tuning.builders import LogModel, write_csv, write_jsonl

if TYPE_CHECKING:
    from typer.testing import Result

LOG_MODEL = LogModel(
    calls=8_000,
    rate=30.0,
    sigma=0.8,
    success_rates=(0.97, 0.9, 0.9, 0.001),
    outages=((50, 70), (120, 140), (200, 220)),
)
FIELDS = [
    "attempt_timeout",
    "initial_delay",
    "max_delay",
    "max_attempts",
    "budget",
    "hedging.after",
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tuning.md"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(tune)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with enough data for every setting."""
    return write_csv(tmp_path_factory.mktemp("logs") / "log.csv", LOG_MODEL.attempts())


@pytest.fixture
def small_log(tmp_path: Path) -> Path:
    """A log that is too small for every setting."""
    return write_jsonl(
        tmp_path / "small.jsonl", LogModel(calls=37, success_rates=(1.0,)).attempts()
    )


def run(*arguments: object, width: int = 140) -> Result:
    """Run `tarry tune` in this process."""
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": str(width)})


def error_of(*arguments: object) -> str:
    """Run a command that must fail; return its error message."""
    error = run(*arguments).exception

    assert isinstance(error, ConfigurationError)
    return str(error)


def test_tables(log: Path) -> None:
    """The output has a row with a reason for each field, then hedging and the comparison."""
    result = run(log, "--seed", 3)

    assert 0 == result.exit_code
    assert "8,000 calls in " in result.stdout
    assert ", 3 outages" in result.stdout
    assert [] == [field for field in FIELDS if field not in result.stdout]
    assert "p99.5 of successful attempts outside" in result.stdout
    assert "of the time: drop it" in result.stdout
    assert "3 attempts wait at most 200 ms" in result.stdout
    assert "hedge percentile" in result.stdout
    assert "simulated: " in result.stdout
    assert " requests at a time, about twice the concurrency in the log" in result.stdout
    assert "requests per call" in result.stdout
    assert re.search(r" +in the log +current +proposed\n", result.stdout)
    assert re.search(r"Better: .*fewer\s+requests\s+per\s+call", result.stdout, re.DOTALL)
    assert result.stdout == run(log, "--seed", 3).stdout


def test_tables_at_80_columns(log: Path) -> None:
    """At 80 columns the names of all fields are complete, and no line is longer."""
    result = run(log, "--no-simulate", width=80)

    assert [] == [field for field in FIELDS if field not in result.stdout]
    assert 80 >= max(map(len, result.stdout.splitlines()))
    assert "simulated" not in result.stdout


@pytest.mark.parametrize("name", ["policy.toml", "policy.json", "POLICY.TOML"])
def test_written_policy_can_be_read(log: Path, tmp_path: Path, name: str) -> None:
    """The written policy is valid, and tuning it again proposes the same policy."""
    out = tmp_path / name
    written = run(log, "--out", out, "--no-simulate")
    tuned_again = run(log, "--policy", out, "--json", "--no-simulate")

    assert f"written to {out}" in written.stdout
    assert read_defence(out).to_dict() == json.loads(tuned_again.stdout)["policy"]
    if out.suffix == ".toml":
        assert 3 == tomllib.loads(out.read_text())["max_attempts"]
    policy, downstream = tarry.load_policy(out, "payments")
    assert (3, tarry.RatioBudget) == (policy.max_attempts, type(downstream.budget))


def test_json(log: Path) -> None:
    """JSON has the log, the suggestions, the proposed policy and the simulation."""
    document = json.loads(run(log, "--json", "--latency-target", "600ms").stdout)

    assert ["log", "warnings", "suggestions", "policy", "simulated"] == list(document)
    assert {*FIELDS, "total_budget"} == {line["field"] for line in document["suggestions"]}
    assert 0.6 == document["policy"]["total_budget"]
    assert 3 == len(document["log"]["outages"])
    assert document["log"]["max_concurrency"] * 2 == document["simulated"]["concurrency"]
    assert document["simulated"]["new"]["requests"] < document["simulated"]["old"]["requests"]


def test_too_little_data_is_reported(small_log: Path) -> None:
    """A small log changes no setting; the output says how much data is missing."""
    result = run(small_log)

    assert 0 == result.exit_code
    assert 6 == result.stdout.count("too little data: ")
    assert "not simulated: the proposed policy equals the current one" in result.stdout
    assert "hedge percentile" not in result.stdout
    assert "simulated" not in json.loads(run(small_log, "--json").stdout)


def test_too_little_to_simulate_is_reported(small_log: Path) -> None:
    """37 latencies are too few for a simulation, which is reported."""
    result = run(small_log, "--latency-target", "2s")

    assert (
        "not simulated: too little data: 37 attempts succeeded outside outages, 100 needed"
        in result.stdout
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "log.csv: the log has no attempts: the file is empty"),
        ("taskId\n", "log.csv:1: column attemptNumber is missing; there are 'taskId'"),
    ],
)
def test_invalid_logs(tmp_path: Path, text: str, message: str) -> None:
    """An invalid log is reported with file and line."""
    path = tmp_path / "log.csv"
    path.write_text(text)

    assert message in error_of(path)


def test_invalid_arguments(log: Path, tmp_path: Path) -> None:
    """Invalid arguments are rejected before the log is read."""
    missing = tmp_path / "missing"

    assert "--out must be a file name that ends in .json or .toml" in error_of(
        missing, "--out", "p.yaml"
    )
    assert "--latency-target must be a time" in error_of(missing, "--latency-target", "soon")
    assert "missing.toml: there is no such file" in error_of(log, "--policy", f"{missing}.toml")
    assert "missing: there is no such file" in error_of(missing)


def test_missing_output_folder_is_reported(tmp_path: Path) -> None:
    """A missing output folder is reported before the log is read."""
    out = tmp_path / "nowhere" / "policy.toml"

    assert f"--out: {out} cannot be written: " in error_of(tmp_path / "missing", "--out", out)


def test_policy_is_written_atomically(small_log: Path, tmp_path: Path) -> None:
    """The output file is replaced atomically."""
    out = tmp_path / "policy.json"
    out.write_text("old")
    old_inode = out.stat().st_ino
    run(small_log, "--out", out, "--latency-target", "2s")

    assert 2.0 == json.loads(out.read_text())["total_budget"]
    assert old_inode != out.stat().st_ino
    assert {small_log, out} == set(tmp_path.iterdir())


def test_missing_value_is_a_dash() -> None:
    """A missing value is "-" in the table and null in JSON."""
    evidence = analyze_log(LOG_MODEL.log())
    proposal = propose(evidence)
    comparison = compare_policies(evidence, proposal.current, proposal.proposed)
    assert comparison is not None
    comparison = comparison._replace(
        current=replace(comparison.current, p50=nan, p99=nan, p999=nan)
    )
    console = Console(width=80, record=True, file=StringIO())
    print_comparison(console, evidence, proposal, comparison)

    assert 3 == len(re.findall(r"p\S+ of calls +\d\S* ms +- +\d", console.export_text()))
    assert None is json.loads(to_json(evidence, proposal, comparison))["simulated"]["old"]["p99"]


def test_paths_are_escaped(small_log: Path, tmp_path: Path) -> None:
    """Markup and control characters in a path are escaped."""
    out = tmp_path / "[red]\x1b[2J.toml"
    result = run(small_log, "--out", out)

    assert "[red]\\x1b[2J.toml" in result.stdout
    assert "\x1b" not in result.stdout


def test_page_names_every_field_and_every_option() -> None:
    """docs/tuning.md documents each proposed field and each option."""
    page = PAGE.read_text(encoding="utf-8")
    options = [option for option in typer.main.get_command(app).params if option.name != "log"]
    names = [option.opts[0] for option in options]

    assert [] == [field for field in [*FIELDS, "total_budget"] if f"| `{field}` |" not in page]
    assert [] == [name for name in names if name not in page]


def test_page_shows_the_output(tmp_path: Path) -> None:
    """The output in docs/tuning.md is the output of the command."""
    example = ROOT / "examples" / "payments_log.py"
    subprocess.run([sys.executable, str(example)], check=True, cwd=tmp_path)
    result = run(tmp_path / "payments.csv", "--latency-target", "2s", "--no-simulate", width=100)
    lines = [line.rstrip() for line in result.stdout.splitlines()]

    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")
