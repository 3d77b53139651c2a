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
DOCUMENTED_OPTIONS = {
    command: set(re.findall(r"`(--[a-z-]+)`", options))
    for command, options in re.findall(r"^\| `(tarry [a-z ]+)` \|([^|]*)\|", PAGE, re.MULTILINE)
}
HEAVY_MODULES = (
    "asyncio",
    "http.server",
    "httpx",
    "msgspec",
    "tarry.client.api",
    "tarry.client.async_client",
    "tarry.client.client",
    "tarry.service",
    "uvicorn",
)
REMOTE_OPTIONS = {"--server", "--key", "--json"}
"""Documented once, for all commands that connect to a service."""


def iter_commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the full name and the object of each command below this one."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield " ".join(path), command
        return
    for name, subcommand in subcommands.items():
        yield from iter_commands(subcommand, (*path, name))


COMMANDS = dict(iter_commands(typer.main.get_command(app), ("tarry",)))
EXAMPLES = re.findall(r"^\$ (?:export \w+=\$\()?(tarry [^#\n)]+)", PAGE, re.MULTILINE)


def options_of(command: str) -> set[str]:
    """Return all option names of a command."""
    return {
        name for param in COMMANDS[command].params for name in param.opts if name.startswith("-")
    }


def test_every_command_has_a_row() -> None:
    """The tables of the page have a row for every command, and no other rows."""
    assert sorted(COMMANDS) == sorted(DOCUMENTED_OPTIONS)


@pytest.mark.parametrize("command", COMMANDS)
def test_row_has_every_option(command: str) -> None:
    """Each row has all long options; --server, --key and --json are documented once."""
    names = {name for name in options_of(command) if name.startswith("--")}
    if "--format" in names and "--server" in names:
        names.add("--json")  # not needed: an export writes JSON Lines by default

    assert (names - REMOTE_OPTIONS if "--server" in names else names) == DOCUMENTED_OPTIONS[command]
    assert "--server" not in names or names >= REMOTE_OPTIONS


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_on_the_page_are_valid_commands(line: str) -> None:
    words = [word for word in shlex.split(line) if word != ">"]
    command = next(name for name in COMMANDS if words[: len(name.split())] == name.split())

    assert {word for word in words if re.match(r"--?[a-zA-Z]", word)} <= options_of(command)


def test_exit_codes_are_documented() -> None:
    """The page and the help list all exit codes with the same descriptions."""
    documented = re.findall(r"^\| (\d+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    help_text = " ".join(CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"]).stdout.split())

    assert [(str(code), meaning) for code, meaning in EXIT_CODES.items()] == documented
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in help_text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command: str) -> None:
    """The help of each command has an example that starts with its name."""
    words = command.split()[1:]
    help_ = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, [*words, "--help"])

    text = help_.stdout.partition("Example")[2]
    assert 0 == help_.exit_code
    assert command in text


@pytest.mark.parametrize("command", ["tarry", "tarry tasks", *COMMANDS])
def test_help_of_flags_has_no_type(command: str) -> None:
    """The help shows no type for flags, because `--dry-run true` is not valid."""
    words = command.split()[1:]
    help_ = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, [*words, "--help"])

    assert "--help" in help_.stdout
    assert "bool" not in help_.stdout.lower()


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


def test_help_of_a_command_imports_neither_client_nor_service() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from tarry.cli.app import app\n"
        "CliRunner().invoke(app, ['send', '--help'])\n"
        "CliRunner().invoke(app, ['demo', '--help'])\n"
        f"print([name for name in {HEAVY_MODULES} if name in sys.modules])\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert "[]\n" == result.stdout
