"""A minimal ASGI client, and an application that counts its runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tarry.wire.http import App, Message, Receive, Scope, Send

KEY = b'"8e03978e-40d5-43dd-bc93-6894a57f9324"'
HeaderPairs = Sequence[tuple[bytes, bytes]]


@dataclass
class Response:
    """The messages of one response."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def status(self) -> int:
        """The status code."""
        return cast("int", self.messages[0]["status"])

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers, in order."""
        return cast("list[tuple[bytes, bytes]]", self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        """The body of all messages."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def is_replayed(self) -> bool:
        """Whether the response has the header of a stored response."""
        return (b"idempotent-replayed", b"true") in self.headers

    @property
    def problem(self) -> dict[str, Any]:
        """The problem document in the body."""
        assert b"application/problem+json" == self.header(b"content-type")
        problem = cast("dict[str, Any]", json.loads(self.body))
        assert self.status == problem["status"]
        return problem

    def header(self, name: bytes) -> bytes | None:
        """Return the value of a header that occurs once, or None."""
        return dict(self.headers).get(name)


def make_scope(
    method: str = "POST", path: str = "/payments", headers: HeaderPairs = (), **extra: Any
) -> dict[str, Any]:
    """Return the scope of a request."""
    base = {"type": "http", "method": method, "path": path, "query_string": b"", "root_path": ""}
    return {**base, "headers": list(headers), **extra}


async def send_request(
    app: App,
    *,
    key: bytes | None = KEY,
    body: bytes | Sequence[bytes] = b"{}",
    headers: HeaderPairs = (),
    before_send: Callable[[Message], None] = lambda _message: None,
    **scope: Any,
) -> Response:
    """Send one request and return the response. The body may be sent in several messages."""
    chunks = [body] if isinstance(body, bytes) else list(body)
    all_headers = [*headers, *([] if key is None else [(b"idempotency-key", key)])]
    unread: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks)}
        for number, chunk in enumerate(chunks, 1)
    ]
    response = Response()

    async def receive() -> Message:
        return unread.pop(0) if unread else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        before_send(message)
        response.messages.append(dict(message))

    await app(make_scope(headers=all_headers, **scope), receive, send)
    return response


def run_sequentially(*requests: Awaitable[Response]) -> list[Response]:
    """Run requests one after the other."""

    async def main() -> list[Response]:
        return [await request for request in requests]

    return asyncio.run(main())


class PaymentsApp:
    """An application that records the request bodies and responds with the number of the run."""

    def __init__(self, status: int = 201) -> None:
        self.status = status
        self.bodies: list[bytes] = []

    @property
    def runs(self) -> int:
        """The number of requests that the application has handled."""
        return len(self.bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request in three messages."""
        message = await receive()
        self.bodies.append(message["body"])
        assert not message["more_body"]
        headers = [(b"Content-Type", b"text/plain"), (b"x-run", b"%d" % self.runs)]
        headers += [(b"date", b"Tue, 15 Nov 1994 08:12:31 GMT"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"run ", "more_body": True})
        await send({"type": "http.response.body", "body": b"%d" % self.runs})


def delay_first_run(payments: PaymentsApp, seconds: float) -> App:
    """Return an application that waits before its first run."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not payments.runs:
            await asyncio.sleep(seconds)
        await payments(scope, receive, send)

    return app
