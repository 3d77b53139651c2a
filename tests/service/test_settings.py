"""Loading and validation of settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.settings import LoadedSettings, Settings, check_environment, load_settings
from tarry.service.store_url import sqlite_path
from tarry.wire.tasks import BreakerSettings, BudgetSettings, DownstreamLimits

_KEY = "A" * 43 + "="
_FILE = __file__


def test_defaults_are_safe() -> None:
    """By default the service listens on loopback, stores in a file, and blocks private targets."""
    loaded = load_settings({}, {})

    assert ("127.0.0.1", "sqlite:tarry-data/tarry.db", ()) == (
        loaded.settings.host,
        loaded.settings.store,
        loaded.settings.allow_target,
    )
    assert {"default"} == set(loaded.sources.values())


def test_flags_override_variables_and_variables_override_the_file(tmp_path: Path) -> None:
    """Each loaded value has its source."""
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


def test_flags_override_set_values_and_set_values_override_variables() -> None:
    """The source of a value of `--set` is `--set NAME`, and an unknown name is an error."""
    set_values = {"port": "4", "drain_ms": "5"}
    loaded = load_settings({"port": 3}, {"TARRY_DRAIN_MS": "2"}, set_values=set_values)

    assert (3, "--port") == (loaded.settings.port, loaded.sources["port"])
    assert (5, "--set drain_ms") == (loaded.settings.drain_ms, loaded.sources["drain_ms"])
    with pytest.raises(ConfigurationError, match=r"^--set colour: there is no such setting"):
        load_settings({}, {}, set_values={"colour": "red"})


def test_a_flag_that_is_none_is_ignored() -> None:
    """The value of the variable is used."""
    assert 2 == load_settings({"port": None}, {"TARRY_PORT": "2"}).settings.port


def test_lists_in_variables_are_separated_by_commas() -> None:
    """A list in a variable is split at commas, and a flag is already a list."""
    loaded = load_settings(
        {"allow_host": ["a", "b"]}, {"TARRY_ALLOW_TARGET": "10.0.0.0/8, *.corp.example,"}
    )

    assert ("10.0.0.0/8", "*.corp.example") == loaded.settings.allow_target
    assert ("a", "b") == loaded.settings.allow_host


def test_secrets_are_not_shown() -> None:
    """Secrets are redacted, and `format` returns only their number."""
    proxy = "http://me:hush@proxy:3128"
    loaded = load_settings({"encryption_keys": [_KEY], "dev": True, "egress_proxy": proxy}, {})

    assert ("[redacted]",) == loaded.redacted_value("encryption_keys")
    assert "http://[redacted]@proxy:3128" == loaded.redacted_value("egress_proxy")
    assert "1 not shown" == loaded.format("encryption_keys")
    assert "none" == loaded.format("signing_secrets")
    assert "true" == loaded.format("dev")
    assert "none" == loaded.format("allow_target")
    loaded = load_settings({"bodies": "s3://me:hush@b/a@b", "bodies_endpoint": proxy}, {})
    assert "s3://[redacted]@b/a@b" == loaded.redacted_value("bodies")
    assert "http://[redacted]@proxy:3128" == loaded.redacted_value("bodies_endpoint")


@pytest.mark.parametrize(
    ("name", "url"),
    [("bodies", "ftp://me:hush@host"), ("store", "mysql://me:hush@host/db")],
)
def test_an_error_does_not_show_a_password(name: str, url: str) -> None:
    """The user info of a rejected URL is redacted."""
    with pytest.raises(ConfigurationError, match=r"://\[redacted\]@host") as raised:
        load_settings({name: url}, {})
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "environ", "parts"),
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
    flags: dict[str, Any], environ: dict[str, str], parts: list[str]
) -> None:
    """The error names the flag or variable, the rule and the rejected value."""
    with pytest.raises(ConfigurationError) as raised:
        load_settings(flags, environ)
    assert all(part in str(raised.value) for part in parts)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("store", "mysql://x", "store must be a path, sqlite:PATH, memory:, "),
        ("store", "memory", "store must be a path, sqlite:PATH, memory:, "),
        ("store", "postgres://h/d?schema=a-b", "store must have a schema of up to 50 letters"),
        ("store", "postgres://h/d?pool_size=0", "store must have a pool_size from 1 to 1000"),
        ("store", "postgres://h/d?listen=no", "store must have listen=on or listen=off, got 'no'"),
        ("store", "sqlite:", "store must name a file"),
        ("store", "", "store must name a file"),
        ("store", "sqlite:/usr", "store must be a file, but /usr is a folder: write /usr/tarry.db"),
        ("store", "/usr", "store must be a file, but /usr is a folder: write /usr/tarry.db"),
        ("store", f"sqlite:{_FILE}/x", f"store cannot be used, because {_FILE} is not a folder"),
        ("bodies", "ftp://x", "bodies must be a folder or a URL like s3://bucket/path ("),
        ("bodies", _FILE, f"bodies cannot be used, because {_FILE} is not a folder"),
        ("bodies_endpoint", "minio:9000", "bodies_endpoint must be a URL like http://host:port"),
        ("bodies", "s3//k:s3@b/p", "bodies must be a folder or a URL like s3://bucket/path, and"),
        ("host", "http://x", "host must name a host that consists of letters"),
        ("host", "", "host must name a host"),
        ("allow_host", "http://x", "allow_host must contain host names, got 'http://x'"),
        ("compatibility", "sqs", "compatibility must be one of cloud_tasks, qstash, got 'sqs'"),
        ("allow_target", "10.0.0.0/99", "allow_target must contain CIDRs"),
        (
            "allow_methods",
            "FETCH,get",
            "allow_methods must contain HTTP methods in capitals, not CO",
        ),
        ("allow_methods", "TRACE", "allow_methods must contain HTTP methods in capitals, not CONN"),
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
def test_values_are_checked_when_they_are_loaded(name: str, value: str, message: str) -> None:
    """An error starts with the source, the setting and its rule."""
    variable = f"TARRY_{name.upper()}"
    for source, flags, environ, set_values in (
        (f"--{name.replace('_', '-')}", {name: value}, {}, {}),
        (variable, {}, {variable: value}, {}),
        (f"--set {name}", {}, {}, {name: value}),
    ):
        with pytest.raises(ConfigurationError) as raised:
            load_settings(flags, environ, set_values=set_values)
        assert str(raised.value).startswith(f"{source}: {message}")


@pytest.mark.parametrize(
    ("store", "path"),
    [
        ("tasks.db", "tasks.db"),
        ("./data/tasks.db", "data/tasks.db"),
        ("/srv/tasks.db", "/srv/tasks.db"),
        ("C:tasks.db", "C:tasks.db"),
        ("sqlite:tasks.db", "tasks.db"),
        ("sqlite:///srv/tasks.db", "/srv/tasks.db"),
    ],
)
def test_a_store_can_be_a_path(store: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path without `sqlite:` names a SQLite file."""
    monkeypatch.setattr("os.access", lambda *_: True)

    assert Path(path) == sqlite_path(load_settings({"store": store}, {}).settings.store)


