"""Responses of the API: complete, pending or streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from tarry.wire.problem import MEDIA_TYPE

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Awaitable, Callable, Generator

    from tarry.service.api.problems import ApiError
    from tarry.wire.asgi import Receive, Scope, Send

_encode = msgspec.json.Encoder().encode
_COMMON_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
_COMMON_HEADER_LINES = b"".join(b"%b: %b\r\n" % header for header in _COMMON_HEADERS)
_JSON_CONTENT_TYPE = (b"content-type", b"application/json")
_PROBLEM_CONTENT_TYPE = (b"content-type", MEDIA_TYPE.encode())
_NO_CONTENT = 204


class ApiResponse:
    """A complete response: status, headers and body."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status: int = status
        self.body: bytes = body
        self.headers: list[tuple[bytes, bytes]] = headers

    def encode_http1(self, more_headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the HTTP/1.1 response without its status line.

        Raise ValueError if a header contains a line break, which would inject another header.
        """
        lines = [b"%b: %b\r\n" % header for header in (*more_headers, *self.headers)]
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            msg = f"a response header contains a line break: {head!r}"
            raise ValueError(msg)
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (
            head,
            _COMMON_HEADER_LINES,
            len(self.body),
            self.body,
        )

    async def send(self, scope: Scope, send: Send) -> None:
        """Send the response through ASGI. The response to a HEAD request has no body."""
        headers = [*self.headers, *_COMMON_HEADERS]
        if self.status != _NO_CONTENT:
            headers.append((b"content-length", b"%d" % len(self.body)))
        body = b"" if scope["method"] == "HEAD" else self.body
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class PendingResponse:
    """A response that is not ready yet: `build_response` builds it when `result` is available.

    The fast path adds a callback to `result`, so that it needs no asyncio task for a
    `POST /retry-tasks`. Other callers await the PendingResponse like a coroutine.
    """

    __slots__ = ("build_response", "result")

    def __init__(
        self, result: Awaitable[Any], build_response: Callable[[Any], ApiResponse]
    ) -> None:
        self.result: Awaitable[Any] = result
        self.build_response: Callable[[Any], ApiResponse] = build_response

    def __await__(self) -> Generator[Any, Any, ApiResponse]:
        return self.build_response((yield from self.result.__await__()))


CompleteRequestHandler: TypeAlias = (
    "Callable[[Scope, bytes, Callable[[ApiResponse], None]], Task[Any] | None]"
)
"""Handles a request whose body is complete: called with scope, body and a response callback.

Returns the asyncio task that computes the response, or None if no task was needed.
"""


class ResponseStream(Protocol):
    """A response whose body is sent in parts, with no length known in advance."""

    async def run(self, receive: Receive, send: Send) -> None:
        """Send the response until the client or the service ends it."""
        ...


def json_response(status: int, value: object, *headers: tuple[bytes, bytes]) -> ApiResponse:
    """Return a response with a JSON body."""
    return ApiResponse(status, _encode(value), [_JSON_CONTENT_TYPE, *headers])


def empty_response(status: int = _NO_CONTENT, *headers: tuple[bytes, bytes]) -> ApiResponse:
    """Return a response without a body."""
    return ApiResponse(status, b"", list(headers))


def problem_response(error: ApiError) -> ApiResponse:
    """Return the response for an error: its problem details (RFC 9457) and headers."""
    problem = error.problem
    return ApiResponse(problem.status, problem.to_json(), [_PROBLEM_CONTENT_TYPE, *error.headers])
