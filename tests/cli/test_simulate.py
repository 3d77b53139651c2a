"""`tarry simulate`: output, files and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.files import read_study
from tarry.simulator.scenarios import STUDIES
from tests.cli.harness import run_process
from tests.cli.harness import run_simulate as run
from tests.simulator.file_builders import CHECKOUT, SMALL, write_file
from tests.test_docs import DOCS, blocks_of

SHORT = ("--set", "duration=20", "--jobs", "1")
PAGE = DOCS / "scenario-files.md"


def test_no_argument_lists_the_scenarios() -> None:
    """Without arguments, each scenario is listed with its question."""
    result = run(width=200)

    assert 0 == result.exit_code
    for study in STUDIES.values():
        assert re.search(
            rf"^{study.name} +{re.escape(study.question)}", result.stdout, re.MULTILINE
        )


def test_scenarios_are_listed_as_json() -> None:
    """`--json` lists the scenarios with variants and parameters."""
    listed = json.loads(run("--json").stdout)

    assert list(STUDIES) == [study["name"] for study in listed]
    assert {"attempts": 4} == listed[2]["parameters"]


def test_page_shows_a_file_that_runs_and_what_it_prints() -> None:
    """docs/scenario-files.md shows the example file and its output."""
    shown = [block.text for block in blocks_of(PAGE)]

    done = run_process("simulate", "examples/checkout.toml")

    command = "$ tarry simulate examples/checkout.toml\n"
    printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    assert CHECKOUT.read_text(encoding="utf-8") == shown[0]
    assert command + printed == shown[1]


def test_page_shows_a_real_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """The assertions on the page hold."""
    result = run(CHECKOUT, "--assert", "careful: amplification < 1.2", "--assert", "crashes == 0")

    assert (0, "all assertions hold") == (result.exit_code, result.stdout.splitlines()[-1])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_table_is_whole_at_any_width(width: int) -> None:
    """Columns that do not fit are in a further table, with the row names repeated."""
    result = run(CHECKOUT, *SHORT, "--sweep", "clients.rate=80,90", width=width)

    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in result.stdout
    tables = len(re.findall(r"^careful +90 ", result.stdout, re.MULTILINE))
    assert {40: 3, 80: 1, 200: 1}[width] == tables


@pytest.mark.parametrize("width", [40, 60, 79, 80])
def test_numbers_keep_their_units_in_a_sweep(width: int) -> None:
    """No cell of a number is cut."""
    arguments = ("--sweep", "clients.rate=50..150:50", "--sweep", "clients.instances=1")

    result = run(CHECKOUT, *SHORT, *arguments, width=width)

    assert max(map(len, result.stdout.splitlines())) <= width
    assert 6 == len(re.findall(r"[\d,.]+ ms$", result.stdout, re.MULTILINE))


def test_narrowest_terminal_has_a_number_in_each_table() -> None:
    """In a narrow terminal the names are wrapped, and each table has a number."""
    result = run(CHECKOUT, *SHORT, width=20)

    assert len(read_study(CHECKOUT).columns) == len(re.findall("─+\n", result.stdout))
    assert 2 == len(re.findall(r"[\d,.]+ ms$", result.stdout, re.MULTILINE))


def test_same_seed_gives_the_same_bytes() -> None:
    """The same seed gives the same output, in one process or several."""
    arguments = ("simulate", str(CHECKOUT), "--json", "--set", "duration=20", "--seed", "3")

    one = run_process(*arguments, "--jobs", "1", PYTHONHASHSEED="1")
    two = run_process(*arguments, "--jobs", "2", PYTHONHASHSEED="2")

    assert 0 == one.returncode
    assert one.stdout == two.stdout
    assert one.stdout != run(*arguments[1:-1], "4", "--jobs", "1").stdout


def test_json_has_rows_and_assertions() -> None:
    """JSON has rows and assertions; a time that was never reached is null."""
    arguments = ("--json", "--variants", "eager", "--assert", "recovered_after < inf")

    result = run(CHECKOUT, *arguments, "--set", "clients.instances=2")

    findings = json.loads(result.stdout)
    (row,) = findings["rows"]
    assert 1 == result.exit_code
    assert ("eager", None) == (row["variant"], row["metrics"]["recovered_after"])
    assert 2 == findings["parameters"]["clients.instances"]
    assert [
        {
            "assertion": "recovered_after < inf",
            "holds": False,
            "parameters": {},
            "variant": "eager",
        }
    ] == findings["assertions"]


def test_builtin_scenario_with_a_parameter() -> None:
    """A built-in scenario runs with a changed parameter in one process."""
    result = run("retry-after", "--set", "clients=50", "--variants", "full", "--jobs", "1")

    assert 0 == result.exit_code
    assert STUDIES["retry-after"].question in " ".join(result.stdout.split())


def test_show_runs_nothing() -> None:
    """`--show` lists variants and parameters with their values, and runs nothing."""
    result = run(CHECKOUT, "--show", "--set", "duration=1e9")

    assert "--variants (variant): eager, careful" in result.stdout
    assert re.search(r"clients\.defence\.breaker\.open_for +2\.0", result.stdout)
    assert re.search(r"duration +1000000000\.0", result.stdout)
    assert {"eager", "careful"} == set(
        json.loads(run(CHECKOUT, "--show", "--json").stdout)["variants"]
    )


def test_show_lists_the_metrics() -> None:
    """`--show` lists the metrics with their descriptions."""
    result = run(CHECKOUT, "--show", width=200)

    meaning = "started calls that succeeded"
    assert re.search(rf"^ +success_rate +succeeded +{meaning}", result.stdout, re.MULTILINE)


def test_show_lists_scenario_settings() -> None:
    """`--show` lists the other settings of the scenario that have an effect."""
    result = run("storm", "--show", "--set", "clients=100")

    assert re.search(r"servers\.server\.latency\.median +0\.08", result.stdout)
    assert re.search(r"servers\.server capacity +\S+ requests per second", result.stdout)
    assert re.search(r"clients\.count +100", result.stdout)
    assert "clients.rate" not in result.stdout


def test_reports_are_written(tmp_path: Path) -> None:
    """Each report format is written, and the page has the command line."""
    html, png, svg = tmp_path / "a.html", tmp_path / "b.png", tmp_path / "c.svg"

    result = run(CHECKOUT, *SHORT, "-q", "--html", str(html), "--png", str(png), "--svg", str(svg))

    assert (0, "") == (result.exit_code, result.output)
    told = run(CHECKOUT, *SHORT, "--svg", svg)
    assert f"written to {svg}\n" == told.stderr
    assert f"tarry simulate {CHECKOUT} --set" in html.read_text("utf-8")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text("utf-8").startswith("<svg")


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
    less = ("--set", "clients=50") if scenario == "storm" else SHORT

    result = run(scenario, "--compare", once, twice, *less)

    assert 0 == result.exit_code
    assert re.search(r"^once .*\ntwice ", result.stdout, re.MULTILINE)


def test_presets_are_compared_too(tmp_path: Path) -> None:
    """Presets can be compared by name; the lesson of the scenario is not printed."""
    once = write_file(tmp_path, "once.toml", "max_attempts = 1")

    result = run("storm", "--compare", once, "interactive", "--set", "clients=50")

    assert re.search(r"^once .*\ninteractive ", result.stdout, re.MULTILINE)
    assert result.stdout.rstrip().endswith("seed 0, 1 trial for each row")


MISTAKES = [
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
    (["storm", "--compare", str(CHECKOUT)], f"{CHECKOUT}:3: the file has no key 'question'; it "),
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


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES, ids=[case[1] for case in MISTAKES])
def test_invalid_arguments_are_rejected(arguments: list[str], expected: str) -> None:
    """Each error says what to change."""
    with pytest.raises(ConfigurationError) as caught:
        run(*arguments)

    assert expected == str(caught.value)[: len(expected)]


def test_text_of_a_file_is_shown_as_text(tmp_path: Path) -> None:
    """Markup and control characters in a file have no effect in the terminal."""
    text = 'question = "[red]why[/red]\\u001b[2J"\n' + SMALL + '[variants."[b]x\\u009b"]\n'

    result = run(write_file(tmp_path, "s.toml", text), "--set", "duration=1")

    assert "[red]why[/red]\\x1b[2J" in result.stdout
    assert "[b]x\\x9b" in result.stdout
    assert set() == set("\x1b\x9b") & set(result.stdout)