def test_a_folder_must_be_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in a folder that is not writable is an error."""
    monkeypatch.setattr("os.access", lambda *_: False)

    with pytest.raises(
        ConfigurationError, match=r"^--store: store cannot be used, because the folder"
    ):
        load_settings({"store": "sqlite:x/tarry.db"}, {})


def test_loading_creates_no_files(tmp_path: Path) -> None:
    """Loading settings creates neither the store nor the folder of bodies."""
    load_settings({"store": f"sqlite:{tmp_path}/a/t.db", "bodies": f"{tmp_path}/b"}, {})

    assert [] == list(tmp_path.iterdir())


def test_the_error_of_an_invalid_default_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default store is an error if its path is a folder."""
    (tmp_path / "tarry-data" / "tarry.db").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigurationError, match=r"^store: store must be a file, but tarry-data"):
        load_settings({}, {})


@pytest.mark.parametrize(
    ("variable", "message"),
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
    "load", [partial(load_settings, {}), check_environment], ids=["load_settings", "check"]
)
def test_an_unknown_variable_is_an_error(
    load: Callable[[dict[str, str]], object], variable: str, message: str
) -> None:
    """The error suggests a similar variable of the service or of the client."""
    with pytest.raises(ConfigurationError) as raised:
        load({variable: "true"})
    assert str(raised.value).startswith(f"{variable}: there is no such setting; {message}")


