"""Records in Redis or Valkey (from version 5 on), single or Cluster.

One hash for each key, and one script for each step, on that key alone and on the clock of the
server. Redis removes by itself what is over, so a sweep has nothing to do.

What is promised holds as far as Redis keeps what it has acknowledged: a replica that takes over
may not know the last claims, and a `maxmemory-policy` other than `noeviction` may drop records.
"""

from __future__ import annotations

import math
from hashlib import sha1
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from tarry.errors import ConfigurationError, MissingExtra
from tarry.idempotency.headers import pack, unpack
from tarry.idempotency.record import Record, StoredResponse
from tarry.idempotency.store import Taken

if TYPE_CHECKING:
    from types import ModuleType

_TIMEOUT = 5.0
_CONNECTIONS = 20

# Times are whole microseconds since the epoch, which a Lua number holds exactly and `tostring`
# does not. The arguments: by whom, for what, and for how long, which Redis wants in milliseconds.
_COMMON = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function text(number) return string.format('%.0f', number) end
local held = redis.call('HMGET', KEYS[1], 'owner', 'status', 'free_at')
local runs = held[1] == ARGV[1] and not held[2]
local function hold()
    redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'fingerprint', ARGV[2],
               'free_at', text(now + ARGV[3]))
    redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[3] / 1000))
    return 1
end
"""

# An owner that asks again is let in: its first answer was lost with its connection.
_CLAIM = """
if held[1] and tonumber(held[3]) > now and not runs then
    local kept = redis.call('HMGET', KEYS[1], 'fingerprint', 'status', 'headers', 'body')
    return {text(now), held[3], kept[1], kept[2], kept[3], kept[4]}
end
redis.call('DEL', KEYS[1])
hold()
return false
"""

_EXTEND = """
return (runs or not held[1]) and hold() or 0
"""

# The same response a second time is no second one: the first answer was lost, as above.
_FINISH = """
if held[1] and held[1] ~= ARGV[1] then return 0 end
if held[2] then
    local kept = redis.call('HMGET', KEYS[1], 'headers', 'body')
    local body = ARGV[6] or false
    if held[2] ~= ARGV[4] or kept[1] ~= ARGV[5] or kept[2] ~= body then return 0 end
end
redis.call('HSET', KEYS[1], 'status', ARGV[4], 'headers', ARGV[5])
if ARGV[6] then redis.call('HSET', KEYS[1], 'body', ARGV[6]) end
return hold()
"""

_RELEASE = """
return runs and redis.call('DEL', KEYS[1]) or 0
"""


class Encoder(Protocol):
    """What is asked of a client's encoder."""

    @property
    def decode_responses(self) -> bool:
        """Whether answers come as text."""
        ...


class Client(Protocol):
    """What is used of a client of `redis.asyncio`: `Redis` or `RedisCluster`."""

    def evalsha(self, sha: str, numkeys: int, /, *keys_and_args: Any) -> Any:
        """Run a script that the server knows."""
        ...

    def eval(self, script: str, numkeys: int, /, *keys_and_args: Any) -> Any:
        """Run a script, and make it known."""
        ...

    def get_encoder(self) -> Encoder:
        """Return what turns answers into values."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class _Script:
    def __init__(self, step: str) -> None:
        self.text = _COMMON + step
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()


_SCRIPTS = {
    "claim": _Script(_CLAIM),
    "extend": _Script(_EXTEND),
    "finish": _Script(_FINISH),
    "release": _Script(_RELEASE),
}


class RedisStore:
    """Keeps records under keys that begin with `prefix`.

    `url_or_client` is a URL of one server, or a client of `redis.asyncio`, for a Cluster too, that
    stays yours to close.
    """

    def __init__(self, url_or_client: str | Client, *, prefix: str = "tarry:idem:") -> None:
        self._redis = _library()
        self._own = isinstance(url_or_client, str)
        self._client = (
            self._connected(url_or_client) if isinstance(url_or_client, str) else url_or_client
        )
        if self._client.get_encoder().decode_responses:
            rule = "bodies are bytes, and would not survive being decoded"
            raise ConfigurationError(f"the client must not have decode_responses=True: {rule}")
        self._prefix = prefix

    async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        """Take a free key for `lease` seconds, or say by what it is taken."""
        held = await self._run("claim", key, owner, fingerprint, _microseconds(lease))
        if held is None:
            return None
        now, free_at, kept_for, status, packed, body = held
        response = None
        if status is not None:
            response = StoredResponse(int(status), unpack(packed), body)
        return Taken(Record(kept_for.decode(), int(free_at) / 1e6, response), int(now) / 1e6)

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Hold a key for `lease` more seconds from now; False: it is finished, or another's."""
        return bool(await self._run("extend", key, owner, fingerprint, _microseconds(lease)))

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, keep: float
    ) -> bool:
        """Keep the response for `keep` seconds; False: the key is another's by now."""
        kept: list[int | str | bytes] = [response.status, pack(response.headers)]
        if response.body is not None:
            kept.append(response.body)
        held = await self._run("finish", key, owner, fingerprint, _microseconds(keep), *kept)
        return bool(held)

    async def release(self, key: str, owner: str) -> None:
        """Free a key whose request came to nothing; nothing happens if it is not the owner's."""
        await self._run("release", key, owner)

    async def sweep(self, limit: int) -> int:  # noqa: ARG002 - part of the port
        """Return 0: Redis forgets by itself."""
        return 0

    async def close(self) -> None:
        """Close the connections that the store has opened itself."""
        if self._own:
            await self._client.aclose()

    async def _run(self, step: str, key: str, *args: Any) -> Any:
        script = _SCRIPTS[step]
        where = self._prefix + key
        try:
            return await self._client.evalsha(script.sha, 1, where, *args)
        except self._redis.exceptions.NoScriptError:
            # The node has been restarted, or has never seen it.
            return await self._client.eval(script.text, 1, where, *args)

    def _connected(self, url: str) -> Client:
        # One more try at once: a pool hands out what died while it lay idle, and every step may be
        # repeated by its owner. A pool that waits: a crowd is no error.
        retry = import_module("redis.asyncio.retry").Retry(
            import_module("redis.backoff").NoBackoff(), 1
        )
        pool = self._redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=_TIMEOUT,
            socket_timeout=_TIMEOUT,
            socket_connect_timeout=_TIMEOUT,
            retry=retry,
            # Before version 6 the client asks for them by name.
            retry_on_error=[self._redis.ConnectionError, self._redis.TimeoutError],
        )
        client: Client = self._redis.asyncio.Redis.from_pool(pool)
        return client


def _microseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1e6))


def _library() -> ModuleType:
    try:
        import_module("redis.asyncio")
        return import_module("redis")
    except ImportError as exc:
        message = "RedisStore needs redis: pip install 'tarry[redis]'"
        raise MissingExtra(message) from exc
