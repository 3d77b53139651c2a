"""Output of `tarry simulate`: tables at several widths, JSON, and `--show`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tarry.simulator.files import read_study
from tests.cli.harness import run_process
from tests.cli.harness import run_simulate as run
from tests.simulator.file_builders import CHECKOUT, SMALL, write_file

SHORT_RUN = ("--set", "duration=20", "--jobs", "1")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_table_is_complete_at_any_width(width: int) -> None:
    """Columns that do not fit are in a further table, with the row names repeated."""
    result = run(CHECKOUT, *SHORT_RUN, "--sweep", "clients.rate=80,90", width=width)

    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in result.stdout
    tables = len(re.findall(r"^careful +90 ", result.stdout, re.MULTILINE))
    assert {40: 3, 80: 1, 200: 1}[width] == tables


@pytest.mark.parametrize("width", [40, 60, 79, 80])
def test_numbers_keep_their_units_in_a_sweep(width: int) -> None:
    """Numbers and their units are complete at any width."""
    arguments = ("--sweep", "clients.rate=50..150:50", "--sweep", "clients.instances=1")

    result = run(CHECKOUT, *SHORT_RUN, *arguments, width=width)

    assert max(map(len, result.stdout.splitlines())) <= width
    assert 6 == len(re.findall(r"[\d,.]+ ms$", result.stdout, re.MULTILINE))


def test_narrow_terminal_has_a_number_in_each_table() -> None:
    result = run(CHECKOUT, *SHORT_RUN, width=20)

    assert len(read_study(CHECKOUT).columns) == len(re.findall("─+\n", result.stdout))
    assert 2 == len(re.findall(r"[\d,.]+ ms$", result.stdout, re.MULTILINE))


def test_same_seed_gives_the_same_output() -> None:
    """The same seed gives the same output, in one process or several."""
    arguments = ("simulate", str(CHECKOUT), "--json", "--set", "duration=20", "--seed", "3")

    one_job = run_process(*arguments, "--jobs", "1", PYTHONHASHSEED="1")
    two_jobs = run_process(*arguments, "--jobs", "2", PYTHONHASHSEED="2")

    assert 0 == one_job.returncode
    assert one_job.stdout == two_jobs.stdout
    assert one_job.stdout != run(*arguments[1:-1], "4", "--jobs", "1").stdout


def test_json_has_rows_and_assertions() -> None:
    """JSON has rows and assertions; a time that was never reached is null."""
    arguments = ("--json", "--variants", "eager", "--assert", "recovered_after < inf")

    result = run(CHECKOUT, *arguments, "--set", "clients.instances=2")

    document = json.loads(result.stdout)
    (row,) = document["rows"]
    assert 1 == result.exit_code
    assert ("eager", None) == (row["variant"], row["metrics"]["recovered_after"])
    assert 2 == document["parameters"]["clients.instances"]
    assert [
        {
            "assertion": "recovered_after < inf",
            "holds": False,
            "parameters": {},
            "variant": "eager",
        }
    ] == document["assertions"]


def test_show_runs_nothing() -> None:
    """`--show` lists variants and parameters with their values, and runs nothing."""
    result = run(CHECKOUT, "--show", "--set", "duration=1e9")

    assert "values of variant (for --variants): eager, careful" in result.stdout
    assert re.search(r"clients\.defence\.breaker\.open_for +2\.0", result.stdout)
    assert re.search(r"duration +1000000000\.0", result.stdout)
    assert {"eager", "careful"} == set(
        json.loads(run(CHECKOUT, "--show", "--json").stdout)["variants"]
    )


def test_show_lists_the_metrics() -> None:
    """`--show` lists the metrics with their descriptions."""
    result = run(CHECKOUT, "--show", width=200)

    description = "started calls that succeeded"
    assert re.search(rf"^ +success_rate +succeeded +{description}", result.stdout, re.MULTILINE)


def test_show_lists_scenario_settings() -> None:
    result = run("storm", "--show", "--set", "clients=100")

    assert re.search(r"servers\.server\.latency\.median +0\.08", result.stdout)
    assert re.search(r"servers\.server capacity +\S+ requests per second", result.stdout)
    assert re.search(r"clients\.count +100", result.stdout)
    assert "clients.rate" not in result.stdout


def test_text_of_a_file_is_escaped(tmp_path: Path) -> None:
    """Markup and control characters in a file have no effect in the terminal."""
    text = 'question = "[red]why[/red]\\u001b[2J"\n' + SMALL + '[variants."[b]x\\u009b"]\n'

    result = run(write_file(tmp_path, "s.toml", text), "--set", "duration=1")

    assert "[red]why[/red]\\x1b[2J" in result.stdout
    assert "[b]x\\x9b" in result.stdout
    assert set() == set("\x1b\x9b") & set(result.stdout)
