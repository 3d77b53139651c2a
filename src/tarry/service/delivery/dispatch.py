"""All ways to make an attempt, chosen by the scheme of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError, MissingExtra
from tarry.service.delivery.messages import DeliveryResult, Fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.delivery.messages import Delivery, DeliveryRequest


class DeliveryDispatcher:
    """HTTP, and gRPC from the first gRPC target on: `grpc` makes it then."""

    def __init__(self, http: Delivery, grpc: Callable[[], Delivery]) -> None:
        self._http = http
        self._make_grpc = grpc
        self._grpc: Delivery | None = None

    def send(self, request: DeliveryRequest) -> Awaitable[DeliveryResult]:
        """Make one attempt."""
        if request.url.startswith("grpc"):
            return self._send_grpc(request)
        return self._http.send(request)

    async def _send_grpc(self, request: DeliveryRequest) -> DeliveryResult:
        if self._grpc is None:
            try:
                self._grpc = self._make_grpc()
            except (MissingExtra, ConfigurationError) as error:
                return DeliveryResult(fault=Fault.INTERNAL, error=str(error))
        return await self._grpc.send(request)

    async def close(self) -> None:
        """Close them all, also when one of them fails to."""
        try:
            await self._http.close()
        finally:
            if self._grpc is not None:
                await self._grpc.close()