def test_variables_of_the_client_are_allowed() -> None:
    """TARRY_SERVER and TARRY_KEY, which the client reads, are no error."""
    environ = {"TARRY_SERVER": "http://x", "TARRY_KEY": "k", "OTHER": "x"}

    assert {"default"} == set(load_settings({}, environ).sources.values())


@pytest.mark.parametrize(
    ("line", "message"),
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
def test_values_of_a_file_are_typed(tmp_path: Path, line: str, message: str) -> None:
    """A value of the wrong TOML type is an error, also a number in quotes."""
    file = tmp_path / "tarry.toml"
    file.write_text(line)

    with pytest.raises(ConfigurationError) as raised:
        load_settings({}, {}, file)
    assert message.format(file) == str(raised.value)


def test_an_integer_is_a_valid_float_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tarry.toml"
    file.write_text('tenant_rate = 5\nallow_host = ["a", "b"]\n')
    settings = load_settings({}, {}, file).settings

    assert (5.0, ("a", "b")) == (settings.tenant_rate, settings.allow_host)


def test_an_invalid_secret_is_not_printed() -> None:
    """Errors about the type or the value of a secret do not contain the secret."""
    for name in ("encryption_keys", "signing_secrets"):
        for invalid in ({"hush": 1}, "hush", "whsec_hush"):
            with pytest.raises(ConfigurationError) as raised:
                load_settings({name: [invalid]}, {})
            assert "hush" not in str(raised.value)


def test_errors_of_the_file_contain_the_cause(tmp_path: Path) -> None:
    """A missing file, invalid TOML and an unknown setting are errors."""
    with pytest.raises(ConfigurationError, match="nowhere"):
        load_settings({}, {}, tmp_path / "nowhere")
    invalid = tmp_path / "invalid.toml"
    invalid.write_text("port = ")
    with pytest.raises(ConfigurationError, match="not TOML"):
        load_settings({}, {}, invalid)
    invalid.write_text("ports = 1")
    with pytest.raises(ConfigurationError, match=r"ports in .*no such setting"):
        load_settings({}, {}, invalid)


def test_the_default_lease_is_longer_than_the_longest_attempt() -> None:
    """The default lease exceeds the attempt timeout by more than 5 s; `lease_ms` overrides it."""
    settings = Settings(max_attempt_timeout_ms=1000)

    assert settings.lease_duration_ms > 1000 + 5000
    assert 9000 == Settings(max_attempt_timeout_ms=1000, lease_ms=9000).lease_duration_ms


def test_service_links_of_kubernetes_are_ignored() -> None:
    """Kubernetes sets these variables in each pod for a Service named tarry or tarry-api."""
    service_links = {
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

    assert Settings() == load_settings({}, service_links).settings


def test_limits_of_downstreams_are_read_from_the_file(tmp_path: Path) -> None:
    """Patterns have the fields of the API, in lower case with underscores."""
    file = tmp_path / "tarry.toml"
    file.write_text("""
[[downstreams]]
lane = "https:*.example.com:443"
rate_per_second = 50
breaker = { failure_rate = 0.5, open_for_ms = 5000 }

[[downstreams]]
lane = "http:a.example:80"
tenant = "acme"
budget = { enabled = false }
""")
    loaded = load_settings({}, {}, file)
    first, second = loaded.settings.downstreams

    breaker = BreakerSettings(failure_rate=0.5, open_for_ms=5000)
    assert DownstreamLimits(rate_per_second=50, breaker=breaker) == first.limits
    assert DownstreamLimits(budget=BudgetSettings(enabled=False)) == second.limits
    patterns = "*/https:*.example.com:443, acme/http:a.example:80"
    assert patterns == loaded.format("downstreams")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("rate_per_second = 5", r"\[0\]: Object missing required field `lane`"),
        ('lane = "*"\nrate = 5', r"\[0\]: Object contains unknown field `rate`"),
        ('lane = "*"\nrate_per_second = 0', r"\[0\].rate_per_second: Expected `float` >= 0.001"),
        ('lane = "*"\nbreaker = {probes = 0}', r"\[0\].breaker.probes: Expected `int` >= 1"),
        ('lane = "example.com"', "must be scheme:host:port"),
        ('lane = "https:Example.com"', "must write the lane as https:example.com:443"),
    ],
)
def test_invalid_limits_of_downstreams_are_reported(
    tmp_path: Path, entry: str, message: str
) -> None:
    """The error names the file, the entry and the field."""
    file = tmp_path / "tarry.toml"
    file.write_text(f"[[downstreams]]\n{entry}\n")
    with pytest.raises(ConfigurationError, match=rf"^downstreams in .*tarry.toml.*{message}"):
        load_settings({}, {}, file)


