"""`/downstreams`: the state of each dependency, and an operator's hand on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.service.api import problems
from tarry.service.api.problems import from_configuration_error
from tarry.service.api.request import NoQuery, PageQuery
from tarry.service.api.response import json_response
from tarry.service.api.routing import Operation
from tarry.service.api.views import downstream_view, internal_lane_name
from tarry.wire.tasks import Downstream, Page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.api.context import ApiContext
    from tarry.service.api.request import ApiRequest
    from tarry.service.api.response import ApiResponse
    from tarry.service.model import LaneRecord

_HANDS = {
    "pause": "Send nothing until it is resumed; what runs may finish.",
    "resume": "Open it again, slowly, whether it was paused or its breaker is open.",
    "reset": "Forget everything that was learnt of it, and open it.",
}


class DownstreamResource:
    """Tells and moves lanes."""

    def __init__(self, around: ApiContext) -> None:
        self._around = around

    def operations(self) -> list[Operation]:
        """Return the rows of the API about downstreams."""
        engine = self._around.engine
        hands = {"pause": engine.pause, "resume": engine.resume, "reset": engine.reset}
        return [
            Operation(
                method="GET", path="/downstreams", name="listDownstreams",
                does="List downstreams by name: breaker, budget, latency, backlog.",
                handler=self.search, query=PageQuery,
                answers={200: Page[Downstream]}, refuses=(400, 422, 503),
            ),
            *(
                Operation(
                    method="POST", path=f"/downstreams/{{lane}}/{name}", name=f"{name}Downstream",
                    does=_HANDS[name], handler=self._hand(act), query=NoQuery,
                    answers={200: Downstream}, refuses=(400, 404, 422, 503),
                )
                for name, act in hands.items()
            ),
            Operation(
                method="GET", path="/downstreams/{lane}", name="getDownstream",
                does="Tell one downstream.", handler=self.get, query=NoQuery,
                answers={200: Downstream}, refuses=(400, 404, 422, 503),
            ),
        ]  # fmt: skip

    async def search(self, asked: ApiRequest) -> ApiResponse:
        """List lanes."""
        query = asked.query(PageQuery)
        try:
            page = await self._around.store.list_lanes(
                asked.tenant, cursor=query.cursor, limit=query.limit
            )
        except ConfigurationError as error:
            raise from_configuration_error("cursor", error) from None
        items = [self._view(lane) for lane in page.items]
        return json_response(200, Page(items=items, next_cursor=page.cursor))

    async def get(self, asked: ApiRequest) -> ApiResponse:
        """Tell one lane."""
        asked.query(NoQuery)
        return json_response(200, self._view(await self._find(asked)))

    def _hand(
        self, act: Callable[[str], Awaitable[None]]
    ) -> Callable[[ApiRequest], Awaitable[ApiResponse]]:
        async def handler(asked: ApiRequest) -> ApiResponse:
            asked.query(NoQuery)
            lane = await self._find(asked)
            await act(lane.name)
            return json_response(200, self._view(await self._find(asked)))

        return handler

    async def _find(self, asked: ApiRequest) -> LaneRecord:
        lane = await self._around.store.get_lane(
            internal_lane_name(asked.tenant, asked.params["lane"])
        )
        if lane is None:
            raise problems.no_such("downstream")
        return lane

    def _view(self, lane: LaneRecord) -> Downstream:
        engine = self._around.engine
        return downstream_view(lane, engine.standing(lane.name), engine.clock.now())
