"""`tarry simulate --assert`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.metrics import METRICS
from tests.cli.harness import run_simulate as run
from tests.simulator.file_builders import CHECKOUT, SMALL, write_file
from tests.test_docs import DOCS, table_of


def test_failed_assertion_exits_with_1() -> None:
    """A failed assertion exits with 1 and prints row, assertion and value."""
    arguments = ("--quiet", "--sweep", "clients.rate=80,110", "--assert", "recovered_after < 60s")

    result = run(CHECKOUT, *arguments)

    assert (1, "") == (result.exit_code, result.stdout)
    assert "failed: eager, rate=110: recovered_after < 60s, but recovered_after is inf\n" == (
        result.stderr
    )


def test_assertion_on_a_missing_value_fails(tmp_path: Path) -> None:
    """An assertion on a missing value fails; the value is null in JSON and "-" in the table."""
    scenario = write_file(tmp_path, "dead.toml", SMALL + "failure_rate = 1\n")

    table_result = run(scenario, "--assert", "p99 < 1s")
    result = run(scenario, "--json", "--assert", "p99 < 1s")

    assert (1, "failed: dead: p99 < 1s, but p99 has no value: no call succeeded\n") == (
        table_result.exit_code,
        table_result.stderr,
    )
    assert re.search(r"^dead +0 %.* - +-$", table_result.stdout, re.MULTILINE)
    document = json.loads(result.stdout)
    assert 1 == result.exit_code
    assert (0.0, None) == tuple(
        document["rows"][0]["metrics"][name] for name in ("success_rate", "p99")
    )
    assert not document["assertions"][0]["holds"]


def test_assertion_without_unit_is_rejected() -> None:
    """A time without a unit is rejected before the run."""
    with pytest.raises(ConfigurationError, match="write 250ms or 250s"):
        run(CHECKOUT, "--set", "duration=1e9", "--assert", "p99 < 250")


def test_metrics_are_documented() -> None:
    """The table in docs/simulator.md has every metric."""
    rows = table_of(DOCS / "simulator.md", "name | meaning")

    assert set(METRICS) == {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_assertion_about_an_unknown_variant_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="variant 'carefull' is not run"):
        run(CHECKOUT, "--set", "duration=1e9", "--assert", "carefull: amplification < 2")
