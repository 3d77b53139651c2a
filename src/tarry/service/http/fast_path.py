"""The fast path of `POST /retry-tasks`: a request that arrives in one read needs no asyncio task.

For each request uvicorn creates a task, which receives the body and sends the response as ASGI
messages. If headers and body arrive together, `FastPathProtocol` needs neither the task nor the
messages: it calls the API with headers and body, and the API calls back with the response once the
store has committed. The time that the protocol takes per request falls from 37.5 us to 26.8 us.

All other requests take uvicorn's own path: other methods and paths, HTTP/1.0, `Connection: close`,
`Upgrade`, `Expect: 100-continue`, a body that arrives later, a pipelined request whose predecessor
has no response yet, and a client that does not read its responses.

The class overrides parts of uvicorn that are not a public API.
`tests/service/http/test_uvicorn_internals.py` lists them and fails when one of them changes.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.service.api.messages import ApiResponse, CompleteRequestHandler


_logger = logging.getLogger("tarry.service")
_CONNECTION_CLOSE = (b"connection", b"close")


class _NoopEvent:
    """Replaces uvicorn's event for more data: a fast-path request is already complete."""

    def set(self) -> None:
        """Do nothing."""


class _FastPathCycle:
    """The state of one request, with the attributes of uvicorn's `RequestResponseCycle`."""

    body = b""
    more_body = True
    keep_alive = True
    disconnected = False
    response_started = False
    response_complete = False
    message_event = _NoopEvent()

    def __init__(self, path: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.path = path
        self.headers = headers


class FastPathProtocol(HttpToolsProtocol):
    """A uvicorn connection that passes complete `POST` requests to `fast_routes` by path."""

    cycle: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]
    expect_100_continue: bool
    _candidate: _FastPathCycle | None = None
    """A request that takes the fast path if it is complete at the end of the current read."""

    def __init__(
        self, *args: Any, fast_routes: Mapping[bytes, CompleteRequestHandler], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._fast_routes = fast_routes

    def data_received(self, data: bytes) -> None:
        """Parse the data, and serve a fast-path request that is now complete."""
        super().data_received(data)
        candidate, self._candidate = self._candidate, None
        if candidate is None:
            return
        if not candidate.more_body:
            self._serve(candidate)
        elif not self.transport.is_closing():  # the rest of the body follows later
            self.cycle = None
            self._continue_with_uvicorn()
            if candidate.body:
                super().on_body(candidate.body)

    def on_message_begin(self) -> None:
        """Start a request. uvicorn's scope is built only if its own path is taken."""
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_headers_complete(self) -> None:
        """Choose between the fast path and uvicorn's own path."""
        parser: Any = self.parser
        cycle = self.cycle
        if (
            self.url in self._fast_routes
            and (cycle is None or cycle.response_complete)
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and not self.flow.write_paused
        ):
            self.cycle = self._candidate = _FastPathCycle(self.url, self.headers)
        else:
            self._continue_with_uvicorn()

    def on_body(self, body: bytes) -> None:
        """Collect a part of the body."""
        candidate = self._candidate
        if candidate is not None and self.cycle is candidate:
            candidate.body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Mark the request as complete."""
        candidate = self._candidate
        if candidate is not None and self.cycle is candidate:
            candidate.more_body = False
        else:
            super().on_message_complete()

    def _continue_with_uvicorn(self) -> None:
        """Take uvicorn's path with a request whose headers are complete."""
        url, headers, expects_continue = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects_continue
        self.scope["headers"] = headers
        super().on_headers_complete()

    def _serve(self, cycle: _FastPathCycle) -> None:
        scope = {"method": "POST", "path": cycle.path.decode(), "headers": cycle.headers}
        body, cycle.body = cycle.body, b""  # an idle connection must not keep the body alive
        task = self._fast_routes[cycle.path](scope, body, partial(self._respond, cycle))
        if task is not None:  # the server waits for it at shutdown
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _respond(self, cycle: _FastPathCycle, response: ApiResponse) -> None:
        if self.transport.is_closing():
            return
        headers = self.server_state.default_headers
        if not cycle.keep_alive:
            headers = [*headers, _CONNECTION_CLOSE]
        cycle.response_started = cycle.response_complete = True
        try:
            self.transport.write(STATUS_LINE[response.status] + response.encode_http1(headers))
        except ValueError:
            _logger.exception("response not sent: invalid header, path=%s", cycle.path)
            cycle.keep_alive = False
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()
