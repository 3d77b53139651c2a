"""docs/cli.md and `--help` document every command and option, and no other."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from tarry.cli.app import app
from tarry.cli.exit_codes import EXIT_CODES

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
ROWS = {
    command: set(re.findall(r"`(--[a-z-]+)`", options))
    for command, options in re.findall(r"^\| `(tarry [a-z ]+)` \|([^|]*)\|", PAGE, re.MULTILINE)
}
HEAVY = (
    "asyncio",
    "http.server",
    "httpx",
    "msgspec",
    "tarry.client.api",
    "tarry.client.client",
    "tarry.service",
    "uvicorn",
)
REMOTE = {"--server", "--key", "--json"}
"""What the page says once, for all commands that talk to a service."""


def commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group, with their names."""
    inner = getattr(group, "commands", None)
    if inner is None:
        yield " ".join(path), group
        return
    for name, one in inner.items():
        yield from commands(one, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app), ("tarry",)))
TYPED = re.findall(r"^\$ (?:export \w+=\$\()?(tarry [^#\n)]+)", PAGE, re.MULTILINE)


def options_of(command: str) -> set[str]:
    """Return all option names of a command."""
    return {name for one in COMMANDS[command].params for name in one.opts if name.startswith("-")}


def test_every_command_has_a_row() -> None:
    """The tables of the page have a row for every command, and no other rows."""
    assert sorted(COMMANDS) == sorted(ROWS)


@pytest.mark.parametrize("command", COMMANDS)
def test_row_has_every_option(command: str) -> None:
    """Each row has all long options; --server, --key and --json are documented once."""
    names = {name for name in options_of(command) if name.startswith("--")}

    assert (names - REMOTE if "--server" in names else names) == ROWS[command]
    assert "--server" not in names or names >= REMOTE


@pytest.mark.parametrize("line", TYPED)
def test_examples_on_the_page_are_valid_commands(line: str) -> None:
    """Each example on the page is a command with options that it has."""
    words = [word for word in shlex.split(line) if word != ">"]
    command = next(name for name in COMMANDS if words[: len(name.split())] == name.split())

    assert {word for word in words if re.match(r"--?[a-zA-Z]", word)} <= options_of(command)


def test_exit_codes_are_documented() -> None:
    """The page and the help list all exit codes, in the same words."""
    documented = re.findall(r"^\| (\d+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    shown = " ".join(CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"]).stdout.split())

    assert [(str(code), meaning) for code, meaning in EXIT_CODES.items()] == documented
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example_of_it(command: str) -> None:
    """The help of each command has an example that starts with its name."""
    words = command.split()[1:]
    help_ = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, [*words, "--help"])

    text = help_.stdout.partition("Example")[2]
    assert 0 == help_.exit_code
    assert command in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_wrapped_at_the_terminal_width(command: str) -> None:
    """Help paragraphs are wrapped at the terminal's width, not at source lines."""
    words, width = command.split()[1:], 80
    help_ = CliRunner(env={"COLUMNS": str(width), "TERM": "dumb"}).invoke(app, [*words, "--help"])

    text = help_.stdout.partition("Usage")[2].partition("╭")[0]
    lines = [line.strip() for line in text.splitlines()]
    for line, following in pairwise(lines):
        if line and following:
            assert len(f"{line} {following.split()[0]}") > width - 2


def test_help_of_a_command_loads_neither_client_nor_service() -> None:
    """The help of a command imports neither the client nor the service."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from tarry.cli.app import app\n"
        "CliRunner().invoke(app, ['send', '--help'])\n"
        "CliRunner().invoke(app, ['demo', '--help'])\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert "[]\n" == result.stdout
