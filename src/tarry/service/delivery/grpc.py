"""gRPC deliveries: `grpc://host:port/package.Service/Method`, and `grpcs`.

The body is the request message as bytes, headers are metadata, the name of the code is the status,
trailing metadata are the headers of the answer. The channel never repeats a call by itself.
"""

from __future__ import annotations

import asyncio
import binascii
import re
from base64 import b64decode, b64encode
from collections import OrderedDict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError, MissingExtra
from tarry.service.delivery.http1.connector import addresses_of, allowed_of
from tarry.service.delivery.http1.dns import Names
from tarry.service.delivery.messages import DeliveryResult, Fault, NoWay
from tarry.service.delivery.targets import parse_target

if TYPE_CHECKING:
    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.targets import Target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.messages import DeliveryRequest
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
_SET_BY_GRPC = frozenset({"accept-encoding", "content-type", "te", "user-agent"})
_IS_TOO_LONG = re.compile(
    rf"Received message larger than max \(\d+ vs\. {MOST_ANSWER}\)|Decompressed message larger than"
).search
"""Knows it by the words of gRPC, which has no code for it."""
_TOO_LONG = f"a message is longer than the {MOST_ANSWER} bytes that an answer may have"
_MOST_WORDS = 512


def is_installed() -> bool:
    """Whether gRPC targets can be served here."""
    return find_spec("grpc") is not None


class GrpcDelivery:
    """Makes attempts over gRPC. `proxy` (http only) and `ca` as for HTTP."""

    def __init__(self, guard: Guard, *, proxy: str | None = None, ca: str | None = None) -> None:
        try:
            self._grpc: Any = import_module("grpc")
            import_module("grpc.aio")
        except ImportError:
            msg = "gRPC targets need grpcio: pip install 'tarry[grpc]'"
            raise MissingExtra(msg) from None
        if proxy is not None and not proxy.startswith("http://"):
            msg = "proxy must be http://host:port for gRPC targets"
            raise ConfigurationError(msg)
        self._guard = guard
        self._channels = Channels(self._grpc, guard, proxy, None if ca is None else Path(ca))

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Make one attempt; cancelled, the call is cancelled too."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            target = parse_target(request.url)
            metadata = _metadata_of(request.headers)
        except ConfigurationError as error:
            return DeliveryResult(fault=Fault.INVALID, error=str(error))
        try:
            self._guard.check_url(target)
        except ConfigurationError as error:
            return DeliveryResult(fault=Fault.BLOCKED, error=str(error))
        try:
            async with asyncio.timeout(request.timeout):
                channel = await self._channels.take(target)
        except TimeoutError:
            delivered = DeliveryResult(
                fault=Fault.TIMEOUT, error="The name was not resolved in time"
            )
        except NoWay as error:
            delivered = DeliveryResult(fault=error.fault, error=str(error))
        else:
            until = started + request.timeout
            try:
                delivered = await self._call(channel, target, request, metadata, until)
            finally:
                await self._channels.give_back(channel)
            delivered.remote = channel.remote
        delivered.duration_ms = (loop.time() - started) * 1000
        return delivered

    async def close(self) -> None:
        """End what runs and close connections."""
        await self._channels.close()

    async def _call(
        self,
        channel: Channel,
        target: Target,
        request: DeliveryRequest,
        metadata: list[tuple[str, str | bytes]],
        until: float,
    ) -> DeliveryResult:
        now = asyncio.get_running_loop().time
        try:
            call = channel.raw.unary_unary(target.path)(
                request.body, timeout=max(until - now(), 0.001), metadata=metadata
            )
            answer = await call
            headers = _headers_of(await call.trailing_metadata())
        except self._grpc.aio.AioRpcError as error:
            code, words = error.code().name, _printable(error.details() or "")
            if code == "UNAVAILABLE":
                self._channels.drop(target)
            if code == "DEADLINE_EXCEEDED" and now() >= until:
                return DeliveryResult(fault=Fault.TIMEOUT, error=words)
            if code == "RESOURCE_EXHAUSTED" and _IS_TOO_LONG(words):
                # The target is not busy: it may have done all, and the next answer is as long.
                return DeliveryResult(fault=Fault.INVALID, error=_TOO_LONG)
            headers = _headers_of(error.trailing_metadata())
            return DeliveryResult(status=code, headers=headers, error=words)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return DeliveryResult(fault=Fault.OURS, error="the delivery was closed meanwhile")
        most = request.max_excerpt
        return DeliveryResult(
            status="OK", headers=headers, excerpt=answer[:most], truncated=len(answer) > most
        )


def _metadata_of(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str | bytes]]:
    """Return headers as metadata: names in lower case, `-bin` values as bytes."""
    metadata: list[tuple[str, str | bytes]] = []
    for given, value in headers:
        name = given.lower()
        if name in _SET_BY_GRPC:
            continue
        if not _is_name(name):
            msg = f"headers must have names of letters, digits, '-', '_' and '.', got {given!r}"
            raise ConfigurationError(msg)
        if name.endswith("-bin"):
            try:
                metadata.append((name, b64decode(value + "=" * (-len(value) % 4), validate=True)))
            except (binascii.Error, ValueError):
                msg = f"headers must have base64 in {name}"
                raise ConfigurationError(msg) from None
        elif value.isascii() and (value.isprintable() or not value):
            metadata.append((name, value))
        else:
            msg = f"headers must be printable ASCII for a gRPC target, {name} is not"
            raise ConfigurationError(msg)
    return metadata


def _is_name(name: str) -> bool:
    plain = name.replace("-", "").replace("_", "").replace(".", "")
    return plain.isascii() and plain.isalnum() and not name.startswith("grpc-")


def _printable(words: str) -> str:
    """Return the beginning of what a target says, for any screen."""
    return "".join(each if each.isprintable() else " " for each in words[:_MOST_WORDS])


def _headers_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[tuple[str, str]]:
    return [
        (name, value if isinstance(value, str) else b64encode(value).decode())
        for name, value in metadata or ()
    ]


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
