"""The settings of the service, and how they are loaded.

Sources, in order of precedence: flags of single settings such as `--port`, `--set NAME=VALUE`,
`TARRY_*` environment variables, a TOML file, the defaults. Errors name the source of a value.

Client commands import this module too, to find misspelt environment variables. The components of
the service check the values of their settings; `check_setting` imports these components only when
it is called, so that client commands do not load them. No check creates or changes a file.
"""

from __future__ import annotations

import os
import re
import ssl
import tomllib
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tarry.core.checks import check_number, check_one_of
from tarry.core.text import suggest
from tarry.errors import ConfigurationError, short_repr
from tarry.service import defaults
from tarry.service.defaults import LEASE_GRACE_MS
from tarry.service.redaction import REDACTED, redact_user_info
from tarry.service.store_url import (
    StoreEngine,
    find_engine,
    may_have_password,
    redact_store_url,
    sqlite_path,
)
from tarry.wire.tasks import SECRET_NAME_PATTERN, DownstreamLimits, DownstreamLimitsRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")

DEFAULT_SOURCE = "default"
"""The source of a setting that has its default value."""
SECRET_SETTINGS = frozenset({"encryption_keys", "signing_secrets"})


def _help(text: str, *, ge: int | None = None, le: int | None = None) -> Meta:
    return Meta(description=text, ge=ge, le=le)


class DownstreamPattern(DownstreamLimitsRequest, frozen=True, kw_only=True):
    """Limits of all downstreams whose lane and tenant match; `*` stands for any characters."""

    lane: Annotated[str, Meta(min_length=1)]
    tenant: Annotated[str, Meta(min_length=1)] = "*"

    def __str__(self) -> str:
        """Return the pattern of tenant and lane."""
        return f"{self.tenant}/{self.lane}"

    @property
    def limits(self) -> DownstreamLimits:
        """The limits without the pattern."""
        return msgspec.convert(self, DownstreamLimits, from_attributes=True)


class SecretDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A secret to which headers of tasks can refer; it has exactly one source.

    The sources are `file`, `environment`, `command` and `token_url`, with the fields below each.
    """

    name: str
    tenant: str = "default"
    targets: tuple[str, ...] = ()
    header: str = "Authorization"  # the only header that may have the value
    template: str = ""  # empty: `{}`, and `Bearer {}` for tokens
    file: str = ""
    environment: str = ""
    command: tuple[str, ...] = ()
    timeout_ms: Annotated[int, Meta(ge=1, le=60_000)] = 5_000
    cache_ms: Annotated[int, Meta(ge=1_000, le=86_400_000)] = 60_000
    token_url: str = ""
    client_id: str = ""
    client_secret_file: str = ""
    client_secret_environment: str = ""
    client_auth: Literal["basic", "body"] = "basic"
    scope: str = ""
    parameters: dict[str, str] = {}

    def __str__(self) -> str:
        """Return the tenant and the name, which contain no secret."""
        return f"{self.tenant}/{self.name}"


class ClientCertificateFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client certificate, and the targets of a tenant to which it is presented."""

    tenant: str = "default"
    targets: tuple[str, ...] = ()
    cert_file: str
    key_file: str

    def __str__(self) -> str:
        """Return the tenant and the file of the certificate."""
        return f"{self.tenant}/{self.cert_file}"


