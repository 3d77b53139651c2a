"""`/downstreams`: read the state of downstreams, and pause, resume or reset them.

The store has one lane (queue) per downstream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.service.api import problems
from tarry.service.api.messages import NoQuery, PageQuery, json_response
from tarry.service.api.problems import from_configuration_error
from tarry.service.api.routing import Operation
from tarry.service.api.views import downstream_view, internal_lane_name
from tarry.wire.tasks import DownstreamInfo, Page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse
    from tarry.service.model import LaneRecord


_SUMMARIES = {
    "pause": "Start no more attempts until the downstream is resumed. Running ones finish.",
    "resume": "Resume a downstream that is paused or whose breaker is open, with a slow start.",
    "reset": "Reset breaker, budget and latency of a downstream, and resume it.",
}


class DownstreamResource:
    """The operations on the downstreams of a tenant."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def operations(self) -> list[Operation]:
        """Return the operations on downstreams."""
        engine = self._context.engine
        actions = {"pause": engine.pause, "resume": engine.resume, "reset": engine.reset}
        return [
            Operation(
                method="GET",
                path="/downstreams",
                operation_id="listDownstreams",
                summary="List downstreams by name, with breaker, budget, latency and backlog.",
                handler=self.list_downstreams,
                query_type=PageQuery,
                responses={200: Page[DownstreamInfo]},
                error_statuses=(400, 422, 503),
            ),
            *(
                Operation(
                    method="POST",
                    path=f"/downstreams/{{lane}}/{name}",
                    operation_id=f"{name}Downstream",
                    summary=_SUMMARIES[name],
                    handler=self._action_handler(action),
                    query_type=NoQuery,
                    responses={200: DownstreamInfo},
                    error_statuses=(400, 404, 422, 503),
                )
                for name, action in actions.items()
            ),
            Operation(
                method="GET",
                path="/downstreams/{lane}",
                operation_id="getDownstream",
                summary="Get a downstream.",
                handler=self.get,
                query_type=NoQuery,
                responses={200: DownstreamInfo},
                error_statuses=(400, 404, 422, 503),
            ),
        ]

    async def list_downstreams(self, request: ApiRequest) -> ApiResponse:
        """List downstreams by name."""
        query = request.parse_query(PageQuery)
        try:
            page = await self._context.store.list_lanes(
                request.tenant, cursor=query.cursor, limit=query.limit
            )
        except ConfigurationError as error:
            raise from_configuration_error("cursor", error) from None
        items = [self._view(lane) for lane in page.items]
        return json_response(200, Page(items=items, next_cursor=page.cursor))

    async def get(self, request: ApiRequest) -> ApiResponse:
        """Return one downstream."""
        request.parse_query(NoQuery)
        return json_response(200, self._view(await self._find(request)))

    def _action_handler(
        self, action: Callable[[str], Awaitable[None]]
    ) -> Callable[[ApiRequest], Awaitable[ApiResponse]]:
        async def handler(request: ApiRequest) -> ApiResponse:
            request.parse_query(NoQuery)
            lane = await self._find(request)
            await action(lane.name)
            return json_response(200, self._view(await self._find(request)))

        return handler

    async def _find(self, request: ApiRequest) -> LaneRecord:
        lane = await self._context.store.get_lane(
            internal_lane_name(request.tenant, request.path_params["lane"])
        )
        if lane is None:
            raise problems.no_such("downstream")
        return lane

    def _view(self, lane: LaneRecord) -> DownstreamInfo:
        engine = self._context.engine
        return downstream_view(lane, engine.local_stats(lane.name), engine.clock.now())
