import subprocess

from tests.cli.harness import ROOT, run_process


def test_whoever_starts_the_service_can_type_the_next_command() -> None:
    """`make serve` makes an environment, and everybody is told how to get at its `tarry`."""
    make = ["make", "--dry-run", "serve"]
    said = subprocess.run(make, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    line = 'export PATH="$PWD/.venv/serve/bin:$PATH"'

    assert f"{line}'\n.venv/serve/bin/tarry serve --dev" in said
    assert line in (ROOT / "README.md").read_text("utf-8")
    assert line in (ROOT / "docs" / "service.md").read_text("utf-8")


def test_the_readme_shows_what_the_command_prints() -> None:
    """The table of the storm in the README is the one that the command prints."""
    _, _, shown = (ROOT / "README.md").read_text("utf-8").partition("$ tarry simulate storm\n")
    expected = shown.partition("```")[0].splitlines()

    printed = [line.rstrip() for line in run_process("simulate", "storm").stdout.splitlines()]

    assert expected == [line for line in printed if line in expected]
