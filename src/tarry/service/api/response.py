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
_COMMON = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
_ALWAYS = b"".join(b"%b: %b\r\n" % field for field in _COMMON)
_JSON = (b"content-type", b"application/json")


class ApiResponse:
    """A response in full."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status: int = status
        self.body: bytes = body
        self.headers: list[tuple[bytes, bytes]] = headers

    def to_http(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return all but the status line, of HTTP/1.1, with further headers."""
        lines = [b"%b: %b\r\n" % field for field in (*headers, *self.headers)]
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            msg = f"a header has no line of its own: {head!r}"
            raise ValueError(msg)
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (head, _ALWAYS, len(self.body), self.body)

    async def send(self, scope: Scope, send: Send) -> None:
        """Send it; to HEAD all but the body."""
        headers = [*self.headers, *_COMMON]
        if self.status != 204:  # noqa: PLR2004 - No Content
            headers.append((b"content-length", b"%d" % len(self.body)))
        body = b"" if scope["method"] == "HEAD" else self.body
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class PendingResponse:
    """An answer that waits for one thing alone: `result`, of which `answer` makes it."""

    __slots__ = ("answer", "result")

    def __init__(self, result: Awaitable[Any], answer: Callable[[Any], ApiResponse]) -> None:
        self.result: Awaitable[Any] = result
        self.answer: Callable[[Any], ApiResponse] = answer

    def __await__(self) -> Generator[Any, Any, ApiResponse]:
        return self.answer((yield from self.result.__await__()))


CompleteRequestHandler: TypeAlias = (
    "Callable[[Scope, bytes, Callable[[ApiResponse], None]], Task[Any] | None]"
)
"""Serves a request that has arrived whole: its scope, its body, and who takes the answer."""


class ResponseStream(Protocol):
    """An answer without an end."""

    async def run(self, receive: Receive, send: Send) -> None:
        """Send until one side ends it."""
        ...


def json_response(status: int, value: object, *headers: tuple[bytes, bytes]) -> ApiResponse:
    """Answer with JSON."""
    return ApiResponse(status, _encode(value), [_JSON, *headers])


def empty_response(status: int = 204, *headers: tuple[bytes, bytes]) -> ApiResponse:
    """Answer with a status alone."""
    return ApiResponse(status, b"", list(headers))


def problem_response(refused: ApiError) -> ApiResponse:
    """Answer with a problem."""
    kind = (b"content-type", MEDIA_TYPE.encode())
    return ApiResponse(refused.problem.status, refused.problem.to_json(), [kind, *refused.headers])
