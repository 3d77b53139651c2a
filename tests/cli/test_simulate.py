"""`tarry simulate`: scenarios, files and invalid arguments."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.simulator.scenarios import STUDIES
from tests.cli.harness import run_process
from tests.cli.harness import run_simulate as run
from tests.simulator.file_builders import CHECKOUT, SMALL, write_file
from tests.test_docs import DOCS, blocks_of

SHORT_RUN = ("--set", "duration=20", "--jobs", "1")
PAGE = DOCS / "scenario-files.md"


def test_no_argument_lists_the_scenarios() -> None:
    """Without arguments, the command lists each scenario with its question."""
    result = run(width=200)

    assert 0 == result.exit_code
    for study in STUDIES.values():
        assert re.search(
            rf"^{study.name} +{re.escape(study.question)}", result.stdout, re.MULTILINE
        )


def test_scenarios_are_listed_as_json() -> None:
    """`--json` lists the scenarios with variants and parameters."""
    studies = json.loads(run("--json").stdout)

    assert list(STUDIES) == [study["name"] for study in studies]
    assert {"attempts": 4} == studies[2]["parameters"]


def test_page_shows_the_example_and_its_output() -> None:
    """docs/scenario-files.md shows the example file and its output."""
    blocks = [block.text for block in blocks_of(PAGE)]

    result = run_process("simulate", "examples/checkout.toml")

    command = "$ tarry simulate examples/checkout.toml\n"
    printed = "".join(f"{line.rstrip()}\n" for line in result.stdout.splitlines())
    assert CHECKOUT.read_text(encoding="utf-8") == blocks[0]
    assert command + printed == blocks[1]


def test_error_on_the_page_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error on the page is the command's output."""
    command = "$ tarry simulate checkout.toml\nerror: "
    (shown,) = (block.text for block in blocks_of(PAGE) if block.text.startswith(command))
    write_file(
        tmp_path, "checkout.toml", CHECKOUT.read_text("utf-8").replace("instances", "instanses")
    )
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigurationError) as caught:
        run("checkout.toml")

    assert shown == f"{command}{caught.value}\n"


def test_assertions_on_the_page_hold() -> None:
    result = run(CHECKOUT, "--assert", "careful: amplification < 1.2", "--assert", "crashes == 0")

    assert (0, "all assertions hold") == (result.exit_code, result.stdout.splitlines()[-1])


def test_builtin_scenario_with_a_parameter() -> None:
    """A built-in scenario runs with a changed parameter in one process."""
    result = run("retry-after", "--set", "clients=50", "--variants", "full", "--jobs", "1")

    assert 0 == result.exit_code
    assert STUDIES["retry-after"].question in " ".join(result.stdout.split())


def test_reports_are_written(tmp_path: Path) -> None:
    """Each report format is written; the HTML report has the command line."""
    html, png, svg = tmp_path / "a.html", tmp_path / "b.png", tmp_path / "c.svg"

    result = run(
        CHECKOUT, *SHORT_RUN, "-q", "--html", str(html), "--png", str(png), "--svg", str(svg)
    )

    assert (0, "") == (result.exit_code, result.output)
    verbose_result = run(CHECKOUT, *SHORT_RUN, "--svg", svg)
    assert f"written to {svg}\n" == verbose_result.stderr
    assert f"tarry simulate {CHECKOUT} --set" in html.read_text("utf-8")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize("option", ["--html", "--png", "--svg"])
def test_missing_extra_of_a_report_is_reported_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Without the package that draws the charts, the command fails and simulates nothing."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.setattr("tarry.simulator.study.run_study", lambda *_, **__: pytest.fail("was run"))
    result = run("storm", option, tmp_path / f"report.{option[2:]}")

    assert isinstance(result.exception, MissingExtra)
    assert "pip install 'tarry[sim]'" in str(result.exception)


