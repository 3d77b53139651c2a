"""The short way to the application, and back, for a request that arrives in one read.

For each request uvicorn makes a task, which asks for the body and sends the answer in messages. A
request that makes one task, and of which head and body came together, needs none of it: the
application is called with both, and calls back with the answer when the store has one.

Everything else goes uvicorn's way: other methods and paths, HTTP/1.0, who wants the connection
closed or upgraded or expects to be told to go on, a body that comes later, a request behind
another that has no answer yet, and one of a client that does not read its answers.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.service.api.response import ApiResponse, CompleteRequestHandler

_logger = logging.getLogger("tarry.service")
_CLOSE = (b"connection", b"close")


class _Nobody:
    """Who waits for more of a request that is here in full."""

    def set(self) -> None:
        """Tell nobody."""


class _Cycle:
    """What a connection has to know of a request, by the names that uvicorn has for it."""

    body = b""
    more_body = True
    keep_alive = True
    disconnected = False
    response_started = False
    response_complete = False
    message_event = _Nobody()

    def __init__(self, path: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.path = path
        self.headers = headers


class FastPathProtocol(HttpToolsProtocol):
    """A connection of uvicorn that brings requests to `whole`, by their paths, where it can."""

    cycle: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]
    expect_100_continue: bool
    _begun: _Cycle | None = None
    """The request that may go the short way when the read ends."""

    def __init__(
        self, *args: Any, whole: Mapping[bytes, CompleteRequestHandler], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._whole = whole

    def data_received(self, data: bytes) -> None:
        """Read on, and serve the request that came with it."""
        super().data_received(data)
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if not begun.more_body:
            self._serve(begun)
        elif not self.transport.is_closing():
            self.cycle = None
            self._go_on()
            if begun.body:
                super().on_body(begun.body)

    def on_message_begin(self) -> None:
        """Begin a request. What uvicorn makes of it then, only its own way needs."""
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_headers_complete(self) -> None:
        """Let the request be served, at once or when the read ends."""
        parser: Any = self.parser
        cycle = self.cycle
        if (
            self.url in self._whole
            and (cycle is None or cycle.response_complete)
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and not self.flow.write_paused
        ):
            self.cycle = self._begun = _Cycle(self.url, self.headers)
        else:
            self._go_on()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        begun = self._begun
        if begun is not None and self.cycle is begun:
            begun.body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        begun = self._begun
        if begun is not None and self.cycle is begun:
            begun.more_body = False
        else:
            super().on_message_complete()

    def _go_on(self) -> None:
        """Go uvicorn's way with a request whose head is here."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        super().on_headers_complete()

    def _serve(self, begun: _Cycle) -> None:
        scope = {"method": "POST", "path": begun.path.decode(), "headers": begun.headers}
        body, begun.body = begun.body, b""  # which an idle connection has no use for
        task = self._whole[begun.path](scope, body, partial(self._answer, begun))
        if task is not None:  # it is waited for at the end
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _answer(self, cycle: _Cycle, answer: ApiResponse) -> None:
        if self.transport.is_closing():
            return
        headers = self.server_state.default_headers
        if not cycle.keep_alive:
            headers = [*headers, _CLOSE]
        cycle.response_started = cycle.response_complete = True
        try:
            self.transport.write(STATUS_LINE[answer.status] + answer.to_http(headers))
        except ValueError:
            _logger.exception("an answer was not sent")
            cycle.keep_alive = False
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()
