"""The options of the middleware: mistakes are told where they are made."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.idempotency import IdempotencyMiddleware, MemoryStore
from tarry.wire.asgi import Scope
from tests.idempotency.asking import Payments, ask, in_order


async def an_async_function(_scope: Scope) -> str:
    """What is given by mistake where a plain function is needed."""
    return "who"


def nobody(_scope: Scope) -> None:
    """Forget to return."""


def somebody_later(scope: Scope) -> Any:
    """Return a coroutine."""
    return an_async_function(scope)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lease": 0}, "lease must be greater than 0"),
        ({"retention": -1.0}, "retention must be greater than 0"),
        ({"max_request_bytes": -1}, "max_request_bytes must be at least 0"),
        ({"max_response_bytes": 1.5}, "max_response_bytes must be a whole number"),
        ({"methods": "POST"}, "methods must be a list of names"),
        ({"require_key": "/payments"}, "require_key must be a list of paths"),
        ({"require_key": ["payments"]}, "require_key takes paths such as"),
        ({"require_key": ["/a*"]}, "require_key takes paths such as"),
        ({"require_key": ["/*/a"]}, "require_key takes paths such as"),
        (
            {"require_key": ["/payments/{id}"]},
            "without parameters, got '/payments/{id}': use all paths below",
        ),
        ({"require_key": ["/payments/<int:id>"]}, "without parameters"),
        ({"require_key": True}, "require_key must be a list of paths or a function, got True"),
        ({"require_key": [5]}, "require_key must be a list of paths, got 5 in it"),
        ({"require_key": an_async_function}, "require_key must be a plain function"),
        ({"identity": "cookie"}, "identity must be a function of the scope, got 'cookie'"),
        ({"identity": an_async_function}, "identity must be a plain function"),
        ({"store": "keys.db"}, "store must be a store, such as .* got 'keys.db'"),
        ({"store": MemoryStore}, "store must be a store, such as"),
        ({"store_errors": "yes"}, "store_errors must be True or False, got 'yes'"),
        (
            {"docs_url": "https://a.example/\r\nset-cookie: a=b"},
            "docs_url must be an http or https",
        ),
        ({"docs_url": "https://a.example/>"}, "docs_url must be an http or https URL"),
        ({"docs_url": 5}, "docs_url must be an http or https URL"),
        ({"app": "app"}, "app must be an ASGI application, got 'app'"),
    ],
)
def test_mistakes_are_told_when_the_middleware_is_made(options: dict[str, Any], words: str) -> None:
    """A value that breaks a rule is refused with the name of the option."""
    with pytest.raises(ConfigurationError, match=words):
        IdempotencyMiddleware(**{"app": Payments(), **options})


@pytest.mark.parametrize("identity", [nobody, somebody_later])
def test_identity_must_be_a_text(identity: Any) -> None:
    """What it returns is checked, with words; nothing runs."""
    payments = Payments()

    with pytest.raises(
        ConfigurationError, match="identity must return a text that identifies the caller"
    ):
        in_order(ask(IdempotencyMiddleware(payments, identity=identity)))

    assert 0 == payments.runs
