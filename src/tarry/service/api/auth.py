"""Authentication: API keys, the tenant of a request, and the check of its `Host` header.

An API key has 256 random bits and belongs to one tenant. Only its SHA-256 digest is stored. A slow
password hash would add nothing, because a random key of this length cannot be guessed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from functools import partial
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from tarry.core.checks import check_one_of
from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.roles import ROLES, Role
from tarry.service.model import ApiKeyRecord
from tarry.service.records.api_keys import find_api_key
from tarry.service.store import StoreLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest
    from tarry.service.store import Store

    Authenticate: TypeAlias = Callable[[ApiRequest, Role], Awaitable[str] | str]

T = TypeVar("T")

API_KEY_PREFIX = "tarry_"
"""The beginning of every API key, by which scanners for leaked secrets recognise it."""
DEFAULT_TENANT = "default"

_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MAX_API_KEY_LENGTH = 200
_MAX_CACHED_API_KEYS = 10_000
_CACHE_TTL_S = 5.0
"""How long the result of a lookup is cached. A revoked key may still be accepted for this time."""
_MAX_STORE_WAIT_S = 0.5
"""How long `authenticate_without_store` waits for the store, and a lookup of a known key for one of
several partitions."""
_OUTAGE_TTL_S = 3_600.0
"""While the store, or only the partition of the keys, does not respond, a key is accepted for this
time after its last lookup."""
_LOOKUP_PAUSE_S = 2.0
_NOT_CACHED = (None, Role.NONE, 0.0)


class Authenticator:
    """Finds the tenant of a request by the API key, and checks the key's role and `Host`."""

    def __init__(self, context: ApiContext) -> None:
        self._keys = ApiKeyCache(context.store, context.monotonic)
        self.authenticate: Authenticate | None = (
            self._authenticate if context.require_api_keys else None
        )
        """Returns the tenant of a request, or an awaitable of the tenant if the API key is not
        cached; raises ApiError if the key does not have the required role. None if no API key is
        required: then all requests belong to `DEFAULT_TENANT`."""
        self.authenticate_without_store: Authenticate | None = (
            self._authenticate_without_store if context.require_api_keys else None
        )
        """The same, for operations that work while the store hangs. Then it accepts keys that were
        valid when they were last looked up."""
        host_names = context.accepted_host_names
        self.check_host: Callable[[dict[bytes, bytes]], None] | None = (
            None if host_names is None else AcceptedHosts(host_names).check
        )
        """Raises ApiError if the `Host` header is not accepted; None if all are accepted."""

    def _authenticate(self, request: ApiRequest, required_role: Role) -> Awaitable[str] | str:
        key = _read_api_key(request)
        return self._keys.cached_tenant(key, required_role) or self._look_up(key, required_role)

    def _authenticate_without_store(
        self, request: ApiRequest, required_role: Role
    ) -> Awaitable[str] | str:
        key = _read_api_key(request)
        cached = self._keys.cached_tenant(key, required_role)
        return cached or self._look_up_without_store(key, required_role)

    async def _look_up(self, key: str, required_role: Role) -> str:
        return _check_role(await self._find(key), required_role)

    async def _look_up_without_store(self, key: str, required_role: Role) -> str:
        try:
            async with asyncio.timeout(_MAX_STORE_WAIT_S):
                return await self._look_up(key, required_role)
        except (TimeoutError, StoreUnavailable) as error:
            last = self._keys.last_known(key)
            if last is None:
                raise StoreUnavailable("the API key could not be looked up") from error
            return _check_role(last, required_role)

    async def _find(self, key: str) -> tuple[str, Role]:
        found = await self._keys.find(key)
        if found is None:
            raise problems.API_KEY_REQUIRED.error("The API key is unknown or was revoked.")
        return found

    def describe_key(self, request: ApiRequest) -> str:
        """Return the name and the id of the API key of an authenticated request, for the log."""
        if self.authenticate is None:
            return "none required"
        return self._keys.describe(_read_api_key(request))

    async def find_role(self, request: ApiRequest) -> Role:
        """Return the role of a request's API key; ADMIN if no API key is required."""
        if self.authenticate is None:
            return Role.ADMIN
        return (await self._find(_read_api_key(request)))[1]


