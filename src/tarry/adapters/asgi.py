"""The server's side of retrying at one layer, for any ASGI application.

    app = OneLayerMiddleware(app)

A request that says how long its client waits shares that deadline with every call its handler
makes, until it is answered. And where a handler failed because a call below it was given up on,
after its retries or behind an open breaker, the answer says `X-Should-Retry: false`: whoever
called has no reason to try again what was tried already. Clients of tarry heed it. Of a call that
was made once because it is not safe to repeat, nothing is said: nobody has retried it.

An error that leaves the application is answered for only if it comes from such a call. An answer
does not say where it comes from: one of 500 or more is taken for the consequence of a call that
was given up on before, unless the application says itself when to come back, or whether to.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationTypeError
from tarry.runtime import deadlines, error_record
from tarry.runtime.clocks import system
from tarry.wire import http
from tarry.wire.problem import MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from tarry.core.verdict import CallRecord
    from tarry.wire.asgi import App, Message, Receive, Scope, Send

_FIRST_FAILURE = 500
_DEADLINE, _SHOULD_RETRY = http.DEADLINE.lower().encode(), http.SHOULD_RETRY.lower().encode()
_RETRY_AFTER = b"retry-after"
_BODIES = frozenset({"http.response.body", "http.response.pathsend"})


class OneLayerMiddleware:
    """Carries deadlines in, and tells clients when not to retry."""

    def __init__(self, app: App) -> None:
        if not callable(app):
            raise ConfigurationTypeError("app", "must be an ASGI application", app)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        left = _deadline_of(scope)
        key = None if left is None else deadlines.enter(system.now() + left)
        given_up = error_record.Ends()
        token = error_record.ends.set(given_up)
        answer = _Answer(send, given_up, key)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            record = given_up.behind(error)
            if record is not None and not answer.begun:
                await answer.fail(record)
            raise  # it is still an error of this server's, to be logged
        finally:
            given_up.close()
            error_record.ends.reset(token)
            if key is not None:
                deadlines.leave(key)


class _Answer:
    """What goes back to the client."""

    def __init__(self, send: Send, given_up: error_record.Ends, key: deadlines.Key | None) -> None:
        self._send = send
        self._given_up = given_up
        self._key = key
        self.begun: bool = False

    async def send(self, message: Message) -> None:
        """Pass a message on; add the word to the head of a failure."""
        kind = message["type"]
        if kind == "http.response.start":
            self.begun = True
            headers = list(message.get("headers", ()))
            said = {name.lower() for name, _ in headers} & {_SHOULD_RETRY, _RETRY_AFTER}
            if message["status"] >= _FIRST_FAILURE and self._given_up and not said:
                message = {**message, "headers": [*headers, (_SHOULD_RETRY, b"false")]}
        await self._send(message)
        if self._key is not None and kind in _BODIES and not message.get("more_body", False):
            deadlines.end(self._key)  # nobody waits any more for what the handler goes on with

    async def fail(self, record: CallRecord) -> None:
        """Answer for a handler that raised; tell when to come back, where that is known."""
        problem = Problem(503, "Service Unavailable", "A service behind this one does not answer.")
        body = problem.to_json()
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (_SHOULD_RETRY, b"false"),
        ]
        if record.retry_after is not None:
            headers.append((_RETRY_AFTER, str(ceil(record.retry_after)).encode()))
        await self.send({"type": "http.response.start", "status": 503, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _deadline_of(scope: Scope) -> float | None:
    """Return the seconds that the client waits; what is said twice or oddly is not believed."""
    said = [value for name, value in scope["headers"] if name.lower() == _DEADLINE]
    return http.deadline_from(said[0].decode("latin-1")) if len(said) == 1 else None
