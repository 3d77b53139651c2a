"""Limits the memory of large responses: pages of lists, and the results of batches.

A response is in memory until its client has read it. A page has up to a few MiB, so some hundred
clients that request pages and do not read them could use up the memory of the process.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from tarry.service.api import problems
from tarry.service.api.messages import ApiResponse
from tarry.service.tenant_shares import TenantShares

if TYPE_CHECKING:
    from tarry.service.api.messages import ApiRequest
    from tarry.service.api.routing import Handler
    from tarry.wire.http import Scope, Send

MAX_UNREAD_BYTES = 64 << 20
"""Limit for what clients of all tenants have not read yet; `TenantShares` limits each tenant."""
MAX_TENANT_CONCURRENT_PAGES = 2
"""Pages of a tenant that are read from the store and encoded at the same time. Their sizes are not
known yet, so `MAX_UNREAD_BYTES` does not limit them. More would not be faster: one thread reads,
and one encodes."""


class LargeResponse(ApiResponse):
    """A response whose size is counted until the client has read all but what buffers hold."""

    tenant: str
    unread_bytes: TenantShares

    async def send(self, scope: Scope, send: Send) -> None:
        """Send the response through ASGI."""
        size = len(self.body)
        self.unread_bytes.acquire(self.tenant, size)
        try:
            await ApiResponse.send(self, scope, send)
        finally:
            self.unread_bytes.release(self.tenant, size)


class LargeResponseLimiter:
    """Wraps handlers, so that the memory of their responses is limited and shared by tenants."""

    def __init__(self) -> None:
        self._unread_bytes = TenantShares(MAX_UNREAD_BYTES)
        self._page_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By tenant. A semaphore is removed when no request uses it."""

    def limit_unread(self, handler: Handler) -> Handler:
        """Return a handler that rejects requests of tenants with too many unread responses."""

        async def handle(request: ApiRequest) -> ApiResponse:
            if not self._unread_bytes.is_available(request.tenant):
                detail = "Clients have not read earlier large responses yet. Read these first."
                raise problems.unavailable(detail)
            response = cast("ApiResponse", await handler(request))
            fields = (response.status, response.body, response.headers)
            return LargeResponse(*fields, request.tenant, self._unread_bytes)

        return handle

    def limit_pages(self, handler: Handler) -> Handler:
        """Return a handler like that of `limit_unread`, which also waits for a slot."""
        limited = self.limit_unread(handler)

        async def handle(request: ApiRequest) -> ApiResponse:
            new_slots = asyncio.Semaphore(MAX_TENANT_CONCURRENT_PAGES)
            # The size is counted when `Endpoint` sends the response, right after the slot is free.
            async with self._page_slots.setdefault(request.tenant, new_slots):
                return cast("ApiResponse", await limited(request))

        return handle
