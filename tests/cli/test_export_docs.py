"""The commands of docs/export.md print the shown output, and its table has every target."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tarry.cli.policy import EXPORT_SYSTEMS, app
from tarry.policyfile.defence import Defence
from tarry.policyfile.grpc import to_grpc

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
POLICY = next(iter(re.findall(r"^```\n(# policy\.toml\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)))
COMMANDS = re.findall(
    r"^```console\n\$ tarry policy ([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize(
    ("command", "expected"), COMMANDS, ids=[command for command, _ in COMMANDS]
)
def test_command_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, expected: str
) -> None:
    """Each command on the page prints the output shown below it."""
    monkeypatch.chdir(tmp_path)
    Path("policy.toml").write_text(POLICY, encoding="utf-8")
    Path("config.json").write_text(service_config(), encoding="utf-8")

    result = CliRunner().invoke(app, shlex.split(command.removesuffix("2>/dev/null")))

    assert 0 == result.exit_code, result.output
    assert expected == result.stdout


def service_config() -> str:
    """Return the service config that the page imports."""
    return json.dumps(to_grpc(Defence(), service="shop.Payments").documents[0])


def test_table_has_every_target() -> None:
    """The table on the page has every export target, and no other."""
    header = next(line for line in PAGE.splitlines() if line.startswith("| | "))

    assert sorted(EXPORT_SYSTEMS) == sorted(re.findall(r"`([a-z-]+)`", header))