DEFAULT_STORE = "sqlite:tarry-data/tarry.db"
"""Its folder is created with it. The folder of any other file must exist."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the service, with their defaults and help texts."""

    store: Annotated[
        str, _help("Where tasks are stored: a path, sqlite:PATH, memory:, or the URL of a server")
    ] = DEFAULT_STORE
    strict_durability: Annotated[
        bool, _help("Refuse to start if the server of `store` may lose acknowledged tasks")
    ] = False
    bodies: Annotated[
        str, _help("Storage of large bodies: a folder, s3://, gs://, az://; empty: next to `store`")
    ] = ""
    bodies_endpoint: Annotated[
        str, _help("The URL of an S3-compatible server for `bodies`: http://minio:9000")
    ] = ""
    role: Annotated[
        Literal["all", "api", "worker"],
        _help("api: accept requests only; worker: deliver tasks only; all: both"),
    ] = "all"
    workers: Annotated[
        int, _help("The number of processes that `tarry serve` starts on one address", ge=1)
    ] = 1
    process_port: Annotated[
        int,
        _help(
            "With `workers`: process n, from 0, also listens on this port plus n; 0: it does not",
            ge=0,
            le=65535,
        ),
    ] = 0
    host: Annotated[str, _help("The address to listen on")] = "127.0.0.1"
    port: Annotated[int, _help("The port to listen on; 0: a free port", ge=0, le=65535)] = 8080
    tls_cert: Annotated[
        str, _help("A PEM file with the certificate of the service; empty: HTTP without TLS")
    ] = ""
    tls_key: Annotated[str, _help("A PEM file with the private key of `tls_cert`")] = ""
    dev: Annotated[bool, _help("Allow targets on loopback addresses, for development")] = False
    allow_target: Annotated[
        tuple[str, ...],
        _help("Allowed targets besides public ones: networks; names (their private addresses)"),
    ] = ()
    allow_methods: Annotated[
        tuple[str, ...],
        _help("HTTP methods that tasks may use besides the standard ones, such as PURGE"),
    ] = ()
    on_blocked: Annotated[
        Literal["wait", "fail"],
        _help("A task whose target is not allowed waits until it is, or fails (dead letter)"),
    ] = "wait"
    require_keys: Annotated[bool, _help("Require API keys on a loopback `host`, too")] = False
    operator: Annotated[
        str, _help("The tenant that can read the metrics of all tenants, and list processes")
    ] = ""
    allow_host: Annotated[
        tuple[str, ...], _help("Without API keys: accepted Host headers besides loopback names")
    ] = ()
    compatibility: Annotated[
        tuple[str, ...], _help("APIs of other vendors to serve, too: qstash, cloud_tasks")
    ] = ()
    horizon_ms: Annotated[int, _help("How long before its due time a task is leased", ge=1)] = 1_000
    max_attempt_timeout_ms: Annotated[
        int, _help("The largest attemptTimeoutMs that a policy may have", ge=1)
    ] = defaults.MAX_ATTEMPT_TIMEOUT_MS
    lease_ms: Annotated[
        int, _help("The duration of a lease; 0: max_attempt_timeout_ms plus 10 s", ge=0)
    ] = 0
    in_flight: Annotated[
        int, _help("Maximum number of attempts in flight in one process", ge=1)
    ] = defaults.MAX_IN_FLIGHT
    lane_in_flight: Annotated[
        int, _help("Maximum attempts in flight to one downstream (lane), in one process", ge=1)
    ] = defaults.MAX_LANE_IN_FLIGHT
    downstreams: Annotated[
        tuple[DownstreamPattern, ...], _help("Limits of downstreams; only in a settings file")
    ] = ()
    max_body_bytes: Annotated[
        int, _help("The largest body of an API request (except batches) or a bodyRef", ge=1)
    ] = defaults.MAX_REQUEST_BYTES
    head_timeout_ms: Annotated[
        int, _help("How long the headers of an API request may take to arrive", ge=1)
    ] = 10_000
    body_timeout_ms: Annotated[
        int, _help("How long the body of an API request may take to arrive", ge=1)
    ] = 60_000
    inline_body_bytes: Annotated[
        int, _help("The largest task body that is stored with its task, not in `bodies`", ge=0)
    ] = defaults.INLINE_BODY_BYTES
    max_response_bytes: Annotated[
        int, _help("How many bytes of a target's response body are read", ge=1)
    ] = defaults.MAX_RESPONSE_BYTES
    tenant_pending: Annotated[
        int, _help("Maximum unfinished (PENDING or IN_FLIGHT) tasks of a tenant; 0: no limit", ge=0)
    ] = defaults.MAX_TENANT_UNFINISHED_TASKS
    tenant_lanes: Annotated[
        int, _help("Maximum lanes (target hosts and lane keys) of a tenant; 0: no limit", ge=0)
    ] = defaults.MAX_TENANT_LANES
    tenant_policy_versions: Annotated[
        int, _help("Maximum number of policy versions of a tenant; 0: no limit", ge=0)
    ] = defaults.MAX_TENANT_POLICY_VERSIONS
    tenant_rate: Annotated[
        float,
        _help(
            "Maximum tasks that a tenant may add, retry and replay per second; 0: no limit", ge=0
        ),
    ] = defaults.MAX_TENANT_TASKS_PER_S
    keep_succeeded_ms: Annotated[int, _help("Retention of succeeded and cancelled tasks", ge=1)] = (
        604_800_000
    )
    keep_dead_ms: Annotated[int, _help("Retention of dead letters", ge=1)] = 2_592_000_000
    egress_proxy: Annotated[str, _help("The proxy for all attempts: http://host:port")] = ""
    ca_file: Annotated[
        str, _help("A PEM file of CA certificates to trust instead of those of the system")
    ] = ""
    signing_secrets: Annotated[
        tuple[str, ...],
        _help("Standard Webhooks secrets (whsec_...) of the tenant `default`, the newest first"),
    ] = ()
    share_signing_secrets: Annotated[
        bool, _help("Use `signing_secrets` for all tenants that have no signing secrets")
    ] = False
    secrets: Annotated[
        tuple[SecretDefinition, ...],
        _help("Secrets to which headers of tasks can refer; only in a settings file"),
    ] = ()
    client_certificates: Annotated[
        tuple[ClientCertificateFiles, ...],
        _help("Client certificates for targets that require one (mTLS); only in a settings file"),
    ] = ()
    encryption_keys: Annotated[
        tuple[str, ...],
        _help("Keys that encrypt tasks, bodies, errors and excerpts, the newest first"),
    ] = ()
    drain_ms: Annotated[int, _help("How long a shutdown waits for running attempts", ge=0)] = 30_000
    traces: Annotated[
        Literal["none", "otlp"],
        _help("otlp: export a span for each attempt, as the OTEL_* environment variables say"),
    ] = "none"
    log: Annotated[Literal["text", "json"], _help("The format of log lines: text or json")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _help("The lowest level that is logged")
    ] = "info"

    @property
    def lease_duration_ms(self) -> int:
        """The duration of a lease: `lease_ms`, or if that is 0, `max_attempt_timeout_ms` + 10 s."""
        return self.lease_ms or self.max_attempt_timeout_ms + 2 * LEASE_GRACE_MS


