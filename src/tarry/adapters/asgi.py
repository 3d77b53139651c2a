"""The server's side of retrying at one layer, for any ASGI application.

    app = OneLayerMiddleware(app)

A request that says how long its client waits shares that deadline with every call its handler
makes. And where a handler failed because a call below it was given up on, after its retries or
behind an open breaker, the answer says `X-Should-Retry: false`: whoever called has no reason to
try again what was tried already. Clients of tarry heed it.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import TYPE_CHECKING

from tarry.errors import Rejected
from tarry.runtime import deadlines, marks
from tarry.runtime.clocks import world
from tarry.wire import http
from tarry.wire.problem import MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from tarry.core.record import CallRecord
    from tarry.wire.asgi import App, Message, Receive, Scope, Send

_FIRST_FAILURE = 500
_DEADLINE, _SHOULD_RETRY = http.DEADLINE.lower().encode(), http.SHOULD_RETRY.lower().encode()
_MOST = 100
"""So many calls that were given up on are remembered; one is enough to know."""


class OneLayerMiddleware:
    """Carries deadlines in, and tells clients when not to retry."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        token = marks.ends.set(answer.given_up)
        left = _deadline_of(scope)
        key = None if left is None else deadlines.enter(world.now() + left)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            if answer.given_up and not answer.begun:
                await answer.fail(error)
            raise  # it is still an error of this server's, to be logged
        finally:
            marks.ends.reset(token)
            if key is not None:
                deadlines.leave(key)


class _Answer:
    """What goes back to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun: bool = False
        self.given_up: deque[CallRecord] = deque(maxlen=_MOST)

    async def send(self, message: Message) -> None:
        """Pass a message on; add the word to the head of a failure."""
        if message["type"] == "http.response.start":
            self.begun = True
            headers = list(message.get("headers", ()))
            said = any(name.lower() == _SHOULD_RETRY for name, _ in headers)
            if message["status"] >= _FIRST_FAILURE and self.given_up and not said:
                message = {**message, "headers": [*headers, (_SHOULD_RETRY, b"false")]}
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """Answer for a handler that raised."""
        problem = Problem(503, "Service Unavailable", "A service behind this one does not answer.")
        body = problem.to_json()
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        if isinstance(error, Rejected) and error.retry_after is not None:
            headers.append((b"retry-after", str(ceil(error.retry_after)).encode()))
        await self.send({"type": "http.response.start", "status": 503, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _deadline_of(scope: Scope) -> float | None:
    """Return the seconds that the client waits; what is said twice or oddly is not believed."""
    said = [value for name, value in scope["headers"] if name.lower() == _DEADLINE]
    return http.deadline_from(said[0].decode("latin-1")) if len(said) == 1 else None
