"""The server: runs the service in uvicorn (socket, event loop, signals), and formats JSON logs."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from functools import partial
from socket import SO_SNDBUF, SOL_SOCKET
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn

from tarry.service.http.protocol import ServiceHttpProtocol
from tarry.service.http.tls_listener import TlsListener
from tarry.service.shutdown import GRACE_S, ShutdownWatchdog

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket
    from types import FrameType

    from tarry.service.app import Service
    from tarry.service.certificates import ServerCertificate

_logger = logging.getLogger("tarry.service")
_LISTEN_BACKLOG = 2048
_SEND_BUFFER_BYTES = 262_144
"""Send buffer of the kernel for one connection (Linux reserves twice as much). By default it grows
to 4 MiB: pages that 300 clients did not read took 890 MiB, which the limits of the service do not
count."""
_GC_THRESHOLD = 10_000
"""Number of new objects after which the cyclic garbage collector runs. The service creates few
reference cycles; with the default of 700, the collector took 5 % of the CPU time."""
_KEEP_ALIVE_S = 75
"""Longer than the idle timeout of most load balancers (60 s), so that the balancer closes first."""
_CERTIFICATE_CHECK_INTERVAL_S = 2.0  # of the times of two files
_encode = msgspec.json.Encoder(enc_hook=str).encode
_RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class HttpServer(uvicorn.Server):
    """Serves a service over HTTP until a signal stops it.

    `on_ready` is called with the URL of the service when the server accepts connections. If the
    shutdown takes longer than `drain_ms` and a few seconds, the process exits with
    `timeout_exit_code`. With `certificate`, the server speaks HTTPS, and loads the certificate
    again when its files change.
    """

    def __init__(
        self,
        service: Service,
        on_ready: Callable[[str], None],
        *,
        timeout_exit_code: int,
        certificate: ServerCertificate | None = None,
    ) -> None:
        self._service = service
        self._on_ready = on_ready
        self._certificate = certificate
        self._certificate_timer: asyncio.TimerHandle | None = None
        settings = service.settings
        drain_s = settings.drain_ms / 1000
        self._watchdog = ShutdownWatchdog(drain_s + GRACE_S, timeout_exit_code)
        http_protocol: Any = partial(
            ServiceHttpProtocol,
            headers_timeout_s=settings.head_timeout_ms / 1000,
            body_timeout_s=settings.body_timeout_ms / 1000,
            fast_routes=service.api.fast_routes,
            max_clients=service.max_clients,
        )
        config = uvicorn.Config(
            service,
            host=settings.host,
            port=settings.port,
            http=http_protocol,
            access_log=False,
            # All connections of the backlog are accepted at once, before any can be refused.
            backlog=min(_LISTEN_BACKLOG, service.max_clients),
            lifespan="on",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=int(drain_s) + 1,  # for running requests
            timeout_keep_alive=_KEEP_ALIVE_S,
            ws="none",
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start listening, and call `on_ready`."""
        self._watchdog.loop = asyncio.get_running_loop()
        if self._certificate is None:
            await super().startup(sockets)
        else:
            await super().startup([])  # starts the service, but does not listen
            await self._listen_with_tls(self._certificate, sockets)
        gc.collect()
        gc.freeze()  # the collector then skips the objects that exist now
        gc.set_threshold(_GC_THRESHOLD)
        for server in self.servers if self.started else ():
            for listener in server.sockets:
                _limit_send_buffer(listener)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            url_host = f"[{host}]" if ":" in host else host
            scheme = "http" if self._certificate is None else "https"
            self._on_ready(f"{scheme}://{url_host}:{port}")

    async def _listen_with_tls(
        self, certificate: ServerCertificate, sockets: list[socket] | None
    ) -> None:
        """Start listening. uvicorn would not count clients before the end of the handshake."""
        config = self.config
        create_protocol = partial(
            config.http_protocol_class,
            config=config,  # type: ignore[call-arg] # a protocol of uvicorn
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        clients: set[Any] = self.server_state.connections
        try:
            listener = TlsListener(
                await self._bind() if sockets is None else sockets,
                create_protocol,
                certificate.context,
                clients,
                max_clients=self._service.max_clients,
                handshake_timeout_s=self._service.settings.head_timeout_ms / 1000,
            )
            listener.start(config.backlog)
        except OSError:
            await self.lifespan.shutdown()
            sys.exit(1)  # as uvicorn does; `tarry serve` reports the error
        servers: list[Any] = self.servers
        servers.append(listener)
        self._check_certificate(certificate)

    async def _bind(self) -> list[socket]:
        """Return a bound socket for each address of the host."""
        loop = asyncio.get_running_loop()
        # asyncio resolves the host and sets the socket options. Closing its server closes its
        # sockets, so the listener gets duplicates.
        server = await loop.create_server(
            asyncio.Protocol, self.config.host, self.config.port, start_serving=False
        )
        sockets = [each.dup() for each in server.sockets]
        server.close()
        return sockets

    def _check_certificate(self, certificate: ServerCertificate) -> None:
        certificate.reload_if_changed()
        self._certificate_timer = asyncio.get_running_loop().call_later(
            _CERTIFICATE_CHECK_INTERVAL_S, self._check_certificate, certificate
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start a shutdown, as a signal handler."""
        # Here and not in `shutdown`, which is never called if the store does not open.
        self._watchdog.start()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Call `Service.begin_shutdown`, then stop listening and close the connections."""
        _logger.info("stopping: running attempts finish, other leased tasks are released")
        if self._certificate_timer is not None:
            self._certificate_timer.cancel()
        self._service.begin_shutdown()
        await super().shutdown(sockets)
        _logger.info("stopped")


def _limit_send_buffer(listener: socket) -> None:
    """Limit the send buffer of the connections that a listening socket accepts."""
    listener.setsockopt(SOL_SOCKET, SO_SNDBUF, _SEND_BUFFER_BYTES)


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text, and a traceback as indented lines.

    Characters that are not printable are escaped: clients choose a part of some messages, such as
    the path of a request, and could otherwise forge lines or control the operator's terminal.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - named by logging
        """Return the line of a record."""
        return _escape_unprintable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - named by logging
        """Return the lines of a traceback, indented, so that an error cannot forge log lines."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {_escape_unprintable(line)}" for line in lines)


def _escape_unprintable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class JsonFormatter(logging.Formatter):
    """Formats a record with its `extra` attributes as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON line of a record."""
        line: dict[str, object] = {
            "at": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= {
            name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encode(line).decode()
