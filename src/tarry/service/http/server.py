"""The process around the service: a socket, an event loop, signals."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from tarry.service.http.limits import LimitedHttpProtocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from tarry.service.app import Service

_logger = logging.getLogger("tarry.service")
_BACKLOG = 2048
_GARBAGE = 10_000
"""Objects after which cycles are looked for: there are few, and to look for them takes time."""
_KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than balancers keep theirs, usually for 60."""


class Server:
    """Serves over HTTP until a signal ends it; `patience`: seconds for open connections then."""

    def __init__(self, service: Service, *, patience: float) -> None:
        self._service = service
        settings = service.settings
        http: Any = partial(
            LimitedHttpProtocol,
            head_timeout=settings.head_timeout_ms / 1000,
            body_timeout=settings.body_timeout_ms / 1000,
            whole=service.api.whole,
        )
        self._config = uvicorn.Config(
            service,
            host=settings.host,
            port=settings.port,
            http=http,
            access_log=False,
            backlog=_BACKLOG,
            lifespan="on",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=int(patience) + 1,
            timeout_keep_alive=_KEEP_ALIVE,
        )

    def run(self, ready: Callable[[str], None]) -> int:
        """Serve; `ready` is told the address when it is there. Returns the exit code."""
        server = _Announced(self._config, ready, self._service.leave)
        server.run()
        return 0 if server.started else 1


class _Announced(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, ready: Callable[[str], None], leave: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._leave = leave

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is here now stays
        gc.set_threshold(_GARBAGE)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._ready(f"http://{shown}:{port}")

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        _logger.info("stopping: what runs is finished, the rest is handed back")
        self._leave()
        await super().shutdown(sockets)
        _logger.info("stopped")