def test_scenario_files_are_compared(tmp_path: Path) -> None:
    """`--compare` of scenario files prints one table with a row for each."""
    before = write_file(tmp_path, "before.toml", SMALL)
    after = write_file(tmp_path, "after.toml", SMALL.replace("0.01", "0.02"))

    result = run("--compare", before, after)

    assert re.search(r"^before .*\nafter ", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("scenario", ["storm", CHECKOUT])
def test_policy_files_are_compared_in_a_scenario(tmp_path: Path, scenario: object) -> None:
    """Compared policies replace the variants of the scenario."""
    once = write_file(tmp_path, "once.toml", "max_attempts = 1")
    twice = write_file(tmp_path, "twice.toml", "max_attempts = 2")
    options = ("--set", "clients=50") if scenario == "storm" else SHORT_RUN

    result = run(scenario, "--compare", once, twice, *options)

    assert 0 == result.exit_code
    assert re.search(r"^once .*\ntwice ", result.stdout, re.MULTILINE)


def test_presets_are_compared(tmp_path: Path) -> None:
    """Presets can be compared by name; the lesson of the scenario is not printed."""
    once = write_file(tmp_path, "once.toml", "max_attempts = 1")

    result = run("storm", "--compare", once, "interactive", "--set", "clients=50")

    assert re.search(r"^once .*\ninteractive ", result.stdout, re.MULTILINE)
    assert result.stdout.rstrip().endswith("seed 0, 1 trial for each row")


INVALID_ARGUMENTS = [
    (["strom"], "'strom' is neither a scenario nor a file; did you mean 'storm'?"),
    (["storm", "hedging"], "got 2 scenarios; use --compare to compare several files"),
    (["storm", "--compare"], "--compare needs policies to compare in storm"),
    ([str(CHECKOUT), "--compare"], f"--compare needs at least two files, got only {CHECKOUT}"),
    (
        ["storm", "--compare", "defalt"],
        "'defalt' is neither a file nor a preset; the presets are default",
    ),
    (["storm", "--set", "clients=3", "--sweep", "clients=4"], "clients is both set and swept; l"),
    (["storm", "--png", "x.svg"], "--png must be a file name that ends in .png, got 'x.svg'"),
    (
        ["storm", "--html", "x.pdf"],
        "--html must be a file name that ends in .html or .htm, got 'x.pdf'",
    ),
    (
        ["contention", "--compare", str(CHECKOUT)],
        "--compare cannot be used with contention: its variants",
    ),
    (
        ["storm", "--compare", str(CHECKOUT)],
        f"{CHECKOUT} is a scenario, not a policy: ",
    ),
    (
        ["storm", "--set", "client=3"],
        "--set: there is no parameter 'client'; did you mean 'clients'?",
    ),
    (["storm", "--set", "clients=few"], "clients must be a whole number, got 'few'"),
    (["storm", "--set", "clients=0"], "clients must be at least 1, got 0"),
    (["storm", "--variants", "ful"], "defence must be one of "),
    (["storm", "--trials", "0"], "trials must be at least 1, got 0"),
    (["storm", "--jobs", "0"], "jobs must be at least 1, got 0"),
    (["storm", "--assert", "p99 ~ 3"], "cannot parse the assertion 'p99 ~ 3'; write "),
    ([str(CHECKOUT), "--sweep", "bucket=0,1"], "bucket = 0: bucket must be greater than 0, got 0"),
    (["storm", "--html", "/no/such/x.html"], "--html: /no/such/x.html cannot be written: No such"),
    (["storm", "--png", "/no/such/x.png"], "--png: /no/such/x.png cannot be written: No such"),
]


@pytest.mark.parametrize(
    ("arguments", "expected"), INVALID_ARGUMENTS, ids=[case[1] for case in INVALID_ARGUMENTS]
)
def test_invalid_arguments_are_rejected(arguments: list[str], expected: str) -> None:
    """The error for invalid arguments says what is wrong."""
    with pytest.raises(ConfigurationError) as caught:
        run(*arguments)

    assert expected == str(caught.value)[: len(expected)]