class LoadedSettings(msgspec.Struct, frozen=True):
    """Settings, and the source of each setting."""

    settings: Settings
    sources: dict[str, str]

    def redacted_value(self, name: str) -> Any:
        """Return the value of a setting, with secrets replaced."""
        value = getattr(self.settings, name)
        if name in SECRET_SETTINGS:
            return (REDACTED,) * len(value)
        if name in {"secrets", "client_certificates"}:  # arguments of a command may be secret
            return tuple(map(str, value))
        if name == "store":
            return redact_store_url(value)
        return redact_user_info(value) if isinstance(value, str) else value

    def format(self, name: str) -> str:
        """Return the value of a setting as text, with secrets replaced."""
        value = self.redacted_value(name)
        if name in SECRET_SETTINGS:
            return f"{len(value)} not shown" if value else "none"
        if isinstance(value, tuple):
            return ", ".join(map(str, cast("tuple[object, ...]", value))) or "none"
        return str(value).lower() if isinstance(value, bool) else str(value)


_PREFIX = "TARRY_"
_KUBERNETES_SERVICE_VARIABLE = re.compile(
    r"TARRY_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)"
)
_SETTING_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}
_FILE_SETTINGS = frozenset({"client_certificates", "downstreams", "secrets"})
"""Settings that consist of tables, which can only be written in a TOML file."""
_URL_SETTINGS = frozenset({"bodies", "bodies_endpoint", "egress_proxy", "store"})
"""Settings whose values may contain a password."""
_KNOWN_NAMES = (*_SETTING_TYPES, "key", "server")
"""Names that may follow `TARRY_`, in lower case: all settings; for clients, `key` and `server`."""
_SECRET_NAME = re.compile(SECRET_NAME_PATTERN)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,31}")
_FORBIDDEN_METHODS = frozenset({"CONNECT", "TRACE"})
_TARGET_PATTERN = re.compile(
    r"\*|(?:\*|https?|grpcs?):(?:\*|(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]):(?:\*|[0-9]+)"
)
"""A `*` elsewhere could match the host of a stranger, such as `https:example*`."""
_SECRET_SOURCES = ("file", "environment", "command", "token_url")
_SECRET_FIELD_DEFAULTS = {
    name: value
    for name, value in msgspec.structs.asdict(SecretDefinition(name="")).items()
    if name.startswith(("client_", "timeout_", "cache_", "scope", "parameters"))
}
"""The fields of a secret that belong to one source, with their defaults."""
_BOUND = re.compile(r" [<>]=? \S+$")
"""The end of msgspec's message about a number out of bounds, such as ` >= 1`."""
_TYPE_TEXTS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a list of strings",
}


