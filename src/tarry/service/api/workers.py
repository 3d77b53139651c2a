"""`GET /workers`: the processes of the service that use the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.api import problems
from tarry.service.api.messages import NoQuery, json_response
from tarry.service.api.routing import Operation
from tarry.service.records.workers import list_workers
from tarry.wire.tasks import Page, WorkerInfo

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse


class WorkerResource:
    """The operation on the processes of the service."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    @Operation("GET", "/workers", "listWorkers", Page[WorkerInfo], errors=(403,))
    async def list_workers(self, request: ApiRequest) -> ApiResponse:
        """List the processes of the service. With API keys, only the operator may do this."""
        request.parse_query(NoQuery)
        context = self._context
        if context.require_api_keys and request.tenant != context.operator_tenant:
            detail = "Only keys of the tenant that the setting `operator` names list processes."
            raise problems.OPERATOR_REQUIRED.error(detail)
        workers = await list_workers(context.store)
        items = [msgspec.convert(worker, WorkerInfo, from_attributes=True) for worker in workers]
        return json_response(200, Page(items=items, next_cursor=None))
