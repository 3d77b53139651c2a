"""Large requests and responses, streams, files, and the order of storing and sending."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.testing import VirtualClock
from tarry.wire.http import App, Message, Receive, Scope, Send
from tests.idempotency.asgi_client import PaymentsApp, Response, send_request
from tests.idempotency.faulty_store import FaultyStore


def answering(
    *chunks: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = (), **start: Any
) -> App:
    """Return an application that responses with these chunks."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begin = {"type": "http.response.start", "status": status, "headers": iter(headers)}
        await send({**begin, **start})
        for number, chunk in enumerate(chunks, 1):
            more = number < len(chunks)
            await send({"type": "http.response.body", "body": chunk, "more_body": more})

    return app


def send_twice(app: App, **options: Any) -> tuple[Response, Response]:
    """Send the same request two times."""

    async def main() -> tuple[Response, Response]:
        guarded = IdempotencyMiddleware(app, **options)
        return await send_request(guarded), await send_request(guarded)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"12345678", [], 201),
        (b"123456789", [], 413),
        (b"", [(b"content-length", b"9")], 413),
        (b"", [(b"content-length", b"9" * 5000)], 413),
        ([b"1234", b"5678"], [], 201),
        ([b"1234", b"56789"], [], 413),
    ],
)
def test_large_request_is_413(
    body: bytes | list[bytes], headers: list[tuple[bytes, bytes]], status: int
) -> None:
    """A body above max_request_bytes is rejected, also by its Content-Length.

    The problem names the option.
    """
    payments = PaymentsApp()

    response = asyncio.run(
        send_request(
            IdempotencyMiddleware(payments, max_request_bytes=8), body=body, headers=headers
        )
    )

    assert (status, status == 201) == (response.status, payments.runs == 1)
    if status == 413:
        assert "max_request" in response.problem["detail"]


def test_large_request_without_a_key_passes() -> None:
    """The limit applies only to requests with a key."""
    response = asyncio.run(
        send_request(IdempotencyMiddleware(PaymentsApp(), max_request_bytes=1), key=None)
    )

    assert 201 == response.status


@pytest.mark.parametrize(
    "chunks", [[b"12345678"], [b"1234", b"5678"], [b"", b""], [b"12345678", b""]]
)
def test_response_within_the_limit_is_stored(chunks: list[bytes]) -> None:
    """A response in any number of messages is sent again as one body."""
    first, second = send_twice(answering(*chunks), max_response_bytes=8)

    assert second.replayed
    assert (first.body, b"".join(chunks)) == (second.body, first.body)


@pytest.mark.parametrize(
    ("app", "options"),
    [
        (answering(b"123456789", status=202), {}),
        (answering(b"1234", b"56789", status=202), {}),
        (answering(b"1", status=202, headers=[(b"Content-Length", b"9")]), {}),
        (
            answering(
                b"1", status=202, headers=[(b"content-type", b"Text/Event-Stream; charset=utf-8")]
            ),
            {},
        ),
        (answering(b"1", status=202, trailers=True), {}),
        (answering(b"123456789", status=502), {"store_errors": True}),
    ],
)
def test_response_that_is_not_stored_is_409(app: App, options: dict[str, Any]) -> None:
    """The response passes unchanged; a retry gets its status, and nothing runs again."""
    first, second = send_twice(app, max_response_bytes=8, **options)

    assert 409 == second.status
    assert "The response for this Idempotency-Key was not kept" == second.problem["title"]
    assert first.status == second.problem["originalStatus"]
    assert f"answered with status {first.status}" in second.problem["detail"]
    assert (None, b"false") == (second.header(b"retry-after"), second.header(b"x-should-retry"))


def test_large_response_passes_unchanged() -> None:
    """Each message arrives as it was sent, in order."""
    chunks = [b"1234", b"5678", b"9", b"0" * 100]

    first, _ = send_twice(answering(*chunks, headers=[(b"a", b"b")]), max_response_bytes=8)

    assert [(b"a", b"b")] == first.headers
    assert chunks == [message["body"] for message in first.messages[1:]]


def test_large_server_error_runs_again() -> None:
    """A response that must not be stored does not count as done because of its size."""
    app = answering(b"123456789", status=500)

    first, second = send_twice(app, max_response_bytes=8)

    assert (500, 500, first.body) == (first.status, second.status, second.body)


def test_stream_is_sent_once_it_exceeds_the_limit() -> None:
    """Before the limit nothing is sent; after it, each part is sent at once."""
    sent: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4):
            sent.append("made")
            await send({"type": "http.response.body", "body": b"1234", "more_body": True})
        await send({"type": "http.response.body"})

    asyncio.run(
        send_request(
            IdempotencyMiddleware(app, max_response_bytes=8),
            before_send=lambda message: sent.append(message["type"].rpartition(".")[2]),
        )
    )

    buffered = ["made", "made", "made", "start", "body", "body", "body"]
    assert [*buffered, "made", "body", "body"] == sent


def test_response_is_stored_before_it_is_sent() -> None:
    """A client that has the response can rely on the record, even if the process dies then."""
    order: list[str] = []

    class Watched(MemoryStore):
        async def finish(self, *args: Any) -> bool:
            order.append("record")
            return await super().finish(*args)

    def note(message: Message) -> None:
        order.append(message["type"])

    asyncio.run(
        send_request(IdempotencyMiddleware(answering(b"done"), Watched()), before_send=note)
    )

    assert ["record", "http.response.start", "http.response.body"] == order


def test_other_messages_pass_through() -> None:
    """Hints before the response are sent at once; a file instead of a body is sent, not stored."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.early_hint", "links": []})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.pathsend", "path": "/file"})

    first, second = send_twice(app)

    assert ["early_hint", "start", "pathsend"] == [
        message["type"].rpartition(".")[2] for message in first.messages
    ]
    assert 409 == second.status


async def failing_stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Exceed the limit, then fail."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"123456789", "more_body": True})
    raise RuntimeError("half way")


def test_failing_stream_releases_the_key() -> None:
    """A handler that raises has failed, however much of its response was sent."""

    async def main() -> None:
        app = IdempotencyMiddleware(failing_stream, FaultyStore(), max_response_bytes=8)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="half way"):
                await send_request(app)

    asyncio.run(main())


def test_stream_keeps_its_lease_until_its_end() -> None:
    """The request is outstanding until the last part, for several lease times."""
    at_end: list[list[str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10):
            await send({"type": "http.response.body", "body": b"123456789", "more_body": True})
            await asyncio.sleep(10)
        await send({"type": "http.response.body"})

    async def main() -> None:
        store = FaultyStore()
        guarded = IdempotencyMiddleware(app, store, lease=30.0, max_response_bytes=8)

        def note(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                at_end.append(list(store.calls))

        first = asyncio.create_task(send_request(guarded, before_send=note))
        await asyncio.sleep(95)
        assert "A request is outstanding" in (await send_request(guarded)).problem["title"]
        await first
        assert "was not kept" in (await send_request(guarded)).problem["title"]

    with VirtualClock() as clock:
        clock.run(main)
    ((*_, last),) = at_end
    assert "finish" == last
