"""Dispatch of each request to HTTP or gRPC, by the scheme of its URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError, MissingExtra
from tarry.service.delivery.messages import DeliveryResult, Fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.delivery.messages import Delivery, DeliveryRequest


class DeliveryDispatcher:
    """Sends requests over HTTP or gRPC; `build_grpc` is called for the first gRPC target."""

    def __init__(self, http: Delivery, build_grpc: Callable[[], Delivery]) -> None:
        self._http = http
        self._build_grpc = build_grpc
        self._grpc: Delivery | None = None

    def send(self, request: DeliveryRequest) -> Awaitable[DeliveryResult]:
        """Make one attempt."""
        if request.url.startswith("grpc"):
            return self._send_grpc(request)
        return self._http.send(request)

    async def _send_grpc(self, request: DeliveryRequest) -> DeliveryResult:
        if self._grpc is None:
            try:
                self._grpc = self._build_grpc()
            except (MissingExtra, ConfigurationError) as error:
                return DeliveryResult(fault=Fault.INTERNAL, error=str(error))
        return await self._grpc.send(request)

    async def close(self) -> None:
        """Close both deliveries. gRPC is closed even if closing HTTP fails."""
        try:
            await self._http.close()
        finally:
            if self._grpc is not None:
                await self._grpc.close()