def load_settings(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    set_values: Mapping[str, Any] = MappingProxyType({}),
) -> LoadedSettings:
    """Load the settings. `set_values` are the values of `--set`; a flag of None was not given."""
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.__struct_fields__, DEFAULT_SOURCE)
    # By (source, name of the setting), the weakest source first.
    raw_values: dict[tuple[str, str], Any] = {}
    if file is not None:
        raw_values |= {
            (f"{name} in {file}", name): value for name, value in _read_file(file).items()
        }
    file_entries = set(raw_values)
    raw_values |= {(_variable_name(name), name): text for name, text in _read_environment(environ)}
    raw_values |= {(f"--set {name}", name): value for name, value in set_values.items()}
    raw_values |= {(f"--{name.replace('_', '-')}", name): value for name, value in flags.items()}
    for (source, name), value in raw_values.items():
        if value is not None:
            # TOML values have types: a number in quotes is a string.
            is_typed = (source, name) in file_entries
            values[name] = _convert(source, name, value, is_typed=is_typed)
            sources[name] = source
    loaded = LoadedSettings(Settings(**values), sources)
    for name, source in sources.items():
        try:
            check_setting(name, getattr(loaded.settings, name))
        except ConfigurationError as error:
            msg = f"{name if source == DEFAULT_SOURCE else source}: {error}"
            raise ConfigurationError(msg) from None
    settings = loaded.settings
    if find_engine(settings.store) is StoreEngine.MEMORY:
        for name, only_value in (("role", "all"), ("workers", 1)):
            value = getattr(settings, name)
            if value != only_value:
                rule = f"must be {only_value} with a store in memory: no other process can use it"
                raise ConfigurationError(name, rule, value)
    if bool(settings.tls_cert) != bool(settings.tls_key):
        missing, given = "tls_key", "tls_cert"
        if settings.tls_key:
            missing, given = given, missing
        raise ConfigurationError(missing, f"must be given with {given}")
    min_ms = settings.max_attempt_timeout_ms + LEASE_GRACE_MS
    if settings.lease_duration_ms < min_ms:
        msg = (
            f"{sources['lease_ms']}: lease_ms must be at least {min_ms} (max_attempt_timeout_ms "
            f"plus {LEASE_GRACE_MS} for storing the result), got {settings.lease_duration_ms}"
        )
        raise ConfigurationError(msg)
    return loaded


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Raise ConfigurationError for an unknown `TARRY_*` variable, which may be misspelt."""
    known_variables = {_variable_name(name) for name in _KNOWN_NAMES}
    for variable, text in (os.environ if environ is None else environ).items():
        is_for_tarry = variable.startswith(_PREFIX) and not _is_set_by_kubernetes(variable, text)
        if is_for_tarry and variable not in known_variables:
            name = variable.removeprefix(_PREFIX).lower()
            raise _unknown_setting(variable, name, _KNOWN_NAMES, _variable_name)


def environment_variables() -> Mapping[str, str]:
    """Return the environment variables of the process, for secrets that are defined by one."""
    return os.environ


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not TOML: {error}") from error


def _read_environment(environ: Mapping[str, str] | None) -> list[tuple[str, str]]:
    environ = os.environ if environ is None else environ
    check_environment(environ)
    texts = {name: environ.get(_variable_name(name)) for name in _SETTING_TYPES}
    return [
        (name, text)
        for name, text in texts.items()
        if text is not None and not _is_set_by_kubernetes(_variable_name(name), text)
    ]


def _is_set_by_kubernetes(variable: str, text: str) -> bool:
    """Return whether Kubernetes has set the variable for a Service named tarry or tarry-*."""
    return _KUBERNETES_SERVICE_VARIABLE.fullmatch(variable) is not None or (
        variable.endswith("_PORT") and "://" in text  # NAME_PORT=tcp://ADDRESS:PORT
    )


def _variable_name(name: str) -> str:
    return _PREFIX + name.upper()


def _unknown_setting(
    source: str, name: str, known_names: Iterable[str], format_name: Callable[[str], str]
) -> ConfigurationError:
    """Return the error for an unknown setting. `format_name` writes a name as the source does."""
    names = sorted(known_names)
    hint = f"the settings are {', '.join(map(format_name, names))}"
    if similar := suggest(name, names):
        hint = f"did you mean {format_name(similar)}?"
    return ConfigurationError(f"{source}: there is no such setting; {hint}")


def _convert(source: str, name: str, value: Any, *, is_typed: bool) -> Any:
    if name not in _SETTING_TYPES:
        raise _unknown_setting(source, name, _SETTING_TYPES, str)
    if name in _FILE_SETTINGS:
        return _convert_tables(source, name, value, is_typed=is_typed)
    setting_type = get_args(_SETTING_TYPES[name])[0]  # without Annotated
    base_type = get_origin(setting_type) or setting_type
    if base_type is tuple and isinstance(value, str) and not is_typed:
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, _SETTING_TYPES[name], strict=is_typed)
    except msgspec.ValidationError as error:
        if base_type is Literal:
            *choices, last = get_args(setting_type)
            rule = f"{', '.join(choices)} or {last}"
        else:
            rule = _TYPE_TEXTS[base_type]
        bound = _BOUND.search(str(error))
        value_text = str(value).lower() if isinstance(value, bool) else short_repr(value)
        may_be_secret = name in SECRET_SETTINGS or name in _URL_SETTINGS
        got = "" if may_be_secret else f", got {value_text}"
        msg = f"{source}: must be {rule}{bound[0] if bound else ''}{got}"
        raise ConfigurationError(msg) from error


def _convert_tables(source: str, name: str, value: Any, *, is_typed: bool) -> Any:
    if not is_typed:
        raise ConfigurationError(f"{source}: can only be set in a settings file")
    if name == "downstreams":
        value = _rename_keys(value)
    try:
        return msgspec.convert(value, _SETTING_TYPES[name])
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        path = re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", path.rstrip("`"))
        raise ConfigurationError(f"{source}{path}: {text}") from error


def _rename_keys(value: Any) -> Any:
    """Return a value of a TOML file with the names of the API: `open_for_ms` as `openForMs`."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {
            re.sub("_([a-z])", lambda match: match[1].upper(), name): _rename_keys(item)
            for name, item in items
        }
    if isinstance(value, list):
        return [_rename_keys(item) for item in cast("Sequence[Any]", value)]
    return value


