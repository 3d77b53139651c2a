"""Monitoring: `/healthz`, `/readyz` and `/metrics`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import msgspec

from tarry.service.api import problems
from tarry.service.api.messages import ApiResponse, json_response
from tarry.service.api.routing import Operation
from tarry.service.engine.metrics import OPENMETRICS_MEDIA_TYPE

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest

_NOT_READY_RETRY_AFTER_S = 5.0


class HealthStatus(msgspec.Struct, omit_defaults=True):
    """The service is healthy. `failing` has partitions of the store that fail, and their causes."""

    status: Literal["ok"]
    failing: dict[str, str] = {}


class HealthResource:
    """The operations for liveness, readiness and metrics."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    @Operation("GET", "/healthz", "isAlive", HealthStatus, query=None, is_public=True)
    async def get_liveness(self, _: ApiRequest) -> ApiResponse:
        """Liveness: the process responds."""
        return json_response(200, HealthStatus("ok"))

    @Operation("GET", "/readyz", "isReady", HealthStatus, errors=(503,), query=None, is_public=True)
    async def get_readiness(self, _: ApiRequest) -> ApiResponse:
        """Readiness: the service can accept and process tasks."""
        engine = self._context.engine
        await asyncio.gather(engine.store_check.run_if_due(), engine.body_store_check.run_if_due())
        failing, is_ready = engine.health.failing, not engine.health.blocking
        # A cause may name hosts and files. If keys are required, causes are only logged, because
        # callers without a key can read this endpoint.
        if self._context.require_api_keys:
            failing = dict.fromkeys(failing, "see the log")
        if is_ready:  # for the tenants of the other partitions
            return json_response(200, HealthStatus("ok", failing))
        detail = f"Failing: {', '.join(sorted(failing))}."
        raise problems.unavailable(detail, _NOT_READY_RETRY_AFTER_S, failing=failing)

    @Operation(
        "GET",
        "/metrics",
        "getMetrics",
        ("text/plain", OPENMETRICS_MEDIA_TYPE),
        query=None,
        needs_store=False,
    )
    async def get_metrics(self, request: ApiRequest) -> ApiResponse:
        """Get Prometheus metrics of the tenant; of all tenants for the operator or without keys."""
        context = self._context
        reads_all = not context.require_api_keys or request.tenant == context.operator_tenant
        tenant = None if reads_all else request.tenant
        accept = b",".join(request.header_values(b"accept")).decode("latin-1")
        body, content_type = await context.render_metrics(tenant, accept)
        return ApiResponse(200, body, [(b"content-type", content_type.encode())])
