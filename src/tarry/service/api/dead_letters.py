"""`/dead-letters`: tasks that wait for a person, and the jobs that bring them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.api import problem_types, problems
from tarry.service.api.request import NoQuery
from tarry.service.api.response import json_response
from tarry.service.api.routing import Operation
from tarry.service.api.task_validation import check_epoch_ms
from tarry.service.api.tasks import DeadLetterQuery, check_reason
from tarry.service.api.views import internal_lane_name, replay_view
from tarry.service.model import ReplayRecord, Status
from tarry.service.store import TaskFilter
from tarry.wire.tasks import (
    LaneName,
    NewReplay,
    Page,
    PolicyName,
    Purged,
    ReasonName,
    ReplayFilter,
    ReplayJob,
    RetryTask,
)

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.request import ApiRequest
    from tarry.service.api.response import ApiResponse
    from tarry.service.api.tasks import TaskResource

_new = msgspec.json.Decoder(NewReplay)
_STEP = 500
_STEPS = 20
"""Steps of one request to purge: what is left is told, and takes another."""


class PurgeQuery(
    msgspec.Struct, rename="camel", kw_only=True, frozen=True, forbid_unknown_fields=True
):
    """Which dead letters to remove; nothing asks for all."""

    policy_id: PolicyName | None = None
    lane: LaneName | None = None
    reason: ReasonName | None = None


class DeadLetterResource:
    """What a tenant may do with what has died."""

    def __init__(self, around: ApiContext, tasks: TaskResource) -> None:
        self._around = around
        self._tasks = tasks

    def operations(self) -> list[Operation]:
        """Return the rows of the API about dead letters."""
        one = "/dead-letters/replays/{replayId}"
        return [
            Operation(
                method="GET", path="/dead-letters", name="listDeadLetters",
                does="List dead letters, newest first.", handler=self.search,
                query=DeadLetterQuery, answers={200: Page[RetryTask]}, refuses=(400, 422, 503),
            ),
            Operation(
                method="DELETE", path="/dead-letters", name="purgeDeadLetters",
                does="Remove dead letters for good.", handler=self.purge,
                query=PurgeQuery, answers={200: Purged}, refuses=(400, 422, 503),
            ),
            Operation(
                method="POST", path="/dead-letters/replays", name="createReplay",
                does="Bring dead letters back: a durable job, at a rate. A dry run counts them.",
                handler=self.start, takes=NewReplay,
                answers={201: ReplayJob, 200: ReplayJob}, refuses=(400, 413, 415, 422, 503),
            ),
            Operation(
                method="GET", path="/dead-letters/replays", name="listReplays",
                does="List the latest replays, newest first, at most 100.", handler=self.replays,
                query=NoQuery, answers={200: Page[ReplayJob]}, refuses=(400, 422, 503),
            ),
            Operation(
                method="GET", path=one, name="getReplay", does="Tell how far a replay has come.",
                handler=self.replay, query=NoQuery,
                answers={200: ReplayJob}, refuses=(400, 404, 422, 503),
            ),
            Operation(
                method="DELETE", path=one, name="cancelReplay",
                does="End a replay that runs; what it brought back stays.", handler=self.cancel,
                query=NoQuery, answers={200: ReplayJob}, refuses=(400, 404, 409, 422, 503),
            ),
        ]  # fmt: skip

    async def search(self, asked: ApiRequest) -> ApiResponse:
        """List dead letters."""
        query = asked.query(DeadLetterQuery)
        return json_response(200, await self._tasks.page(asked.tenant, query, Status.EXHAUSTED))

    async def purge(self, asked: ApiRequest) -> ApiResponse:
        """Remove dead letters."""
        query = asked.query(PurgeQuery)
        check_reason("reason", query.reason)
        wanted = TaskFilter(
            status=Status.EXHAUSTED,
            policy_id=query.policy_id,
            lane=None if query.lane is None else internal_lane_name(asked.tenant, query.lane),
            reason=query.reason,
        )
        purged, more = 0, True
        for _ in range(_STEPS):
            removed = await self._around.store.purge(asked.tenant, wanted, _STEP)
            purged += removed
            more = removed == _STEP
            if not more:
                break
        return json_response(200, Purged(purged=purged, more=more))

    async def start(self, asked: ApiRequest) -> ApiResponse:
        """Make a replay job, or say what it would do."""
        form = await asked.document(_new, self._around.limits.max_request_bytes)
        which = form.filter or ReplayFilter()
        check_epoch_ms("filter.before", which.before)
        check_reason("filter.reason", which.reason)
        job = ReplayRecord(
            id=self._around.new_id(),
            tenant=asked.tenant,
            lane=None if which.lane is None else internal_lane_name(asked.tenant, which.lane),
            policy_id=which.policy_id,
            reason=which.reason,
            before=which.before or 0,
            rate=form.rate or 0.0,
        )
        if form.dry_run:
            job.matched = await self._around.store.count_dead(job)
            return json_response(200, replay_view(job, dry_run=True))
        job = await self._around.store.start_replay(job)
        location = (b"location", f"/dead-letters/replays/{job.id}".encode())
        return json_response(201, replay_view(job), location)

    async def replays(self, asked: ApiRequest) -> ApiResponse:
        """List jobs."""
        asked.query(NoQuery)
        jobs = await self._around.store.list_replays(running=False, tenant=asked.tenant)
        return json_response(200, Page(items=[replay_view(job) for job in jobs], next_cursor=None))

    async def replay(self, asked: ApiRequest) -> ApiResponse:
        """Tell one job."""
        asked.query(NoQuery)
        job = await self._around.store.get_replay(asked.tenant, asked.params["replayId"])
        if job is None:
            raise problems.no_such("replay")
        return json_response(200, replay_view(job))

    async def cancel(self, asked: ApiRequest) -> ApiResponse:
        """End a job."""
        asked.query(NoQuery)
        job = await self._around.store.cancel_replay(asked.tenant, asked.params["replayId"])
        if job is None:
            raise problems.no_such("replay")
        if job.status == "done":
            raise problems.conflict(problem_types.ENDED, "The replay is DONE.")
        return json_response(200, replay_view(job))