def check_setting(name: str, value: Any) -> None:
    """Raise ConfigurationError if a value of the right type is not valid for its setting."""
    if not value and name not in {"host", "store"}:  # only these must not be empty
        return
    from tarry.service.api.auth import check_tenant
    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.http1.connector import parse_proxy
    from tarry.service.delivery.signing import Signer
    from tarry.service.encryption import Codec

    checks: dict[str, Callable[[Any], object]] = {
        "store": _check_store,
        "bodies": _check_bodies,
        "bodies_endpoint": _check_endpoint,
        "host": _check_host,
        "allow_host": _check_hosts,
        "compatibility": _check_compatibility,
        "allow_target": Guard,
        "allow_methods": _check_methods,
        "operator": check_tenant,
        "tenant_rate": lambda rate: check_number("tenant_rate", rate),
        "egress_proxy": parse_proxy,
        "ca_file": _check_certificates,
        "signing_secrets": Signer,
        "encryption_keys": Codec,
        "downstreams": _check_patterns,
        "secrets": _check_secrets,
        "client_certificates": _check_client_certificates,
    }
    if name not in checks:
        return
    try:
        checks[name](value)
    except ConfigurationError as error:
        # The error names a parameter of the component. Users only know the name of the setting.
        raise error.with_field(name) from None


