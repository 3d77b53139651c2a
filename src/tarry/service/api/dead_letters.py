"""`/dead-letters`: list, purge and replay dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.api import problems
from tarry.service.api.messages import NoQuery, json_response
from tarry.service.api.routing import Operation
from tarry.service.api.task_validation import check_epoch_ms
from tarry.service.api.tasks import DeadLetterQuery, check_reason
from tarry.service.api.views import internal_lane_name, replay_view
from tarry.service.model import ReplayRecord, Status
from tarry.service.store import TaskFilter
from tarry.wire.tasks import (
    LaneName,
    Page,
    PolicyName,
    PurgeResult,
    ReasonName,
    ReplayFilter,
    ReplayJob,
    ReplayRequest,
    RetryTask,
)

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse
    from tarry.service.api.tasks import TaskResource


_replay_decoder = msgspec.json.Decoder(ReplayRequest)
_PURGE_CHUNK = 500
"""Tasks that one call of the store deletes."""
_MAX_PURGE_CHUNKS = 20
"""Calls of the store per request; the response reports whether more dead letters are left."""


class PurgeQuery(
    msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True
):
    """Filter for the dead letters to purge; an empty filter matches all."""

    policy_id: PolicyName | None = None
    lane: LaneName | None = None
    reason: ReasonName | None = None


class DeadLetterResource:
    """The operations on the dead letters of a tenant."""

    def __init__(self, context: ApiContext, tasks: TaskResource) -> None:
        self._context = context
        self._tasks = tasks

    def operations(self) -> list[Operation]:
        """Return the operations on dead letters."""
        replay_path = "/dead-letters/replays/{replayId}"
        return [
            Operation(
                method="GET",
                path="/dead-letters",
                operation_id="listDeadLetters",
                summary="List dead letters, newest first.",
                handler=self.list_dead_letters,
                query_type=DeadLetterQuery,
                responses={200: Page[RetryTask]},
                error_statuses=(400, 422, 503),
            ),
            Operation(
                method="DELETE",
                path="/dead-letters",
                operation_id="purgeDeadLetters",
                summary="Delete dead letters permanently.",
                handler=self.purge,
                query_type=PurgeQuery,
                responses={200: PurgeResult},
                error_statuses=(400, 422, 503),
            ),
            Operation(
                method="POST",
                path="/dead-letters/replays",
                operation_id="createReplay",
                summary="Replay dead letters: a durable job with an optional rate. A dry run only "
                "counts them.",
                handler=self.start_replay,
                request_type=ReplayRequest,
                responses={201: ReplayJob, 200: ReplayJob},
                error_statuses=(400, 413, 415, 422, 503),
            ),
            Operation(
                method="GET",
                path="/dead-letters/replays",
                operation_id="listReplays",
                summary="List the latest 100 replays, newest first.",
                handler=self.list_replays,
                query_type=NoQuery,
                responses={200: Page[ReplayJob]},
                error_statuses=(400, 422, 503),
            ),
            Operation(
                method="GET",
                path=replay_path,
                operation_id="getReplay",
                summary="Get the progress of a replay.",
                handler=self.get_replay,
                query_type=NoQuery,
                responses={200: ReplayJob},
                error_statuses=(400, 404, 422, 503),
            ),
            Operation(
                method="DELETE",
                path=replay_path,
                operation_id="cancelReplay",
                summary="Cancel a running replay. Tasks that it has replayed are not affected.",
                handler=self.cancel_replay,
                query_type=NoQuery,
                responses={200: ReplayJob},
                error_statuses=(400, 404, 409, 422, 503),
            ),
        ]

    async def list_dead_letters(self, request: ApiRequest) -> ApiResponse:
        """List dead letters, newest first."""
        query = request.parse_query(DeadLetterQuery)
        return json_response(
            200, await self._tasks.read_page(request.tenant, query, Status.EXHAUSTED)
        )

    async def purge(self, request: ApiRequest) -> ApiResponse:
        """Delete dead letters permanently, up to 10,000 per request."""
        query = request.parse_query(PurgeQuery)
        check_reason("reason", query.reason)
        task_filter = TaskFilter(
            status=Status.EXHAUSTED,
            policy_id=query.policy_id,
            lane=None if query.lane is None else internal_lane_name(request.tenant, query.lane),
            reason=query.reason,
        )
        purged, has_more = 0, True
        for _ in range(_MAX_PURGE_CHUNKS):
            removed = await self._context.store.purge(request.tenant, task_filter, _PURGE_CHUNK)
            purged += removed
            has_more = removed == _PURGE_CHUNK
            if not has_more:
                break
        return json_response(200, PurgeResult(purged=purged, more=has_more))

    async def start_replay(self, request: ApiRequest) -> ApiResponse:
        """Start a replay job, or preview one (dry run)."""
        replay = await request.read_json(_replay_decoder, self._context.limits.max_request_bytes)
        replay_filter = replay.filter or ReplayFilter()
        check_epoch_ms("filter.before", replay_filter.before)
        check_reason("filter.reason", replay_filter.reason)
        lane = replay_filter.lane
        job = ReplayRecord(
            id=self._context.new_id(),
            tenant=request.tenant,
            lane=None if lane is None else internal_lane_name(request.tenant, lane),
            policy_id=replay_filter.policy_id,
            reason=replay_filter.reason,
            before=replay_filter.before or 0,
            rate=replay.rate or 0.0,
        )
        if replay.dry_run:
            job.matched = await self._context.store.count_dead(job)
            return json_response(200, replay_view(job, dry_run=True))
        job = await self._context.store.start_replay(job)
        location = (b"location", f"/dead-letters/replays/{job.id}".encode())
        return json_response(201, replay_view(job), location)

    async def list_replays(self, request: ApiRequest) -> ApiResponse:
        """List replay jobs."""
        request.parse_query(NoQuery)
        jobs = await self._context.store.list_replays(running=False, tenant=request.tenant)
        return json_response(200, Page(items=[replay_view(job) for job in jobs], next_cursor=None))

    async def get_replay(self, request: ApiRequest) -> ApiResponse:
        """Return a replay job."""
        request.parse_query(NoQuery)
        job = await self._context.store.get_replay(request.tenant, request.path_params["replayId"])
        if job is None:
            raise problems.no_such("replay")
        return json_response(200, replay_view(job))

    async def cancel_replay(self, request: ApiRequest) -> ApiResponse:
        """Cancel a running replay job."""
        request.parse_query(NoQuery)
        job = await self._context.store.cancel_replay(
            request.tenant, request.path_params["replayId"]
        )
        if job is None:
            raise problems.no_such("replay")
        if job.status == "done":
            raise problems.conflict(problems.ALREADY_FINISHED, "The replay is DONE.")
        return json_response(200, replay_view(job))
