"""Operations of the API, and the endpoint that dispatches the requests of one path to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import msgspec

from tarry.errors import Overloaded, StoreUnavailable
from tarry.runtime.effects import effects
from tarry.service.api import messages, problems
from tarry.service.api.messages import (
    HEADER_FIELDS,
    ApiRequest,
    ApiResponse,
    PendingResponse,
)
from tarry.service.api.roles import Role

if TYPE_CHECKING:
    from tarry.wire.http import Receive, Scope, Send

_logger = logging.getLogger("tarry.service")
_READ_METHODS = frozenset({"GET", "HEAD"})
_LOG_INTERVAL_S = 10.0
"""In which one line is logged about requests that were rejected because of the store."""
_METHODS_WITHOUT_ORIGIN_CHECK = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITES = frozenset({b"none", b"same-origin"})
"""Accepted values of `Sec-Fetch-Site`. `same-site` is another port or subdomain, so another origin,
and a value with blanks or a list could come from a proxy that has joined two headers."""
_SINGLE_HEADERS = {
    name.lower().encode(): name
    for name in ("Authorization", "Content-Type", "Host", "Origin", "Sec-Fetch-Site", "X-API-Key")
}
"""Headers that a request must not repeat, by name in lower case."""

REQUIRED_ROLES = {
    "createTask": Role.WRITE,
    "createTasks": Role.WRITE,
    "cancelTask": Role.WRITE,
    "cancelTasks": Role.WRITE,
    "retryTask": Role.WRITE,
    "createReplay": Role.WRITE,
    "cancelReplay": Role.WRITE,
    "setDownstreamLimits": Role.WRITE,
    "pauseDownstream": Role.WRITE,
    "resumeDownstream": Role.WRITE,
    "resetDownstream": Role.WRITE,
    "purgeDeadLetters": Role.ADMIN,  # deletes tasks for ever
    "createPolicy": Role.ADMIN,
    "putPolicy": Role.ADMIN,
    "deletePolicy": Role.ADMIN,
    "createSigningSecret": Role.ADMIN,
    "deleteSigningSecret": Role.ADMIN,
    "planRetries": Role.READ,  # computes a schedule, and stores nothing
    "simulatePolicy": Role.READ,  # stores nothing
    "advisePolicy": Role.READ,  # stores nothing
}
"""The role that an API key needs for an operation. A GET operation is not listed: it needs READ."""

Handler: TypeAlias = Callable[[ApiRequest], Awaitable[ApiResponse | messages.ResponseStream]]
_NO_OPERATOR_ACTIONS = frozenset(
    {"createTask", "createTasks", "planRetries", "simulatePolicy", "advisePolicy"}
)
"""Operations that are not a GET, but change nothing except that they add tasks."""
H = TypeVar("H", bound=Callable[..., Any])


class Operation(msgspec.Struct, frozen=True):
    """An HTTP method of a path, with its documentation for OpenAPI.

    Decorates its handler, a function of a resource class. The handler's docstring is the summary of
    the operation.
    """

    method: str
    path: str
    operation_id: str
    response: Any
    """The type of a successful response's JSON, a tuple of other media types, or None: no body."""
    statuses: tuple[int, ...] = (200,)
    """Statuses of successful responses."""
    errors: tuple[int, ...] = ()
    """Error statuses besides those that `all_error_statuses` derives from the other fields."""
    body: type[msgspec.Struct] | None = None
    """The type of the JSON of a request."""
    query: type[msgspec.Struct] | None = messages.NoQuery
    """The query parameters of an operation without a JSON body; None if they are ignored."""
    headers: dict[str, str] = {}
    """Request headers that change the response, with their descriptions."""
    callback: type[msgspec.Struct] | None = None
    """The type of the JSON that is later posted to the `callbackUrl` of the request."""
    is_public: bool = False
    """Whether no API key is needed."""
    needs_store: bool = True
    """Whether the operation fails while the store does not respond."""

    def __call__(self, handler: H) -> H:
        """Declare the handler of the operation."""
        _operations[handler] = self
        return handler

    @property
    def required_role(self) -> Role:
        """The role that an API key needs. Each operation that is not a GET must have one."""
        return Role.READ if self.method == "GET" else REQUIRED_ROLES[self.operation_id]

    @property
    def is_operator_action(self) -> bool:
        """Whether the changes of the operation are logged, see `action_log`."""
        return self.method != "GET" and self.operation_id not in _NO_OPERATOR_ACTIONS

    @property
    def all_error_statuses(self) -> list[int]:
        """All error statuses except 401, which every operation that needs an API key can return."""
        statuses = {*self.errors}
        if self.body is not None:
            statuses |= {400, 413, 415, 422, 431, 503}
        elif self.query is not None:
            statuses |= {400, 422, 431, 503}
            if "{" in self.path:
                statuses.add(404)
        return sorted(statuses)


