from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.settings import Settings, load


def test_defaults_are_safe() -> None:
    """Nothing said: loopback, a file, no targets beside public ones."""
    loaded = load({}, {})

    assert ("127.0.0.1", "sqlite:tarry-data/tarry.db", ()) == (
        loaded.settings.host,
        loaded.settings.store,
        loaded.settings.allow_target,
    )
    assert {"default"} == set(loaded.origins.values())


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    """Each value comes from the nearest source, which is named."""
    file = tmp_path / "tarry.toml"
    file.write_text('port = 1\nhost = "::1"\nlog = "json"\n')
    loaded = load({"port": 3}, {"TARRY_PORT": "2", "TARRY_HOST": "localhost"}, file)

    assert (3, "localhost", "json") == (
        loaded.settings.port,
        loaded.settings.host,
        loaded.settings.log,
    )
    assert ("--port", "TARRY_HOST", f"log in {file}") == (
        loaded.origins["port"],
        loaded.origins["host"],
        loaded.origins["log"],
    )


def test_what_set_says_is_named_as_it_was_said() -> None:
    """A value of --set lies below its own flag and above a variable, and names --set."""
    changes = {"port": "4", "drain_ms": "5"}
    loaded = load({"port": 3}, {"TARRY_DRAIN_MS": "2"}, changes=changes)

    assert (3, "--port") == (loaded.settings.port, loaded.origins["port"])
    assert (5, "--set drain_ms") == (loaded.settings.drain_ms, loaded.origins["drain_ms"])
    with pytest.raises(ConfigurationError, match=r"^--set colour: there is no such setting"):
        load({}, {}, changes={"colour": "red"})


def test_flag_that_was_not_given_changes_nothing() -> None:
    """None stands for a flag that is not there."""
    assert 2 == load({"port": None}, {"TARRY_PORT": "2"}).settings.port


def test_list_in_a_variable_is_divided_by_commas() -> None:
    """Networks and names are parted by commas; a flag has a list already."""
    given = load({"signing_secrets": ["a", "b"]}, {"TARRY_ALLOW_TARGET": "10.0.0.0/8, *.internal,"})

    assert ("10.0.0.0/8", "*.internal") == given.settings.allow_target
    assert ("a", "b") == given.settings.signing_secrets


def test_secrets_are_not_shown() -> None:
    """`tarry config` says that there are some, and no more."""
    loaded = load({"encryption_keys": ["hush"], "dev": True}, {})

    assert "1 kept secret" == loaded.shown("encryption_keys")
    assert "none" == loaded.shown("signing_secrets")
    assert "true" == loaded.shown("dev")
    assert "none" == loaded.shown("allow_target")


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({"port": "x"}, {}, ["--port", "int", "'x'"]),
        ({"port": 70_000}, {}, ["--port", "65535"]),
        ({}, {"TARRY_IN_FLIGHT": "0"}, ["TARRY_IN_FLIGHT", ">= 1", "'0'"]),
        ({}, {"TARRY_LOG": "xml"}, ["TARRY_LOG", "text|json", "'xml'"]),
        ({}, {"TARRY_LEASE_MS": "5"}, ["TARRY_LEASE_MS", "max_attempt_timeout_ms", "65000"]),
    ],
)
def test_a_mistake_names_its_place_and_the_rule(
    flags: dict[str, Any], environ: dict[str, str], words: list[str]
) -> None:
    """Whoever reads it knows what to change."""
    with pytest.raises(ConfigurationError) as caught:
        load(flags, environ)
    assert all(word in str(caught.value) for word in words)


def test_a_wrong_secret_is_not_repeated() -> None:
    """An error does not print what was to be kept secret."""
    with pytest.raises(ConfigurationError) as caught:
        load({"encryption_keys": [{"hush": 1}]}, {})
    assert "hush" not in str(caught.value)


def test_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    """The file is named, and what is wrong with it."""
    with pytest.raises(ConfigurationError, match="nowhere"):
        load({}, {}, tmp_path / "nowhere")
    bad = tmp_path / "bad.toml"
    bad.write_text("port = ")
    with pytest.raises(ConfigurationError, match="not TOML"):
        load({}, {}, bad)
    bad.write_text("ports = 1")
    with pytest.raises(ConfigurationError, match=r"ports in .*no such setting"):
        load({}, {}, bad)


def test_lease_is_longer_than_the_longest_attempt() -> None:
    """The default lease leaves time to write a result down."""
    settings = Settings(max_attempt_timeout_ms=1000)

    assert settings.lease > 1000 + 5000
    assert 9000 == Settings(max_attempt_timeout_ms=1000, lease_ms=9000).lease
