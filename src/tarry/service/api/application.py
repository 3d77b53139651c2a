"""The ASGI application of the API: all operations, their routes and the OpenAPI document."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, get_origin

from starlette.routing import Route, Router

from tarry.service.api import problems
from tarry.service.api.action_log import log_changes
from tarry.service.api.auth import DEFAULT_TENANT, Authenticator
from tarry.service.api.caller import CallerResource
from tarry.service.api.dashboard.handlers import dashboard_handlers
from tarry.service.api.dead_letters import DeadLetterResource
from tarry.service.api.downstreams import DownstreamResource
from tarry.service.api.events import EventResource
from tarry.service.api.large_responses import LargeResponseLimiter
from tarry.service.api.messages import ApiResponse, problem_response
from tarry.service.api.monitoring import HealthResource
from tarry.service.api.openapi import build_openapi
from tarry.service.api.overview import OverviewResource
from tarry.service.api.policies import PolicyResource
from tarry.service.api.policy_analysis import PolicyAnalysisResource
from tarry.service.api.reference.handlers import reference_handlers
from tarry.service.api.roles import Role
from tarry.service.api.routing import Endpoint, resource_operations
from tarry.service.api.shims.cloud_tasks import CloudTasksShim
from tarry.service.api.shims.qstash import QStashShim
from tarry.service.api.signing_secrets import SigningSecretResource
from tarry.service.api.task_creation import TaskCreation
from tarry.service.api.tasks import ResultWaiter, TaskResource
from tarry.service.api.workers import WorkerResource
from tarry.wire.tasks import BatchResults, Page

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.api.auth import Authenticate
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, BufferedRequestHandler
    from tarry.service.api.routing import Operation
    from tarry.service.api.shims.vendor_requests import Shim
    from tarry.wire.http import Receive, Scope, Send

_CREATE_TASK_PATH = "/retry-tasks"
_WORKER_PATHS = (
    "/healthz",
    "/readyz",
    "/metrics",
    "/workers",
    "/downstreams",
    "/events",
    "/whoami",
)
"""Paths that a process with the role `worker` serves: monitoring, and the operator's actions on
downstreams. A process with the role `api` has no local breakers and latencies."""
_PUBLIC_TENANT = ""
"""The tenant of requests to public paths, which need no API key."""


class Api:
    """The HTTP API as one ASGI application."""

    def __init__(self, context: ApiContext, *, version: str = "0") -> None:
        authenticator = Authenticator(context)
        self._result_waiter = ResultWaiter(context)
        tasks = TaskResource(context, self._result_waiter)
        self._events = EventResource(context)
        self._policy_analysis = PolicyAnalysisResource(context)
        task_creation = TaskCreation(context, self._result_waiter)
        resources = (
            task_creation,
            tasks,
            DeadLetterResource(context, tasks),
            PolicyResource(context),
            self._policy_analysis,
            DownstreamResource(context),
            SigningSecretResource(context),
            self._events,
            WorkerResource(context),
            OverviewResource(context),
            CallerResource(authenticator),
            HealthResource(context),
        )
        operations = [pair for resource in resources for pair in resource_operations(resource)]
        build_document = partial(
            build_openapi,
            operations,
            version=version,
            require_api_keys=context.require_api_keys,
            limits=context.limits,
        )
        handlers = reference_handlers(build_document)
        handlers |= dashboard_handlers(context.role, require_api_keys=context.require_api_keys)
        public_paths = set(handlers)  # so far, those of the documentation and the dashboard
        required_roles: dict[tuple[str, str], Role] = {}
        authenticate_by_path: dict[str, Authenticate | None] = {}
        """Without the paths for which an API key is looked up in the store."""
        limiter = LargeResponseLimiter()
        for operation, handler in operations:
            limited_handler = handler
            if not _is_served(operation, context.role):
                limited_handler = partial(_reject_for_role, context.role)
            elif get_origin(operation.response) is Page:
                limited_handler = limiter.limit_pages(handler)
            elif operation.response is BatchResults:
                limited_handler = limiter.limit_unread(handler)
            if operation.is_operator_action:
                limited_handler = log_changes(
                    operation.operation_id, limited_handler, authenticator.describe_key
                )
            handlers.setdefault(operation.path, {})[operation.method] = limited_handler
            required_roles[operation.path, operation.method] = operation.required_role
            if operation.is_public:
                public_paths.add(operation.path)
            elif not operation.needs_store:
                authenticate_by_path[operation.path] = authenticator.authenticate_without_store
        authenticate_by_path |= dict.fromkeys(public_paths)
        endpoints = {
            path: Endpoint(
                {
                    method: (handler, required_roles.get((path, method), Role.READ))
                    for method, handler in method_handlers.items()
                },
                authenticate_by_path.get(path, authenticator.authenticate),
                authenticator.check_host,
                default_tenant=_PUBLIC_TENANT if path in public_paths else DEFAULT_TENANT,
            )
            for path, method_handlers in handlers.items()
        }
        self._endpoint_by_fixed_path = {
            path: endpoint for path, endpoint in endpoints.items() if "{" not in path
        }
        """Endpoints of paths without parameters: a dict is faster than Starlette's router."""
        self.fast_routes: dict[bytes, BufferedRequestHandler] = {
            _CREATE_TASK_PATH.encode(): endpoints[_CREATE_TASK_PATH].handle_buffered
        }
        """By path: handlers for `POST` requests that the HTTP server has received completely."""
        # Fixed paths first, then longer paths first: `{lane}` would also match `{lane}/pause`.
        ordered_paths = sorted(endpoints, key=lambda path: ("{" in path, -path.count("/")))
        self._router = Router(
            [
                *(
                    Route(path.replace("{lane}", "{lane:path}"), endpoints[path])
                    for path in ordered_paths
                ),
                *_shim_routes(context, task_creation, authenticator),
            ],
            redirect_slashes=False,
            default=_reject_unknown_path,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        # The path of a mounted application begins with `root_path`, which only the router removes.
        is_unmounted_http = scope["type"] == "http" and not scope.get("root_path")
        endpoint = self._endpoint_by_fixed_path.get(scope["path"]) if is_unmounted_http else None
        await (endpoint or self._router)(scope, receive, send)

    def close(self) -> None:
        """End all requests that may take long, so that a server can stop.

        These are waits for a result (`Prefer: wait`), event streams, and analyses of policies.
        """
        self._result_waiter.close()
        self._events.close()
        self._policy_analysis.close()


def _shim_routes(
    context: ApiContext, task_creation: TaskCreation, authenticator: Authenticator
) -> list[Route]:
    """Return the routes of the vendors' APIs that the setting `compatibility` names."""
    routes: list[Route] = []
    # In this order, because a path of QStash matches all paths that begin with /v2/.
    shim_types: dict[str, Callable[[ApiContext, TaskCreation], Shim]] = {
        "cloud_tasks": CloudTasksShim,
        "qstash": QStashShim,
    }
    for name, shim_type in shim_types.items():
        if name not in context.compatibility:
            continue
        shim = shim_type(context, task_creation)
        reject = partial(_reject_for_role, context.role) if context.role == "worker" else None
        for path, handlers in shim.handlers.items():
            endpoint = Endpoint(
                {
                    method: (
                        reject
                        or log_changes(f"{name}.{method}", handler, authenticator.describe_key),
                        Role.READ if method == "GET" else Role.WRITE,
                    )
                    for method, handler in handlers.items()
                },
                authenticator.authenticate,
                authenticator.check_host,
                default_tenant=DEFAULT_TENANT,
                render_error=shim.render_error,
            )
            routes.append(Route(path, endpoint))
    return routes


def _is_served(operation: Operation, role: str) -> bool:
    """Return whether a process with this role serves an operation."""
    if role == "api":
        return operation.path != "/events"
    return role == "all" or operation.path.startswith(_WORKER_PATHS)


async def _reject_for_role(role: str, _: ApiRequest) -> ApiResponse:
    if role == "api":
        detail = (
            "This process makes no attempts (role api), so it has no events of attempts. Connect "
            "to a process with the role worker or all."
        )
    else:
        detail = (
            "This process only delivers tasks (role worker). Send the request to a process with "
            "the role api or all."
        )
    raise problems.WRONG_ROLE.error(detail)


async def _reject_unknown_path(scope: Scope, _: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
    else:
        detail = "There is no such path. GET /docs lists all paths."
        if scope["path"].startswith("/v2/"):
            detail += " The setting `compatibility` enables the paths of QStash and Cloud Tasks."
        error = problems.NOT_FOUND.error(detail)
        await problem_response(error).send(scope, send)
