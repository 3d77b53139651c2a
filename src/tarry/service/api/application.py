"""The API put together: one ASGI application.

Starlette finds the way to an endpoint; where the path has no parameters, a look-up does.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import msgspec
from starlette.routing import Route, Router

from tarry.service.api import problems
from tarry.service.api.auth import Authenticator
from tarry.service.api.dead_letters import DeadLetterResource
from tarry.service.api.docs import CONTENT_SECURITY_POLICY, build_docs_page
from tarry.service.api.downstreams import DownstreamResource
from tarry.service.api.events import EventResource
from tarry.service.api.health import HealthResource
from tarry.service.api.openapi import build_openapi
from tarry.service.api.policies import PolicyResource
from tarry.service.api.prefer import ResultWaiter
from tarry.service.api.response import ApiResponse, problem_response
from tarry.service.api.routing import Endpoint, Operation
from tarry.service.api.task_creation import TaskCreation
from tarry.service.api.tasks import TaskResource

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.api.context import ApiContext
    from tarry.service.api.request import ApiRequest
    from tarry.service.api.response import CompleteRequestHandler
    from tarry.service.api.routing import Handler
    from tarry.wire.asgi import Receive, Scope, Send


_HOT = "/retry-tasks"


class Api:
    """Every row of the API behind one ASGI application."""

    def __init__(self, around: ApiContext, *, version: str = "0") -> None:
        self._waiting = ResultWaiter(around)
        tasks = TaskResource(around, self._waiting)
        self._events = EventResource(around)
        operations = [
            *TaskCreation(around, self._waiting).operations(),
            *tasks.operations(),
            *DeadLetterResource(around, tasks).operations(),
            *PolicyResource(around).operations(),
            *DownstreamResource(around).operations(),
            *self._events.operations(),
            *HealthResource(around).operations(),
        ]
        rows = tuple(operations)
        operations += _self_description(
            cache(lambda: build_openapi(rows, version=version, keys=around.require_keys))
        )
        endpoints = _endpoints(operations, Authenticator(around))
        self._fixed = {path: one for path, one in endpoints.items() if "{" not in path}
        self.whole: dict[bytes, CompleteRequestHandler] = {_HOT.encode(): self._fixed[_HOT].answer}
        """By their paths, what serves a `POST` that has arrived whole."""
        # Longer paths first: `{lane}` must not swallow `{lane}/pause`.
        self._router = Router(
            [
                Route(path.replace("{lane}", "{lane:path}"), endpoint)
                for path, endpoint in sorted(
                    endpoints.items(), key=lambda item: ("{" in item[0], -item[0].count("/"))
                )
            ],
            redirect_slashes=False,
            default=_nowhere,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        is_plain = scope["type"] == "http" and not scope.get("root_path")
        endpoint = self._fixed.get(scope["path"]) if is_plain else None
        await (endpoint or self._router)(scope, receive, send)

    def close(self) -> None:
        """End streams and waits, so that their connections do not hold up the end."""
        self._waiting.close()
        self._events.close()


def _endpoints(operations: list[Operation], door: Authenticator) -> dict[str, Endpoint]:
    handlers: dict[str, dict[str, Handler]] = {}
    is_open: dict[str, bool] = {}
    for operation in operations:
        handlers.setdefault(operation.path, {})[operation.method] = operation.handler
        is_open[operation.path] = operation.is_open
    return {
        path: Endpoint(methods, "" if is_open[path] else door.tenant_of, door.check_host)
        for path, methods in handlers.items()
    }


def _self_description(document: Callable[[], dict[str, object]]) -> list[Operation]:
    """Return the rows that tell about the others, and are not in the document themselves."""
    encoded = cache(lambda: msgspec.json.encode(document()))
    html = cache(lambda: build_docs_page(document()))

    async def as_json(_: ApiRequest) -> ApiResponse:
        return ApiResponse(200, encoded(), [(b"content-type", b"application/json")])

    async def as_html(_: ApiRequest) -> ApiResponse:
        headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", CONTENT_SECURITY_POLICY),
        ]
        return ApiResponse(200, html(), headers)

    return [
        Operation(
            method="GET", path=path, name=path[1:], does="Tell about the API.", handler=handler,
            answers={}, is_open=True,
        )
        for path, handler in (("/openapi.json", as_json), ("/docs", as_html))
    ]  # fmt: skip


async def _nowhere(scope: Scope, _: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
    else:
        nothing = problems.no_such("path: GET /docs lists them")
        await problem_response(nothing).send(scope, send)
