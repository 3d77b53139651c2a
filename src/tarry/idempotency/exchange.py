"""One request under a key: what its handler receives and sends, and what becomes of the key.

A process may die at any moment. Were the response sent first, one that dies right after would have
told its client that all is done and leave a key under which a retry runs the handler again. So the
record comes first, and for that the response is held in memory: up to a limit, beyond which it
flows as it comes, and only its status and headers are kept, when it has come to its end.

A client that goes away does not stop the work it asked for: it may come back and ask again. So the
handler does not hear of it before there is an answer, recorded or flowing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.idempotency.loops import new_event
from tarry.idempotency.record import StoredResponse

if TYPE_CHECKING:
    from tarry.idempotency.headers import Headers
    from tarry.idempotency.lease import Lease
    from tarry.idempotency.loops import Event
    from tarry.wire.asgi import App, Message, Receive, Scope, Send

_NOT_KEPT = frozenset({401, 403, 404, 405, 407, 408, 425, 429})
"""Statuses that say "not so", "not here" or "not now": nothing was done. Whoever puts it right, or
waits, and comes back must not be told so for a day."""
_SERVER_ERROR = 500
_CONTENT = frozenset({"http.response.body", "http.response.pathsend", "http.response.zerocopysend"})


class Exchange:
    """The request of a lease and its response."""

    __slots__ = (
        "_answer",
        "_body",
        "_client_is_lost",
        "_flows",
        "_headers",
        "_held",
        "_is_kept",
        "_lease",
        "_limit",
        "_receive",
        "_send",
        "_size",
        "_status",
    )

    def __init__(self, lease: Lease, body: bytes, receive: Receive, send: Send) -> None:
        self._lease = lease
        self._body: bytes | None = body
        self._receive = receive
        self._send = send
        self._limit = lease.terms.max_response
        self._held: list[Message] = []
        self._size = 0
        self._flows = False
        """The response has begun to be sent."""
        self._client_is_lost = False
        self._answer: Event | None = None
        """Set when the response begins to be sent; made when the handler waits for its client."""

    async def run(self, app: App, scope: Scope) -> None:
        """Let the application answer, and settle what becomes of the key.

        Nothing is settled when the request is cancelled: a thread of the handler may still run, so
        the lease is left to run out.
        """
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if self._client_is_lost:
                await self._end(None)
            await self._lease.release()
            raise
        finally:
            if self._answer is not None:
                self._answer.set()
        if not self._lease.over:
            if self._flows:
                await self._end(None)
            else:  # it came to no answer
                await self._lease.release()
        if self._held:
            await self._pass_on()

    async def receive(self) -> Message:
        """Give the body, and then, once there is an answer, what the server gives."""
        body = self._body
        if body is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._flows:
            if self._answer is None:
                self._answer = new_event()
            await self._answer.wait()
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Take one message of the response: to hold it, or to pass it on."""
        kind = message["type"]
        if self._flows:
            if kind in _CONTENT and not message.get("more_body"):
                await self._end(None)
            self._held.append(message)
            await self._pass_on()
        elif kind == "http.response.start":
            self._held.append(message)
            if not self._is_short(message):
                await self._pass_on()
        elif not self._held:  # a hint before the response
            await self._send(message)
        elif kind == "http.response.body":
            self._held.append(message)
            body = message.get("body", b"")
            self._size += len(body)
            if self._size > self._limit:
                if not message.get("more_body"):
                    await self._end(None)
                await self._pass_on()
            elif not message.get("more_body"):
                if len(self._held) > 2:  # noqa: PLR2004 - the start, and all of the body
                    body = b"".join([held.get("body", b"") for held in self._held[1:]])
                await self._end(bytes(body))
                await self._pass_on()
        else:  # a file by its path, and what else servers may offer in place of a body
            await self._pass_on()
            await self.send(message)

    async def _end(self, body: bytes | None) -> None:
        """Keep the response, or give the key back: before the last of it is sent."""
        lease = self._lease
        if lease.over:
            return
        if self._is_kept:
            await lease.finish(StoredResponse(self._status, self._headers, body))
        else:
            await lease.release()

    async def _pass_on(self) -> None:
        """Send what is held, and from now on what comes."""
        self._flows = True
        if self._answer is not None:
            self._answer.set()
        held, self._held = self._held, []
        try:
            for message in held:
                await self._send(message)
        except Exception:
            self._client_is_lost = True
            raise

    def _is_short(self, start: Message) -> bool:
        """Say no if the start announces more than is kept, or a stream that may never end."""
        status = self._status = start["status"]
        self._is_kept = (
            self._lease.terms.store_errors if status >= _SERVER_ERROR else status not in _NOT_KEPT
        )
        short = not start.get("trailers")
        headers: list[tuple[bytes, bytes]] = []
        for name, value in start.get("headers", ()):
            headers.append((bytes(name), bytes(value)))
            lower = name.lower()
            if lower == b"content-length":
                short = short and not (value.isdigit() and float(value) > self._limit)
            elif lower == b"content-type":
                short = short and not value.lower().startswith(b"text/event-stream")
        start["headers"] = headers  # it may have been an iterator
        self._headers: Headers = tuple(headers)
        return short


async def replay(send: Send, response: StoredResponse, body: bytes) -> None:
    """Answer as the first request was answered, and say that it is a replay."""
    headers = [*response.headers, (b"idempotent-replayed", b"true")]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
