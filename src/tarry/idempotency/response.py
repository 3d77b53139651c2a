"""The response's side: held back until its record is written, then sent as the application made it.

A process may die at any moment. Were the response sent first, one that dies right after would have
told its client that all is done and leave a key under which a retry runs the handler again. So the
record comes first, and for that the response is held in memory: up to a limit, beyond which it
flows as it comes and only its status and headers are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.idempotency.record import StoredResponse

if TYPE_CHECKING:
    from tarry.idempotency.headers import Headers
    from tarry.idempotency.lease import Lease
    from tarry.wire.asgi import Message, Send

_LATER = frozenset({408, 425, 429})
"""Statuses that say "not now": whoever obeys and comes back must not be told so for a day."""
_SERVER_ERROR = 500


class Recorder:
    """Takes the messages of the application's response."""

    def __init__(
        self, send: Send, lease: Lease, *, keep: float, limit: int, store_errors: bool
    ) -> None:
        self._send = send
        self._lease = lease
        self._keep = keep
        self._limit = limit
        self._store_errors = store_errors
        self._held: list[Message] = []
        self._size = 0
        self._status = 0
        self._headers: Headers = ()
        self._flows = False

    async def send(self, message: Message) -> None:
        """Take one message: to hold it, or to pass it on."""
        if self._flows or (not self._held and message["type"] != "http.response.start"):
            await self._send(message)
        elif message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] == "http.response.body":
            await self._body(message)
        else:  # a file by its path, and what else servers may offer in place of a body
            await self._let_flow(message)

    async def pass_on(self) -> None:
        """Send what is held."""
        self._flows = True
        for message in self._held:
            await self._send(message)
        self._held.clear()

    async def _start(self, message: Message) -> None:
        self._status = message["status"]
        self._headers = tuple((bytes(n), bytes(v)) for n, v in message.get("headers", ()))
        message["headers"] = list(self._headers)  # it may have been an iterator
        if message.get("trailers") or self._is_long():
            await self._let_flow(message)
        else:
            self._held.append(message)

    async def _body(self, message: Message) -> None:
        self._size += len(message.get("body", b""))
        if self._size > self._limit:
            await self._let_flow(message)
            return
        self._held.append(message)
        if message.get("more_body", False):
            return
        if self._to_keep():
            body = b"".join(held.get("body", b"") for held in self._held[1:])
            await self._lease.finish(self._response(body), self._keep)
        else:
            await self._lease.release()
        await self.pass_on()

    async def _let_flow(self, message: Message) -> None:
        """Give up on keeping the body. A response that is not to be kept leaves the lease alone."""
        if self._to_keep():
            await self._lease.finish(self._response(None), self._keep)
        await self.pass_on()
        await self._send(message)

    def _to_keep(self) -> bool:
        if self._status >= _SERVER_ERROR:
            return self._store_errors
        return self._status not in _LATER

    def _is_long(self) -> bool:
        """Say whether the headers announce more than is kept, or a stream that may never end."""
        for name, value in self._headers:
            match name.lower():
                case b"content-length":
                    if value.isdigit() and float(value) > self._limit:
                        return True
                case b"content-type":
                    if value.lower().startswith(b"text/event-stream"):
                        return True
                case _:
                    pass
        return False

    def _response(self, body: bytes | None) -> StoredResponse:
        return StoredResponse(self._status, self._headers, body)


async def replay(send: Send, response: StoredResponse, body: bytes) -> None:
    """Answer as the first request was answered, and say that it is a replay."""
    headers = [*response.headers, (b"idempotent-replayed", b"true")]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
