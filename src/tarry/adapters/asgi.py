"""ASGI middleware that prevents a server and its clients from both retrying the same failure.

    app = OneRetryLayerMiddleware(app)

Deadlines: a header of the request may contain the time that its client will still wait. All calls
that the handler of the request makes share this deadline, until the response is sent.

Retries: a handler may fail because one of its calls was given up, after retries or because of an
open breaker. The response then has the header `X-Should-Retry: false`, because the client should
not retry what this server has retried. A call that was attempted only once, because it is not
repeatable, does not cause the header. There are two cases:

- The handler raises an error. If the error comes from a call that was given up, the middleware
  sends a 503 with the header, and with `Retry-After` if it is known when a new call can succeed.
- The handler sends a response with a status of 500 or more. The middleware adds the header if any
  call was given up, because a response does not show which error caused it. It adds nothing if the
  response has `Retry-After` or `X-Should-Retry`.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationTypeError
from tarry.runtime import scopes
from tarry.runtime.effects import effects
from tarry.runtime.error_record import GivenUpCalls, current_given_up_calls
from tarry.wire import http
from tarry.wire.http import PROBLEM_MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from tarry.core.verdict import CallRecord
    from tarry.wire.http import App, Message, Receive, Scope, Send

_MIN_SERVER_ERROR_STATUS = 500
_DEADLINE_HEADER = http.DEADLINE_HEADER.lower().encode()
_SHOULD_RETRY_HEADER = http.SHOULD_RETRY_HEADER.lower().encode()
_RETRY_AFTER_HEADER = b"retry-after"
_HINT_HEADERS = (_SHOULD_RETRY_HEADER, _RETRY_AFTER_HEADER)  # a server's hints about retries
_BODY_MESSAGES = frozenset({"http.response.body", "http.response.pathsend"})


class OneRetryLayerMiddleware:
    """Passes client deadlines to handlers, and tells clients not to retry what was retried here."""

    def __init__(self, app: App) -> None:
        if not callable(app):
            raise ConfigurationTypeError("app", "must be an ASGI application", app)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        values = [value for name, value in scope["headers"] if name.lower() == _DEADLINE_HEADER]
        header = values[0].decode("latin-1") if len(values) == 1 else ""
        seconds = http.parse_deadline_header(header)  # None if it is missing, repeated or invalid
        scope_handle = None if seconds is None else scopes.enter(effects.now() + seconds)
        given_up_calls = GivenUpCalls()
        token = current_given_up_calls.set(given_up_calls)
        sender = _ResponseSender(send, given_up_calls, scope_handle)
        try:
            await self._app(scope, receive, sender.send)
        except Exception as error:
            call_record = given_up_calls.find(error)
            if call_record is not None and not sender.has_started:
                await sender.send_failure(call_record)
            raise  # the server still logs the error
        finally:
            given_up_calls.close()
            current_given_up_calls.reset(token)
            if scope_handle is not None:
                scopes.leave(scope_handle)


class _ResponseSender:
    """Wraps the ASGI `send` of one request, to add `X-Should-Retry: false` to the response."""

    def __init__(
        self,
        send: Send,
        given_up_calls: GivenUpCalls,
        scope_handle: scopes.ScopeHandle | None,
    ) -> None:
        self._send = send
        self._given_up_calls = given_up_calls
        self._scope_handle = scope_handle
        self.has_started: bool = False

    async def send(self, message: Message) -> None:
        """Send a message of the handler."""
        message_type = message["type"]
        if message_type == "http.response.start":
            self.has_started = True
            headers = list(message.get("headers", ()))
            is_server_error = message["status"] >= _MIN_SERVER_ERROR_STATUS
            has_hint = any(name.lower() in _HINT_HEADERS for name, _ in headers)
            if is_server_error and self._given_up_calls and not has_hint:
                message = {**message, "headers": [*headers, (_SHOULD_RETRY_HEADER, b"false")]}
        await self._send(message)
        is_last = message_type in _BODY_MESSAGES and not message.get("more_body", False)
        if self._scope_handle is not None and is_last:
            # The client does not wait for background work that the handler does from now on.
            self._scope_handle.has_ended = True

    async def send_failure(self, call_record: CallRecord) -> None:
        """Send a 503 for a handler that raised because of a call that was given up."""
        detail = "A call to another service failed and was given up."
        problem = Problem(503, "Service Unavailable", detail)
        body = problem.to_json()
        headers = [
            (b"content-type", PROBLEM_MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (_SHOULD_RETRY_HEADER, b"false"),
        ]
        if call_record.retry_after is not None:
            headers.append((_RETRY_AFTER_HEADER, str(ceil(call_record.retry_after)).encode()))
        await self.send({"type": "http.response.start", "status": 503, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