def test_limits_of_downstreams_can_only_be_set_in_a_file() -> None:
    """A variable or `--set` cannot hold patterns with several fields."""
    message = "can only be set in a settings file"
    with pytest.raises(ConfigurationError, match=f"^TARRY_DOWNSTREAMS: {message}"):
        load_settings({}, {"TARRY_DOWNSTREAMS": "a"})
    with pytest.raises(ConfigurationError, match=f"^--set downstreams: {message}"):
        load_settings({}, {}, set_values={"downstreams": "a"})


@pytest.mark.parametrize("role", ["api", "worker"])
def test_a_store_in_memory_has_one_process(role: str) -> None:
    """A role for one of several processes is rejected, because they could not share the store."""
    with pytest.raises(ConfigurationError, match="role must be all with a store in memory"):
        load_settings({"role": role, "store": "memory:"}, {})
    assert role == load_settings({"role": role}, {}).settings.role
    with pytest.raises(ConfigurationError, match="workers must be 1 with a store in memory"):
        load_settings({"workers": 2, "store": "memory:"}, {})


def load_secrets(folder: Path, entry: str) -> LoadedSettings:
    """Return the settings of a file with one secret."""
    file = folder / "tarry.toml"
    file.write_text(f'[[secrets]]\nname = "orders"\n{entry}\n')
    return load_settings({}, {}, file)


ANY_TARGET = 'targets = ["*"]\n'
TOKEN = f'{ANY_TARGET}token_url = "https://login.example/token"\nclient_id = "tarry"\n'


@pytest.mark.parametrize(
    "entry",
    [
        f'{ANY_TARGET}file = "/run/secrets/orders"\ntemplate = "Bearer {{}}"\nheader = "X-Key"',
        'targets = ["https:a.example:443", "https:*.b.example:443"]\nenvironment = "ORDERS_TOKEN"',
        f'{ANY_TARGET}command = ["pass", "show", "topsecret"]\ntimeout_ms = 100\ncache_ms = 1000',
        f'{TOKEN}client_secret_file = "secret"\nscope = "a b"\nparameters = {{audience = "c"}}',
        TOKEN.replace("https://login.example", "http://127.0.0.1:9")
        + 'client_auth = "body"\nclient_secret_environment = "S"',
    ],
)
def test_secrets_are_read_from_the_file_and_only_their_names_are_shown(
    tmp_path: Path, entry: str
) -> None:
    """`tarry config` shows tenant and name: arguments of a command may be secret."""
    loaded = load_secrets(tmp_path, f'tenant = "shop"\n{entry}')
    assert "shop/orders" == loaded.format("secrets")
    assert ("shop/orders",) == loaded.redacted_value("secrets")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('file = "f"', r"targets of 'orders' must list the lanes .*or \[\"\*\"\] for all"),
        ('targets = ["example.com"]\nfile = "f"', "targets of 'orders' must be scheme:host:port"),
        (
            'targets = ["https:a.example:443@key"]\nfile = "f"',
            "must write lanes without a lane key, such as https:a.example:443",
        ),
        *(
            (f'targets = ["{pattern}"]\nfile = "f"', r"targets of 'orders' must be \* or scheme")
            for pattern in ("https:a.example*", "https:*a.example:443", "https://*", "https:*")
        ),
        (ANY_TARGET, "the source of 'orders' must be exactly one of file, environment, command"),
        (f'{ANY_TARGET}file = "f"\nenvironment = "E"', "must be exactly one of"),
        (f'{ANY_TARGET}file = "f"\ntemplate = "Bearer"', "template of 'orders' must be visible"),
        (f'{ANY_TARGET}file = "f"\ntemplate = "a\\n{{}}"', "template of 'orders' must be visible"),
        (f'{ANY_TARGET}file = "f"\ncache_ms = 5000', "cache_ms of 'orders' .* without command"),
        (f'{ANY_TARGET}environment = "TARRY_KEY"', "must not begin with TARRY_"),
        (f'{ANY_TARGET}file = "f"\nparameters = {{a = "b"}}', "parameters of .* without token_url"),
        (f'{ANY_TARGET}file = "f"\nscope = "a"', "scope of 'orders' .* without token_url"),
        (f'{ANY_TARGET}file = "f"\ntenant = "a/b"', "tenant of 'orders' must be 1 to 63"),
        (TOKEN, "client_secret_file of 'orders' or client_secret_environment must be given"),
        (
            f'{ANY_TARGET}token_url = "https://a.example/"\nclient_secret_file = "f"',
            "client_id of 'orders' must be given with token_url",
        ),
        (
            TOKEN.replace("https", "http") + 'client_secret_file = "f"',
            "token_url of 'orders' must be an https URL",
        ),
        (
            TOKEN.replace("https://", "https://user@") + 'client_secret_file = "f"',
            "token_url of 'orders' must",
        ),
        (f'{ANY_TARGET}fil = "f"', r"\[0\]: Object contains unknown field `fil`"),
        (f'{ANY_TARGET}file = "f"\nheader = "X Key"', "header of 'orders' must be the name of a"),
        (f'{ANY_TARGET}file = "f"\nheader = ""', "header of 'orders' must be the name of a"),
        (f'{ANY_TARGET}file = "f"\n[[secrets]]\nname = "orders"\nfile = "f"', "twice"),
        (f'{ANY_TARGET}file = "f"\n[[secrets]]\nname = "a b"\nfile = "f"', "name of 'a b' must be"),
    ],
)
def test_invalid_secrets_are_reported(tmp_path: Path, entry: str, message: str) -> None:
    """The error names the file, the secret and the field."""
    with pytest.raises(ConfigurationError, match=rf"^secrets in .*tarry.toml.*{message}"):
        load_secrets(tmp_path, entry)


