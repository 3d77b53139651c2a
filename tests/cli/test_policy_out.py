"""`tarry policy` with `--out`, and output to a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tarry.cli.policy import app
from tarry.core.policy import PRESETS
from tarry.policyfile.defence import Defence
from tarry.policyfile.grpc import to_grpc


def test_out_replaces_standard_output(tmp_path: Path) -> None:
    """`--out` writes the document to the file; only the differences are printed."""
    out = tmp_path / "route.yaml"
    command = ["export", "default", "--to", "envoy", "--host", "payments"]
    printed = CliRunner().invoke(app, command, catch_exceptions=False).stdout

    result = CliRunner().invoke(app, [*command, "--out", str(out)], catch_exceptions=False)

    assert "" == result.stdout
    assert printed == out.read_text(encoding="utf-8")
    assert result.stderr


def test_out_is_replaced_atomically(tmp_path: Path) -> None:
    """An existing file is replaced by a new one, so a hard link keeps the old content."""
    out, hard_link = tmp_path / "config.json", tmp_path / "link.json"
    out.write_text("{}")
    hard_link.hardlink_to(out)

    command = ["export", "default", "--to", "grpc", "--out", str(out)]
    CliRunner().invoke(app, command, catch_exceptions=False)

    assert "{}" == hard_link.read_text(encoding="utf-8")
    expected = to_grpc(Defence(PRESETS["default"])).documents[0]
    assert expected == json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    ("command", "has_comments"),
    [
        (["export", "default", "--to", "envoy", "--host", "payments"], True),
        (["export", "default", "--to", "grpc"], False),
        (["import", "config.json", "--from", "grpc"], True),
        (["export", "default", "--to", "envoy", "--host", "payments", "--out", "a.yaml"], False),
    ],
    ids=["yaml", "json", "toml", "file"],
)
def test_terminal_shows_each_difference_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    has_comments: bool,
    is_terminal: bool,
) -> None:
    """On a terminal that shows the comments, the differences are not printed again."""
    monkeypatch.chdir(tmp_path)
    config = to_grpc(Defence()).documents[0]
    Path("config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)

    app(command, standalone_mode=False)

    captured = capsys.readouterr()
    assert has_comments == ("# Different in " in captured.out)
    assert (not (has_comments and is_terminal)) == ("different in " in captured.err)
