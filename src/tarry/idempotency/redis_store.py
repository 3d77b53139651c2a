"""`RedisStore`: idempotency records in Redis (5 or later) or Valkey, a single server or a Cluster.

Each record is one hash. Each method runs one Lua script, which accesses only that hash and uses the
clock of the server. Redis deletes expired records itself, so `sweep` has nothing to do.

A request may take effect twice if Redis loses acknowledged writes. A replica that is promoted may
lack the last claims, and a `maxmemory-policy` other than `noeviction` may delete records.
"""

from __future__ import annotations

import math
import re
from hashlib import sha1
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from tarry.core.extras import require_extra
from tarry.errors import ConfigurationError
from tarry.idempotency.store import ExistingRecord, Record, decode_response, encode_headers

if TYPE_CHECKING:
    from tarry.idempotency.store import StoredResponse

_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 20

# The beginning of each script. Times are whole microseconds since the epoch. A Lua number can
# represent them exactly, but `tostring` would round them. ARGV: 1 owner, 2 fingerprint, 3 duration
# in microseconds; for `finish` also 4 status, 5 headers, 6 body (absent if it is not stored).
_PROLOGUE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function to_text(number) return string.format('%.0f', number) end
local record = redis.call('HMGET', KEYS[1], 'owner', 'status', 'free_at')
local is_own_claim = record[1] == ARGV[1] and not record[2]
local function write_record()
    redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'fingerprint', ARGV[2],
               'free_at', to_text(now + ARGV[3]))
    redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[3] / 1000))
    return 1
end
"""

# A repeated claim of the same owner succeeds, because the result of its first claim may have been
# lost with a connection.
_CLAIM = """
if record[1] and tonumber(record[3]) > now and not is_own_claim then
    local stored = redis.call('HMGET', KEYS[1], 'fingerprint', 'status', 'headers', 'body')
    return {to_text(now), record[3], stored[1], stored[2], stored[3], stored[4]}
end
redis.call('DEL', KEYS[1])
write_record()
return false
"""

_EXTEND = """
return (is_own_claim or not record[1]) and write_record() or 0
"""

# Storing the same response again succeeds, because the result of the first call may have been lost.
_FINISH = """
if record[1] and record[1] ~= ARGV[1] then return 0 end
if record[2] then
    local stored = redis.call('HMGET', KEYS[1], 'headers', 'body')
    local body = ARGV[6] or false
    if record[2] ~= ARGV[4] or stored[1] ~= ARGV[5] or stored[2] ~= body then return 0 end
end
redis.call('HSET', KEYS[1], 'status', ARGV[4], 'headers', ARGV[5])
if ARGV[6] then redis.call('HSET', KEYS[1], 'body', ARGV[6]) end
return write_record()
"""

_RELEASE = """
return is_own_claim and redis.call('DEL', KEYS[1]) or 0
"""

_URL = re.compile("(?:rediss?|unix)://", re.IGNORECASE)
_URL_RULE = "must be a URL like redis://USER:PASSWORD@HOST/0"
_DIGESTS = {
    script: sha1((_PROLOGUE + script).encode(), usedforsecurity=False).hexdigest()
    for script in (_CLAIM, _EXTEND, _FINISH, _RELEASE)
}


class RedisClient(Protocol):
    """The methods of `redis.asyncio.Redis` and `RedisCluster` that the store uses."""

    def evalsha(self, sha: str, numkeys: int, /, *keys_and_args: Any) -> Any:
        """Run a script that the server has cached."""

    def eval(self, script: str, numkeys: int, /, *keys_and_args: Any) -> Any:
        """Run a script; the server caches it."""

    def get_encoder(self) -> Any:
        """Return the encoder, whose attribute `decode_responses` is a bool."""

    async def aclose(self) -> None:
        """Close all connections."""


class RedisStore:
    """Stores each record in a hash whose name begins with `prefix`.

    Args:
        url_or_client: the URL of a single server, or a client of `redis.asyncio` (also for a
            Cluster), which the caller closes.
        prefix: the prefix of all Redis keys.
    """

    def __init__(self, url_or_client: str | RedisClient, *, prefix: str = "tarry:idem:") -> None:
        with require_extra("RedisStore needs redis", "redis"):
            import_module("redis.asyncio")
            self._redis = import_module("redis")
        self._owns_client = isinstance(url_or_client, str)
        self._client: Any = url_or_client
        if isinstance(url_or_client, str):
            self._client = self._connect(url_or_client)
        if self._client.get_encoder().decode_responses:
            raise ConfigurationError(
                "the client must not have decode_responses=True: response bodies are bytes, which "
                "decoding would corrupt"
            )
        self._prefix = prefix

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Claim a key for `lease` seconds. Return None, or the record of a key that is not free."""
        existing = await self._run_script(_CLAIM, key, owner, fingerprint, _microseconds(lease))
        if existing is None:
            return None
        now, free_at, stored_fingerprint, status, headers, body = existing
        response = decode_response(status, headers, body)
        record = Record(stored_fingerprint.decode(), int(free_at) / 1e6, response)
        return ExistingRecord(record, int(now) / 1e6)

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now; see `IdempotencyStore`."""
        return bool(await self._run_script(_EXTEND, key, owner, fingerprint, _microseconds(lease)))

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, retention: float
    ) -> bool:
        """Store the response for `retention` seconds; see `IdempotencyStore`."""
        fields: list[int | str | bytes] = [response.status, encode_headers(response.headers)]
        if response.body is not None:
            fields.append(response.body)
        duration = _microseconds(retention)
        return bool(await self._run_script(_FINISH, key, owner, fingerprint, duration, *fields))

    async def release(self, key: str, owner: str) -> None:
        """Free a key that this owner has claimed and not finished."""
        await self._run_script(_RELEASE, key, owner)

    async def sweep(self, limit: int) -> int:  # noqa: ARG002 - part of the protocol
        """Return 0: Redis deletes expired records itself."""
        return 0

    async def close(self) -> None:
        """Close the connections, unless they belong to the caller's client."""
        if self._owns_client:
            await self._client.aclose()

    async def _run_script(self, script: str, key: str, *args: Any) -> Any:
        redis_key = self._prefix + key
        try:
            return await self._client.evalsha(_DIGESTS[script], 1, redis_key, *args)
        except self._redis.exceptions.NoScriptError:
            # The server was restarted, or this cluster node has not cached the script yet.
            return await self._client.eval(_PROLOGUE + script, 1, redis_key, *args)

    def _connect(self, url: str) -> Any:
        # One immediate retry, because a pool may return a connection that died while it was idle.
        # A script that runs twice does no harm. Under load, requests wait for a connection of the
        # blocking pool instead of failing.
        backoff = import_module("redis.backoff").NoBackoff()
        retry = import_module("redis.asyncio.retry").Retry(backoff, 1)
        # Errors do not show a mistyped URL, because its password could be anywhere in it.
        if not _URL.match(url):
            raise ConfigurationError("url_or_client", _URL_RULE)
        try:
            pool = self._redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=_TIMEOUT_S,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                retry=retry,
                # Versions of redis-py before 6 retry only on the errors that are listed here.
                retry_on_error=[self._redis.ConnectionError, self._redis.TimeoutError],
            )
        except ValueError:  # redis-py may quote a part of the password, which it takes for the port
            rule = f"{_URL_RULE}, with special characters of the password as %2F, %40 ..."
            raise ConfigurationError("url_or_client", rule) from None
        return self._redis.asyncio.Redis.from_pool(pool)


def _microseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1e6))
