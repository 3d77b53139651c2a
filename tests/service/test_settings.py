"""Loading and checking of settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.settings import Settings, check_environment, load_settings

_KEY = "A" * 43 + "="
_FILE = __file__


def test_defaults_are_safe() -> None:
    """Without any source: loopback, a file, and only public targets."""
    loaded = load_settings({}, {})

    assert ("127.0.0.1", "sqlite:tarry-data/tarry.db", ()) == (
        loaded.settings.host,
        loaded.settings.store,
        loaded.settings.allow_target,
    )
    assert {"default"} == set(loaded.sources.values())


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    """The source of each value is reported."""
    file = tmp_path / "tarry.toml"
    file.write_text('port = 1\nhost = "::1"\nlog = "json"\n')
    loaded = load_settings({"port": 3}, {"TARRY_PORT": "2", "TARRY_HOST": "localhost"}, file)

    assert (3, "localhost", "json") == (
        loaded.settings.port,
        loaded.settings.host,
        loaded.settings.log,
    )
    assert ("--port", "TARRY_HOST", f"log in {file}") == (
        loaded.sources["port"],
        loaded.sources["host"],
        loaded.sources["log"],
    )


def test_set_is_below_flags_and_above_variables() -> None:
    """Its source is reported as `--set NAME`."""
    set_values = {"port": "4", "drain_ms": "5"}
    loaded = load_settings({"port": 3}, {"TARRY_DRAIN_MS": "2"}, set_values=set_values)

    assert (3, "--port") == (loaded.settings.port, loaded.sources["port"])
    assert (5, "--set drain_ms") == (loaded.settings.drain_ms, loaded.sources["drain_ms"])
    with pytest.raises(ConfigurationError, match=r"^--set colour: there is no such setting"):
        load_settings({}, {}, set_values={"colour": "red"})


def test_a_flag_that_is_none_is_ignored() -> None:
    """The variable is used."""
    assert 2 == load_settings({"port": None}, {"TARRY_PORT": "2"}).settings.port


def test_lists_in_variables_are_separated_by_commas() -> None:
    """A flag is already a list."""
    given = load_settings(
        {"allow_host": ["a", "b"]}, {"TARRY_ALLOW_TARGET": "10.0.0.0/8, *.internal,"}
    )

    assert ("10.0.0.0/8", "*.internal") == given.settings.allow_target
    assert ("a", "b") == given.settings.allow_host


def test_secrets_are_not_shown() -> None:
    """`tarry config` shows only their number."""
    proxy = "http://me:hush@proxy:3128"
    loaded = load_settings({"encryption_keys": [_KEY], "dev": True, "egress_proxy": proxy}, {})

    assert ("[redacted]",) == loaded.redacted_value("encryption_keys")
    assert "http://[redacted]@proxy:3128" == loaded.redacted_value("egress_proxy")
    assert "1 not shown" == loaded.format("encryption_keys")
    assert "none" == loaded.format("signing_secrets")
    assert "true" == loaded.format("dev")
    assert "none" == loaded.format("allow_target")


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({"port": "x"}, {}, ["--port: must be a whole number, got 'x'"]),
        ({"port": 70_000}, {}, ["--port", "65535"]),
        ({}, {"TARRY_IN_FLIGHT": "0"}, ["TARRY_IN_FLIGHT", ">= 1", "'0'"]),
        ({}, {"TARRY_LOG": "xml"}, ["TARRY_LOG: must be text or json, got 'xml'"]),
        ({}, {"TARRY_LOG_LEVEL": "all"}, ["must be debug, info, warning or error, got 'all'"]),
        ({}, {"TARRY_DEV": "yes"}, ["TARRY_DEV: must be true or false, got 'yes'"]),
        ({}, {"TARRY_LEASE_MS": "5"}, ["TARRY_LEASE_MS", "max_attempt_timeout_ms", "65000"]),
    ],
)
def test_an_error_names_the_source_and_the_rule(
    flags: dict[str, Any], environ: dict[str, str], words: list[str]
) -> None:
    """With the rejected value."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(flags, environ)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("store", "postgres://x", "store must be sqlite:PATH or memory:, got 'postgres://x'"),
        ("store", "sqlite:", "store must name a file: sqlite:PATH"),
        ("store", "sqlite:/usr", "store must be a file, but /usr is a folder: write sqlite:/usr/"),
        ("store", f"sqlite:{_FILE}/x", f"store cannot be used, because {_FILE} is not a folder"),
        ("bodies", "ftp://x", "bodies must be a folder or a URL like s3://bucket/path ("),
        ("bodies", _FILE, f"bodies cannot be used, because {_FILE} is not a folder"),
        ("bodies_endpoint", "minio:9000", "bodies_endpoint must be a URL like http://host:port"),
        ("host", "http://x", "host must name a host that consists of letters"),
        ("host", "", "host must name a host"),
        ("allow_host", "http://x", "allow_host must contain host names, got 'http://x'"),
        ("allow_target", "10.0.0.0/99", "allow_target must contain CIDRs"),
        ("allow_target", "http://x", "allow_target must contain CIDRs"),
        ("operator", "a/b", "operator must be 1 to 63 characters"),
        ("tenant_rate", "inf", "tenant_rate must be finite, got inf"),
        ("egress_proxy", "foo", "egress_proxy must be a URL like http://host:port, got 'foo'"),
        ("egress_proxy", "socks5h://x", "egress_proxy must be a URL like http://host:port, got"),
        ("egress_proxy", "http://x:99999", "egress_proxy must be a URL like http://host:port"),
        ("ca_file", "/nope.pem", "ca_file must be a file of PEM certificates, got '/nope.pem'"),
        ("ca_file", _FILE, "ca_file must be a file of PEM certificates"),
        ("signing_secrets", "abc", "signing_secrets[0] must start with whsec_"),
        ("encryption_keys", "abc", "encryption_keys must be 32 random bytes"),
    ],
)
def test_values_are_checked_when_they_are_loaded(name: str, value: str, words: str) -> None:
    """The error names the source, the setting and its rule."""
    variable = f"TARRY_{name.upper()}"
    for origin, flags, environ, set_values in (
        (f"--{name.replace('_', '-')}", {name: value}, {}, {}),
        (variable, {}, {variable: value}, {}),
        (f"--set {name}", {}, {}, {name: value}),
    ):
        with pytest.raises(ConfigurationError) as caught:
            load_settings(flags, environ, set_values=set_values)
        assert str(caught.value).startswith(f"{origin}: {words}")