def load_client_certificate(folder: Path, entry: str) -> LoadedSettings:
    """Return the settings of a file with one client certificate."""
    file = folder / "tarry.toml"
    file.write_text(f'[[client_certificates]]\ncert_file = "a.crt"\nkey_file = "a.key"\n{entry}\n')
    return load_settings({}, {}, file)


def test_client_certificates_are_read_from_the_file(tmp_path: Path) -> None:
    """`tarry config` shows the tenant and the file of the certificate."""
    loaded = load_client_certificate(tmp_path, 'targets = ["https:*.bank.example:443"]')
    assert "default/a.crt" == loaded.format("client_certificates")
    assert ("https:*.bank.example:443",) == loaded.settings.client_certificates[0].targets


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("", "targets of 'a.crt' must list the lanes"),
        ('targets = ["https:*bank.example:443"]', r"targets of 'a.crt' must be \* or scheme"),
        (f'{ANY_TARGET}tenant = "a/b"', "tenant of 'a.crt' must be 1 to 63"),
        (f'{ANY_TARGET}password = "p"', r"\[0\]: Object contains unknown field `password`"),
    ],
)
def test_invalid_client_certificates_are_reported(tmp_path: Path, entry: str, message: str) -> None:
    """The error names the settings file, the certificate and the field."""
    match = rf"^client_certificates in .*tarry.toml.*{message}"
    with pytest.raises(ConfigurationError, match=match):
        load_client_certificate(tmp_path, entry)


def test_certificate_and_key_of_the_service_are_given_together() -> None:
    """The error names the setting that is missing."""
    with pytest.raises(ConfigurationError, match=r"^tls_key must be given with tls_cert$"):
        load_settings({"tls_cert": "a.crt"}, {})
    with pytest.raises(ConfigurationError, match=r"^tls_cert must be given with tls_key$"):
        load_settings({}, {"TARRY_TLS_KEY": "a.key"})


def test_secrets_can_only_be_set_in_a_file() -> None:
    """A variable or `--set` cannot hold definitions with several fields."""
    with pytest.raises(ConfigurationError, match=r"^TARRY_SECRETS: can only be set in a settings"):
        load_settings({}, {"TARRY_SECRETS": "a"})
