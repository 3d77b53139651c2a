"""`/healthz`, `/readyz` and `/metrics`: for monitoring."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.messages import ApiResponse, json_response
from tarry.service.api.routing import Operation

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest


_STORE_TIMEOUT_S = 5.0
_CHECK_INTERVAL_S = 1.0
"""How long a check of the store is cached: it needs no API key, and each check is a write."""
_RETRY_AFTER_S = 5.0


class HealthStatus(msgspec.Struct):
    """The service is healthy."""

    status: Literal["ok"] = "ok"


class HealthResource:
    """The operations for monitoring."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._checked_at = float("-inf")
        self._store_error: str | None = None

    def operations(self) -> list[Operation]:
        """Return the operations for monitoring."""
        return [
            Operation(
                method="GET",
                path="/healthz",
                operation_id="isAlive",
                summary="Liveness: the process responds.",
                handler=self.get_liveness,
                responses={200: HealthStatus},
                is_public=True,
            ),
            Operation(
                method="GET",
                path="/readyz",
                operation_id="isReady",
                summary="Readiness: tasks are accepted and processed.",
                handler=self.get_readiness,
                responses={200: HealthStatus},
                error_statuses=(503,),
                is_public=True,
            ),
            Operation(
                method="GET",
                path="/metrics",
                operation_id="getMetrics",
                summary="Get the metrics in the Prometheus format; with keys, those of the tenant.",
                handler=self.get_metrics,
                responses={200: "text/plain"},
            ),
        ]

    async def get_liveness(self, _: ApiRequest) -> ApiResponse:
        """Return 200, which shows that the process responds."""
        return json_response(200, HealthStatus())

    async def get_readiness(self, _: ApiRequest) -> ApiResponse:
        """Return 200, or a problem that names the failing components."""
        await self._check_store()
        failing = self._context.engine.health.failing
        if self._store_error is not None:
            failing = {**failing, "store": self._store_error}
        if not failing:
            return json_response(200, HealthStatus())
        # A cause may name hosts and files. If keys are required, causes are only logged, because
        # callers without a key can read this endpoint.
        shown = dict.fromkeys(failing, "see the log") if self._context.require_keys else failing
        detail = f"Failing: {', '.join(sorted(failing))}."
        raise problems.unavailable(detail, _RETRY_AFTER_S, failing=shown)

    async def get_metrics(self, request: ApiRequest) -> ApiResponse:
        """Return the metrics of all tenants to the operator, and to another tenant only its own."""
        sees_all = not self._context.require_keys or request.tenant == self._context.operator
        body, content_type = await self._context.render_metrics(
            None if sees_all else request.tenant
        )
        return ApiResponse(200, body, [(b"content-type", content_type.encode())])

    async def _check_store(self) -> None:
        now = self._context.monotonic()
        if now - self._checked_at < _CHECK_INTERVAL_S:
            return
        self._checked_at = now
        try:
            async with asyncio.timeout(_STORE_TIMEOUT_S):
                await self._context.store.ping()
        except StoreUnavailable as error:
            self._store_error = str(error)
        except TimeoutError:
            self._store_error = f"no response for {_STORE_TIMEOUT_S:g} s"
        else:
            self._store_error = None