def _check_compatibility(names: tuple[str, ...]) -> None:
    from tarry.service.api.shims import SHIM_NAMES

    for name in names:
        check_one_of("compatibility", name, SHIM_NAMES)


def _check_methods(methods: Sequence[str]) -> None:
    for method in methods:
        if not _METHOD.fullmatch(method) or method in _FORBIDDEN_METHODS:
            rule = "must contain HTTP methods in capitals, not CONNECT or TRACE"
            raise ConfigurationError("allow_methods", rule, method)


def _check_store(url: str) -> None:
    engine = find_engine(url)
    if engine is StoreEngine.POSTGRES:
        from tarry.service.stores.postgres import parse_url

        parse_url(url)
    if engine is not StoreEngine.SQLITE:
        return
    path = sqlite_path(url)
    if path.is_dir():
        rule = f"must be a file, but {path} is a folder: write {path}/tarry.db"
        raise ConfigurationError("store", rule)
    _check_folder("store", path.parent)


def _check_bodies(url: str) -> None:
    from tarry.service.payloads import BodyStore

    if "://" in url:
        try:
            BodyStore(url, max_object_bytes=1)
        except ConfigurationError as error:
            rule = f"must be a folder or a URL like s3://bucket/path ({error})"
            raise ConfigurationError("bodies", rule) from None
    elif may_have_password(url):
        rule = "must be a folder or a URL like s3://bucket/path, and looks like a mistyped URL"
        raise ConfigurationError("bodies", rule)
    else:
        _check_folder("bodies", Path(url))


