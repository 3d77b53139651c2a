"""Who may ask: the tenant whose key a request carries, and only what was meant for this service."""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from typing import TYPE_CHECKING, TypeVar

from tarry.errors import ConfigurationError, short_repr
from tarry.service.api import problems
from tarry.service.model import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.store import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from tarry.service.api.context import ApiContext
    from tarry.service.api.request import ApiRequest


class Authenticator:
    """Lets in who has a key, or everybody as one tenant where none is demanded."""

    def __init__(self, around: ApiContext) -> None:
        self._keys = ApiKeyCache(around.store, around.monotonic)
        self.tenant_of: Callable[[ApiRequest], Awaitable[str] | str] | str = (
            self._tenant_of if around.require_keys else DEFAULT_TENANT
        )
        """Returns the tenant of a request; where no key is needed, all have the same."""
        self.check_host: Callable[[dict[bytes, bytes]], None] | None = (
            None if around.allowed_hosts is None else AllowedHosts(around.allowed_hosts).check
        )

    def _tenant_of(self, asked: ApiRequest) -> Awaitable[str] | str:
        secret, other = _secrets(asked.fields)
        if other is not None and other != secret:
            raise problems.unauthorized("Authorization and X-API-Key differ: send one key.")
        if secret is None:
            detail = "Send `Authorization: Bearer KEY`, or `X-API-Key: KEY`."
            raise problems.unauthorized(detail)
        return self._keys.believed(secret) or self._look_up(secret)

    async def _look_up(self, secret: str) -> str:
        tenant = await self._keys.tenant_of(secret)
        if tenant is None:
            raise problems.unauthorized("The API key is not known, or was revoked.")
        return tenant


class AllowedHosts:
    """The names of this service, beside those of loopback.

    Without keys, a page in a browser could let its own name point to loopback and then read what
    is here (DNS rebinding). It cannot send another `Host` than that name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(map(_name_in, names))
        self._last: bytes | None = None
        """The one that was last found to be ours, for it will come again."""

    def check(self, fields: dict[bytes, bytes]) -> None:
        """Refuse a request to another host; one without a `Host` is of no browser."""
        host = fields.get(b"host")
        if host is None or host == self._last:
            return
        said = host.decode("latin-1")
        name = _name_in(said)
        if name not in self._names and not _is_loopback(name):
            raise problems.wrong_host(said[:100])
        self._last = host


def _name_in(host: str) -> str:
    """Return the name or address in a `Host`, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    if host.count(":") == 1:  # else it is an IPv6 address without brackets
        host = host.partition(":")[0]
    return host.removesuffix(".").lower()


def _is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _secrets(fields: dict[bytes, bytes]) -> tuple[str | None, str | None]:
    """Return the key of a request, and the one that it carries besides."""
    key = fields.get(b"x-api-key")
    other = None if key is None else key.strip().decode("latin-1")
    line = fields.get(b"authorization")
    if line is None:
        return other, None
    scheme, _, rest = line.partition(b" ")
    return (rest.strip().decode("latin-1") if scheme.lower() == b"bearer" else None), other


T = TypeVar("T")

KEY_PREFIX = "tarry_"
"""So that scanners for leaked secrets know one when they see it."""
DEFAULT_TENANT = "default"

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LONGEST = 200
_MOST = 10_000
_FRESH_FOR = 5.0
"""Seconds for which an answer of the store is believed: a revoked key works as long."""


def check_tenant(tenant: str) -> str:
    """Return the name of a tenant; it begins the names of its lanes, so it has no slash."""
    if not _TENANT.fullmatch(tenant):
        rule = (
            "must have 1 to 63 letters, digits and ._- and begin with a letter or digit, got "
            f"{short_repr(tenant)}"
        )
        raise ConfigurationError("tenant", rule)
    return tenant


def key_digest(secret: str) -> bytes:
    """Return what is kept of a key."""
    return sha256(secret.encode()).digest()


def make_key(tenant: str, key_id: str, name: str = "") -> tuple[str, ApiKey]:
    """Return a new key, which is shown once, and what the store keeps of it."""
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    return secret, ApiKey(
        id=key_id, tenant=check_tenant(tenant), digest=key_digest(secret), name=name
    )


class ApiKeyCache:
    """Says whose a key is; answers are believed for a few seconds, the bad ones too."""

    def __init__(self, store: Store, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._now = monotonic
        # Apart, so that a flood of wrong keys does not push out the right ones.
        self._good: dict[bytes, tuple[str, float]] = {}
        self._bad: dict[bytes, float] = {}

    def believed(self, secret: str) -> str | None:
        """Return the tenant of a good key that was looked up a moment ago."""
        if len(secret) > _LONGEST:
            return None
        good = self._good.get(key_digest(secret))
        return good[0] if good is not None and self._now() < good[1] else None

    async def tenant_of(self, secret: str) -> str | None:
        """Return the tenant of a key, or None for one that is unknown or revoked."""
        if len(secret) > _LONGEST:
            return None
        if (tenant := self.believed(secret)) is not None:
            return tenant
        digest, now = key_digest(secret), self._now()
        if now < self._bad.get(digest, now):
            return None
        key = await self._store.find_key(digest)
        if key is None or key.revoked_at is not None or not compare_digest(key.digest, digest):
            self._good.pop(digest, None)
            _keep(self._bad, digest, now + _FRESH_FOR)
            return None
        _keep(self._good, digest, (key.tenant, now + _FRESH_FOR))
        return key.tenant


def _keep(cache: dict[bytes, T], digest: bytes, value: T) -> None:
    cache.pop(digest, None)
    if len(cache) >= _MOST:
        del cache[next(iter(cache))]
    cache[digest] = value
