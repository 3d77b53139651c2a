"""Idempotency keys of the calls that a handler makes, derived from the key of its own request.

A handler that calls another service and fails afterwards runs again when its client retries. If the
second run called the service with new random keys, the service would run the calls twice. Derived
keys are the same in both runs.

The idempotency middleware sets `current_request`, and the HTTP adapters read it.
"""

from __future__ import annotations

from contextvars import ContextVar
from hashlib import sha256
from itertools import count
from uuid import uuid4

from tarry.errors import ConfigurationTypeError

_KEY_LENGTH = 32
"""128 bits in hexadecimal digits, as in a random key."""


class KeyedRequest:
    """A request with an idempotency key, while its handler runs.

    `record_name` names the key, its caller, method and path: when different callers send the same
    key, the calls of their handlers must get different keys.
    """

    __slots__ = ("_call_numbers", "_record_name")

    def __init__(self, record_name: str) -> None:
        self._record_name = record_name
        self._call_numbers: dict[str, count[int]] = {}

    def derive_key(self, name: str) -> str:
        """Return the key for a name; the same name gives the same key."""
        return self._digest(f"name {name}")

    def derive_call_key(self, method: str, url: str, body: bytes | None) -> str:
        """Return the key for an HTTP call of the handler; `body` is None if it is not known.

        A handler may make two equal calls on purpose, such as two payments of the same amount. The
        number of the call among equal calls gives each its own key, which is the same in the next
        run of the handler.
        """
        call = f"call {method} {url} {sha256(body or b'').hexdigest()}"
        # Both steps are atomic, because a handler may make calls in several threads.
        number = next(self._call_numbers.setdefault(call, count(1)))
        return self._digest(f"{call} {number}")

    def _digest(self, text: str) -> str:
        data = f"{self._record_name} {text}".encode("utf-8", "surrogatepass")
        return sha256(data).hexdigest()[:_KEY_LENGTH]


current_request: ContextVar[KeyedRequest | None] = ContextVar("tarry_request", default=None)
"""The request with an idempotency key that this context handles; None without such a request."""


def derive_key(name: str) -> str:
    """Return an idempotency key for a call that the current request makes to another service.

    In a handler behind `IdempotencyMiddleware`, the same name gives the same key whenever the
    request runs again, and another key in each other request. Use different names for different
    calls. If the current request has no idempotency key, the key is random.
    """
    if not isinstance(name, str):
        raise ConfigurationTypeError("name", "must be a string that names the call", name)
    request = current_request.get()
    return uuid4().hex if request is None else request.derive_key(name)
