"""Which service a client talks to, and how it sends: what both drivers have in common.

Needs neither httpx nor msgspec, so that the clients' names can be had without them.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from tarry.client.errors import ServiceUnreachable
from tarry.core.checks import positive
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError, MissingExtra
from tarry.runtime.config import instance
from tarry.runtime.downstream import Downstream

if TYPE_CHECKING:
    import httpx

    from tarry.client.request import Request

logger: logging.Logger = logging.getLogger("tarry.client")

FOR_EVER = Policy(max_attempts=1_000_000_000, max_delay=10.0)
"""For a reader of events that has been connected once: the service comes back."""


class Service:
    """The service's address, the user's key, and how to send."""

    def __init__(self, url: str, key: str | None, policy: Policy | None, timeout: float) -> None:
        need_packages()
        self.url: str = _checked_url(url)
        self.is_secure: bool = self.url.startswith("https")
        """Without TLS no certificates are needed, which take a tenth of a second to load."""
        self.headers: dict[str, str] = {"accept-encoding": "identity"}  # so that lengths are bounds
        if key is not None:
            self.headers["authorization"] = f"Bearer {_checked_key(key)}"
        instance("policy", policy, Policy, "a tarry.Policy(...)")
        self.policy: Policy | None = policy
        self.timeout: float = positive("timeout", timeout)

    def build(
        self,
        http: httpx.Client | httpx.AsyncClient,
        request: Request[Any],
        silence: float | None = None,
    ) -> httpx.Request:
        """Return a request as httpx sends it; a stream may be silent for so many seconds."""
        usual = self.timeout
        read = usual + request.waits if silence is None else silence
        limits = {"connect": usual, "read": read, "write": usual, "pool": usual}
        return http.build_request(
            request.method,
            request.path,
            headers=request.headers,
            content=request.content,
            extensions={"timeout": limits},
        )

    def seen_by(self, waiting: Literal["wait", "events"]) -> Downstream:
        """Return the dependency as those see it who wait for it: nothing is too much."""
        return Downstream(f"{self.url}/{waiting}")

    def tell_lost(self) -> None:
        """Say that a stream of events has ended, which a reader of it cannot see."""
        logger.warning("%s: the stream of events was lost; it is opened again", self.url)

    def unreachable(self, request: object, error: Exception) -> ServiceUnreachable:
        """Return what a failed connection means to the user."""
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        return ServiceUnreachable(f"{request} got no answer from {self.url}: {said}")


def need_packages() -> None:
    """Refuse to go on without what the client is built on."""
    try:
        import_module("httpx")
        import_module("msgspec")
    except ImportError:
        msg = "this needs httpx and msgspec: pip install 'tarry[client]'"
        raise MissingExtra(msg) from None


def _checked_url(url: Any) -> str:
    if not isinstance(url, str):
        rule = 'must be the address of the service, "http://127.0.0.1:8080"'
        raise ConfigurationTypeError("url", rule, url)
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname)
        has_more = bool(parts.query or parts.fragment or "@" in parts.netloc or parts.port == 0)
    except ValueError:
        is_address = has_more = False
    if not is_address or has_more:
        # Not shown: what is no address may be a secret.
        rule = (
            "must be the address of the service, as http://127.0.0.1:8080: scheme, host and port, "
            "perhaps a path; no user, query or fragment. The API key is given separately"
        )
        raise ConfigurationError("url", rule)
    return url.rstrip("/")


def _checked_key(key: Any) -> str:
    if not (isinstance(key, str) and key.isascii() and key.isprintable() and key.strip() == key):
        rule = "must be an API key of the service, a text of visible ASCII characters"
        raise ConfigurationTypeError("key", rule)
    return key
