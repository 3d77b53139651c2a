"""Size limits of requests and responses, streams, and the order of storing and sending."""

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


def make_app(
    *chunks: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = (), **start: Any
) -> App:
    """Return an application that sends these chunks; `start` is added to its start message."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = {"type": "http.response.start", "status": status, "headers": iter(headers)}
        await send({**message, **start})
        for number, chunk in enumerate(chunks, 1):
            has_more = number < len(chunks)
            await send({"type": "http.response.body", "body": chunk, "more_body": has_more})

    return app


def send_twice(app: App, **options: Any) -> tuple[Response, Response]:
    """Send the same request twice, and return both responses."""

    async def main() -> tuple[Response, Response]:
        middleware = IdempotencyMiddleware(app, **options)
        return await send_request(middleware), await send_request(middleware)

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
    """A body or a Content-Length above max_request_bytes gets a 413 that names the option."""
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
    """A request without a key may exceed max_request_bytes."""
    response = asyncio.run(
        send_request(IdempotencyMiddleware(PaymentsApp(), max_request_bytes=1), key=None)
    )

    assert 201 == response.status


@pytest.mark.parametrize(
    "chunks", [[b"12345678"], [b"1234", b"5678"], [b"", b""], [b"12345678", b""]]
)
def test_response_within_the_limit_is_stored(chunks: list[bytes]) -> None:
    """A response of up to max_response_bytes in any number of messages is stored."""
    first, second = send_twice(make_app(*chunks), max_response_bytes=8)

    assert second.is_replayed
    assert (first.body, b"".join(chunks)) == (second.body, first.body)


@pytest.mark.parametrize(
    ("app", "options"),
    [
        (make_app(b"123456789", status=202), {}),
        (make_app(b"1234", b"56789", status=202), {}),
        (make_app(b"1", status=202, headers=[(b"Content-Length", b"9")]), {}),
        (
            make_app(
                b"1", status=202, headers=[(b"content-type", b"Text/Event-Stream; charset=utf-8")]
            ),
            {},
        ),
        (make_app(b"1", status=202, trailers=True), {}),
        (make_app(b"123456789", status=502), {"store_errors": True}),
    ],
)
def test_retry_without_a_stored_response_is_409(app: App, options: dict[str, Any]) -> None:
    """If the response could not be stored, a retry gets a 409 with the original status."""
    first, second = send_twice(app, max_response_bytes=8, **options)

    assert 409 == second.status
    assert "The response for this Idempotency-Key was not kept" == second.problem["title"]
    assert first.status == second.problem["originalStatus"]
    assert f"answered with status {first.status}" in second.problem["detail"]
    assert (None, b"false") == (second.header(b"retry-after"), second.header(b"x-should-retry"))


SKIPPED_HEADERS = [
    (b"Set-Cookie", b"session=1; HttpOnly"),
    (b"set-cookie", b"theme=dark"),
    (b"WWW-Authenticate", b'Basic realm="api"'),
    (b"Proxy-Authenticate", b"Basic"),
    (b"Connection", b"keep-alive"),
    (b"Keep-Alive", b"timeout=5"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Trailer", b"Expires"),
    (b"Upgrade", b"h2c"),
    (b"Date", b"Tue, 15 Nov 1994 08:12:31 GMT"),
    (b"Age", b"5"),
]
REPLAYED_HEADERS = [
    (b"Content-Type", b"text/plain"),
    (b"Location", b"/payments/1"),
    (b"ETag", b'"1"'),
    (b"Link", b"</payments>"),
    (b"Link", b"</>"),
]


def test_headers_of_the_first_client_are_not_replayed() -> None:
    """A replayed response has no cookies, challenges, dates or hop-by-hop headers."""
    headers = [*SKIPPED_HEADERS, *REPLAYED_HEADERS]
    first, second = send_twice(make_app(b"1", headers=headers))

    assert headers == first.headers
    assert [*REPLAYED_HEADERS, (b"idempotent-replayed", b"true")] == second.headers


def test_headers_that_are_not_replayed_are_not_stored() -> None:
    """A cookie of the first client is not written to the store."""
    store = MemoryStore()
    send_twice(make_app(b"1", headers=[*SKIPPED_HEADERS, *REPLAYED_HEADERS]), store=store)

    (entry,) = store._entries.values()
    assert entry.response is not None
    assert tuple(REPLAYED_HEADERS) == entry.response.headers


def test_also_replay() -> None:
    """Headers in `also_replay` are replayed, whatever the case of their names."""
    headers = [*SKIPPED_HEADERS, *REPLAYED_HEADERS]
    _, second = send_twice(make_app(b"1", headers=headers), also_replay=["SET-Cookie", "date"])

    expected = [*SKIPPED_HEADERS[:2], SKIPPED_HEADERS[-2], *REPLAYED_HEADERS]
    assert [*expected, (b"idempotent-replayed", b"true")] == second.headers


def test_large_response_passes_unchanged() -> None:
    """The messages of a response above max_response_bytes are sent unchanged and in order."""
    chunks = [b"1234", b"5678", b"9", b"0" * 100]

    first, _ = send_twice(make_app(*chunks, headers=[(b"a", b"b")]), max_response_bytes=8)

    assert [(b"a", b"b")] == first.headers
    assert chunks == [message["body"] for message in first.messages[1:]]


def test_large_server_error_is_not_stored() -> None:
    """After a large 500 response a retry runs the handler, as after a small one."""
    app = make_app(b"123456789", status=500)

    first, second = send_twice(app, max_response_bytes=8)

    assert (500, 500, first.body) == (first.status, second.status, second.body)


def test_stream_is_sent_once_it_exceeds_the_limit() -> None:
    """A response is buffered up to max_response_bytes; after that each message is sent at once."""
    events: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4):
            events.append("produced")
            await send({"type": "http.response.body", "body": b"1234", "more_body": True})
        await send({"type": "http.response.body"})

    asyncio.run(
        send_request(
            IdempotencyMiddleware(app, max_response_bytes=8),
            before_send=lambda message: events.append(message["type"].rpartition(".")[2]),
        )
    )

    until_limit = ["produced", "produced", "produced", "start", "body", "body", "body"]
    assert [*until_limit, "produced", "body", "body"] == events


def test_response_is_stored_before_it_is_sent() -> None:
    """A response is stored before it is sent, so a crash after sending does not lose it."""
    events: list[str] = []

    class RecordingStore(MemoryStore):
        async def finish(self, *args: Any) -> bool:
            events.append("stored")
            return await super().finish(*args)

    def record_message(message: Message) -> None:
        events.append(message["type"])

    asyncio.run(
        send_request(
            IdempotencyMiddleware(make_app(b"done"), RecordingStore()), before_send=record_message
        )
    )

    assert ["stored", "http.response.start", "http.response.body"] == events


def test_other_messages_pass_through() -> None:
    """Early hints and a file instead of a body are sent, but the response is not stored."""

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
    """Send more than 8 bytes, then fail."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"123456789", "more_body": True})
    raise RuntimeError("failed in the stream")


async def test_failing_stream_releases_the_key() -> None:
    """A handler that raises releases its key, also if a part of its response was sent."""
    app = IdempotencyMiddleware(failing_stream, FaultyStore(), max_response_bytes=8)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed in the stream"):
            await send_request(app)


def test_stream_keeps_its_lease_until_its_end() -> None:
    """The lease of a long stream is renewed until the last message."""
    calls_at_end: list[list[str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10):
            await send({"type": "http.response.body", "body": b"123456789", "more_body": True})
            await asyncio.sleep(10)
        await send({"type": "http.response.body"})

    async def main() -> None:
        store = FaultyStore()
        middleware = IdempotencyMiddleware(app, store, lease=30.0, max_response_bytes=8)

        def record_calls(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                calls_at_end.append(list(store.calls))

        first = asyncio.create_task(send_request(middleware, before_send=record_calls))
        await asyncio.sleep(95)
        assert "A request is outstanding" in (await send_request(middleware)).problem["title"]
        await first
        assert "was not kept" in (await send_request(middleware)).problem["title"]

    with VirtualClock() as clock:
        clock.run(main)
    ((*_, last_call),) = calls_at_end
    assert "finish" == last_call
