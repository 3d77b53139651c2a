"""`/healthz`, `/readyz` and `/metrics`: for those who watch the service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.response import ApiResponse, json_response
from tarry.service.api.routing import Operation

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.request import ApiRequest

_PATIENCE = 5.0
_FRESH_FOR = 1.0
"""Seconds: anybody may ask, and each look costs the store a write."""


class HealthStatus(msgspec.Struct):
    """All is well."""

    status: Literal["ok"] = "ok"


class HealthResource:
    """Says how the service is."""

    def __init__(self, around: ApiContext) -> None:
        self._around = around
        self._looked_at = float("-inf")
        self._store_ill: str | None = None

    def operations(self) -> list[Operation]:
        """Return the rows of the API for those who watch."""
        return [
            Operation(
                method="GET", path="/healthz", name="isAlive",
                does="Say that the process answers.", handler=self.alive,
                answers={200: HealthStatus}, is_open=True,
            ),
            Operation(
                method="GET", path="/readyz", name="isReady",
                does="Say whether tasks are taken and worked on.", handler=self.ready,
                answers={200: HealthStatus}, refuses=(503,), is_open=True,
            ),
            Operation(
                method="GET", path="/metrics", name="getMetrics",
                does="Tell the metrics, as Prometheus reads them; with keys, those of the tenant.",
                handler=self.metrics,
                answers={200: "text/plain"},
            ),
        ]  # fmt: skip

    async def alive(self, _: ApiRequest) -> ApiResponse:
        """Answer."""
        return json_response(200, HealthStatus())

    async def ready(self, _: ApiRequest) -> ApiResponse:
        """Look at the store and at what the engine found out of order."""
        await self._look()
        failing = self._around.engine.health.failing
        if self._store_ill is not None:
            failing = {**failing, "store": self._store_ill}
        if not failing:
            return json_response(200, HealthStatus())
        # Why is for the log where strangers may ask: it may name hosts and files.
        reported_failing = (
            dict.fromkeys(failing, "see the log") if self._around.require_keys else failing
        )
        detail = f"Out of order: {', '.join(sorted(failing))}."
        raise problems.unavailable(detail, 5.0, failing=reported_failing)

    async def metrics(self, asked: ApiRequest) -> ApiResponse:
        """Tell the metrics: all of them to an operator, and what is his own to another tenant."""
        sees_all = not self._around.require_keys or asked.tenant == self._around.operator
        body, kind = await self._around.render_metrics(None if sees_all else asked.tenant)
        return ApiResponse(200, body, [(b"content-type", kind.encode())])

    async def _look(self) -> None:
        now = self._around.monotonic()
        if now - self._looked_at < _FRESH_FOR:
            return
        self._looked_at = now
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._around.store.ping()
        except StoreUnavailable as error:
            self._store_ill = str(error)
        except TimeoutError:
            self._store_ill = f"it has not answered for {_PATIENCE:g} s"
        else:
            self._store_ill = None
