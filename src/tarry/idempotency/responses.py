"""Responses: those of the application, which are stored, and those of the middleware itself.

`ResponseRecorder` stores a response before it sends the response. If the response were sent first
and the process died right after, the client would see a success, but a retry with the same key
would run the handler again. The response is therefore buffered in memory, up to a limit. A larger
response is streamed to the client, and when it is complete, only its status and headers are stored.

A request keeps running when its client disconnects, because the client may send the request again
with the same key. The handler gets the `http.disconnect` message only after its response has been
stored or has started to stream.

A key's lease is settled in one of two ways: `finish` stores the response, `release` frees the key.

The responses of the middleware itself are problem details (RFC 9457), with the titles of
draft-ietf-httpapi-idempotency-key-header, section 2.7. The middleware raises them as `Rejection`.
"""

from __future__ import annotations

import re
from math import ceil
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.idempotency.lease import new_event
from tarry.idempotency.store import StoredResponse
from tarry.wire.http import PROBLEM_MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from tarry.idempotency.lease import AsyncEvent, KeyLease
    from tarry.idempotency.store import Headers
    from tarry.wire.http import App, Message, Receive, Scope, Send

_NOT_STORED_STATUSES = frozenset({401, 403, 404, 405, 407, 408, 425, 429})
"""Statuses that mean that nothing was done. They are not stored, because a client that corrects its
request, or waits, and then retries would get the stored error until the retention ends."""
_MIN_SERVER_ERROR_STATUS = 500
_BODY_MESSAGE_TYPES = frozenset(
    {"http.response.body", "http.response.pathsend", "http.response.zerocopysend"}
)
_MIN_RETRY_AFTER_S = 1
"""One second, because most handlers finish within it, and a retry that comes too early is cheap."""
_DRAFT = "https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/"
_URL = re.compile(r"https?://[!#-;=?-~]+")
"""Excludes spaces, quotes, angle brackets and line breaks, because the URL is sent in a header."""

_PROBLEMS = {
    "missing": (400, "Idempotency-Key is missing"),
    "malformed": (400, "Idempotency-Key is malformed"),
    "unknown-caller": (400, "The caller of this Idempotency-Key is not known"),
    "reused": (422, "Idempotency-Key is already used"),
    "outstanding": (409, "A request is outstanding for this Idempotency-Key"),
    # 409, because the requested effect exists and a retry would conflict with it. Not 410, because
    # webhook senders disable an endpoint that returns 410. Not a status that clients retry, because
    # a retry cannot succeed either.
    "not-kept": (409, "The response for this Idempotency-Key was not kept"),
    "too-large": (413, "Content is too large for an Idempotency-Key"),
    "unavailable": (503, "Idempotency-Key cannot be checked"),
}
"""Status and title of each problem."""


