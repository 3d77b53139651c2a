"""Run the application for a request with a key, and store its response before sending it.

Store first: if the response were sent first and the process died right after, the client would see
a success, but a retry would run the handler again. The response is therefore buffered in memory, up
to a limit. A larger response is streamed to the client, and only its status and headers are stored
when it is complete.

A client that disconnects does not stop its request, because it may send it again with the same key.
The handler sees the disconnect only after there is a response, stored or streaming.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.idempotency.async_backend import new_event
from tarry.idempotency.store import StoredResponse

if TYPE_CHECKING:
    from tarry.idempotency.async_backend import AsyncEvent
    from tarry.idempotency.lease import KeyLease
    from tarry.idempotency.store import Headers
    from tarry.wire.asgi import App, Message, Receive, Scope, Send

_NOT_STORED_STATUSES = frozenset({401, 403, 404, 405, 407, 408, 425, 429})
"""Statuses that mean that nothing was done. A client that corrects the request, or waits, and sends
it again must not get the stored refusal until the retention ends."""
_FIRST_SERVER_ERROR = 500
_BODY_MESSAGES = frozenset(
    {"http.response.body", "http.response.pathsend", "http.response.zerocopysend"}
)


class ResponseRecorder:
    """The ASGI `receive` and `send` of one request with a key."""

    __slots__ = (
        "_buffer",
        "_buffered_bytes",
        "_headers",
        "_is_client_lost",
        "_is_response_stored",
        "_is_streaming",
        "_lease",
        "_max_bytes",
        "_receive",
        "_request_body",
        "_response_started",
        "_send",
        "_status",
    )

    def __init__(self, lease: KeyLease, body: bytes, receive: Receive, send: Send) -> None:
        self._lease = lease
        self._request_body: bytes | None = body
        self._receive = receive
        self._send = send
        self._max_bytes = lease.context.max_response_bytes
        self._buffer: list[Message] = []
        self._buffered_bytes = 0
        self._is_streaming = False
        """The response is being sent; messages are no longer buffered."""
        self._is_client_lost = False
        self._response_started: AsyncEvent | None = None
        """Set when sending starts. Created only if the handler waits for a disconnect before."""

    async def run(self, app: App, scope: Scope) -> None:
        """Run the application; then finish or release the key.

        When the request is cancelled the key is neither finished nor released, because a thread of
        the handler may still run: the lease expires.
        """
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if self._is_client_lost:
                await self._settle(None)
            await self._lease.release()
            raise
        finally:
            if self._response_started is not None:
                self._response_started.set()
        if not self._lease.is_settled:
            if self._is_streaming:
                await self._settle(None)
            else:  # the application sent no complete response
                await self._lease.release()
        if self._buffer:
            await self._flush()

    async def receive(self) -> Message:
        """Return the request body; after that, messages of the server once there is a response."""
        body = self._request_body
        if body is not None:
            self._request_body = None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._is_streaming:
            if self._response_started is None:
                self._response_started = new_event()
            await self._response_started.wait()
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Buffer one message of the response, or send it."""
        message_type = message["type"]
        if self._is_streaming:
            if message_type in _BODY_MESSAGES and not message.get("more_body"):
                await self._settle(None)
            self._buffer.append(message)
            await self._flush()
        elif message_type == "http.response.start":
            self._buffer.append(message)
            if not self._can_buffer(message):
                await self._flush()
        elif not self._buffer:  # an informational message before the response
            await self._send(message)
        elif message_type == "http.response.body":
            self._buffer.append(message)
            body = message.get("body", b"")
            self._buffered_bytes += len(body)
            if self._buffered_bytes > self._max_bytes:
                if not message.get("more_body"):
                    await self._settle(None)
                await self._flush()
            elif not message.get("more_body"):
                if len(self._buffer) > 2:  # noqa: PLR2004 - the start and several parts of the body
                    body = b"".join([part.get("body", b"") for part in self._buffer[1:]])
                await self._settle(bytes(body))
                await self._flush()
        else:  # a body that the server reads itself, such as a file by its path
            await self._flush()
            await self.send(message)

    async def _settle(self, body: bytes | None) -> None:
        """Store the response or release the key. Called before the end of the response is sent."""
        lease = self._lease
        if lease.is_settled:
            return
        if self._is_response_stored:
            await lease.finish(StoredResponse(self._status, self._headers, body))
        else:
            await lease.release()

    async def _flush(self) -> None:
        """Send the buffered messages, and stop buffering."""
        self._is_streaming = True
        if self._response_started is not None:
            self._response_started.set()
        messages, self._buffer = self._buffer, []
        try:
            for message in messages:
                await self._send(message)
        except Exception:
            self._is_client_lost = True
            raise

    def _can_buffer(self, start: Message) -> bool:
        """Return False if the response is known to be too large, or is an endless stream."""
        status = self._status = start["status"]
        self._is_response_stored = (
            self._lease.context.store_errors
            if status >= _FIRST_SERVER_ERROR
            else status not in _NOT_STORED_STATUSES
        )
        can_buffer = not start.get("trailers")
        headers: list[tuple[bytes, bytes]] = []
        for name, value in start.get("headers", ()):
            headers.append((bytes(name), bytes(value)))
            lower = name.lower()
            if lower == b"content-length":
                can_buffer = can_buffer and not (value.isdigit() and float(value) > self._max_bytes)
            elif lower == b"content-type":
                can_buffer = can_buffer and not value.lower().startswith(b"text/event-stream")
        start["headers"] = headers  # the original may be an iterator, which is now exhausted
        self._headers: Headers = tuple(headers)
        return can_buffer


async def send_stored_response(send: Send, response: StoredResponse, body: bytes) -> None:
    """Send a stored response, marked with `Idempotent-Replayed: true`."""
    headers = [*response.headers, (b"idempotent-replayed", b"true")]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
