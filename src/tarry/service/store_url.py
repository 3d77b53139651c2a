"""The URL of a store: which engine it names, and how it is shown without its password."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from tarry.errors import ConfigurationError
from tarry.service.redaction import REDACTED

MEMORY_URL = "memory:"
_SQLITE_SCHEME = "sqlite:"
STORE_RULE = (
    "must be a path, sqlite:PATH, memory:, postgresql://HOST/DATABASE, redis://HOST or "
    "redis+cluster://HOST"
)
"""What the setting `store` may be. Names the engines in `_SERVER_SCHEMES`, too."""


class StoreEngine(StrEnum):
    """The engines of stores."""

    MEMORY = "memory"
    SQLITE = "sqlite"
    POSTGRES = "postgres"
    REDIS = "redis"


_SERVER_SCHEMES: dict[str, StoreEngine] = {
    "postgresql": StoreEngine.POSTGRES,
    "postgres": StoreEngine.POSTGRES,
    **dict.fromkeys(
        (
            *("redis", "rediss", "redis+unix", "redis+cluster", "rediss+cluster"),
            *("valkey", "valkeys", "valkey+unix", "valkey+cluster", "valkeys+cluster"),
        ),
        StoreEngine.REDIS,
    ),
}
"""The engines of stores on a server, by the scheme of their URLs."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://([^/?#]*).*", re.DOTALL)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""A scheme has at least two characters: `C:tasks.db` is a path."""
_KNOWN_SCHEME = re.compile(
    rf"[\s'\"]*({'|'.join(map(re.escape, _SERVER_SCHEMES))})[:/]", re.IGNORECASE
)
_CREDENTIALS = re.compile(
    r"(?::|//).*@|://|//[^/]*:|(?:pass|pwd|secret|token)[^=&]*=", re.IGNORECASE | re.DOTALL
)
"""Matches a text that may contain a password: in a URL, or as in `host=db password=...`."""
_CREDENTIALS_OF_SQLITE = re.compile(r"sqlite://[^/]*:.*@", re.DOTALL)
_INVALID_PORT = re.compile(r"(?:^|,)(?:\[[^\],]*\]|[^\[\]:,]*):(?![0-9]*(?:,|$))")
_USER_INFO = re.compile(r"(?<=://)(?:.*[?&].*=.*@[^&]*|.*@(?:[^/?&]*=[^&]*)?)", re.DOTALL)
"""Also matches the value of a parameter that has an @: it may be the password."""
_PARAMETER = re.compile(r"(?<=[?&])([^=&]*)=?([^&]*)")
_PUBLIC_PARAMETERS = frozenset(
    (
        *("host", "port", "user", "dbname", "database", "db", "application_name", "options"),
        *("schema", "pool_size", "statement_cache", "listen", "prefix", "partitions"),
        *("sslmode", "sslrootcert", "sslcert", "ssl_ca_certs", "ssl_certfile", "ssl_cert_reqs"),
        *("ssl_check_hostname", "target_session_attrs", "gsslib", "krbsrvname"),
    )
)
"""Parameters whose values are shown. The name of another one may be a mistyped `password`."""
_SECRET_PARAMETERS = frozenset(("password", "passfile", "sslkey", "sslpassword", "ssl_keyfile"))
"""Parameters of which only the names are shown."""


def find_engine(url: str) -> StoreEngine:
    """Return the engine of a store; raise `ConfigurationError` if no engine has this scheme.

    A text that looks like the URL of a server with a typo is an error, too. As the path of a file
    it would create a new store, and messages would show its password.
    """
    if url == MEMORY_URL:
        return StoreEngine.MEMORY
    scheme = _find_mistyped_scheme(url)
    if scheme is not None:
        rule = f"looks like the URL of a server with a typo: {_describe_form(scheme)}"
        raise ConfigurationError("store", rule, redact_store_url(url))
    match = _URL.fullmatch(url)
    if url.startswith(_SQLITE_SCHEME) or (
        _SCHEME.match(url) is None and url not in {"memory", "sqlite"}
    ):
        return StoreEngine.SQLITE
    engine = None if match is None else _SERVER_SCHEMES.get(match[1].lower())
    if engine is None:
        raise ConfigurationError("store", STORE_RULE, redact_store_url(url))
    if _lacks_host(url):
        rule = "must have a number as the port, and USER:PASSWORD@ before the host"
        raise ConfigurationError("store", rule, redact_store_url(url))
    return engine


def redact_store_url(url: str) -> str:
    """Return the URL of a store without its user name, password and secret parameters.

    Everything up to the last `@` counts as the password, because a password may contain characters
    that should have been escaped. Of a mistyped URL, only a known scheme is returned.
    """
    scheme = _find_mistyped_scheme(url)
    if scheme is not None:
        return f"{scheme}{REDACTED}"
    if url.startswith(_SQLITE_SCHEME):
        return url
    if _lacks_host(url):
        scheme, _, _ = url.partition("://")
        return f"{scheme}://{REDACTED}"
    return _PARAMETER.sub(_redact_parameter, _USER_INFO.sub(f"{REDACTED}@", url))


def _redact_parameter(match: re.Match[str]) -> str:
    name = match[1]
    if not match[0] or (name in _PUBLIC_PARAMETERS and "=" not in match[2]):
        return match[0]
    return f"{name}={REDACTED}" if name in _SECRET_PARAMETERS else REDACTED


def _find_mistyped_scheme(url: str) -> str | None:
    """Return the scheme of a server's URL that has a typo, "" if it is unknown; otherwise None."""
    if url.startswith(_SQLITE_SCHEME):
        return "" if _CREDENTIALS_OF_SQLITE.match(url) else None
    if _URL.fullmatch(url):
        return None
    if match := _KNOWN_SCHEME.match(url):
        return match[1].lower()
    return "" if may_have_password(url) else None


def may_have_password(text: str) -> bool:
    """Return whether a text that is not a valid URL looks like one with a password."""
    return _CREDENTIALS.search(text) is not None


def _lacks_host(url: str) -> bool:
    """Return whether a URL has a password in the place of a port, as in `redis://user:password`."""
    match = _URL.fullmatch(url)
    return match is not None and "@" not in url and _INVALID_PORT.search(match[2]) is not None


def _describe_form(scheme: str) -> str:
    """Return how to write the URL of a server that has this scheme, or an unknown one."""
    engine = _SERVER_SCHEMES.get(scheme)
    if scheme.endswith("+unix"):
        form = f"{scheme}:///PATH"
    elif engine is StoreEngine.REDIS:
        database = "" if scheme.endswith("+cluster") else "/0"
        form = f"{scheme}://USER:PASSWORD@HOST{database}"
    else:
        form = "postgresql://USER:PASSWORD@HOST/DATABASE"
        if engine is None:
            form += " or redis://USER:PASSWORD@HOST/0"
    return f"write {form}, or sqlite:PATH if it is a file"


def missing_store(name: str) -> ConfigurationError:
    """Return the error of a command that does not create a store; `name` has no password."""
    return ConfigurationError(
        f"there is no store at {name}. Is this the store of your service? Only `tarry serve` "
        'creates a store, and its start message names it after "data in"'
    )


def sqlite_path(url: str) -> Path:
    """Return the file of a store; `sqlite:///srv/t.db` is the same as `/srv/t.db`."""
    rest = url.removeprefix(_SQLITE_SCHEME)
    path = "/" + rest.lstrip("/") if rest.startswith("/") else rest
    if not path.strip("/"):
        raise ConfigurationError("store", "must name a file", url)
    return Path(path)
