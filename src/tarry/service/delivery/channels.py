"""gRPC channels, one for each server, to addresses that the guard has judged.

A name is looked up here, not by gRPC: the channel is given addresses, so it cannot go elsewhere,
and the name goes along for TLS and `:authority`. It is looked up anew every minute, and when the
server cannot be reached. With an egress proxy, the proxy looks names up and judges them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from tarry.service.delivery.names import Names
from tarry.service.delivery.ways import addresses_of, allowed_of

if TYPE_CHECKING:
    from pathlib import Path

    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.targets import Target

MOST = 256
"""Channels that are kept."""
_FRESH_SECONDS = 60.0
_IDLE_MS = 60_000
MOST_ANSWER = 4 << 20
"""Bytes of an answer, which gRPC reads in full or not at all."""

_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.client_idle_timeout_ms", _IDLE_MS),
    ("grpc.max_receive_message_length", MOST_ANSWER),
)


class Channel:
    """A channel, how many attempts use it, and where it leads."""

    __slots__ = ("address", "checked_at", "raw", "users")

    def __init__(self, raw: Any, address: str, checked_at: float) -> None:
        self.raw: Any = raw
        self.address: str = address
        self.checked_at: float = checked_at
        self.users: int = 0

    @property
    def remote(self) -> str | None:
        """The address, where there is but one."""
        scheme, _, rest = self.address.rpartition(":")[0].partition(":")
        return rest.strip("[]") if scheme in {"ipv4", "ipv6"} and "," not in rest else None


class Channels:
    """The channels that are open, the least recently used first to go."""

    def __init__(self, grpc: Any, guard: Guard, proxy: str | None, ca: Path | None) -> None:
        self._grpc = grpc
        self._guard = guard
        self._names = Names()
        self._proxy = proxy
        self._roots = None if ca is None else ca.read_bytes()
        self._kept: OrderedDict[str, Channel] = OrderedDict()
        self._left: list[Channel] = []
        """Those that take no more attempts: closed when the last one on them has ended."""

    async def take(self, target: Target) -> Channel:
        """Return a channel to the server of a target, to be given back, or raise NoWay."""
        now = asyncio.get_running_loop().time()
        channel = self._kept.get(target.origin)
        if channel is None or now - channel.checked_at >= _FRESH_SECONDS:
            address = await self._address_of(target)
            channel = self._kept.get(target.origin)  # another attempt may have been faster
            if channel is None or channel.address != address:
                self.drop(target)
                channel = self._kept[target.origin] = Channel(
                    self._open(target, address), address, now
                )
            channel.checked_at = now
        self._kept.move_to_end(target.origin)
        if len(self._kept) > MOST:
            self._left.append(self._kept.popitem(last=False)[1])
        channel.users += 1
        return channel

    async def give_back(self, channel: Channel) -> None:
        """An attempt has ended."""
        channel.users -= 1
        done = [left for left in self._left if not left.users]
        self._left = [left for left in self._left if left.users]
        for left in done:
            await left.raw.close()

    def drop(self, target: Target) -> None:
        """Look the name up anew next time."""
        channel = self._kept.pop(target.origin, None)
        if channel is not None:
            self._left.append(channel)

    async def close(self) -> None:
        """Close all; calls that run are cancelled."""
        channels = [*self._kept.values(), *self._left]
        self._kept.clear()
        self._left.clear()
        for channel in channels:
            await channel.raw.close()
        await self._names.close()

    async def _address_of(self, target: Target) -> str:
        """Return what gRPC is to connect to: every address of the name that is allowed."""
        if self._proxy is not None:
            return f"dns:///{target.authority}"
        allowed = allowed_of(await addresses_of(target.host, self._names), target.host, self._guard)
        is_6 = ":" in allowed[0]  # one address text of gRPC's holds one family
        texts = [
            f"[{each}]:{target.port}" if is_6 else f"{each}:{target.port}"
            for each in allowed
            if (":" in each) == is_6
        ]
        return f"{'ipv6' if is_6 else 'ipv4'}:{','.join(texts)}"

    def _open(self, target: Target, address: str) -> Any:
        options: list[tuple[str, object]] = [
            *_OPTIONS,
            ("grpc.default_authority", target.authority),
        ]
        if self._proxy is not None:
            options.append(("grpc.http_proxy", self._proxy))
        else:
            options.append(("grpc.enable_http_proxy", 0))  # nothing from the environment
        if target.scheme == "grpc":
            return self._grpc.aio.insecure_channel(address, options=options)
        options.append(("grpc.ssl_target_name_override", target.host))
        credentials = self._grpc.ssl_channel_credentials(self._roots)
        return self._grpc.aio.secure_channel(address, credentials, options=options)
