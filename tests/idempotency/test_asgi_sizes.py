"""The middleware and large things: bodies, streams, files, and the order of record and response."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.testing import VirtualClock
from tarry.wire.asgi import App, Message, Receive, Scope, Send
from tests.idempotency.asking import Answer, Payments, ask
from tests.idempotency.wayward import Wayward


def answering(
    *chunks: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = (), **start: Any
) -> App:
    """An application that answers with these chunks."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begin = {"type": "http.response.start", "status": status, "headers": iter(headers)}
        await send({**begin, **start})
        for number, chunk in enumerate(chunks, 1):
            more = number < len(chunks)
            await send({"type": "http.response.body", "body": chunk, "more_body": more})

    return app


def twice(app: App, **options: Any) -> tuple[Answer, Answer]:
    """Send one request two times."""

    async def main() -> tuple[Answer, Answer]:
        guarded = IdempotencyMiddleware(app, **options)
        return await ask(guarded), await ask(guarded)

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
def test_a_large_request_is_413(
    body: bytes | list[bytes], headers: list[tuple[bytes, bytes]], status: int
) -> None:
    """A body beyond max_request is refused, also by its announced length; the option is named."""
    payments = Payments()

    answer = asyncio.run(
        ask(IdempotencyMiddleware(payments, max_request_bytes=8), body=body, headers=headers)
    )

    assert (status, status == 201) == (answer.status, payments.runs == 1)
    if status == 413:
        assert "max_request" in answer.problem["detail"]


def test_a_large_request_without_a_key_passes() -> None:
    """The bound is for requests that must be compared."""
    answer = asyncio.run(ask(IdempotencyMiddleware(Payments(), max_request_bytes=1), key=None))

    assert 201 == answer.status


@pytest.mark.parametrize(
    "chunks", [[b"12345678"], [b"1234", b"5678"], [b"", b""], [b"12345678", b""]]
)
def test_a_response_of_up_to_the_limit_is_kept(chunks: list[bytes]) -> None:
    """However it is cut into messages, it is replayed as one body."""
    first, second = twice(answering(*chunks), max_response_bytes=8)

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
def test_a_response_that_cannot_be_kept_is_said_to_be_done(
    app: App, options: dict[str, Any]
) -> None:
    """It passes unchanged; a retry is told its status and that nothing was run again."""
    first, second = twice(app, max_response_bytes=8, **options)

    assert 409 == second.status
    assert "The response for this Idempotency-Key was not kept" == second.problem["title"]
    assert first.status == second.problem["originalStatus"]
    assert f"answered with status {first.status}" in second.problem["detail"]
    assert (None, b"false") == (second.header(b"retry-after"), second.header(b"x-should-retry"))


def test_a_large_response_passes_unchanged() -> None:
    """Each message arrives as it was sent, in order."""
    chunks = [b"1234", b"5678", b"9", b"0" * 100]

    first, _ = twice(answering(*chunks, headers=[(b"a", b"b")]), max_response_bytes=8)

    assert [(b"a", b"b")] == first.headers
    assert chunks == [message["body"] for message in first.messages[1:]]


def test_a_large_server_error_is_run_again() -> None:
    """What is not to be kept does not become "done" by its size."""
    app = answering(b"123456789", status=500)

    first, second = twice(app, max_response_bytes=8)

    assert (500, 500, first.body) == (first.status, second.status, second.body)


def test_a_stream_flows_once_it_has_outgrown_the_limit() -> None:
    """From then on each piece is sent when it comes; before, nothing is."""
    sent: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4):
            sent.append("made")
            await send({"type": "http.response.body", "body": b"1234", "more_body": True})
        await send({"type": "http.response.body"})

    asyncio.run(
        ask(
            IdempotencyMiddleware(app, max_response_bytes=8),
            before_send=lambda message: sent.append(message["type"].rpartition(".")[2]),
        )
    )

    held = ["made", "made", "made", "start", "body", "body", "body"]
    assert [*held, "made", "body", "body"] == sent


def test_the_record_is_written_before_the_response_is_sent() -> None:
    """Whoever has the answer can rely on the record, even if the process dies right then."""
    order: list[str] = []

    class Watched(MemoryStore):
        async def finish(self, *args: Any) -> bool:
            order.append("record")
            return await super().finish(*args)

    def note(message: Message) -> None:
        order.append(message["type"])

    asyncio.run(ask(IdempotencyMiddleware(answering(b"done"), Watched()), before_send=note))

    assert ["record", "http.response.start", "http.response.body"] == order


def test_other_messages_pass() -> None:
    """Hints before the response go out at once; a file in place of a body is passed, not kept."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.early_hint", "links": []})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.pathsend", "path": "/file"})

    first, second = twice(app)

    assert ["early_hint", "start", "pathsend"] == [
        message["type"].rpartition(".")[2] for message in first.messages
    ]
    assert 409 == second.status


async def half_a_stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Outgrow the limit, and fail."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"123456789", "more_body": True})
    raise RuntimeError("half way")


def test_a_stream_that_fails_gives_the_key_back() -> None:
    """A handler that raises has not done its work, however much of its response has flowed."""

    async def main() -> None:
        app = IdempotencyMiddleware(half_a_stream, Wayward(), max_response_bytes=8)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="half way"):
                await ask(app)

    asyncio.run(main())


def test_a_stream_holds_its_key_while_it_flows() -> None:
    """Until its last piece it is outstanding, for many leases; if its process dies it is free."""
    at_end: list[list[str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10):
            await send({"type": "http.response.body", "body": b"123456789", "more_body": True})
            await asyncio.sleep(10)
        await send({"type": "http.response.body"})

    async def main() -> None:
        store = Wayward()
        guarded = IdempotencyMiddleware(app, store, lease=30.0, max_response_bytes=8)

        def note(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                at_end.append(list(store.calls))

        first = asyncio.create_task(ask(guarded, before_send=note))
        await asyncio.sleep(95)
        assert "A request is outstanding" in (await ask(guarded)).problem["title"]
        await first
        assert "was not kept" in (await ask(guarded)).problem["title"]

    with VirtualClock() as clock:
        clock.run(main)
    ((*_, last),) = at_end
    assert "finish" == last
