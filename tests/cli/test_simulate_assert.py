"""`tarry simulate --assert`: what a build is told when a claim does not hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.metrics import METRICS
from tests.cli.harness import run_simulate as run
from tests.simulator.files.file_builders import CHECKOUT, SMALL, write_file
from tests.test_docs import DOCS, table_of


def test_claim_that_fails_ends_with_1_and_names_the_row() -> None:
    """The error stream has the row, the claim and the value that was seen."""
    arguments = ("--quiet", "--sweep", "clients.rate=80,110", "--assert", "recovered_after < 60s")

    result = run(CHECKOUT, *arguments)

    assert (1, "") == (result.exit_code, result.stdout)
    assert "failed: eager, rate=110: recovered_after < 60s, but recovered_after is inf\n" == (
        result.stderr
    )


def test_claim_about_a_number_without_value_fails(tmp_path: Path) -> None:
    """Where no call succeeded none was quick; in JSON the number is null, in the table a dash."""
    dead = write_file(tmp_path, "dead.toml", SMALL + "failure_rate = 1\n")

    told = run(dead, "--assert", "p99 < 1s")
    result = run(dead, "--json", "--assert", "p99 < 1s")

    assert (1, "failed: dead: p99 < 1s, but p99 has no value: no call succeeded\n") == (
        told.exit_code,
        told.stderr,
    )
    assert re.search(r"^dead +0 %.* - +-$", told.stdout, re.MULTILINE)
    found = json.loads(result.stdout)
    assert 1 == result.exit_code
    assert (0.0, None) == tuple(
        found["rows"][0]["metrics"][name] for name in ("success_rate", "p99")
    )
    assert not found["assertions"][0]["holds"]


def test_claim_without_its_unit_is_refused_before_anything_runs() -> None:
    """The table shows milliseconds, and 250 seconds would always hold."""
    with pytest.raises(ConfigurationError, match="write 250ms or 250s"):
        run(CHECKOUT, "--set", "duration=1e9", "--assert", "p99 < 250")


def test_numbers_on_the_page_are_those_of_the_code() -> None:
    """The table on docs/simulator.md names every number that a claim can be about."""
    rows = table_of(DOCS / "simulator.md", "name | meaning")

    assert set(METRICS) == {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_misspelt_claim_is_refused_before_anything_runs() -> None:
    """Nobody waits an hour for that."""
    with pytest.raises(ConfigurationError, match="variant 'carefull' is not run"):
        run(CHECKOUT, "--set", "duration=1e9", "--assert", "carefull: amplification < 2")
