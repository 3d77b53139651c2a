"""API keys: random, kept as a digest, each bound to a tenant.

A key has 256 random bits, so that a plain digest hides it as well as a slow one would.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, TypeVar

from tarry.core.checks import short
from tarry.errors import ConfigurationError
from tarry.service.model import ApiKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.store import Store

T = TypeVar("T")

PREFIX = "tarry_"
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
        msg = (
            "tenant must have 1 to 63 letters, digits and ._- and begin with a letter or digit, "
            f"got {short(tenant)}"
        )
        raise ConfigurationError(msg)
    return tenant


def digest_of(secret: str) -> bytes:
    """Return what is kept of a key."""
    return sha256(secret.encode()).digest()


def make_key(tenant: str, key_id: str, name: str = "") -> tuple[str, ApiKey]:
    """Return a new key, which is shown once, and what the store keeps of it."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, ApiKey(
        id=key_id, tenant=check_tenant(tenant), digest=digest_of(secret), name=name
    )


class Keys:
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
        good = self._good.get(digest_of(secret))
        return good[0] if good is not None and self._now() < good[1] else None

    async def tenant_of(self, secret: str) -> str | None:
        """Return the tenant of a key, or None for one that is unknown or revoked."""
        if len(secret) > _LONGEST:
            return None
        if (tenant := self.believed(secret)) is not None:
            return tenant
        digest, now = digest_of(secret), self._now()
        if now < self._bad.get(digest, now):
            return None
        key = await self._store.key(digest)
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
