"""Code that both clients share: the connection settings, transports and the event parser.

Imports httpx and msgspec only when needed, so that the client classes can be imported without them.
"""

from __future__ import annotations

import logging
from contextlib import aclosing, closing
from importlib import import_module
from importlib.metadata import version
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from tarry.client.errors import ServiceError, ServiceUnreachable
from tarry.core.checks import check_positive
from tarry.core.extras import require_extra
from tarry.core.policy import UNLIMITED_ATTEMPTS, Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime.config import check_policy
from tarry.runtime.downstream import Downstream

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    import httpx

    from tarry.core.events import Event
    from tarry.wire.tasks import ServiceEvent

logger: logging.Logger = logging.getLogger("tarry.client")

SendMode: TypeAlias = Literal["retry", "long_poll", "once", "retry_forever"]
"""How a request is sent.

`retry`: retried under the client's policy. `long_poll`: also retried under that policy, but with
separate latency statistics, because the service delays its response on purpose. `once`: not
retried. `retry_forever`: retried under `RECONNECT_POLICY`, which does not limit the attempts.
"""

RECONNECT_POLICY = Policy(max_attempts=UNLIMITED_ATTEMPTS, max_delay=10.0)
"""Retries forever to open a lost event stream again. The service was reachable before, so it is
expected to become reachable again."""
MAX_RESPONSE_BYTES = 64 << 20
"""More than the largest page of any list. Bounds the memory that one response can use."""
STREAM_READ_TIMEOUT_S = 60.0
"""A stream on which no byte arrives for this long counts as lost, because the service sends a
comment every 15 seconds."""
MAX_RECONNECT_DELAY_S = 1.0
"""Upper bound of the random delay before a lost stream is opened again."""
_HTTPX_TRANSPORT_MODULE = "httpx._transports.default"
_MAX_EVENT_BYTES = 1 << 18
"""Many times the size of a real event. Bounds the memory that a broken stream can use."""


class ClientConfig:
    """Address of the service, API key, retry policy, timeout and CA certificates of a client."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        policy: Policy | None,
        timeout: float,
        ca_file: str | None,
    ) -> None:
        require_packages()
        self.url: str = _check_url(url)
        self.uses_tls: bool = self.url.startswith("https")
        """If False, the clients do not load the CA certificates, which would take 0.1 seconds."""
        # Without compression, MAX_RESPONSE_BYTES also bounds the decoded content.
        self.headers: dict[str, str] = {
            "accept": "*/*",
            "accept-encoding": "identity",
            "user-agent": f"tarry/{version('tarry')}",
        }
        if api_key is not None:
            self.headers["authorization"] = f"Bearer {_check_api_key(api_key)}"
        check_policy(policy)
        self.policy: Policy | None = policy
        self.timeout: float = check_positive("timeout", timeout)
        self._ca_file = ca_file

    def build_transport(self) -> httpx.BaseTransport:
        """Return the default transport of `Client`.

        If another package has replaced `httpx.HTTPTransport.handle_request`, for traces or in
        tests, that class sends the requests, so that the replaced method is called.
        """
        import httpx

        from tarry.client.http1 import Http1Transport

        if _is_replaced(httpx.HTTPTransport.handle_request):
            return httpx.HTTPTransport(verify=self._build_ssl_context() or False)
        return Http1Transport(self._build_ssl_context())

    def build_async_transport(self) -> httpx.AsyncBaseTransport:
        """Return the default transport of `AsyncClient`; see `build_transport`."""
        import httpx

        from tarry.client.http1 import AsyncHttp1Transport

        if _is_replaced(httpx.AsyncHTTPTransport.handle_async_request):
            return httpx.AsyncHTTPTransport(verify=self._build_ssl_context() or False)
        return AsyncHttp1Transport(self._build_ssl_context())

    def _build_ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context; None without TLS."""
        if not self.uses_tls:
            return None
        if self._ca_file is None:
            import httpx

            return httpx.create_ssl_context()
        import ssl

        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:  # also an SSLError
            reason = "has no certificates" if isinstance(error, ssl.SSLError) else error.strerror
            rule = f"must be a file of PEM certificates, but {self._ca_file} cannot be used"
            raise ConfigurationError("ca_file", f"{rule}: {reason}") from None

    def build_retry_transports(
        self,
        retry_class: Callable[..., Any],
        transport: BufferingTransport | AsyncBufferingTransport,
    ) -> dict[SendMode, Any]:
        """Return a transport for each send mode; all of them share the given transport.

        Long polls and lost event streams each have a `Downstream` of their own, without breaker and
        budget, so that their durations and failures do not affect other requests. The events of
        all requests are only logged: the program makes no requests itself.
        """
        from tarry.adapters.http.send import default_downstream

        def use_own_listener(downstream: Downstream) -> Downstream:
            downstream.listener = log_request_event
            return downstream

        requests = use_own_listener(default_downstream(self.url))
        polls = use_own_listener(Downstream(f"{self.url}/wait"))
        streams = use_own_listener(Downstream(f"{self.url}/events"))
        return {
            "retry": retry_class(transport, policy=self.policy, downstream=requests),
            "long_poll": retry_class(transport, policy=self.policy, downstream=polls),
            "once": transport,
            "retry_forever": retry_class(transport, policy=RECONNECT_POLICY, downstream=streams),
        }

    def unreachable_error(self, request: object, error: Exception) -> ServiceUnreachable:
        """Return the error for a request that got no response."""
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        return ServiceUnreachable(f"{request} got no response from {self.url}: {cause}")


