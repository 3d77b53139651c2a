"""Tests for the commands and the output in the README."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.cli.harness import ROOT, run_process
from tests.integration.ports import free_port
from tests.test_docs import blocks_of

README = ROOT / "README.md"


def commands_of_readme() -> list[str]:
    """Return the commands in the README, without prompts."""
    text = "\n".join(block.text for block in blocks_of(README) if block.info == "console")
    return re.findall(r"^\$ ((?:.*\\\n)*.*)", text, re.MULTILINE)


def run_command_of_readme(start: str, address: str, target: str) -> str:
    """Run the only command with this start in a shell, with other addresses; return its output."""
    [command] = [each for each in commands_of_readme() if each.startswith(start)]
    command = command.replace("http://127.0.0.1:8080", address).replace("127.0.0.1:9009", target)
    folder = shlex.quote(str(Path(sys.executable).parent))
    done = subprocess.run(
        ["bash", "-c", f"PATH={folder}:$PATH; {command}"],  # noqa: S607
        env={**os.environ, "TARRY_SERVER": address, "COLUMNS": "200", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_commands_of_the_service_section(address: str) -> None:
    """A request is delivered; one to a target that does not exist becomes a dead letter."""
    target = f"127.0.0.1:{free_port()}"

    delivered = json.loads(run_command_of_readme("curl ", address, target))
    assert "SUCCEEDED" == delivered["status"]

    assert "after 5 attempts" in run_command_of_readme("tarry send ", address, target)
    assert target in run_command_of_readme("tarry dead list", address, target)


def test_path_of_the_command_is_documented() -> None:
    """`make serve`, the README and the docs show how to put `tarry` on the PATH."""
    make = ["make", "--dry-run", "serve"]
    output = subprocess.run(make, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    line = 'export PATH="$PWD/.venv/serve/bin:$PATH"'

    assert f"{line}'\n.venv/serve/bin/tarry serve --dev" in output
    assert line in README.read_text("utf-8")
    assert line in (ROOT / "docs" / "service.md").read_text("utf-8")


def test_readme_table_is_current() -> None:
    """The table of `tarry simulate storm` in the README is the command's output."""
    _, _, rest = README.read_text("utf-8").partition("$ tarry simulate storm\n")
    expected = rest.partition("```")[0].splitlines()

    printed = [line.rstrip() for line in run_process("simulate", "storm").stdout.splitlines()]

    assert expected
    assert expected == [line for line in printed if line in expected]