def _check_role(found: tuple[str, Role], required_role: Role) -> str:
    """Return the tenant of an API key, or raise ApiError if the key lacks the role."""
    tenant, role = found
    if role < required_role:
        detail = (
            f"The API key has the role {role.label}, but this operation needs the role "
            f"{required_role.label}."
        )
        raise problems.ROLE_REQUIRED.error(
            detail, role=role.label, requiredRole=required_role.label
        )
    return tenant


class AcceptedHosts:
    """The names that the service accepts in the `Host` header, in addition to loopback names.

    Protects a service without API keys against DNS rebinding: the owner of a web page can make its
    host name resolve to loopback, but the browser still sends that name as `Host`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(map(_host_name, names))
        self._last_accepted: bytes | None = None
        """Compared first, because most clients always send the same `Host`."""

    def check(self, headers: dict[bytes, bytes]) -> None:
        """Raise ApiError if `Host` is not accepted."""
        host = headers.get(b"host")
        if host is None or host == self._last_accepted:
            return  # a request without `Host` is not from a browser, which always sends it
        text = host.decode("latin-1")
        name = _host_name(text)
        if name not in self._names and not is_loopback(name):
            detail = (
                f"Requests to {text[:100]} are not accepted: without API keys, the host must be a "
                "loopback name. The operator can allow other names (setting allow_host)."
            )
            raise problems.WRONG_HOST.error(detail)
        self._last_accepted = host


class ApiKeyCache:
    """Finds tenant and role of an API key. Valid and invalid keys are cached for `_CACHE_TTL_S`."""

    def __init__(self, store: Store, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._now = monotonic
        # Two caches, so that many invalid keys do not evict the valid ones.
        self._valid_keys: dict[bytes, tuple[str, Role, float]] = {}
        """The tenant, the role and the expiry, by key digest."""
        self._descriptions: dict[bytes, str] = {}
        """The names and ids of valid keys, by key digest."""
        self._invalid_keys: dict[bytes, float] = {}  # expiry, by key digest
        self._lookups: set[asyncio.Future[ApiKeyRecord | None]] = set()
        """Lookups in progress that a request may not wait for."""
        self._next_lookup_at = float("-inf")
        """While the partition of the keys is unavailable: before this time, the last known tenants
        and roles are returned at once."""

    def cached_tenant(self, key: str, required_role: Role) -> str | None:
        """Return the tenant of a key that is cached as valid and has the role, else None."""
        if len(key) > _MAX_API_KEY_LENGTH:
            return None
        tenant, role, expires_at = self._valid_keys.get(api_key_digest(key), _NOT_CACHED)
        return tenant if role >= required_role and self._now() < expires_at else None

    def last_known(self, key: str) -> tuple[str, Role] | None:
        """Return the tenant and the role that a key had at its last lookup, up to an hour ago."""
        tenant, role, expires_at = self._valid_keys.get(api_key_digest(key), _NOT_CACHED)
        if tenant is None or self._now() >= expires_at + _OUTAGE_TTL_S:
            return None
        return tenant, role

    def describe(self, key: str) -> str:
        """Return the name and the id of a key that was looked up recently."""
        return self._descriptions.get(api_key_digest(key), "unknown")

    async def find(self, key: str) -> tuple[str, Role] | None:
        """Return the tenant and the role of a key, or None if the key is unknown or revoked."""
        if len(key) > _MAX_API_KEY_LENGTH:
            return None
        digest, now = api_key_digest(key), self._now()
        tenant, role, expires_at = self._valid_keys.get(digest, _NOT_CACHED)
        if tenant is not None and now < expires_at:
            return tenant, role
        if now < self._invalid_keys.get(digest, now):
            return None
        last = self.last_known(key)
        if last is not None and now < self._next_lookup_at:
            return last
        if last is None or self._store.partition_count == 1:
            return self._record(digest, await find_api_key(self._store, digest), now)
        if self._next_lookup_at > float("-inf"):
            # The last lookup has failed: of concurrent requests, only this one tries again.
            self._next_lookup_at = now + _LOOKUP_PAUSE_S
        # If the partition of the keys hangs, the lookup takes as long as the timeout of the store.
        # It continues after the timeout here: the store may be slow, and the key be revoked.
        lookup = asyncio.ensure_future(find_api_key(self._store, digest))
        self._lookups.add(lookup)
        lookup.add_done_callback(partial(self._on_looked_up, digest, now))
        try:
            async with asyncio.timeout(_MAX_STORE_WAIT_S):
                return self._record(digest, await asyncio.shield(lookup), now)
        except (StoreUnavailable, TimeoutError) as error:
            if isinstance(error, StoreLost):
                self._next_lookup_at = float("-inf")
                raise
            # The tenant may be in another partition, which works.
            self._next_lookup_at = self._now() + _LOOKUP_PAUSE_S
            return self.last_known(key)  # None if an earlier lookup has ended meanwhile: revoked

    def _on_looked_up(
        self, digest: bytes, now: float, lookup: asyncio.Future[ApiKeyRecord | None]
    ) -> None:
        self._lookups.discard(lookup)
        if lookup.cancelled() or lookup.exception() is not None:
            return
        if now >= self._invalid_keys.get(digest, now):  # otherwise a later lookup has ended before
            self._record(digest, lookup.result(), now)

    def _record(
        self, digest: bytes, record: ApiKeyRecord | None, now: float
    ) -> tuple[str, Role] | None:
        """Cache the result of a lookup made at `now`; return tenant and role of a valid key."""
        self._next_lookup_at = float("-inf")
        if (
            record is None
            or record.revoked_at is not None
            or not compare_digest(record.digest, digest)
        ):
            self._valid_keys.pop(digest, None)
            _put_in_cache(self._invalid_keys, digest, now + _CACHE_TTL_S)
            return None
        role = Role.parse(record.role)
        description = f"{record.name} ({record.id})" if record.name else record.id
        _put_in_cache(self._descriptions, digest, description)
        _put_in_cache(self._valid_keys, digest, (record.tenant, role, now + _CACHE_TTL_S))
        return record.tenant, role


def check_tenant(tenant: str) -> str:
    """Return the tenant name if it is valid, or raise ConfigurationError."""
    # A slash is not allowed, because it separates tenant and downstream in the name of a lane.
    if not _TENANT_NAME.fullmatch(tenant):
        rule = "must be 1 to 63 characters (A-Z a-z 0-9 . _ -) and begin with a letter or digit"
        raise ConfigurationError("tenant", rule, tenant)
    return tenant


def api_key_digest(key: str) -> bytes:
    """Return the digest of an API key. The key itself is not stored."""
    return sha256(key.encode()).digest()


def make_api_key(
    tenant: str, key_id: str, name: str = "", role: str = Role.ADMIN.label
) -> tuple[str, ApiKeyRecord]:
    """Return a new API key, and the record to store, which contains the digest, not the key."""
    key = API_KEY_PREFIX + secrets.token_urlsafe(32)
    check_tenant(tenant)
    check_one_of("role", role, ROLES)
    digest = api_key_digest(key)
    record = ApiKeyRecord(id=key_id, tenant=tenant, digest=digest, name=name, role=role)
    return key, record


def _read_api_key(request: ApiRequest) -> str:
    header = request.headers.get(b"x-api-key")
    key = None if header is None else header.strip().decode("latin-1")
    authorization = request.headers.get(b"authorization")
    if authorization is not None:
        scheme, _, rest = authorization.partition(b" ")
        bearer_key = rest.strip().decode("latin-1") if scheme.lower() == b"bearer" else None
        if key is not None and key != bearer_key:
            detail = "Authorization and X-API-Key do not have the same key. Send one key."
            raise problems.API_KEY_REQUIRED.error(detail)
        key = bearer_key
    if key is None:
        detail = "Send `Authorization: Bearer KEY`, or `X-API-Key: KEY`."
        raise problems.API_KEY_REQUIRED.error(detail)
    return key


def _put_in_cache(cache: dict[bytes, T], digest: bytes, entry: T) -> None:
    cache.pop(digest, None)
    if len(cache) >= _MAX_CACHED_API_KEYS:
        del cache[next(iter(cache))]  # the oldest entry
    cache[digest] = entry


def _host_name(host: str) -> str:
    """Return the name or address in a `Host` header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    if host.count(":") == 1:  # more than one: an IPv6 address without brackets
        host = host.partition(":")[0]
    return host.removesuffix(".").lower()


def is_loopback(name: str) -> bool:
    """Return whether a name is `localhost` or a loopback address."""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