_operations: dict[Callable[..., Any], Operation] = {}
"""Operations by handler, which is a method of a resource class."""


def resource_operations(resource: object) -> list[tuple[Operation, Handler]]:
    """Return the operations of a resource with their handlers, in the order of their definition."""
    methods = vars(type(resource)).items()
    return [
        (_operations[function], getattr(resource, name))
        for name, function in methods
        if isinstance(function, FunctionType) and function in _operations
    ]


class Endpoint:
    """The ASGI application for one path: authenticates requests and calls their handlers."""

    def __init__(
        self,
        handlers: dict[str, tuple[Handler, Role]],
        authenticate: Callable[[ApiRequest, Role], Awaitable[str] | str] | None,
        check_host: Callable[[dict[bytes, bytes]], None] | None,
        *,
        default_tenant: str,
        render_error: Callable[[problems.ApiError], ApiResponse] = messages.problem_response,
    ) -> None:
        """`handlers` are by method, each with the role that its API key needs.

        If `authenticate` is None, all requests belong to `default_tenant`, whatever their role.
        `handle_buffered` ignores `render_error`: it always responds with problem details.
        """
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]
        self._authenticate = authenticate
        self._default_tenant = default_tenant
        self._check_host = check_host
        self._render_error = render_error
        self._allowed_methods = ", ".join(sorted({*self._handlers, "OPTIONS"}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request. Every exception except `Disconnected` becomes a response."""
        try:
            response = await self._dispatch(scope, receive)
        except messages.Disconnected:
            return
        except Exception as error:  # noqa: BLE001 - reported to the caller
            response = self._render_error(_to_api_error(error, scope))
        if isinstance(response, ApiResponse):
            await response.send(scope, send)
        else:
            await response.run(receive, send)

    def handle_buffered(
        self, scope: Scope, body: bytes, respond: Callable[[ApiResponse], None]
    ) -> asyncio.Task[Any] | None:
        """Handle a complete request; call `respond` once. The handler must not return a stream.

        Return the asyncio task that computes the response, or None if no asyncio task is needed.
        """
        try:
            awaitable = self._dispatch(scope, _receive_disconnect, body)
        except Exception as error:  # noqa: BLE001 - reported to the caller
            respond(_error_response(error, scope))
            return None
        if not isinstance(awaitable, PendingResponse):
            awaitable = PendingResponse(awaitable, lambda response: response)
        future, task = awaitable.result, None
        if not isinstance(future, asyncio.Future):
            future = task = asyncio.ensure_future(future)
        future.add_done_callback(partial(_on_result, scope, awaitable.build_response, respond))
        return task

    def _dispatch(
        self, scope: Scope, receive: Receive, body: bytes | None = None
    ) -> Awaitable[ApiResponse | messages.ResponseStream]:
        # A plain function, so that `handle_buffered` needs no asyncio task if the API key is cached
        # and the handler returns a PendingResponse.
        method = scope["method"]
        found = self._handlers.get(method)
        if found is None:
            return self._handle_other_method(method)
        handler, required_role = found
        headers: dict[bytes, bytes] = scope.get(HEADER_FIELDS) or dict(scope["headers"])
        if len(headers) != len(scope["headers"]):
            _check_repeated_headers(scope["headers"])
        if self._check_host is not None:
            self._check_host(headers)
        if (
            b"origin" in headers or b"sec-fetch-site" in headers
        ) and method not in _METHODS_WITHOUT_ORIGIN_CHECK:
            _check_origin(headers)
        request = ApiRequest(scope, receive, headers, body)
        authenticate = self._authenticate
        tenant = (
            self._default_tenant if authenticate is None else authenticate(request, required_role)
        )
        if not isinstance(tenant, str):  # an awaitable, because the API key is not cached
            return _authenticate_and_handle(tenant, handler, request)
        request.tenant = tenant
        return handler(request)

    async def _handle_other_method(self, method: str) -> ApiResponse:
        allow = (b"allow", self._allowed_methods.encode())
        if method == "OPTIONS":
            return ApiResponse(204, b"", [allow])
        detail = f"This path supports {self._allowed_methods}."
        raise problems.METHOD_NOT_ALLOWED.error(detail, headers=[allow])


async def _authenticate_and_handle(
    pending_tenant: Awaitable[str], handler: Handler, request: ApiRequest
) -> ApiResponse | messages.ResponseStream:
    request.tenant = await pending_tenant
    return await handler(request)


def _on_result(
    scope: Scope,
    build_response: Callable[[Any], ApiResponse],
    respond: Callable[[ApiResponse], None],
    future: asyncio.Future[Any],
) -> None:
    try:
        response = build_response(future.result())
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - reported to the caller
        response = _error_response(error, scope)
    respond(response)


async def _receive_disconnect() -> NoReturn:
    raise messages.Disconnected


def _error_response(error: BaseException, scope: Scope) -> ApiResponse:
    return messages.problem_response(_to_api_error(error, scope))


def _to_api_error(error: BaseException, scope: Scope) -> problems.ApiError:
    """Return the ApiError for an exception; log store failures and unexpected exceptions."""
    if isinstance(error, problems.ApiError):
        return error
    if isinstance(error, RecursionError):
        return problems.nested_too_deeply()
    if isinstance(error, StoreUnavailable):
        _store_failures.log(scope, error)
        detail = "The store is unavailable. Send the request again."
        if scope["method"] not in _READ_METHODS:
            detail += (
                " It may have been stored already, so a task without an idempotencyKey may then "
                "exist twice."
            )
        return problems.unavailable(detail)
    if isinstance(error, Overloaded):
        return problems.unavailable(f"{error}.", error.retry_after)
    _logger.error("request failed: %s %s", scope["method"], scope["path"], exc_info=error)
    return problems.INTERNAL_ERROR.error("The service failed; see its log.")


class _StoreFailureLog:
    """Logs requests that the store could not serve: the first at once, then one line per interval.

    With a line for each request, an outage would fill the log at the rate of the requests.
    """

    def __init__(self) -> None:
        self._next_log_at = float("-inf")
        self._unlogged_count = 0
        self._timer: asyncio.TimerHandle | None = None

    def log(self, scope: Scope, error: StoreUnavailable) -> None:
        """Log a rejected request, or count it for the next line."""
        self._unlogged_count += 1
        now = effects.now()
        if now >= self._next_log_at:
            self._log(scope, error, now)
        elif self._unlogged_count == 1:
            # At the end of the interval, because the next request may be rejected days later.
            loop = asyncio.get_running_loop()
            delay = self._next_log_at - now
            self._timer = loop.call_later(delay, self._log, scope, error, self._next_log_at)

    def _log(self, scope: Scope, error: StoreUnavailable, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        message = "store unavailable, request=%s %s rejected_requests=%d: %s"
        count, self._unlogged_count = self._unlogged_count, 0
        self._next_log_at = now + _LOG_INTERVAL_S
        _logger.info(message, scope["method"], scope["path"], count, error)


_store_failures = _StoreFailureLog()


def _check_repeated_headers(headers: list[tuple[bytes, bytes]]) -> None:
    """Raise ApiError if a header is repeated that a proxy could have read differently.

    A proxy may check the first value of `Authorization` while the service would use the last one.
    """
    names = [name for name, _ in headers if name in _SINGLE_HEADERS]
    for name in names:
        if names.count(name) > 1:
            raise problems.invalid(_SINGLE_HEADERS[name], "must be given only once", status=400)


def _check_origin(headers: dict[bytes, bytes]) -> None:
    """Raise ApiError for a request that a browser sends for a web page of another origin.

    A service on loopback may need no API key. Such a page could then use the service.
    """
    if headers.get(b"sec-fetch-site", b"none").lower() not in _OWN_SITES:
        raise problems.CROSS_SITE.error("Requests from web pages of other sites are not accepted.")
    origin = headers.get(b"origin")
    if origin is None:
        return
    if origin.rpartition(b"://")[2] != headers.get(b"host"):
        text = origin.decode("latin-1")[:100]
        raise problems.CROSS_SITE.error(f"Requests from web pages of {text} are not accepted.")
