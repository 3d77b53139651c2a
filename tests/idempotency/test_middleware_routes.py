"""What a key belongs to, where a key is required, and which requests pass through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware
from tarry.idempotency.request import warn_of_unstable_credentials
from tarry.wire.http import Message, Receive, Scope, Send
from tests.idempotency.asgi_client import HeaderPairs, PaymentsApp, run_sequentially, send_request

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
    """The same key for another route, or from another caller, is a different key."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    responses = run_sequentially(
        send_request(app, **one), send_request(app, **other), send_request(app, **one)
    )

    assert [b"run 1", b"run 2", b"run 1"] == [response.body for response in responses]


SIGNATURES = [
    'Digest username="alice", nc={}',
    "AWS4-HMAC-SHA256 Credential=alice, Signature={}",
    "Negotiate {}",
]


@pytest.mark.parametrize("scheme", SIGNATURES)
def test_signatures_do_not_identify_callers(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    """Schemes that sign each request would make every retry a new caller; one warning is logged."""
    warn_of_unstable_credentials.cache_clear()
    app = IdempotencyMiddleware(PaymentsApp())

    _, second = run_sequentially(
        *(
            send_request(app, headers=[(b"authorization", scheme.format(n).encode())])
            for n in range(2)
        )
    )

    assert second.replayed
    assert 1 == caplog.text.count("pass a function that returns")


def test_mounted_path_with_and_without_root_path() -> None:
    """With `root_path`, a path with the mount point is the same as one without it."""
    app = IdempotencyMiddleware(PaymentsApp())

    _, second = run_sequentially(
        send_request(app, path="/v2/payments", root_path="/v2"),
        send_request(app, path="/payments", root_path="/v2"),
    )

    assert second.replayed


def test_identity_function() -> None:
    """A function of the scope identifies the caller instead of the credentials."""
    payments = PaymentsApp()

    def tenant(scope: Scope) -> str:
        return dict(scope["headers"])[b"x-tenant"].decode()  # type: ignore[no-any-return]

    app = IdempotencyMiddleware(payments, identity=tenant)

    def tenant_headers(name: bytes, credentials: HeaderPairs) -> HeaderPairs:
        return [(b"x-tenant", name), *credentials]

    responses = run_sequentially(
        send_request(app, headers=tenant_headers(b"a", ALICE)),
        send_request(app, headers=tenant_headers(b"a", BOB)),
        send_request(app, headers=tenant_headers(b"b", BOB)),
    )

    assert [b"run 1", b"run 1", b"run 2"] == [response.body for response in responses]


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
    """A key is required by path, by prefix or by a function; elsewhere it is optional."""
    app = IdempotencyMiddleware(PaymentsApp(), require_key=required)

    (response,) = run_sequentially(send_request(app, key=None, path=path))

    assert status == response.status
    if status == 400:
        assert "Idempotency-Key is missing" == response.problem["title"]


def test_required_paths_are_relative_to_the_application() -> None:
    """A mount point before the path does not matter, in either form."""
    app = IdempotencyMiddleware(PaymentsApp(), require_key=["/payments"])

    responses = run_sequentially(
        send_request(app, key=None, path="/v2/payments", root_path="/v2"),
        send_request(app, key=None, path="/payments", root_path="/v2/"),
    )

    assert [400, 400] == [response.status for response in responses]


@pytest.mark.parametrize("key", [None, b'"a"'])
def test_other_methods_pass_through(key: bytes | None) -> None:
    """A request with another method passes through, with a key or without."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments, require_key=["/payments"], methods=["post"])

    run_sequentially(*(send_request(app, method="PATCH", key=key) for _ in range(2)))

    assert 2 == payments.runs


@pytest.mark.parametrize("scope_type", ["lifespan", "websocket"])
def test_other_scopes_pass_through(scope_type: str) -> None:
    """Lifespan and websocket scopes pass through."""
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([scope, receive, send])

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    scope = {"type": scope_type}
    asyncio.run(IdempotencyMiddleware(app)(scope, receive, send))

    assert [scope, receive, send] == seen
