"""What the service can be told, and what it goes by unless it is."""

from __future__ import annotations

import os
import re
import tomllib
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin

import msgspec
from msgspec import Meta

from tarry.core.suggest import suggest
from tarry.errors import ConfigurationError, short_repr
from tarry.service import defaults
from tarry.service.defaults import LEASE_GRACE_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

DEFAULT = "default"
SECRETS = frozenset({"encryption_keys", "signing_secrets"})
_REDACTED = "[redacted]"

_Positive = Annotated[int, Meta(ge=1)]
_NotNegative = Annotated[int, Meta(ge=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every value that the service goes by."""

    store: Annotated[str, Meta(description="Where tasks are kept: sqlite:PATH or memory:")] = (
        "sqlite:tarry-data/tarry.db"
    )
    bodies: Annotated[
        str, Meta(description="Where large bodies are kept: a folder, or s3://, gs://, az://")
    ] = ""
    bodies_endpoint: Annotated[
        str, Meta(description="The server of an S3 that is not Amazon's: http://minio:9000")
    ] = ""
    host: Annotated[str, Meta(description="The address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="The port; 0 takes a free one")] = 8080
    dev: Annotated[bool, Meta(description="Allow loopback targets, for trying things out")] = False
    allow_target: Annotated[
        tuple[str, ...],
        Meta(description="Targets allowed beside public addresses: networks and host names"),
    ] = ()
    require_keys: Annotated[bool, Meta(description="Demand API keys also on loopback")] = False
    operator: Annotated[
        str, Meta(description="The tenant whose keys see the metrics of all tenants")
    ] = ""
    allow_host: Annotated[
        tuple[str, ...],
        Meta(description="Host names that requests may be sent to on loopback, beside its own"),
    ] = ()
    horizon_ms: Annotated[_Positive, Meta(description="How far ahead tasks are claimed")] = 1_000
    max_attempt_timeout_ms: Annotated[
        _Positive, Meta(description="The longest attemptTimeoutMs that a policy may ask for")
    ] = defaults.MAX_ATTEMPT_TIMEOUT_MS
    lease_ms: Annotated[
        int,
        Meta(ge=0, description="How long a claimed task is a worker's; 0 works it out"),
    ] = 0
    in_flight: Annotated[_Positive, Meta(description="Attempts at a time")] = defaults.MAX_IN_FLIGHT
    lane_in_flight: Annotated[_Positive, Meta(description="Attempts at a time, of a lane")] = (
        defaults.MAX_LANE_IN_FLIGHT
    )
    max_body_bytes: Annotated[
        _Positive, Meta(description="The largest body of a request to the API")
    ] = defaults.MAX_REQUEST_BYTES
    head_timeout_ms: Annotated[
        _Positive, Meta(description="How long the head of a request may take to arrive")
    ] = 10_000
    body_timeout_ms: Annotated[
        _Positive, Meta(description="How long the body of a request may take to arrive")
    ] = 60_000
    inline_body_bytes: Annotated[
        _NotNegative, Meta(description="Larger bodies go to where large bodies are kept")
    ] = defaults.INLINE_BODY_BYTES
    max_response_bytes: Annotated[
        _Positive, Meta(description="How much of a target's answer is read")
    ] = defaults.MAX_RESPONSE_BYTES
    tenant_pending: Annotated[
        _NotNegative, Meta(description="Live tasks that a tenant may have; 0 is no limit")
    ] = 0
    tenant_rate: Annotated[
        float, Meta(ge=0, description="Tasks a second that a tenant may add; 0 is no limit")
    ] = 0.0
    keep_succeeded_ms: Annotated[
        _Positive, Meta(description="How long succeeded and cancelled tasks are kept")
    ] = 604_800_000
    keep_dead_ms: Annotated[_Positive, Meta(description="How long dead letters are kept")] = (
        2_592_000_000
    )
    egress_proxy: Annotated[str, Meta(description="A proxy for all attempts: http://host:port")] = (
        ""
    )
    ca_file: Annotated[
        str, Meta(description="Certificates to trust instead of the system's: a PEM file")
    ] = ""
    signing_secrets: Annotated[
        tuple[str, ...],
        Meta(description="Standard Webhooks secrets (whsec_...), the newest first"),
    ] = ()
    encryption_keys: Annotated[
        tuple[str, ...],
        Meta(description="Keys that encrypt what is kept, the newest first"),
    ] = ()
    drain_ms: Annotated[
        _NotNegative, Meta(description="How long running attempts are waited for at the end")
    ] = 30_000
    log: Annotated[Literal["text", "json"], Meta(description="text or json")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least level to log")
    ] = "info"

    @property
    def lease(self) -> int:
        """The length of a lease in ms."""
        return self.lease_ms or self.max_attempt_timeout_ms + 2 * LEASE_GRACE_MS


class LoadedSettings(msgspec.Struct, frozen=True):
    """The settings in force, and where each of them came from."""

    settings: Settings
    origins: dict[str, str]

    def harmless(self, name: str) -> Any:
        """Return a value as it may be seen: without its secrets."""
        value = getattr(self.settings, name)
        if name in SECRETS:
            return (_REDACTED,) * len(value)
        if name == "egress_proxy" and "@" in value:
            scheme, _, rest = value.rpartition("://")
            return f"{scheme}://{_REDACTED}@{rest.rpartition('@')[2]}"
        return value

    def shown(self, name: str) -> str:
        """Return a value as people see it."""
        value = self.harmless(name)
        if name in SECRETS:
            return f"{len(value)} kept secret" if value else "none"
        if isinstance(value, tuple):
            return ", ".join(map(str, cast("tuple[object, ...]", value))) or "none"
        return str(value).lower() if isinstance(value, bool) else str(value)


_PREFIX = "TARRY_"
_LINK = re.compile(r"TARRY_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)")
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}
_WITH_VARIABLES = (*_TYPES, "key", "server")
"""The settings, and what those who call a service are told by variables."""
_BOUND = re.compile(r" [<>]=? \S+$")
"""The end of an error of msgspec's about a number that is too large or too small."""
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of texts",
}


class _Said(NamedTuple):
    """A value as one place says it."""

    origin: str
    name: str
    value: Any
    is_typed: bool = False
    """Whether the place has types of its own: there, a number in quotes is a text."""


def load_settings(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> LoadedSettings:
    """Lay flags over `changes` (of --set) over variables over the file over the defaults."""
    from tarry.service.settings_checks import (
        check_setting,  # loads parts of the service: callers do without
    )

    values: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.__struct_fields__, DEFAULT)
    sources = [
        *(_from_file(file) if file is not None else ()),
        *_from_environ(environ),
        *(_Said(f"--set {name}", name, value) for name, value in changes.items()),
        *(_Said(f"--{name.replace('_', '-')}", name, value) for name, value in flags.items()),
    ]
    for said in sources:
        if said.value is None:
            continue
        values[said.name] = _checked(said)
        origins[said.name] = said.origin
    loaded = LoadedSettings(Settings(**values), origins)
    for name, origin in origins.items():
        try:
            check_setting(name, getattr(loaded.settings, name))
        except ConfigurationError as error:
            msg = f"{name if origin == DEFAULT else origin}: {error}"
            raise ConfigurationError(msg) from None
    _check_lease(loaded)
    return loaded


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Refuse a `TARRY_*` variable that nobody reads: misspelt, it leaves a default in force."""
    known = {_variable(name) for name in _WITH_VARIABLES}
    for variable, text in (os.environ if environ is None else environ).items():
        is_ours = variable.startswith(_PREFIX) and not _is_link(variable, text)
        if is_ours and variable not in known:
            name = variable.removeprefix(_PREFIX).lower()
            raise _unknown(variable, name, _WITH_VARIABLES, _variable)


def _from_file(file: Path) -> list[_Said]:
    try:
        table = tomllib.loads(file.read_text())
    except OSError as error:
        msg = f"cannot read {file}: {error.strerror}"
        raise ConfigurationError(msg) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{file} is not TOML: {error}"
        raise ConfigurationError(msg) from error
    return [_Said(f"{name} in {file}", name, value, is_typed=True) for name, value in table.items()]


def _from_environ(environ: Mapping[str, str] | None) -> list[_Said]:
    environ = os.environ if environ is None else environ
    check_environment(environ)
    given = {name: environ.get(_variable(name)) for name in _TYPES}
    return [
        _Said(_variable(name), name, text)
        for name, text in given.items()
        if text is not None and not _is_link(_variable(name), text)
    ]


def _is_link(variable: str, text: str) -> bool:
    """Say whether Kubernetes has set a variable, for a Service called tarry or tarry-something."""
    return _LINK.fullmatch(variable) is not None or (
        variable.endswith("_PORT") and "://" in text  # all have this one, with their address
    )


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _unknown(
    origin: str, name: str, known: Iterable[str], written: Callable[[str], str]
) -> ConfigurationError:
    """Return what to say of a name that is none; there, names are `written` so."""
    names = sorted(known)
    close = suggest(name, names)
    every = ", ".join(map(written, names))
    said = f"did you mean {written(close)}?" if close else f"there are {every}"
    return ConfigurationError(f"{origin}: there is no such setting; {said}")


def _checked(said: _Said) -> Any:
    origin, name, value, is_typed = said
    if name not in _TYPES:
        raise _unknown(origin, name, _TYPES, str)
    if _kind(name) is tuple and isinstance(value, str) and not is_typed:
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, _TYPES[name], strict=is_typed)
    except msgspec.ValidationError as error:
        bound = _BOUND.search(str(error))
        seen = str(value).lower() if isinstance(value, bool) else short_repr(value)
        given = "" if name in SECRETS else f", got {seen}"
        msg = f"{origin}: must be {_wanted(name)}{bound[0] if bound else ''}{given}"
        raise ConfigurationError(msg) from error


def _wanted(name: str) -> str:
    """Say what the value of a setting is."""
    kind = _kind(name)
    if kind is Literal:
        *words, last = get_args(get_args(_TYPES[name])[0])
        return f"{', '.join(words)} or {last}"
    return _KINDS[kind]


def _kind(name: str) -> Any:
    kind = get_args(_TYPES[name])[0]  # without what is noted on it
    return get_origin(kind) or kind


def _check_lease(loaded: LoadedSettings) -> None:
    settings = loaded.settings
    least = settings.max_attempt_timeout_ms + LEASE_GRACE_MS
    if settings.lease < least:
        msg = (
            f"{loaded.origins['lease_ms']}: lease_ms must be at least max_attempt_timeout_ms plus "
            f"{LEASE_GRACE_MS} ms to store the result ({least}); otherwise a live worker would "
            f"lose its lease. Got {settings.lease}"
        )
        raise ConfigurationError(msg)
