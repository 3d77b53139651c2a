"""Settings from flags, from `TARRY_*` variables, from a TOML file, in that order.

The only reader of the environment and of the file. A mistake names the place it was made in.
Commands that call a service look for misspelt variables here: importing it loads little.
"""

from __future__ import annotations

import os
import re
import tomllib
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from tarry.core.checks import short
from tarry.errors import ConfigurationError
from tarry.service.settings import DEFAULT, GRACE_MS, SECRETS, Loaded, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

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


def load(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Loaded:
    """Lay flags over `changes` (of --set) over variables over the file over the defaults."""
    from tarry.service.checks import check  # loads parts of the service: callers do without

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
    loaded = Loaded(Settings(**values), origins)
    for name, origin in origins.items():
        try:
            check(name, getattr(loaded.settings, name))
        except ConfigurationError as error:
            msg = f"{name if origin == DEFAULT else origin}: {error}"
            raise ConfigurationError(msg) from None
    _check_lease(loaded)
    return loaded


def check_variables(environ: Mapping[str, str] | None = None) -> None:
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
    check_variables(environ)
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
    close = [written(one) for one in get_close_matches(name, names, n=1)]
    every = ", ".join(map(written, names))
    said = f"did you mean {close[0]}?" if close else f"there are {every}"
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
        seen = str(value).lower() if isinstance(value, bool) else short(value)
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


def _check_lease(loaded: Loaded) -> None:
    settings = loaded.settings
    least = settings.max_attempt_timeout_ms + GRACE_MS
    if settings.lease < least:
        msg = (
            f"{loaded.origins['lease_ms']}: lease_ms must be at least max_attempt_timeout_ms and "
            f"{GRACE_MS} ms to write the result down ({least}), or a live worker would lose it; "
            f"got {settings.lease}"
        )
        raise ConfigurationError(msg)
