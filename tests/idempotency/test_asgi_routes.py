"""The middleware and routes: what a key belongs to, where one is needed, what passes untouched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware
from tarry.idempotency.fingerprint import warn_of_unstable_credentials
from tarry.wire.asgi import Message, Receive, Scope, Send
from tests.idempotency.asking import Pairs, Payments, ask, in_order

ALICE = [(b"authorization", b"Bearer alice")]
BOB = [(b"authorization", b"Bearer bob")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"headers": ALICE}, {"headers": BOB}),
        ({"headers": ALICE}, {"headers": []}),
        ({"headers": [(b"x-api-key", b"good")]}, {"headers": [(b"x-api-key", b"bad")]}),
        ({"headers": [(b"host", b"a.example")]}, {"headers": [(b"host", b"b.example")]}),
        ({"method": "POST"}, {"method": "PATCH"}),
        ({"path": "/payments"}, {"path": "/payments/"}),
        ({"path": "/payments", "root_path": ""}, {"path": "/payments", "root_path": "/v2"}),
    ],
)
def test_keys_belong_to_a_caller_and_a_route(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same key elsewhere, or from somebody else, is another key."""
    payments = Payments()
    app = IdempotencyMiddleware(payments)

    answers = in_order(ask(app, **one), ask(app, **other), ask(app, **one))

    assert [b"run 1", b"run 2", b"run 1"] == [answer.body for answer in answers]


SIGNATURES = [
    'Digest username="alice", nc={}',
    "AWS4-HMAC-SHA256 Credential=alice, Signature={}",
    "Negotiate {}",
]


@pytest.mark.parametrize("scheme", SIGNATURES)
def test_a_signature_is_no_identity(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    """Schemes that sign each request would make every retry a new caller; the log says so, once."""
    warn_of_unstable_credentials.cache_clear()
    app = IdempotencyMiddleware(Payments())

    _, second = in_order(
        *(ask(app, headers=[(b"authorization", scheme.format(n).encode())]) for n in range(2))
    )

    assert second.replayed
    assert 1 == caplog.text.count("pass identity= a function")


def test_mounted_path_is_one_however_it_is_told() -> None:
    """A path with its mount point in front is the same as one without, beside `root_path`."""
    app = IdempotencyMiddleware(Payments())

    _, second = in_order(
        ask(app, path="/v2/payments", root_path="/v2"), ask(app, path="/payments", root_path="/v2")
    )

    assert second.replayed


def test_identity_can_be_told() -> None:
    """A function of the scope says who calls, instead of the credentials."""
    payments = Payments()

    def tenant(scope: Scope) -> str:
        return dict(scope["headers"])[b"x-tenant"].decode()  # type: ignore[no-any-return]

    app = IdempotencyMiddleware(payments, identity=tenant)

    def tenant_of(name: bytes, who: Pairs) -> Pairs:
        return [(b"x-tenant", name), *who]

    answers = in_order(
        ask(app, headers=tenant_of(b"a", ALICE)),
        ask(app, headers=tenant_of(b"a", BOB)),
        ask(app, headers=tenant_of(b"b", BOB)),
    )

    assert [b"run 1", b"run 1", b"run 2"] == [answer.body for answer in answers]


@pytest.mark.parametrize(
    ("required", "path", "status"),
    [
        ((), "/payments", 201),
        (["/payments"], "/payments", 400),
        (["/payments"], "/payments/1", 201),
        (["/payments"], "/payments/", 400),
        (["/payments/"], "/payments", 400),
        (["/"], "/", 400),
        (["/payments/*"], "/payments/1/refunds", 400),
        (["/payments/*"], "/payments", 201),
        (["/orders", "/payments", "/payments/*"], "/payments", 400),
        (["/*"], "/anything", 400),
        (lambda scope: scope["path"].endswith("s"), "/payments", 400),
        (lambda scope: scope["path"].endswith("s"), "/payment", 201),
    ],
)
def test_missing_key_is_400_where_it_is_required(
    required: list[str] | Callable[[Scope], bool], path: str, status: int
) -> None:
    """Routes are told by path, by prefix or by a function; elsewhere a key is optional."""
    app = IdempotencyMiddleware(Payments(), require_key=required)

    (answer,) = in_order(ask(app, key=None, path=path))

    assert status == answer.status
    if status == 400:
        assert "Idempotency-Key is missing" == answer.problem["title"]


def test_required_routes_are_those_of_the_application() -> None:
    """A mount point in front of the path does not matter, told in either way."""
    app = IdempotencyMiddleware(Payments(), require_key=["/payments"])

    answers = in_order(
        ask(app, key=None, path="/v2/payments", root_path="/v2"),
        ask(app, key=None, path="/payments", root_path="/v2/"),
    )

    assert [400, 400] == [answer.status for answer in answers]


@pytest.mark.parametrize("key", [None, b'"a"'])
def test_other_methods_pass(key: bytes | None) -> None:
    """A method that is not guarded is not touched, with a key or without."""
    payments = Payments()
    app = IdempotencyMiddleware(payments, require_key=["/payments"], methods=["post"])

    in_order(*(ask(app, method="PATCH", key=key) for _ in range(2)))

    assert 2 == payments.runs


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_scopes_pass(kind: str) -> None:
    """Lifespan and websockets reach the application as they are."""
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([scope, receive, send])

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    scope = {"type": kind}
    asyncio.run(IdempotencyMiddleware(app)(scope, receive, send))

    assert [scope, receive, send] == seen