def _check_folder(setting: str, path: Path) -> None:
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigurationError(setting, f"cannot be used, because {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        rule = f"cannot be used, because the folder {existing} is not writable"
        raise ConfigurationError(setting, rule)


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        rule = "must be a URL like http://host:port"
        raise ConfigurationError("bodies_endpoint", rule, redact_store_url(url))


def _check_certificates(file: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (OSError, ValueError):  # an SSLError is an OSError
        raise ConfigurationError("ca_file", "must be a file of PEM certificates", file) from None


def _check_host(host: str) -> None:
    from tarry.service.delivery.targets import parse_host

    try:
        ip_address(host)
    except ValueError:
        parse_host(host)


def _check_patterns(patterns: Sequence[DownstreamPattern]) -> None:
    from tarry.service.delivery.targets import parse_lane_name

    for pattern in patterns:
        name = pattern.lane if "*" in pattern.lane else parse_lane_name(pattern.lane)
        if name != pattern.lane:
            raise ConfigurationError("downstreams", f"must write the lane as {name}", pattern.lane)


def _check_secrets(definitions: Sequence[SecretDefinition]) -> None:
    names: set[str] = set()
    for definition in definitions:
        if str(definition) in names:
            raise ConfigurationError("secrets", f"must not define {definition} twice")
        names.add(str(definition))
        try:
            _check_secret(definition)
        except ConfigurationError as error:
            msg = f"secrets: {error.field} of {short_repr(definition.name)} {error.rule}"
            raise ConfigurationError(msg) from None


def _check_secret(definition: SecretDefinition) -> None:
    from tarry.service.api.auth import check_tenant, is_loopback
    from tarry.service.delivery.targets import parse_target

    if not _SECRET_NAME.fullmatch(definition.name):
        rule = "must be 1 to 100 characters (A-Z a-z 0-9 . _ -) and begin with a letter or digit"
        raise ConfigurationError("name", rule)
    check_tenant(definition.tenant)
    _check_target_patterns(definition.targets)
    template = definition.template
    if template and (
        template.count("{}") != 1
        or not (template.isascii() and template.isprintable() and template == template.strip())
    ):
        rule = "must be visible ASCII characters with one {} for the value, such as Bearer {}"
        raise ConfigurationError("template", rule)
    if not _HEADER_NAME.fullmatch(definition.header):
        raise ConfigurationError("header", "must be the name of a header, such as X-API-Key")
    sources = [name for name in _SECRET_SOURCES if getattr(definition, name)]
    if len(sources) != 1:
        rule = f"must be exactly one of {', '.join(_SECRET_SOURCES)}"
        raise ConfigurationError("the source", rule)
    for variable in (definition.environment, definition.client_secret_environment):
        if variable.upper().startswith(_PREFIX):
            rule = f"must not begin with {_PREFIX}: these are settings of the service"
            raise ConfigurationError("the environment variable", rule)
    for name, default in _SECRET_FIELD_DEFAULTS.items():
        source = "command" if name in {"timeout_ms", "cache_ms"} else "token_url"
        if getattr(definition, name) != default and sources != [source]:
            raise ConfigurationError(name, f"must not be given without {source}")
    if definition.token_url:
        target = _parse("token_url", parse_target, definition.token_url)
        is_local_http = target.scheme == "http" and is_loopback(target.host)
        if target.scheme != "https" and not is_local_http:
            rule = "must be an https URL: the client secret is sent to it (RFC 6749, 3.2)"
            raise ConfigurationError("token_url", rule)
        if not definition.client_id:
            raise ConfigurationError("client_id", "must be given with token_url")
        if bool(definition.client_secret_file) == bool(definition.client_secret_environment):
            rule = "or client_secret_environment must be given with token_url, not both"
            raise ConfigurationError("client_secret_file", rule)


def _check_client_certificates(definitions: Sequence[ClientCertificateFiles]) -> None:
    from tarry.service.api.auth import check_tenant

    for definition in definitions:
        try:
            check_tenant(definition.tenant)
            _check_target_patterns(definition.targets)
        except ConfigurationError as error:
            name = short_repr(definition.cert_file)
            msg = f"client_certificates: {error.field} of {name} {error.rule}"
            raise ConfigurationError(msg) from None


def _check_target_patterns(targets: Sequence[str]) -> None:
    from tarry.service.delivery.targets import parse_lane_name

    if not targets:
        rule = (
            'must list the lanes for which it is used, such as ["https:example.com:443"], or '
            '["*"] for all: callers choose the target of a task'
        )
        raise ConfigurationError("targets", rule)
    for lane in targets:
        if "*" in lane:
            if not _TARGET_PATTERN.fullmatch(lane):
                rule = (
                    "must be * or scheme:host:port, where the scheme, the host, the first labels "
                    "of the host and the port can be *, such as https:*.example.com:443"
                )
                raise ConfigurationError("targets", rule, lane)
            continue
        name = _parse("targets", parse_lane_name, lane)
        if name != lane or "@" in lane:
            rule = f"must write lanes without a lane key, such as {name.partition('@')[0]}"
            raise ConfigurationError("targets", rule)


def _parse(field: str, parse: Callable[[str], T], text: str) -> T:
    """Parse a text; an error has the name of the field of a secret."""
    try:
        return parse(text)
    except ConfigurationError as error:
        raise error.with_field(field) from None


def _check_hosts(hosts: Sequence[str]) -> None:
    for host in hosts:
        if "/" in host or not urlsplit(f"//{host}").hostname:
            raise ConfigurationError("allow_host", "must contain host names", host)
