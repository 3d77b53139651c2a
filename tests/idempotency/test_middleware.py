"""The middleware: the flow of the draft, its problems, and expiry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.runtime.clocks import environment
from tarry.testing import VirtualClock
from tarry.wire.http import Receive, Scope, Send
from tests.idempotency.asgi_client import (
    PaymentsApp,
    Response,
    make_scope,
    run_sequentially,
    send_request,
)

ALICE = [(b"authorization", b"Bearer alice")]
JSON = [(b"content-type", b"application/json")]


def test_first_request_runs() -> None:
    """The handler gets the whole body, and the client the messages as they were sent."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    (response,) = run_sequentially(send_request(app, body=[b"amount", b"=", b"100"]))

    assert [b"amount=100"] == payments.bodies
    assert (201, b"run 1", False) == (response.status, response.body, response.replayed)
    assert [True, False] == [message.get("more_body", False) for message in response.messages[1:]]


def test_repeated_request_gets_the_stored_response() -> None:
    """The handler runs once. Status, headers in order and body are those of the first response."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    first, second, third = run_sequentially(*(send_request(app) for _ in range(3)))

    assert 1 == payments.runs
    assert (first.status, first.body) == (second.status, second.body)
    assert [*first.headers, (b"idempotent-replayed", b"true")] == second.headers
    assert second == third


def test_unquoted_and_quoted_key_are_the_same() -> None:
    """A key without quotes is the same as the key in quotes."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    _, second = run_sequentially(send_request(app, key=b'"a-1"'), send_request(app, key=b"a-1"))

    assert second.replayed


@pytest.mark.parametrize(
    "other",
    [
        {"body": b"[]"},
        {"query_string": b"dry=1"},
        {"headers": [(b"content-type", b"text/plain")]},
    ],
)
def test_same_key_with_another_payload_is_422(other: dict[str, Any]) -> None:
    """A known key with another body, query or content type is rejected and not run."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    first: dict[str, Any] = {"body": b"{}", "query_string": b"", "headers": JSON}
    _, refused = run_sequentially(
        send_request(app, **first), send_request(app, **{**first, **other})
    )

    assert (422, "Idempotency-Key is already used") == (refused.status, refused.problem["title"])
    assert b"false" == refused.header(b"x-should-retry")
    assert 1 == payments.runs


def test_same_key_while_the_first_runs_is_409() -> None:
    """A second request does not wait for the first; it gets a Retry-After."""
    running, go_on = asyncio.Event(), asyncio.Event()
    payments = PaymentsApp()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        running.set()
        await go_on.wait()
        await payments(scope, receive, send)

    async def main() -> None:
        app = IdempotencyMiddleware(slow)
        first = asyncio.create_task(send_request(app))
        await running.wait()
        second = await send_request(app)
        go_on.set()

        assert 409 == second.status
        assert "A request is outstanding for this Idempotency-Key" == second.problem["title"]
        assert (b"1", b"true") == (second.header(b"retry-after"), second.header(b"x-should-retry"))
        assert b"run 1" == (await first).body
        assert (await send_request(app)).replayed

    asyncio.run(main())
    assert 1 == payments.runs


def test_responses_expire() -> None:
    """After the retention the key is free and the request runs again."""

    async def main() -> list[bool]:
        app = IdempotencyMiddleware(PaymentsApp(), retention=60.0)
        responses: list[Response] = []
        for _ in range(3):
            responses.append(await send_request(app))
            await asyncio.sleep(40)
        return [response.replayed for response in responses]

    with VirtualClock() as clock:
        assert [False, True, False] == clock.run(main)


@pytest.mark.parametrize("key", [b"", b'""', b'"open', b"a b", b'"a", "b"', b"a" * 256])
@pytest.mark.parametrize("required", [(), ["/payments"]])
def test_malformed_key_is_400(key: bytes, required: list[str]) -> None:
    """A malformed key is rejected, also where a key is optional."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments, require_key=required)

    (response,) = run_sequentially(send_request(app, key=key))

    assert (400, "Idempotency-Key is malformed") == (response.status, response.problem["title"])
    assert 0 == payments.runs


def test_two_keys_are_malformed() -> None:
    """A request with two Idempotency-Key headers is rejected."""
    payments = PaymentsApp()

    (response,) = run_sequentially(
        send_request(IdempotencyMiddleware(payments), headers=[(b"idempotency-key", b'"a"')])
    )

    assert (400, 0) == (response.status, payments.runs)


def test_problems_link_to_the_documentation() -> None:
    """Every problem has its own absolute type and a link to the API's page or the draft."""
    url = "https://example.com/docs/retries"

    with_docs, with_anchor, without = run_sequentially(
        *(
            send_request(IdempotencyMiddleware(PaymentsApp(), docs_url=docs_url), key=b"")
            for docs_url in (url, f"{url}#keys", None)
        )
    )

    assert f"{url}#malformed" == with_docs.problem["type"]
    assert f'<{url}>; rel="describedby"'.encode() == with_docs.header(b"link")
    assert f"{url}#keys" == with_anchor.problem["type"]
    assert "urn:tarry:idempotency:malformed" == without.problem["type"]
    assert b"draft-ietf-httpapi-idempotency-key-header" in (without.header(b"link") or b"")
    assert b"en" == without.header(b"content-language")
    assert b"%d" % len(without.body) == without.header(b"content-length")


def test_some_requests_sweep_expired_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request in a hundred deletes expired records, so that no sweeper is needed."""
    draws = iter([0.99, 0.01, 0.0099])
    monkeypatch.setattr(environment, "draw_random", lambda: next(draws))

    async def main() -> list[int]:
        store = MemoryStore()
        app = IdempotencyMiddleware(PaymentsApp(), store, retention=60.0)
        left: list[int] = []
        for number in range(3):
            await send_request(app, key=b"%d" % number)
            left.append(len(store._entries))
            await asyncio.sleep(60)
        return left

    with VirtualClock() as clock:
        assert [1, 2, 1] == clock.run(main)


def test_handler_gets_the_scope_of_the_server() -> None:
    """The application gets the scope object of the server, which is unchanged afterwards."""
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await PaymentsApp()(scope, receive, send)

    (response,) = run_sequentially(send_request(IdempotencyMiddleware(app), headers=ALICE))

    assert 201 == response.status
    assert [make_scope(headers=scopes[0]["headers"])] == scopes


@pytest.mark.parametrize("shared", [True, False])
def test_nested_middleware_passes_the_request(shared: bool) -> None:
    """An inner middleware passes the request: it would otherwise conflict with the outer one."""
    payments, store = PaymentsApp(), MemoryStore()
    inner = IdempotencyMiddleware(payments, store, require_key=["/payments"])
    app = IdempotencyMiddleware(inner, store if shared else MemoryStore())

    first, second, without = run_sequentially(
        send_request(app), send_request(app), send_request(app, key=None)
    )

    assert [201, 201, 400] == [first.status, second.status, without.status]
    assert (False, True, 1) == (first.replayed, second.replayed, payments.runs)
    assert shared or {} == store._entries
