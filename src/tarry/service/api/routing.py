"""What stands behind one path: its methods, who may ask, and an answer whatever happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import msgspec

from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.problems import ApiError
from tarry.service.api.request import ApiRequest, Disconnected
from tarry.service.api.response import (
    ApiResponse,
    PendingResponse,
    ResponseStream,
    empty_response,
    problem_response,
)

if TYPE_CHECKING:
    from tarry.wire.asgi import Receive, Scope, Send

_logger = logging.getLogger("tarry.service")
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


Handler: TypeAlias = Callable[[ApiRequest], Awaitable[ApiResponse | ResponseStream]]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """A method of a path, what it does, and the forms that go in and out."""

    method: str
    path: str
    name: str
    does: str
    handler: Handler
    answers: dict[int, Any]
    """The forms by status; None is an answer without content, a string its media type."""
    refuses: tuple[int, ...] = ()
    takes: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    more_headers: dict[str, str] = {}
    """Further request headers that mean something, and what."""
    calls_back: type[msgspec.Struct] | None = None
    """What is posted to the `callbackUrl` of the request, later."""
    is_open: bool = False
    """Whether it needs no key."""


class Endpoint:
    """An ASGI application that knows the methods of its path."""

    def __init__(
        self,
        handlers: dict[str, Handler],
        tenant_of: Callable[[ApiRequest], Awaitable[str] | str] | str,
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
            answer = await self._ask(scope, receive)
        except Disconnected:
            return
        except Exception as error:  # noqa: BLE001 - it is told
            answer = _answer_to(error, scope)
        if isinstance(answer, ApiResponse):
            await answer.send(scope, send)
        else:
            await answer.run(receive, send)

    def answer(
        self, scope: Scope, body: bytes, reply: Callable[[ApiResponse], None]
    ) -> asyncio.Task[Any] | None:
        """Serve one request that is here in full, to `reply`; return a task, where it needs one.

        Its handler must not answer with a stream.
        """
        try:
            awaited = self._ask(scope, _nothing, body)
        except Exception as error:  # noqa: BLE001 - it is told
            reply(_answer_to(error, scope))
            return None
        if not isinstance(awaited, PendingResponse):
            awaited = PendingResponse(awaited, _as_it_is)
        result, task = awaited.result, None
        if not isinstance(result, asyncio.Future):
            result = task = asyncio.ensure_future(result)
        result.add_done_callback(partial(_reply, scope, awaited.answer, reply))
        return task

    def _ask(
        self, scope: Scope, receive: Receive, whole: bytes | None = None
    ) -> Awaitable[ApiResponse | ResponseStream]:
        handler = self._handlers.get(scope["method"])
        if handler is None:
            return self._without_handler(scope["method"])
        asked = ApiRequest(scope, receive, self._fields(scope), whole)
        tenant = self._tenant_of
        whose = tenant if isinstance(tenant, str) else tenant(asked)
        if not isinstance(whose, str):
            return _ask_of(whose, handler, asked)
        asked.tenant = whose
        return handler(asked)

    async def _without_handler(self, method: str) -> ApiResponse:
        if method == "OPTIONS":
            return empty_response(204, (b"allow", self._allowed.encode()))
        raise problems.method_not_allowed(self._allowed)

    def _fields(self, scope: Scope) -> dict[bytes, bytes]:
        """Return the header fields of a request that was meant for this service."""
        fields: dict[bytes, bytes] = dict(scope["headers"])
        if self._check_host is not None:
            self._check_host(fields)
        if b"origin" in fields and scope["method"] not in _SAFE:
            _check_origin(fields)
        return fields


async def _ask_of(
    tenant: Awaitable[str], handler: Handler, asked: ApiRequest
) -> ApiResponse | ResponseStream:
    asked.tenant = await tenant
    return await handler(asked)


def _reply(
    scope: Scope,
    make: Callable[[Any], ApiResponse],
    reply: Callable[[ApiResponse], None],
    result: asyncio.Future[Any],
) -> None:
    try:
        answer = make(result.result())
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is told
        answer = _answer_to(error, scope)
    reply(answer)


def _as_it_is(answer: ApiResponse) -> ApiResponse:
    return answer


async def _nothing() -> NoReturn:
    raise Disconnected


def _answer_to(error: BaseException, scope: Scope) -> ApiResponse:
    """Return what a caller is told of an error."""
    if isinstance(error, ApiError):
        return problem_response(error)
    if isinstance(error, RecursionError):
        return problem_response(problems.nested_too_deeply())
    if isinstance(error, StoreUnavailable):
        _logger.info("%s %s: %s", scope["method"], scope["path"], error)
        detail = (
            "The store is out of order. What was sent may have been kept: send it again. A task "
            "without an idempotencyKey may then be there twice."
        )
        return problem_response(problems.unavailable(detail))
    if isinstance(error, Overloaded):
        return problem_response(problems.unavailable(f"{error}.", error.retry_after))
    _logger.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return problem_response(problems.internal_error())


def _check_origin(fields: dict[bytes, bytes]) -> None:
    """Refuse what a page of another site asks a browser to send: here is no cookie, but no key
    either on loopback.
    """
    origin = fields[b"origin"]
    if origin.rpartition(b"://")[2] != fields.get(b"host"):
        raise problems.cross_site(origin.decode("latin-1")[:100])
