"""gRPC deliveries to `grpc://host:port/package.Service/Method` and `grpcs://...` targets.

The body of a request is the request message, and its headers are the metadata of the call. The
status of a result is the name of the gRPC status code, and its headers are the trailing metadata.
gRPC's own retries are switched off, because the service decides about retries.
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

import msgspec

from tarry.core.extras import require_extra
from tarry.errors import ConfigurationError
from tarry.service.certificates import CertificateFiles, ReloadingCertificate
from tarry.service.delivery import DeliveryError, DeliveryResult, Fault
from tarry.service.delivery.client_certificates import find_certificate
from tarry.service.delivery.dns import DEADLINE_PAUSE_S, DnsCache
from tarry.service.delivery.http1.connector import select_allowed
from tarry.service.delivery.targets import parse_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.service.delivery import DeliveryRequest
    from tarry.service.delivery.client_certificates import ClientCertificate
    from tarry.service.delivery.guard import Guard
    from tarry.service.delivery.targets import Target

MAX_CHANNELS = 256
MAX_MESSAGE_BYTES = 4 << 20  # a longer message is an error: gRPC cannot read a part of a message
_ADDRESS_TTL_S = 60.0  # time after which the addresses of a channel are resolved and checked again
_IDLE_TIMEOUT_MS = 60_000
_MAX_ERROR_CHARS = 2048  # the engine redacts the error and cuts it again for the attempt log
_MIN_TIMEOUT_S = 0.001

_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.client_idle_timeout_ms", _IDLE_TIMEOUT_MS),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
_is_metadata_name = re.compile(r"(?!grpc-)[-_.]*[a-z0-9][a-z0-9_.-]*").fullmatch
_HEADERS_SET_BY_GRPC = frozenset({"accept-encoding", "content-type", "te", "user-agent"})
# gRPC reports an oversized message as RESOURCE_EXHAUSTED, like throttling; only the text differs.
_is_oversized = re.compile(
    rf"Received message larger than max \(\d+ vs\. {MAX_MESSAGE_BYTES}\)"
    "|Decompressed message larger than"
).search
_ADDRESS = re.compile(r"ipv[46]:[^\s,;]*[^\s,;:]")  # in gRPC's format, see `Channel`
_OVERSIZED = f"a message is longer than the {MAX_MESSAGE_BYTES} bytes that a response may have"


def is_installed() -> bool:
    """Return whether grpcio is installed, which gRPC targets need."""
    return find_spec("grpc") is not None


class Channel(msgspec.Struct, eq=False):
    """A `grpc.aio.Channel` with its resolved addresses and the number of attempts that use it."""

    grpc_channel: Any
    grpc_target: str  # the addresses in gRPC's format: `ipv4:192.0.2.1:443,192.0.2.2:443`
    checked_at: float  # when the addresses were last resolved and checked
    certificate: tuple[bytes, bytes] | None = None  # the client certificate and its private key
    attempt_count: int = 0

    @property
    def remote(self) -> str | None:
        """The IP address; None if there are several, or if a proxy resolves the name."""
        family, _, ip = self.grpc_target.rpartition(":")[0].partition(":")
        return ip.strip("[]") if family in {"ipv4", "ipv6"} and "," not in ip else None


class GrpcDeliveryClient:
    """Sends requests over gRPC. `proxy` is an http URL, `ca_file` a PEM file of trusted CAs.

    Of `client_certificates`, the first one for a target is presented to it.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        dns: DnsCache | None = None,
        proxy: str | None = None,
        ca_file: str | None = None,
        client_certificates: Sequence[ClientCertificate] = (),
    ) -> None:
        with require_extra("gRPC targets need grpcio", "grpc"):
            self._grpc: Any = import_module("grpc")
            import_module("grpc.aio")
        if proxy is not None and not proxy.startswith("http://"):
            raise ConfigurationError("proxy", "must be http://host:port for gRPC targets")
        self._guard = guard
        self._dns = dns or DnsCache()
        self._proxy = proxy
        self._root_certificates = None if ca_file is None else Path(ca_file).read_bytes()
        self._client_certificates = {
            certificate: ReloadingCertificate(certificate.open_files(), CertificateFiles.read)
            for certificate in client_certificates
        }
        self._channels: OrderedDict[tuple[str, str], Channel] = OrderedDict()
        """Channels by tenant and endpoint. Above `MAX_CHANNELS`, the least recently used one is
        drained. Tenants do not share channels, as in `HttpDeliveryClient`."""
        self._draining_channels: list[Channel] = []
        """Channels that get no new attempts. Each is closed when its last attempt has ended."""

    async def send(self, request: DeliveryRequest) -> DeliveryResult:
        """Send one request; cancelling this coroutine cancels the gRPC call."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        try:
            target, metadata = parse_target(request.url), encode_metadata(request.headers.items())
        except ConfigurationError as error:
            return DeliveryResult(fault=Fault.INVALID, error=str(error))
        try:
            self._guard.check_host(target)
        except ConfigurationError as error:
            return DeliveryResult(fault=Fault.BLOCKED, error=str(error))
        try:
            async with asyncio.timeout(request.timeout):
                channel = await self._acquire(request.tenant, target)
        except TimeoutError:
            message = "The host name was not resolved in time"
            result = DeliveryResult(fault=Fault.DNS, error=message, pause_s=DEADLINE_PAUSE_S)
        except DeliveryError as error:
            result = error.to_result()
        else:
            deadline = started_at + request.timeout
            try:
                result = await self._call(channel, target, request, metadata, deadline)
            finally:
                await self._release(channel)
            result.remote = channel.remote
        result.duration_ms = (loop.time() - started_at) * 1000
        return result

    async def close(self) -> None:
        """Close all channels, which cancels running calls."""
        channels = [*self._channels.values(), *self._draining_channels]
        self._channels.clear()
        self._draining_channels.clear()
        for channel in channels:
            await channel.grpc_channel.close()
        await self._dns.close()

    async def _call(
        self,
        channel: Channel,
        target: Target,
        request: DeliveryRequest,
        metadata: list[tuple[str, str | bytes]],
        deadline: float,
    ) -> DeliveryResult:
        now = asyncio.get_running_loop().time
        try:
            call = channel.grpc_channel.unary_unary(target.path_and_query)(
                request.body, timeout=max(deadline - now(), _MIN_TIMEOUT_S), metadata=metadata
            )
            response = await call
            headers = _decode_metadata(await call.trailing_metadata())
        except self._grpc.aio.AioRpcError as error:
            code, details = error.code().name, _clean_and_shorten(error.details() or "")
            # gRPC names the address of a failed connection, which may be internal.
            details = _ADDRESS.sub(target.authority, details)
            if code == "UNAVAILABLE":
                self._drain_channel((request.tenant, target.endpoint))
            if code == "DEADLINE_EXCEEDED" and now() >= deadline:
                return DeliveryResult(fault=Fault.TIMEOUT, error=details)
            if code == "RESOURCE_EXHAUSTED" and _is_oversized(details):
                # The target is not overloaded. It may have done the work, and a retry would get a
                # response of the same length.
                return DeliveryResult(fault=Fault.INVALID, error=_OVERSIZED)
            headers = _decode_metadata(error.trailing_metadata())
            return DeliveryResult(status=code, headers=headers, error=details)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            message = "the service shut down during the call"
            return DeliveryResult(fault=Fault.INTERNAL, error=message)
        limit = request.max_excerpt
        return DeliveryResult(
            status="OK", headers=headers, excerpt=response[:limit], truncated=len(response) > limit
        )

    async def _acquire(self, tenant: str, target: Target) -> Channel:
        """Return a channel to a target, or raise DeliveryError. The caller must `_release` it."""
        now, key = asyncio.get_running_loop().time(), (tenant, target.endpoint)
        channel = self._channels.get(key)
        if channel is None or now - channel.checked_at >= _ADDRESS_TTL_S:
            grpc_target = await self._resolve_grpc_target(tenant, target)
            # Another attempt may have opened the channel while the name was resolved.
            channel = self._channels.get(key)
            certificate = self._load_certificate(tenant, target)
            if (
                channel is None
                or channel.grpc_target != grpc_target
                or channel.certificate is not certificate
            ):
                self._drain_channel(key)
                grpc_channel = self._open_channel(target, grpc_target, certificate)
                channel = Channel(grpc_channel, grpc_target, now, certificate)
                self._channels[key] = channel
            channel.checked_at = now
        self._channels.move_to_end(key)
        if len(self._channels) > MAX_CHANNELS:
            self._draining_channels.append(self._channels.popitem(last=False)[1])
        channel.attempt_count += 1
        return channel

    async def _release(self, channel: Channel) -> None:
        """End an attempt on a channel, and close the draining channels without attempts."""
        channel.attempt_count -= 1
        unused = [each for each in self._draining_channels if not each.attempt_count]
        self._draining_channels = [each for each in self._draining_channels if each.attempt_count]
        for each in unused:
            await each.grpc_channel.close()

    def _drain_channel(self, key: tuple[str, str]) -> None:
        """Drain the channel of a tenant and endpoint; the next attempt resolves the name again."""
        channel = self._channels.pop(key, None)
        if channel is not None:
            self._draining_channels.append(channel)

    async def _resolve_grpc_target(self, tenant: str, target: Target) -> str:
        """Return the allowed addresses of a target's host in gRPC's format."""
        if self._proxy is not None:
            return f"dns:///{target.authority}"
        addresses = await self._dns.resolve(target.host, tenant)
        allowed = select_allowed(addresses, target.host, self._guard)
        is_ipv6 = ":" in allowed[0]  # gRPC's format cannot mix IPv4 and IPv6
        template = "[{}]:{}" if is_ipv6 else "{}:{}"
        same_family = [address for address in allowed if (":" in address) == is_ipv6]
        host_ports = ",".join(template.format(address, target.port) for address in same_family)
        return f"{'ipv6' if is_ipv6 else 'ipv4'}:{host_ports}"

    def _load_certificate(self, tenant: str, target: Target) -> tuple[bytes, bytes] | None:
        """Return the current client certificate for a target and its key; None: there is none."""
        certificate = find_certificate(self._client_certificates, tenant, target)
        if certificate is None:
            return None
        reloading = self._client_certificates[certificate]
        reloading.reload_if_changed()
        return reloading.current

    def _open_channel(
        self, target: Target, grpc_target: str, certificate: tuple[bytes, bytes] | None
    ) -> Any:
        authority = "grpc.default_authority", target.authority
        options: list[tuple[str, object]] = [*_CHANNEL_OPTIONS, authority]
        if self._proxy is not None:
            options.append(("grpc.http_proxy", self._proxy))
        else:
            options.append(("grpc.enable_http_proxy", 0))  # ignore `http_proxy`
        if target.scheme == "grpc":
            return self._grpc.aio.insecure_channel(grpc_target, options=options)
        options.append(("grpc.ssl_target_name_override", target.host))
        chain, key = certificate or (None, None)
        credentials = self._grpc.ssl_channel_credentials(self._root_certificates, key, chain)
        return self._grpc.aio.secure_channel(grpc_target, credentials, options=options)


def encode_metadata(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str | bytes]]:
    """Return headers as gRPC metadata: names in lower case, values of `-bin` names as bytes.

    Raises ConfigurationError for a header that cannot be sent; its field is `headers.NAME`.
    """
    metadata: list[tuple[str, str | bytes]] = []
    for original_name, value in headers:
        name = original_name.lower()
        if name in _HEADERS_SET_BY_GRPC:
            continue
        field = f"headers.{original_name}"
        if not _is_metadata_name(name):
            rule = (
                "has a name that gRPC reserves (grpc-...) or does not allow: use A-Z a-z 0-9 - _ ."
            )
            raise ConfigurationError(field, rule)
        if name.endswith("-bin"):
            try:
                metadata.append((name, b64decode(value + "=" * (-len(value) % 4), validate=True)))
            except (binascii.Error, ValueError):
                raise ConfigurationError(field, "must be base64, because of -bin") from None
        elif value.isascii() and (value.isprintable() or not value):
            metadata.append((name, value))
        else:
            raise ConfigurationError(field, "must be printable ASCII for a gRPC target")
    return metadata


def _clean_and_shorten(text: str) -> str:
    """Return the beginning of a text, with spaces instead of control characters."""
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_ERROR_CHARS])


def _decode_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> list[tuple[str, str]]:
    return [
        (name, value if isinstance(value, str) else b64encode(value).decode())
        for name, value in metadata or ()
    ]