def test_a_folder_must_be_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised before the service creates its file."""
    monkeypatch.setattr("os.access", lambda *_: False)

    with pytest.raises(
        ConfigurationError, match=r"^--store: store cannot be used, because the folder"
    ):
        load_settings({"store": "sqlite:x/tarry.db"}, {})


def test_checks_create_nothing(tmp_path: Path) -> None:
    """`tarry config` leaves no folder behind."""
    load_settings({"store": f"sqlite:{tmp_path}/a/t.db", "bodies": f"{tmp_path}/b"}, {})

    assert [] == list(tmp_path.iterdir())


def test_an_unusable_default_is_named_by_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a folder at the path of the store."""
    (tmp_path / "tarry-data" / "tarry.db").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigurationError, match=r"^store: store must be a file, but tarry-data"):
        load_settings({}, {})


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("TARRY_REQUIRE_KEY", "did you mean TARRY_REQUIRE_KEYS?"),
        ("TARRY_PROT", "did you mean TARRY_PORT?"),
        ("TARRY_port", "did you mean TARRY_PORT?"),
        ("TARRY_SEVER", "did you mean TARRY_SERVER?"),
        ("TARRY_KEYS", "did you mean TARRY_KEY?"),
        ("TARRY_QQQQ", "the settings are TARRY_ALLOW_HOST, "),
    ],
)
@pytest.mark.parametrize(
    "refuse", [partial(load_settings, {}), check_environment], ids=["load_settings", "check"]
)
def test_an_unknown_variable_is_an_error(
    refuse: Callable[[dict[str, str]], object], variable: str, words: str
) -> None:
    """A default would be used without notice; the client's variables are suggested, too."""
    with pytest.raises(ConfigurationError) as caught:
        refuse({variable: "true"})
    assert str(caught.value).startswith(f"{variable}: there is no such setting; {words}")


