"""What stands behind one path: its methods, who may ask, and an answer whatever happens."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.exchange import Answer, Asked, Disconnected, empty, refusal
from tarry.service.api.problems import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.api.exchange import Stream
    from tarry.wire.asgi import Receive, Scope, Send

_logger = logging.getLogger("tarry.service")
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


class Endpoint:
    """An ASGI application that knows the methods of its path."""

    def __init__(
        self,
        handlers: dict[str, Callable[[Asked], Awaitable[Answer | Stream]]],
        tenant_of: Callable[[Asked], Awaitable[str]] | str,
        check_host: Callable[[dict[bytes, bytes]], None] | None = None,
    ) -> None:
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]
        self._tenant_of = tenant_of
        self._check_host = check_host
        self._allowed = ", ".join(sorted({*self._handlers, "OPTIONS"}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Whatever goes wrong is an answer."""
        try:
            handler = self._handlers.get(scope["method"])
            if handler is None:
                answer: Answer | Stream = self._without_handler(scope["method"])
            else:
                asked = Asked(scope, receive, self._fields(scope))
                tenant = self._tenant_of
                asked.tenant = tenant if isinstance(tenant, str) else await tenant(asked)
                answer = await handler(asked)
        except Disconnected:
            return
        except Refused as refused:
            answer = refusal(refused)
        except RecursionError:
            answer = refusal(problems.too_deep())
        except StoreUnavailable as error:
            _logger.info("%s %s: %s", scope["method"], scope["path"], error)
            detail = "The store is out of order. What was sent may have been kept: send it again."
            answer = refusal(problems.unavailable(detail))
        except Overloaded as error:
            answer = refusal(problems.unavailable(f"{error}.", error.retry_after))
        except Exception:
            _logger.exception("%s %s failed", scope["method"], scope["path"])
            answer = refusal(problems.broken())
        if isinstance(answer, Answer):
            await answer.send(scope, send)
        else:
            await answer.run(receive, send)

    def _without_handler(self, method: str) -> Answer:
        if method == "OPTIONS":
            return empty(204, (b"allow", self._allowed.encode()))
        raise problems.not_allowed(self._allowed)

    def _fields(self, scope: Scope) -> dict[bytes, bytes]:
        """Return the header fields of a request that was meant for this service."""
        fields: dict[bytes, bytes] = dict(scope["headers"])
        if self._check_host is not None:
            self._check_host(fields)
        if b"origin" in fields and scope["method"] not in _SAFE:
            _check_origin(fields)
        return fields


def _check_origin(fields: dict[bytes, bytes]) -> None:
    """Refuse what a page of another site asks a browser to send: here is no cookie, but no key
    either on loopback.
    """
    origin = fields[b"origin"]
    if origin.rpartition(b"://")[2] != fields.get(b"host"):
        raise problems.foreign(origin.decode("latin-1")[:100])
