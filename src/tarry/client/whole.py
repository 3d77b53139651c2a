"""Answers in full: one that is cut off half-way is a failed attempt, and sent for again."""

from __future__ import annotations

from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from tarry.client.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

    from tarry.client.request import Answer

MOST_BYTES = 64 << 20
"""Of an answer: more than any page has, and no more than a process can hold."""


class Whole:
    """A transport that reads an answer to its end before it hands it on."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        response: httpx.Response = self._transport.handle_request(request)
        if not is_whole(response.headers):
            return response
        content = bytearray()
        with closing(response):
            for chunk in response.iter_raw():
                _add(content, chunk)
        return _rebuilt(response, content)

    def close(self) -> None:
        """Close the transport inside."""
        self._transport.close()


class AsyncWhole:
    """What `Whole` is, to await."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        response: httpx.Response = await self._transport.handle_async_request(request)
        if not is_whole(response.headers):
            return response
        content = bytearray()
        async with aclosing(response):
            async for chunk in response.aiter_raw():
                _add(content, chunk)
        return _rebuilt(response, content)

    async def aclose(self) -> None:
        """Close the transport inside."""
        await self._transport.aclose()


def is_whole(headers: Mapping[str, str]) -> bool:
    """Say whether an answer has an end, which a stream of events has not."""
    return not headers.get("content-type", "").startswith("text/event-stream")


def _add(content: bytearray, chunk: bytes) -> None:
    """Take a piece of an answer in, up to a bound."""
    content += chunk
    if len(content) > MOST_BYTES:
        msg = f"an answer of the service has more than {MOST_BYTES} bytes"
        raise ServiceError(msg)


def answer_of(response: httpx.Response, content: bytes) -> Answer:
    """Return what httpx got as the pure parts see it."""
    from tarry.client.request import Answer

    return Answer(response.status_code, response.headers, content)


def _rebuilt(response: httpx.Response, content: bytearray) -> httpx.Response:
    import httpx

    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=httpx.ByteStream(bytes(content)),
        extensions=response.extensions,
    )