def test_variables_of_the_client_are_allowed() -> None:
    """They may be set in the same shell."""
    given = {"TARRY_SERVER": "http://x", "TARRY_KEY": "k", "OTHER": "x"}

    assert {"default"} == set(load_settings({}, given).sources.values())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('port = "9000"', "port in {}: must be a whole number, got '9000'"),
        ("port = true", "port in {}: must be a whole number, got true"),
        ("port = -1", "port in {}: must be a whole number >= 0, got -1"),
        ('tenant_rate = "5"', "tenant_rate in {}: must be a number, got '5'"),
        ("host = 1", "host in {}: must be a string, got 1"),
        ("dev = 1", "dev in {}: must be true or false, got 1"),
        ('dev = "true"', "dev in {}: must be true or false, got 'true'"),
        ('allow_host = "a,b"', "allow_host in {}: must be a list of strings, got 'a,b'"),
        ('encryption_keys = "hush"', "encryption_keys in {}: must be a list of strings"),
    ],
)
def test_values_of_a_file_are_typed(tmp_path: Path, line: str, words: str) -> None:
    """A number in quotes is a text there, but not in a variable."""
    file = tmp_path / "tarry.toml"
    file.write_text(line)

    with pytest.raises(ConfigurationError) as caught:
        load_settings({}, {}, file)
    assert words.format(file) == str(caught.value)


def test_an_integer_is_a_valid_float_in_the_file(tmp_path: Path) -> None:
    """5.0 can be written as 5."""
    file = tmp_path / "tarry.toml"
    file.write_text('tenant_rate = 5\nallow_host = ["a", "b"]\n')
    settings = load_settings({}, {}, file).settings

    assert (5.0, ("a", "b")) == (settings.tenant_rate, settings.allow_host)


def test_an_invalid_secret_is_not_printed() -> None:
    """Neither in a type error nor in a rule."""
    for name in ("encryption_keys", "signing_secrets"):
        for wrong in ({"hush": 1}, "hush", "whsec_hush"):
            with pytest.raises(ConfigurationError) as caught:
                load_settings({name: [wrong]}, {})
            assert "hush" not in str(caught.value)


def test_errors_of_the_file_name_it(tmp_path: Path) -> None:
    """A missing file, invalid TOML, and an unknown setting."""
    with pytest.raises(ConfigurationError, match="nowhere"):
        load_settings({}, {}, tmp_path / "nowhere")
    bad = tmp_path / "bad.toml"
    bad.write_text("port = ")
    with pytest.raises(ConfigurationError, match="not TOML"):
        load_settings({}, {}, bad)
    bad.write_text("ports = 1")
    with pytest.raises(ConfigurationError, match=r"ports in .*no such setting"):
        load_settings({}, {}, bad)


def test_the_default_lease_is_longer_than_the_longest_attempt() -> None:
    """It leaves time to store the result."""
    settings = Settings(max_attempt_timeout_ms=1000)

    assert settings.lease_duration_ms > 1000 + 5000
    assert 9000 == Settings(max_attempt_timeout_ms=1000, lease_ms=9000).lease_duration_ms


def test_variables_of_kubernetes_are_ignored() -> None:
    """A Service named tarry or tarry-api sets them in every pod."""
    links = {
        "TARRY_SERVICE_HOST": "10.0.0.1",
        "TARRY_SERVICE_PORT": "80",
        "TARRY_SERVICE_PORT_HTTP": "80",
        "TARRY_PORT": "tcp://10.0.0.1:80",
        "TARRY_PORT_80_TCP_ADDR": "10.0.0.1",
        "TARRY_API_SERVICE_HOST": "10.0.0.1",
        "TARRY_API_SERVICE_PORT": "80",
        "TARRY_API_PORT": "tcp://10.0.0.1:80",
        "TARRY_API_PORT_80_TCP": "tcp://10.0.0.1:80",
        "TARRY_API_PORT_80_TCP_PROTO": "tcp",
    }

    assert Settings() == load_settings({}, links).settings
