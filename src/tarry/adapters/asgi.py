"""ASGI middleware for servers: prevents retries by both this server and its clients.

    app = OneRetryLayerMiddleware(app)

Deadlines: a request may have a header with the time that its client waits. All calls that its
handler makes share this deadline, until the response is sent.

Retries: a handler may fail because one of its calls was given up, after retries or because of an
open breaker. The response then has `X-Should-Retry: false`, because the client should not repeat
what was retried here already. A call that is not repeatable was not retried and does not count.
Two cases:

- The handler raises an error. If the error comes from a call that was given up, the middleware
  sends the response.
- The handler sends a response of 500 or more. The response does not show its cause, so it is
  attributed to the call that was given up, unless it has `Retry-After` or `X-Should-Retry`.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationTypeError
from tarry.runtime import deadlines
from tarry.runtime.clocks import system
from tarry.runtime.error_record import GiveUpLog, give_up_log
from tarry.wire import http
from tarry.wire.http import PROBLEM_MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from tarry.core.verdict import CallRecord
    from tarry.wire.http import App, Message, Receive, Scope, Send

_FIRST_SERVER_ERROR = 500
_DEADLINE = http.DEADLINE_HEADER.lower().encode()
_SHOULD_RETRY = http.SHOULD_RETRY_HEADER.lower().encode()
_RETRY_AFTER = b"retry-after"
_BODY_MESSAGES = frozenset({"http.response.body", "http.response.pathsend"})


class OneRetryLayerMiddleware:
    """Passes client deadlines to handlers, and marks failures that were retried here already."""

    def __init__(self, app: App) -> None:
        if not callable(app):
            raise ConfigurationTypeError("app", "must be an ASGI application", app)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        values = [value for name, value in scope["headers"] if name.lower() == _DEADLINE]
        # None if the header is missing, repeated or invalid.
        text = values[0].decode("latin-1") if len(values) == 1 else ""
        remaining = http.parse_deadline_ms(text)
        deadline_key = None if remaining is None else deadlines.enter(system.now() + remaining)
        given_up = GiveUpLog()
        token = give_up_log.set(given_up)
        response = _MarkedResponse(send, given_up, deadline_key)
        try:
            await self._app(scope, receive, response.send)
        except Exception as error:
            record = given_up.find(error)
            if record is not None and not response.has_started:
                await response.send_failure(record)
            raise  # the server still logs the error
        finally:
            given_up.close()
            give_up_log.reset(token)
            if deadline_key is not None:
                deadlines.leave(deadline_key)


class _MarkedResponse:
    """The ASGI `send` of one request. It adds `X-Should-Retry: false` to failed responses."""

    def __init__(
        self, send: Send, given_up: GiveUpLog, deadline_key: deadlines.DeadlineKey | None
    ) -> None:
        self._send = send
        self._given_up = given_up
        self._deadline_key = deadline_key
        self.has_started: bool = False

    async def send(self, message: Message) -> None:
        message_type = message["type"]
        if message_type == "http.response.start":
            self.has_started = True
            headers = list(message.get("headers", ()))
            has_advice = {name.lower() for name, _ in headers} & {_SHOULD_RETRY, _RETRY_AFTER}
            if message["status"] >= _FIRST_SERVER_ERROR and self._given_up and not has_advice:
                message = {**message, "headers": [*headers, (_SHOULD_RETRY, b"false")]}
        await self._send(message)
        is_last = message_type in _BODY_MESSAGES and not message.get("more_body", False)
        if self._deadline_key is not None and is_last:
            self._deadline_key.is_over = True  # no client waits for later background work

    async def send_failure(self, record: CallRecord) -> None:
        """Send a 503 for a handler that raised, with `Retry-After` if the delay is known."""
        problem = Problem(503, "Service Unavailable", "A service behind this one does not answer.")
        body = problem.to_json()
        headers = [
            (b"content-type", PROBLEM_MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (_SHOULD_RETRY, b"false"),
        ]
        if record.retry_after is not None:
            headers.append((_RETRY_AFTER, str(ceil(record.retry_after)).encode()))
        await self.send({"type": "http.response.start", "status": 503, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
