"""Options of the middleware: validation of their values."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.wire.http import Scope
from tests.idempotency.asgi_client import PaymentsApp, run_sequentially, send_request


async def async_function(_scope: Scope) -> str:
    """Return a text; for options that require a plain function."""
    return "caller"


def return_none(_scope: Scope) -> None:
    """Return None instead of a text."""


def return_coroutine(scope: Scope) -> Any:
    """Return a coroutine instead of a text."""
    return async_function(scope)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease": 0}, "lease must be greater than 0"),
        ({"retention": -1.0}, "retention must be greater than 0"),
        ({"max_request_bytes": -1}, "max_request_bytes must be at least 0"),
        ({"max_response_bytes": 1.5}, "max_response_bytes must be a whole number"),
        ({"methods": "POST"}, "methods must be a list of HTTP method names"),
        ({"require_key": "/payments"}, "require_key must be a list of paths"),
        ({"require_key": ["payments"]}, "require_key takes paths such as"),
        ({"require_key": ["/a*"]}, "require_key takes paths such as"),
        ({"require_key": ["/*/a"]}, "require_key takes paths such as"),
        (
            {"require_key": ["/payments/{id}"]},
            "without parameters, got '/payments/{id}': use a pattern for all paths below",
        ),
        ({"require_key": ["/payments/<int:id>"]}, "without parameters"),
        ({"require_key": True}, "require_key must be a list of paths or a function, got True"),
        ({"require_key": [5]}, "require_key must be a list of paths, but contains 5"),
        ({"require_key": async_function}, "require_key must be a plain function"),
        ({"identity": "cookie"}, "identity must be a function that takes the scope, got 'cookie'"),
        ({"identity": async_function}, "identity must be a plain function"),
        ({"store": "keys.db"}, "store must be a store, such as .* got 'keys.db'"),
        ({"store": MemoryStore}, "store must be a store, such as"),
        ({"store_errors": "yes"}, "store_errors must be True or False, got 'yes'"),
        ({"also_replay": "Set-Cookie"}, "also_replay must be a list of header names"),
        ({"also_replay": [b"Date"]}, "also_replay takes headers that are left out .* got b'Date'"),
        ({"also_replay": ["Set-Cookies"]}, "such as Set-Cookie and Date, got 'Set-Cookies'"),
        (
            {"docs_url": "https://a.example/\r\nset-cookie: a=b"},
            "docs_url must be an http or https",
        ),
        ({"docs_url": "https://a.example/>"}, "docs_url must be an http or https URL"),
        ({"docs_url": 5}, "docs_url must be an http or https URL"),
        ({"app": "app"}, "app must be an ASGI application, got 'app'"),
    ],
)
def test_invalid_option_raises(options: dict[str, Any], message: str) -> None:
    """An invalid option raises when the middleware is created; the error names the option."""
    with pytest.raises(ConfigurationError, match=message):
        IdempotencyMiddleware(**{"app": PaymentsApp(), **options})


@pytest.mark.parametrize("identity", [return_none, return_coroutine])
def test_identity_must_return_a_text(identity: Any) -> None:
    """If `identity` does not return a text, the request raises and the handler does not run."""
    payments = PaymentsApp()

    with pytest.raises(
        ConfigurationError, match="identity must return a string that identifies the caller"
    ):
        run_sequentially(send_request(IdempotencyMiddleware(payments, identity=identity)))

    assert 0 == payments.runs
