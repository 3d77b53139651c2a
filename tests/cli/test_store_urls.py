"""Passwords in store URLs: no command shows them, whatever is wrong with the URL or the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import run_command

PASSWORD = "s3cret"  # noqa: S105
URLS = [
    f"postgres//u:{PASSWORD}@h/db",
    f"postgresql:/u:{PASSWORD}@h/db",
    f"redis//:{PASSWORD}@h",
    f"rediss:u:{PASSWORD}@h",
    f"sqlite://u:{PASSWORD}@h/db",
    f"u:{PASSWORD}@h/db",
]
STORE_COMMANDS = [
    ("serve", "--store", "{url}"),
    ("serve", "--set", "store={url}"),
    ("config", "--store", "{url}"),
    ("config", "--json", "--store", "{url}"),
    ("keys", "list", "--store", "{url}"),
    ("keys", "create", "--tenant", "default", "--store", "{url}"),
    ("backup", "copy.db", "--store", "{url}"),
    ("migrate", "--from", "{url}", "--to", "new.db"),
    ("migrate", "--from", "old.db", "--to", "{url}"),
    ("migrate", "--from", "{url}", "--undo"),
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", STORE_COMMANDS, ids=" ".join)
def test_a_mistyped_store_url_is_refused(
    command: tuple[str, ...], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the right form, no file is created, and the password is not shown."""
    monkeypatch.chdir(tmp_path)

    result = run_command(*(part.format(url=url) for part in command))

    assert 2 == result.code
    assert "looks like the URL of a server with a typo: write " in result.err
    assert PASSWORD not in result.out + result.err
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "url", [*URLS, f"postgresql://u:{PASSWORD}@h/db", f"redis://:{PASSWORD}@h"]
)
@pytest.mark.parametrize(
    "command",
    [
        ("serve", "{url}"),
        ("health", "{url}"),
        ("keys", "list", "{url}"),
        ("serve", "--port", "{url}"),
        ("serve", "--store={url}", "--port={url}"),
        ("serve", "--store{url}"),
        ("serve", "--set", "{url}"),
        ("serve", "--set", "store:{url}"),
        ("serve", "--set", "{url}?schema=a"),
        ("serve", "--set", "port={url}"),
        ("serve", "--set", "allow_target={url}"),
        ("serve", "--log", "{url}"),
        ("{url}",),
    ],
    ids=" ".join,
)
def test_a_store_url_in_a_wrong_place_is_not_shown(
    command: tuple[str, ...], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A usage error does not show the password of an argument."""
    monkeypatch.chdir(tmp_path)

    result = run_command(*(part.format(url=url) for part in command))

    assert 2 == result.code
    assert PASSWORD not in result.out + result.err


def test_a_store_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    """A list of URLs in a settings file is an error that does not show the password."""
    file = tmp_path / "tarry.toml"
    file.write_text(f'store = ["postgresql://u:{PASSWORD}@h/db"]')

    result = run_command("config", "--config", str(file))

    assert 2 == result.code
    assert "must be a string" in result.err
    assert PASSWORD not in result.err
