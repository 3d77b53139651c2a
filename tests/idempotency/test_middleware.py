"""The middleware: stored responses, problem responses and expiry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.runtime.effects import effects
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
    """The handler gets the complete body, and the client gets the messages of the handler."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    (response,) = run_sequentially(send_request(app, body=[b"amount", b"=", b"100"]))

    assert [b"amount=100"] == payments.bodies
    assert (201, b"run 1", False) == (response.status, response.body, response.is_replayed)
    assert [True, False] == [message.get("more_body", False) for message in response.messages[1:]]


def test_repeated_request_gets_the_stored_response() -> None:
    """A repeated request gets status, headers and body of the first, but no Date or Connection."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    first, second, third = run_sequentially(*(send_request(app) for _ in range(3)))

    assert 1 == payments.runs
    assert (first.status, first.body) == (second.status, second.body)
    assert [*first.headers[:2], (b"idempotent-replayed", b"true")] == second.headers
    assert [b"date", b"connection"] == [name for name, _ in first.headers[2:]]
    assert second == third


def test_unquoted_and_quoted_key_are_the_same() -> None:
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    _, second = run_sequentially(send_request(app, key=b'"a-1"'), send_request(app, key=b"a-1"))

    assert second.is_replayed


@pytest.mark.parametrize(
    "changes",
    [
        {"body": b"[]"},
        {"query_string": b"dry=1"},
        {"headers": [(b"content-type", b"text/plain")]},
    ],
)
def test_same_key_with_another_payload_is_422(changes: dict[str, Any]) -> None:
    """A known key with another body, query or content type gets a 422; the handler does not run."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    first: dict[str, Any] = {"body": b"{}", "query_string": b"", "headers": JSON}
    _, rejected = run_sequentially(
        send_request(app, **first), send_request(app, **{**first, **changes})
    )

    assert (422, "Idempotency-Key is already used") == (rejected.status, rejected.problem["title"])
    assert b"false" == rejected.header(b"x-should-retry")
    assert 1 == payments.runs


async def test_same_key_while_the_first_runs_is_409() -> None:
    """A request whose key is in progress gets a 409 with Retry-After at once."""
    started, resume = asyncio.Event(), asyncio.Event()
    payments = PaymentsApp()

    async def wait_and_pay(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        await resume.wait()
        await payments(scope, receive, send)

    app = IdempotencyMiddleware(wait_and_pay)
    first = asyncio.create_task(send_request(app))
    await started.wait()
    second = await send_request(app)
    resume.set()

    assert 409 == second.status
    assert "A request is outstanding for this Idempotency-Key" == second.problem["title"]
    assert (b"1", b"true") == (second.header(b"retry-after"), second.header(b"x-should-retry"))
    assert b"run 1" == (await first).body
    assert (await send_request(app)).is_replayed
    assert 1 == payments.runs


def test_stored_response_expires() -> None:
    """After the retention the handler runs again."""

    async def main() -> list[bool]:
        app = IdempotencyMiddleware(PaymentsApp(), retention=60.0)
        responses: list[Response] = []
        for _ in range(3):
            responses.append(await send_request(app))
            await asyncio.sleep(40)
        return [response.is_replayed for response in responses]

    with VirtualClock() as clock:
        assert [False, True, False] == clock.run(main)


@pytest.mark.parametrize("key", [b"", b'""', b'"open', b"a\tb", b'"a", "b"', b"a" * 256])
@pytest.mark.parametrize("require_key_paths", [(), ["/payments"]])
def test_malformed_key_is_400(key: bytes, require_key_paths: list[str]) -> None:
    """A malformed key gets a 400, also where a key is optional."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments, require_key=require_key_paths)

    (response,) = run_sequentially(send_request(app, key=key))

    assert (400, "Idempotency-Key is malformed") == (response.status, response.problem["title"])
    assert 0 == payments.runs


def test_two_key_headers_are_400() -> None:
    """A request with two Idempotency-Key headers gets a 400."""
    payments = PaymentsApp()

    (response,) = run_sequentially(
        send_request(IdempotencyMiddleware(payments), headers=[(b"idempotency-key", b'"a"')])
    )

    assert (400, 0) == (response.status, payments.runs)


def test_problems_link_to_the_documentation() -> None:
    """The `type` of a problem is an absolute URI; it links to `docs_url` or to the IETF draft."""
    url = "https://example.com/docs/retries"

    with_docs, with_anchor, without_docs = run_sequentially(
        *(
            send_request(IdempotencyMiddleware(PaymentsApp(), docs_url=docs_url), key=b"")
            for docs_url in (url, f"{url}#keys", None)
        )
    )

    assert f"{url}#malformed" == with_docs.problem["type"]
    assert f'<{url}>; rel="describedby"'.encode() == with_docs.header(b"link")
    assert f"{url}#keys" == with_anchor.problem["type"]
    assert "urn:tarry:idempotency:malformed" == without_docs.problem["type"]
    assert b"draft-ietf-httpapi-idempotency-key-header" in (without_docs.header(b"link") or b"")
    assert b"en" == without_docs.header(b"content-language")
    assert b"%d" % len(without_docs.body) == without_docs.header(b"content-length")


def test_some_requests_sweep_expired_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request deletes expired records with a probability of 1%."""
    random_numbers = iter([0.99, 0.01, 0.0099])
    monkeypatch.setattr(effects, "draw_random", lambda: next(random_numbers))

    async def main() -> list[int]:
        store = MemoryStore()
        app = IdempotencyMiddleware(PaymentsApp(), store, retention=60.0)
        record_counts: list[int] = []
        for number in range(3):
            await send_request(app, key=b"%d" % number)
            record_counts.append(len(store._entries))
            await asyncio.sleep(60)
        return record_counts

    with VirtualClock() as clock:
        assert [1, 2, 1] == clock.run(main)


def test_handler_gets_the_scope_of_the_server() -> None:
    """The handler gets a scope equal to the scope that the server passed to the middleware."""
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await PaymentsApp()(scope, receive, send)

    (response,) = run_sequentially(send_request(IdempotencyMiddleware(app), headers=ALICE))

    assert 201 == response.status
    assert [make_scope(headers=scopes[0]["headers"])] == scopes


@pytest.mark.parametrize("same_store", [True, False])
def test_nested_middleware_only_checks_that_a_required_key_is_present(same_store: bool) -> None:
    """An IdempotencyMiddleware inside another one claims no key and stores no response."""
    payments, store = PaymentsApp(), MemoryStore()
    inner = IdempotencyMiddleware(payments, store, require_key=["/payments"])
    app = IdempotencyMiddleware(inner, store if same_store else MemoryStore())

    first, second, without_key = run_sequentially(
        send_request(app), send_request(app), send_request(app, key=None)
    )

    assert [201, 201, 400] == [first.status, second.status, without_key.status]
    assert (False, True, 1) == (first.is_replayed, second.is_replayed, payments.runs)
    assert same_store or {} == store._entries
