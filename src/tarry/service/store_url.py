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
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):.*", re.DOTALL)
"""A scheme has at least two characters: `C:tasks.db` is a path."""
_USER_INFO = re.compile(r"(?<=://).*@", re.DOTALL)
_SECRET_PARAMETER = re.compile(r"([?&][^=&]*(?:pass|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)


def find_engine(url: str) -> StoreEngine:
    """Return the engine of a store; raise `ConfigurationError` if no engine has this scheme."""
    if url == MEMORY_URL:
        return StoreEngine.MEMORY
    match = _SCHEME.fullmatch(url)
    if url.startswith(_SQLITE_SCHEME) or (match is None and url not in {"memory", "sqlite"}):
        return StoreEngine.SQLITE
    engine = None if match is None else _SERVER_SCHEMES.get(match[1].lower())
    if engine is None or "://" not in url:
        raise ConfigurationError("store", STORE_RULE, redact_store_url(url))
    return engine


def redact_store_url(url: str) -> str:
    """Return the URL of a store without its user name, password and secret parameters.

    Everything up to the last `@` counts as the password, because a password may contain characters
    that should have been escaped. Without `//`, everything after the scheme does.
    """
    match = _SCHEME.fullmatch(url)
    if (
        match is not None
        and "://" not in url
        and not url.startswith(_SQLITE_SCHEME)
        and (match[1].lower() in _SERVER_SCHEMES or "@" in url)
    ):
        return f"{match[1]}:{REDACTED}"
    return _SECRET_PARAMETER.sub(rf"\1{REDACTED}", _USER_INFO.sub(f"{REDACTED}@", url))


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
