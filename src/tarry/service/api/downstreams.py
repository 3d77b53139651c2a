"""`/downstreams`: operations on downstreams. The API calls a lane of the store a downstream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from tarry.service.api import problems
from tarry.service.api.messages import NoQuery, PageQuery, decode_json, json_response
from tarry.service.api.quotas import too_many_lanes
from tarry.service.api.routing import Operation
from tarry.service.api.views import downstream_view
from tarry.service.delivery.targets import parse_lane_name, stored_lane_name
from tarry.service.engine.limits import MAX_CONFIGURED_LANES
from tarry.service.model import LaneActivity, LaneRecord
from tarry.service.store import LaneWriteStatus
from tarry.wire.tasks import DownstreamInfo, DownstreamLimitsRequest, Page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse


_NO_ACTIVITY = LaneActivity()
_YIELD_EVERY_LANES = 50
"""Number of views, of up to 60 us each, after which a list yields to the event loop."""
_MAX_SHOWN_NAME = 200
_limits_decoder = msgspec.json.Decoder(DownstreamLimitsRequest)


class CreateLaneQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of an operation that can create a downstream."""

    create: bool = False
    """Also change a downstream that no task of the tenant has used."""


class DownstreamResource:
    """The operations on the downstreams of a tenant."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    @Operation("GET", "/downstreams", "listDownstreams", Page[DownstreamInfo], query=PageQuery)
    async def list_downstreams(self, request: ApiRequest) -> ApiResponse:
        """List downstreams, sorted by name, with breaker, budget, latency and backlog."""
        query = request.parse_query(PageQuery)
        with problems.convert_errors("cursor"):
            page = await self._context.store.list_lanes(
                request.tenant, cursor=query.cursor, limit=query.limit
            )
        activity = await self._context.engine.read_activity([lane.name for lane in page.items])
        items: list[DownstreamInfo] = []
        for number, lane in enumerate(page.items):
            lane_activity = activity.get(lane.name, _NO_ACTIVITY)
            items.append(self._view(lane, lane_activity, with_history=False))
            if not number % _YIELD_EVERY_LANES:
                await asyncio.sleep(0)
        return json_response(200, Page(items=items, next_cursor=page.cursor))

    @Operation(
        "PUT",
        "/downstreams/{lane}",
        "setDownstreamLimits",
        DownstreamInfo,
        errors=(404, 429),
        body=DownstreamLimitsRequest,
        query=CreateLaneQuery,
    )
    async def set_limits(self, request: ApiRequest) -> ApiResponse:
        """Replace the limits of a downstream; `{}` removes them.

        With `create`, also before its first task.
        """
        max_bytes = self._context.limits.max_request_bytes
        body, query = await request.read_body_and_query(max_bytes, CreateLaneQuery)
        limits = decode_json(_limits_decoder, body)
        name, before = await self._find_or_create(request, query, "limit")
        limits_before = self._context.engine.configured_limits(name)[0]
        is_default = limits == DownstreamLimitsRequest()
        status = await self._context.engine.set_limits(name, None if is_default else limits)
        if status is LaneWriteStatus.TOO_MANY_LIMITED:
            raise problems.TENANT_LIMIT.error(
                f"The tenant has limits for {MAX_CONFIGURED_LANES} downstreams, the maximum. "
                "Remove limits that are not needed: PUT /downstreams/LANE with the body {}."
            )
        self._check_lane_quota(status)
        response, after = await self._get_changed(name)
        request.report_change(
            after.lane,
            None if before is None else {"limits": msgspec.to_builtins(limits_before)},
            {"limits": msgspec.to_builtins(after.limits)},
        )
        return response

    @Operation(
        "POST",
        "/downstreams/{lane}/pause",
        "pauseDownstream",
        DownstreamInfo,
        errors=(429,),
        query=CreateLaneQuery,
    )
    async def pause(self, request: ApiRequest) -> ApiResponse:
        """Pause a downstream. No attempts start until it is resumed.

        With `create`, also before its first task.

        The time of the pause counts towards the total budgets (`totalBudgetMs`) of waiting tasks.
        """
        query = request.parse_query(CreateLaneQuery)
        name, before = await self._find_or_create(request, query, "pause")
        self._check_lane_quota(await self._context.engine.pause(name))
        return await self._report_state(request, name, before)

    @Operation("POST", "/downstreams/{lane}/resume", "resumeDownstream", DownstreamInfo)
    async def resume(self, request: ApiRequest) -> ApiResponse:
        """Resume a downstream that is paused or whose breaker is open, with a slow start."""
        return await self._change(request, self._context.engine.resume)

    @Operation("POST", "/downstreams/{lane}/reset", "resetDownstream", DownstreamInfo)
    async def reset(self, request: ApiRequest) -> ApiResponse:
        """Reset breaker, budget and latency of a downstream, and resume it."""
        return await self._change(request, self._context.engine.reset)

    @Operation("GET", "/downstreams/{lane}", "getDownstream", DownstreamInfo)
    async def get(self, request: ApiRequest) -> ApiResponse:
        """Get a downstream, with the history of its breaker."""
        request.parse_query(NoQuery)
        name = stored_lane_name(request.tenant, request.path_parameter("lane"))
        return json_response(200, await self._full_view(await self._find(name)))

    def _check_lane_quota(self, status: LaneWriteStatus) -> None:
        if status is LaneWriteStatus.TOO_MANY_LANES:
            raise too_many_lanes(self._context.engine.limits)

    async def _change(
        self, request: ApiRequest, change: Callable[[str], Awaitable[None]]
    ) -> ApiResponse:
        request.parse_query(NoQuery)
        name = stored_lane_name(request.tenant, request.path_parameter("lane"))
        before = self._view(await self._find(name), _NO_ACTIVITY, with_history=False)
        await change(name)
        return await self._report_state(request, name, before)

    async def _report_state(
        self, request: ApiRequest, name: str, before: DownstreamInfo | None
    ) -> ApiResponse:
        response, after = await self._get_changed(name)
        request.report_change(after.lane, None if before is None else _state(before), _state(after))
        return response

    async def _find(self, name: str) -> LaneRecord:
        lane = await self._context.store.get_lane(name)
        if lane is None:
            raise _no_such_downstream(name)
        return lane

    async def _find_or_create(
        self, request: ApiRequest, query: CreateLaneQuery, action: str
    ) -> tuple[str, DownstreamInfo | None]:
        """Return the stored name of the lane in the path, and the lane, or None if it is new.

        Raises ApiError if the lane does not exist and `create` is not set. Otherwise, an operator
        who uses a key of another tenant, or misspells the name, would get a 200, and the lane of
        the tasks would continue.
        """
        with problems.convert_errors("lane"):
            lane = parse_lane_name(request.path_parameter("lane"))
            name = stored_lane_name(request.tenant, lane)
        record = await self._context.store.get_lane(name)
        if record is None and not query.create:
            fix = f" To {action} it before its first task, add ?create=true (tarry: --create)."
            raise _no_such_downstream(name, fix)
        before = None if record is None else self._view(record, _NO_ACTIVITY, with_history=False)
        return name, before

    async def _get_changed(self, name: str) -> tuple[ApiResponse, DownstreamInfo]:
        # A lane without tasks may be deleted as soon as it is resumed or its limits are removed.
        lane = await self._context.store.get_lane(name)
        tenant = name.partition("/")[0]
        view = await self._full_view(lane or LaneRecord(name=name, tenant=tenant))
        return json_response(200, view), view

    async def _full_view(self, lane: LaneRecord) -> DownstreamInfo:
        activity = await self._context.engine.read_activity([lane.name])
        return self._view(lane, activity.get(lane.name, _NO_ACTIVITY), with_history=True)

    def _view(
        self, lane: LaneRecord, activity: LaneActivity, *, with_history: bool
    ) -> DownstreamInfo:
        engine = self._context.engine
        return downstream_view(
            lane,
            engine.configured_limits(lane.name),
            # A process without attempts has a lane only after a request that changed the lane.
            None if self._context.role == "api" else engine.local_stats(lane.name),
            activity,
            engine.clock.now_ms(),
            waiting_for=engine.waiting_for(lane),
            with_history=with_history,
        )


def _state(downstream: DownstreamInfo) -> dict[str, str]:
    return {"state": downstream.state, "breaker": downstream.shared_breaker}


def _no_such_downstream(name: str, fix: str = "") -> problems.ApiError:
    tenant, _, lane = name.partition("/")
    return problems.NOT_FOUND.error(
        f"Tenant {tenant} has no downstream {lane[:_MAX_SHOWN_NAME]}. Check the name (GET "
        f"/downstreams lists all), and whether the API key belongs to the tenant of the tasks.{fix}"
    )