def log_request_event(event: Event) -> None:
    """Log an event of a request to the service at the level DEBUG."""
    if logger.isEnabledFor(logging.DEBUG):
        from tarry.telemetry.logs import log_to

        log_to(logger, logging.DEBUG, event)


def require_packages() -> None:
    """Raise `MissingExtra` unless httpx and msgspec are installed."""
    with require_extra("tarry.client needs httpx and msgspec", "client"):
        import_module("httpx")
        import_module("msgspec")


def _check_url(url: Any) -> str:
    if not isinstance(url, str):
        rule = 'must be the address of the service, such as "http://127.0.0.1:8080"'
        raise ConfigurationTypeError("url", rule, url)
    try:
        address = urlsplit(url)
        is_http = address.scheme in {"http", "https"} and address.hostname and address.port != 0
        has_forbidden_parts = address.query or address.fragment or "@" in address.netloc
    except ValueError:
        is_http = has_forbidden_parts = False
    if not is_http or has_forbidden_parts:
        # The value is not shown, because it may be an API key that was passed by mistake.
        rule = (
            "must be the address of the service, such as http://127.0.0.1:8080, with scheme and "
            "host, optionally a port and a path, but no user, query or fragment. Pass the API key "
            "separately."
        )
        raise ConfigurationError("url", rule)
    return url.rstrip("/")


def _check_api_key(api_key: Any) -> str:
    is_text = isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()
    if is_text and api_key.strip() == api_key:
        return str(api_key)
    # The value is not shown, because it is a secret.
    rule = "must be an API key of the service, a string of visible ASCII characters"
    raise ConfigurationTypeError("key", rule)


def _is_replaced(method: object) -> bool:
    """Return whether a method of httpx is no longer the function that httpx defines."""
    return (
        not isinstance(method, FunctionType)
        or method.__module__ != _HTTPX_TRANSPORT_MODULE
        or hasattr(method, "__wrapped__")
    )


class BufferingTransport:
    """An httpx transport that reads a response completely before it returns the response.

    The retry transport wraps this transport. Therefore a response that is cut off counts as a
    failed attempt and is retried. Event streams are not buffered.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        response: httpx.Response = self._transport.handle_request(request)
        if is_event_stream(response):
            return response
        content = bytearray()
        with closing(response):
            for chunk in response.iter_raw():
                _append_chunk(content, chunk)
        return _buffered_response(response, content)

    def close(self) -> None:
        """Close the wrapped transport."""
        self._transport.close()


class AsyncBufferingTransport:
    """The asynchronous version of `BufferingTransport`."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        response: httpx.Response = await self._transport.handle_async_request(request)
        if is_event_stream(response):
            return response
        content = bytearray()
        async with aclosing(response):
            async for chunk in response.aiter_raw():
                _append_chunk(content, chunk)
        return _buffered_response(response, content)

    async def aclose(self) -> None:
        """Close the wrapped transport."""
        await self._transport.aclose()


def is_event_stream(response: httpx.Response) -> bool:
    """Return whether a response is a stream of server-sent events, which never ends."""
    content_type: str = response.headers.get("content-type", "")
    return response.is_success and content_type.startswith("text/event-stream")


def _append_chunk(content: bytearray, chunk: bytes) -> None:
    """Append a chunk to the content; raise `ServiceError` if the content is too large."""
    content += chunk
    if len(content) > MAX_RESPONSE_BYTES:
        raise ServiceError(f"a response from the service has more than {MAX_RESPONSE_BYTES} bytes")


def _buffered_response(response: httpx.Response, content: bytearray) -> httpx.Response:
    import httpx

    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=httpx.ByteStream(bytes(content)),
        extensions=response.extensions,
    )


class EventStreamParser:
    """Parses server-sent events (HTML standard, 9.2); a chunk may end within an event or a line."""

    def __init__(self) -> None:
        import msgspec

        from tarry.wire.tasks import ServiceEvent

        self._decode = msgspec.json.Decoder(ServiceEvent).decode
        self._decode_errors = (msgspec.DecodeError, UnicodeDecodeError)
        self._incomplete_line = b""
        self._data_lines: list[bytes] = []
        self._data_size = 0

    def feed(self, chunk: bytes) -> Iterator[ServiceEvent]:
        """Yield the events that this chunk completes."""
        received = self._incomplete_line + chunk
        # A CR at the end may be the first half of a CRLF, so it is kept for the next chunk.
        trailing_cr = b"\r" if received.endswith(b"\r") else b""
        received = received.removesuffix(trailing_cr)
        lines = received.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._incomplete_line = lines.pop() + trailing_cr
        for line in lines:
            field, _, value = line.partition(b":")
            if not line and self._data_lines:
                data = b"\n".join(self._data_lines)
                self._data_lines, self._data_size = [], 0
                try:
                    event = self._decode(data)
                except self._decode_errors as error:
                    msg = f"an event from the service cannot be parsed: {error}"
                    raise ServiceError(msg) from error
                yield event
            # `event:` is ignored because the data repeats it, `id:` because streams cannot be
            # resumed.
            elif field == b"data":
                self._data_lines.append(value.removeprefix(b" "))
                self._data_size += len(value)
        if len(self._incomplete_line) + self._data_size > _MAX_EVENT_BYTES:
            raise ServiceError(f"an event from the service has more than {_MAX_EVENT_BYTES} bytes")
