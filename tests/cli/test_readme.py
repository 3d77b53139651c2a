"""Tests for the commands and the output in the README."""

import subprocess

from tests.cli.harness import ROOT, run_process


def test_path_of_the_command_is_documented() -> None:
    """`make serve`, the README and the docs show how to put `tarry` on the PATH."""
    make = ["make", "--dry-run", "serve"]
    output = subprocess.run(make, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    line = 'export PATH="$PWD/.venv/serve/bin:$PATH"'

    assert f"{line}'\n.venv/serve/bin/tarry serve --dev" in output
    assert line in (ROOT / "README.md").read_text("utf-8")
    assert line in (ROOT / "docs" / "service.md").read_text("utf-8")


def test_readme_table_is_current() -> None:
    """The table of `tarry simulate storm` in the README is the command's output."""
    _, _, rest = (ROOT / "README.md").read_text("utf-8").partition("$ tarry simulate storm\n")
    expected = rest.partition("```")[0].splitlines()

    printed = [line.rstrip() for line in run_process("simulate", "storm").stdout.splitlines()]

    assert expected
    assert expected == [line for line in printed if line in expected]
