"""The scope of keys, required keys, and requests that the middleware passes through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tarry.idempotency import IdempotencyMiddleware
from tarry.idempotency.request import _log_unknown_caller
from tarry.wire.http import Message, Receive, Scope, Send
from tests.idempotency.asgi_client import HeaderPairs, PaymentsApp, run_sequentially, send_request

ALICE = [(b"authorization", b"Bearer alice")]
BOB = [(b"authorization", b"Bearer bob")]


@pytest.mark.parametrize(
    ("request_options", "other_options"),
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
def test_keys_belong_to_a_caller_and_a_route(
    request_options: dict[str, Any], other_options: dict[str, Any]
) -> None:
    """The same key of another caller or for another route has its own record."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    responses = run_sequentially(
        send_request(app, **request_options),
        send_request(app, **other_options),
        send_request(app, **request_options),
    )

    assert [b"run 1", b"run 2", b"run 1"] == [response.body for response in responses]


UNKNOWN_CALLERS: list[HeaderPairs] = [
    *(
        [(b"authorization", value)]
        for value in (
            b'Digest username="alice", nc=1',
            b"AWS4-HMAC-SHA256 Credential=alice, Signature=1",
            b"Negotiate YIIabc",
            b"Negotiate",
            b"Custom abc",
            b"Bearer",
            b"Bearer\tabc",
            b"abc\xff",
            b"abc def",
        )
    ),
    [(b"cookie", b"session=alice")],
    [(b"cookie", b"session=alice"), (b"x-api-key", b""), (b"authorization", b"")],
    [(b"x-api-key", b"app"), (b"authorization", b"Negotiate YIIabc")],
    [*ALICE, (b"authorization", b"Digest abc")],
]


@pytest.mark.parametrize("headers", UNKNOWN_CALLERS)
def test_callers_that_cannot_be_distinguished_are_rejected(
    headers: HeaderPairs, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise one of them could get the response of another; the text has the fix."""
    _log_unknown_caller.cache_clear()
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments)

    responses = run_sequentially(*(send_request(app, headers=headers) for _ in range(2)))

    assert [400, 400] == [response.status for response in responses]
    assert "urn:tarry:idempotency:unknown-caller" == responses[0].problem["type"]
    assert "identity=" in responses[0].problem["detail"]
    assert not payments.runs
    assert 1 == caplog.text.count("pass a function that returns")
    [accepted] = run_sequentially(
        send_request(IdempotencyMiddleware(payments, identity=lambda _: "alice"), headers=headers)
    )
    assert 201 == accepted.status
    # Without a key, the request is passed through.
    [unkeyed] = run_sequentially(send_request(app, headers=headers, key=None))
    assert 201 == unkeyed.status


@pytest.mark.parametrize(
    "form",
    [
        "authorization: Bearer {}",
        "authorization: bearer {}",
        "authorization: Basic {}",
        "authorization: Token {}",
        "authorization: ApiKey {}",
        "authorization: DPoP {}",
        "authorization: JWT {}",
        "authorization: {}",
        "authorization: {}.e30.c2ln",
        "x-api-key: {}",
    ],
)
@pytest.mark.parametrize("extra", [[], [(b"cookie", b"session=1")]])
def test_callers_with_stable_credentials_have_own_keys(form: str, extra: HeaderPairs) -> None:
    """Each caller gets only its own response, also if cookies are sent as well."""
    name, _, value = form.partition(": ")
    callers = [
        [(name.encode(), value.format(secret).encode()), *extra] for secret in ("abc", "ABD")
    ]
    app = IdempotencyMiddleware(PaymentsApp())

    responses = run_sequentially(
        *(send_request(app, headers=headers) for headers in [*callers, *callers])
    )

    assert [b"run 1", b"run 2", b"run 1", b"run 2"] == [each.body for each in responses]


@pytest.mark.parametrize("headers", [[], [(b"authorization", b""), (b"cookie", b"")]])
def test_requests_without_credentials_share_their_keys(headers: HeaderPairs) -> None:
    """An API without callers needs no `identity`."""
    app = IdempotencyMiddleware(PaymentsApp())

    _, second = run_sequentially(*(send_request(app, headers=headers) for _ in range(2)))

    assert second.is_replayed


def test_problem_names_the_request() -> None:
    """`instance` is the path of the request, as the client has sent it."""
    app = IdempotencyMiddleware(PaymentsApp(), require_key=["/pay ments/\xe9"])
    rejected, mounted = run_sequentially(
        send_request(app, key=None, path="/pay ments/\xe9"),
        send_request(app, key=b'"', path="/v2/x", root_path="/v2"),
    )
    assert "/pay%20ments/%C3%A9" == rejected.problem["instance"]
    assert "/v2/x" == mounted.problem["instance"]


def test_mounted_path_with_and_without_root_path() -> None:
    """A path that includes `root_path` is the same as the path without it."""
    app = IdempotencyMiddleware(PaymentsApp())

    _, second = run_sequentially(
        send_request(app, path="/v2/payments", root_path="/v2"),
        send_request(app, path="/payments", root_path="/v2"),
    )

    assert second.is_replayed


def test_identity_function_identifies_the_caller() -> None:
    payments = PaymentsApp()

    def get_tenant(scope: Scope) -> str:
        return dict(scope["headers"])[b"x-tenant"].decode()  # type: ignore[no-any-return]

    app = IdempotencyMiddleware(payments, identity=get_tenant)

    def make_headers(tenant: bytes, credentials: HeaderPairs) -> HeaderPairs:
        return [(b"x-tenant", tenant), *credentials]

    responses = run_sequentially(
        send_request(app, headers=make_headers(b"a", ALICE)),
        send_request(app, headers=make_headers(b"a", BOB)),
        send_request(app, headers=make_headers(b"b", BOB)),
    )

    assert [b"run 1", b"run 1", b"run 2"] == [response.body for response in responses]


@pytest.mark.parametrize(
    ("require_key", "path", "status"),
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
    require_key: list[str] | Callable[[Scope], bool], path: str, status: int
) -> None:
    """A key is required by path, by prefix or by a function; elsewhere it is optional."""
    app = IdempotencyMiddleware(PaymentsApp(), require_key=require_key)

    (response,) = run_sequentially(send_request(app, key=None, path=path))

    assert status == response.status
    if status == 400:
        assert "Idempotency-Key is missing" == response.problem["title"]


def test_required_paths_are_relative_to_the_application() -> None:
    """Paths of `require_key` are matched without `root_path`."""
    app = IdempotencyMiddleware(PaymentsApp(), require_key=["/payments"])

    responses = run_sequentially(
        send_request(app, key=None, path="/v2/payments", root_path="/v2"),
        send_request(app, key=None, path="/payments", root_path="/v2/"),
    )

    assert [400, 400] == [response.status for response in responses]


@pytest.mark.parametrize("key", [None, b'"a"'])
def test_other_methods_pass_through(key: bytes | None) -> None:
    """A request with another method is not stored, with or without a key."""
    payments = PaymentsApp()
    app = IdempotencyMiddleware(payments, require_key=["/payments"], methods=["post"])

    run_sequentially(*(send_request(app, method="PATCH", key=key) for _ in range(2)))

    assert 2 == payments.runs


@pytest.mark.parametrize("scope_type", ["lifespan", "websocket"])
def test_other_scopes_pass_through(scope_type: str) -> None:
    """Lifespan and websocket scopes are passed to the application unchanged."""
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