class ResponseRecorder:
    """Wraps the ASGI `receive` and `send` of one request with a key, and stores its response."""

    __slots__ = (
        "_buffer", "_buffered_bytes", "_has_send_failed", "_headers", "_is_sending", "_lease",
        "_max_bytes", "_receive", "_request_body", "_send", "_sending_started", "_should_store",
        "_status",
    )  # fmt: skip

    def __init__(self, lease: KeyLease, body: bytes, receive: Receive, send: Send) -> None:
        self._lease = lease
        self._request_body: bytes | None = body
        """None once the handler has received the body."""
        self._receive = receive
        self._send = send
        self._max_bytes = lease.context.max_response_bytes
        self._buffer: list[Message] = []
        self._buffered_bytes = 0
        self._is_sending = False
        """Whether the response is being sent; messages are then no longer buffered."""
        self._has_send_failed = False
        """Whether the server's `send` raised, most likely because the client has disconnected."""
        self._sending_started: AsyncEvent | None = None
        """Set when the response starts to be sent; None until `receive` waits for it."""

    async def run(self, app: App, scope: Scope) -> None:
        """Run the application; then finish or release the key.

        When the request is cancelled, the key is neither finished nor released, because a thread of
        the handler may still run. The key then becomes free when its lease expires.
        """
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if self._has_send_failed:
                # The error is not the handler's, so the handler may have had its effect.
                await self._settle(body=None)
            await self._lease.release()
            raise
        finally:
            if self._sending_started is not None:
                self._sending_started.set()
        if not self._lease.settlement_started:
            if self._is_sending:
                await self._settle(body=None)
            else:  # the application sent no complete response
                await self._lease.release()
        if self._buffer:
            await self._flush()

    async def receive(self) -> Message:
        """Return the request body; then, once the response is being sent, the server's messages."""
        body = self._request_body
        if body is not None:
            self._request_body = None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._is_sending:
            if self._sending_started is None:
                self._sending_started = new_event()
            await self._sending_started.wait()
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Buffer one message of the response, or send it."""
        message_type = message["type"]
        if self._is_sending:
            if message_type in _BODY_MESSAGE_TYPES and not message.get("more_body"):
                await self._settle(body=None)
            self._buffer.append(message)
            await self._flush()
        elif message_type == "http.response.start":
            self._buffer.append(message)
            if not self._record_start(message):
                await self._flush()
        elif not self._buffer:  # an informational message before the response
            await self._send(message)
        elif message_type == "http.response.body":
            self._buffer.append(message)
            body = message.get("body", b"")
            self._buffered_bytes += len(body)
            if self._buffered_bytes > self._max_bytes:
                if not message.get("more_body"):
                    await self._settle(body=None)
                await self._flush()
            elif not message.get("more_body"):
                if len(self._buffer) > 2:  # noqa: PLR2004 - start and several body parts
                    body = b"".join([part.get("body", b"") for part in self._buffer[1:]])
                await self._settle(body=bytes(body))
                await self._flush()
        else:  # a message for a body that the server reads itself, such as a file by its path
            await self._flush()
            await self.send(message)

    async def _settle(self, body: bytes | None) -> None:
        """Store the response, or release the key if the response must not be stored.

        `body` is None if the buffer does not contain the whole body.
        """
        lease = self._lease
        if lease.settlement_started:
            return
        if self._should_store:
            await lease.finish(StoredResponse(self._status, self._headers, body))
        else:
            await lease.release()

    async def _flush(self) -> None:
        self._is_sending = True
        if self._sending_started is not None:
            self._sending_started.set()
        messages, self._buffer = self._buffer, []
        try:
            for message in messages:
                await self._send(message)
        except Exception:
            self._has_send_failed = True
            raise

    def _record_start(self, start: Message) -> bool:
        """Record the status and the headers of the response; return whether to buffer the body.

        The body is not buffered if it is known to be too large, is an endless stream, or is
        followed by trailers.
        """
        status = self._status = start["status"]
        self._should_store = (
            self._lease.context.stores_error_responses
            if status >= _MIN_SERVER_ERROR_STATUS
            else status not in _NOT_STORED_STATUSES
        )
        can_buffer = not start.get("trailers")
        headers: list[tuple[bytes, bytes]] = []
        stored_headers: list[tuple[bytes, bytes]] = []
        skipped_headers = self._lease.context.skipped_headers
        for name, value in start.get("headers", ()):
            header = bytes(name), bytes(value)
            headers.append(header)
            lower_name = header[0].lower()
            if lower_name not in skipped_headers:
                stored_headers.append(header)
            if lower_name == b"content-length":
                can_buffer = can_buffer and not (value.isdigit() and float(value) > self._max_bytes)
            elif lower_name == b"content-type":
                can_buffer = can_buffer and not value.lower().startswith(b"text/event-stream")
        start["headers"] = headers  # the original may be an iterator, now exhausted
        self._headers: Headers = tuple(stored_headers)
        return can_buffer


class Rejection(Exception):
    """Raised to respond with a problem (RFC 9457) instead of calling the application.

    `anchor` is the problem's key in `_PROBLEMS`, which its `type` contains (see `ProblemSender`).
    If the same request may succeed later, `retry_after` is the time to wait in seconds.
    """

    def __init__(
        self,
        anchor: str,
        detail: str,
        *,
        retry_after: float | None = None,
        extensions: dict[str, int] | None = None,
    ) -> None:
        super().__init__(detail)
        self.anchor: str = anchor
        self.detail: str = detail
        self.retry_after: float | None = retry_after
        self.extensions: dict[str, int] | None = extensions


class ProblemSender:
    """Sends problems with links to their documentation: the page at `docs_url`, or the draft.

    The type of a problem is a URN, or `docs_url` with an anchor (unless `docs_url` has its own).
    """

    def __init__(self, docs_url: str | None) -> None:
        if docs_url is not None and not (isinstance(docs_url, str) and _URL.fullmatch(docs_url)):
            rule = "must be an http or https URL in plain ASCII"
            raise ConfigurationError("docs_url", rule, docs_url)
        self._type_prefix = "urn:tarry:idempotency:" if docs_url is None else f"{docs_url}#"
        self._fixed_type = docs_url if docs_url is not None and "#" in docs_url else None
        self._link = f'<{docs_url or _DRAFT}>; rel="describedby"'.encode()

    async def send_rejection(self, send: Send, rejection: Rejection, instance: str) -> None:
        """Send the problem of a rejected request."""
        status, title = _PROBLEMS[rejection.anchor]
        problem_type = self._fixed_type or self._type_prefix + rejection.anchor
        extensions = rejection.extensions or {}
        problem = Problem(
            status, title, rejection.detail, problem_type, instance, extensions=extensions
        )
        body = problem.to_json()
        retry_after = rejection.retry_after
        headers = [
            (b"content-type", PROBLEM_MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"content-language", b"en"),
            (b"link", self._link),
            (b"x-should-retry", b"false" if retry_after is None else b"true"),
        ]
        if retry_after is not None:
            seconds = max(_MIN_RETRY_AFTER_S, ceil(retry_after))
            headers.append((b"retry-after", str(seconds).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
