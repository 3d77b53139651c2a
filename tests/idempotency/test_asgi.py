"""The middleware: the flow of the draft, its problems, and expiry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.runtime.clocks import system
from tarry.testing import VirtualClock
from tarry.wire.asgi import Receive, Scope, Send
from tests.idempotency.asking import Answer, Payments, ask, in_order, scope_of

ALICE = [(b"authorization", b"Bearer alice")]
JSON = [(b"content-type", b"application/json")]


def test_first_request_runs_and_its_response_passes() -> None:
    """The handler sees the whole body, and the client the messages as they were sent."""
    payments = Payments()
    app = IdempotencyMiddleware(payments)

    (answer,) = in_order(ask(app, body=[b"amount", b"=", b"100"]))

    assert [b"amount=100"] == payments.bodies
    assert (201, b"run 1", False) == (answer.status, answer.body, answer.replayed)
    assert [True, False] == [message.get("more_body", False) for message in answer.messages[1:]]


def test_same_request_is_replayed_to_the_byte() -> None:
    """The handler runs once; status, headers in order and body are those of the first answer."""
    payments = Payments()
    app = IdempotencyMiddleware(payments)

    first, second, third = in_order(*(ask(app) for _ in range(3)))

    assert 1 == payments.runs
    assert (first.status, first.body) == (second.status, second.body)
    assert [*first.headers, (b"idempotent-replayed", b"true")] == second.headers
    assert second == third


def test_bare_and_quoted_key_are_one() -> None:
    """A client that sends the key bare is served as one that quotes it."""
    payments = Payments()
    app = IdempotencyMiddleware(payments)

    _, second = in_order(ask(app, key=b'"a-1"'), ask(app, key=b"a-1"))

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
    """Another body, query or content type under a key that is known is refused and not run."""
    payments = Payments()
    app = IdempotencyMiddleware(payments)

    first: dict[str, Any] = {"body": b"{}", "query_string": b"", "headers": JSON}
    _, refused = in_order(ask(app, **first), ask(app, **{**first, **other}))

    assert (422, "Idempotency-Key is already used") == (refused.status, refused.problem["title"])
    assert b"false" == refused.header(b"x-should-retry")
    assert 1 == payments.runs


def test_same_key_while_the_first_runs_is_409() -> None:
    """A second request does not wait for the first; it is told when to ask again."""
    running, go_on = asyncio.Event(), asyncio.Event()
    payments = Payments()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        running.set()
        await go_on.wait()
        await payments(scope, receive, send)

    async def main() -> None:
        app = IdempotencyMiddleware(slow)
        first = asyncio.create_task(ask(app))
        await running.wait()
        second = await ask(app)
        go_on.set()

        assert 409 == second.status
        assert "A request is outstanding for this Idempotency-Key" == second.problem["title"]
        assert (b"1", b"true") == (second.header(b"retry-after"), second.header(b"x-should-retry"))
        assert b"run 1" == (await first).body
        assert (await ask(app)).replayed

    asyncio.run(main())
    assert 1 == payments.runs


def test_responses_expire() -> None:
    """After `keep` seconds the key is free and the request runs again."""

    async def main() -> list[bool]:
        app = IdempotencyMiddleware(Payments(), retention=60.0)
        answers: list[Answer] = []
        for _ in range(3):
            answers.append(await ask(app))
            await asyncio.sleep(40)
        return [answer.replayed for answer in answers]

    with VirtualClock() as clock:
        assert [False, True, False] == clock.run(main)


@pytest.mark.parametrize("key", [b"", b'""', b'"open', b"a b", b'"a", "b"', b"a" * 256])
@pytest.mark.parametrize("required", [(), ["/payments"]])
def test_malformed_key_is_400(key: bytes, required: list[str]) -> None:
    """Also where a key is optional: who sends one counts on it."""
    payments = Payments()
    app = IdempotencyMiddleware(payments, require_key=required)

    (answer,) = in_order(ask(app, key=key))

    assert (400, "Idempotency-Key is malformed") == (answer.status, answer.problem["title"])
    assert 0 == payments.runs


def test_two_keys_are_malformed() -> None:
    """A request with two lines of the field is refused."""
    payments = Payments()

    (answer,) = in_order(
        ask(IdempotencyMiddleware(payments), headers=[(b"idempotency-key", b'"a"')])
    )

    assert (400, 0) == (answer.status, payments.runs)


def test_problems_lead_to_the_documentation() -> None:
    """Every problem has an absolute type of its own, and a link: to the API's page or the draft."""
    url = "https://example.com/docs/retries"

    with_docs, with_anchor, without = in_order(
        *(
            ask(IdempotencyMiddleware(Payments(), docs_url=docs_url), key=b"")
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


def test_expired_records_are_swept_along_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody needs to run a sweeper: one request in a hundred takes what is over with it."""
    draws = iter([0.99, 0.01, 0.0099])
    monkeypatch.setattr(system, "draw", lambda: next(draws))

    async def main() -> list[int]:
        store = MemoryStore()
        app = IdempotencyMiddleware(Payments(), store, retention=60.0)
        left: list[int] = []
        for number in range(3):
            await ask(app, key=b"%d" % number)
            left.append(len(store._entries))
            await asyncio.sleep(60)
        return left

    with VirtualClock() as clock:
        assert [1, 2, 1] == clock.run(main)


def test_scope_of_the_handler_is_the_servers() -> None:
    """The application gets the very scope that the server made, which is as it was afterwards."""
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await Payments()(scope, receive, send)

    (answer,) = in_order(ask(IdempotencyMiddleware(app), headers=ALICE))

    assert 201 == answer.status
    assert [scope_of(headers=scopes[0]["headers"])] == scopes


@pytest.mark.parametrize("shared", [True, False])
def test_one_guard_is_enough(shared: bool) -> None:
    """A guard inside of a guard lets the request pass, that would else be its own rival."""
    payments, store = Payments(), MemoryStore()
    inner = IdempotencyMiddleware(payments, store, require_key=["/payments"])
    app = IdempotencyMiddleware(inner, store if shared else MemoryStore())

    first, second, without = in_order(ask(app), ask(app), ask(app, key=None))

    assert [201, 201, 400] == [first.status, second.status, without.status]
    assert (False, True, 1) == (first.replayed, second.replayed, payments.runs)
    assert shared or {} == store._entries
