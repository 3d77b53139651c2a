"""`/dead-letters`: list, group, purge and replay dead letters (tasks with the status EXHAUSTED)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.api import problems
from tarry.service.api.messages import NoQuery, decode_json, json_response
from tarry.service.api.routing import Operation
from tarry.service.api.task_validation import check_epoch_ms
from tarry.service.api.tasks import (
    DEAD_LETTER_FILTERS,
    DeadLetterGroupQuery,
    DeadLetterQuery,
    PurgeQuery,
    check_not_empty,
    check_search,
    query_fields,
)
from tarry.service.api.views import dead_letter_group_view, replay_view
from tarry.service.model import ReplayRecord
from tarry.service.task_search import search_of_replay
from tarry.wire.search import SEARCH_FIELDS
from tarry.wire.tasks import (
    DEFAULT_REPLAY_RATE,
    MIN_REPLAY_RATE,
    DeadLetterGroup,
    Page,
    PurgeResult,
    ReplayFilter,
    ReplayJob,
    ReplayRequest,
    RetryTask,
    Search,
)

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse
    from tarry.service.api.tasks import TaskResource

_replay_decoder = msgspec.json.Decoder(ReplayRequest)
_REPLAYS_PATH = "/dead-letters/replays"
_REPLAY_PATH = "/dead-letters/replays/{replayId}"
_MAX_UNFINISHED_REPLAYS = 100
"""Maximum number of a tenant. Each of them is written to the store again with each step."""
_PURGE_CHUNK_TASKS = 500
"""Maximum number of tasks that one call of the store deletes."""
_MAX_PURGE_CHUNKS = 20
"""Maximum number of such calls per request; the response reports whether tasks are left."""


class DeadLetterResource:
    """The operations on the dead letters of a tenant."""

    def __init__(self, context: ApiContext, tasks: TaskResource) -> None:
        self._context = context
        self._tasks = tasks

    @Operation("GET", "/dead-letters", "listDeadLetters", Page[RetryTask], query=DeadLetterQuery)
    async def list_dead_letters(self, request: ApiRequest) -> ApiResponse:
        """List dead letters, newest first."""
        query = request.parse_query(DeadLetterQuery)
        search = _to_dead_letter_search(query)
        page = await self._tasks.read_page(request.tenant, search, query.cursor, query.limit)
        return json_response(200, page)

    @Operation(
        "GET",
        "/dead-letters/groups",
        "groupDeadLetters",
        Page[DeadLetterGroup],
        query=DeadLetterGroupQuery,
    )
    async def group_dead_letters(self, request: ApiRequest) -> ApiResponse:
        """Count dead letters by reason and downstream, up to 10,000 in one request.

        With the `nextCursor`, the next request counts older ones, also in groups of this response.
        """
        query = request.parse_query(DeadLetterGroupQuery)
        search = _to_dead_letter_search(query)
        with problems.convert_errors("cursor"):
            page = await self._tasks.finder.group(
                request.tenant,
                search,
                cursor=query.cursor,
                is_abandoned=lambda: request.is_abandoned,
            )
        now = self._context.engine.clock.now_ms()
        items = [dead_letter_group_view(group, now) for group in page.items]
        return json_response(200, Page(items=items, next_cursor=page.cursor))

    @Operation("DELETE", "/dead-letters", "purgeDeadLetters", PurgeResult, query=PurgeQuery)
    async def purge(self, request: ApiRequest) -> ApiResponse:
        """Delete dead letters permanently."""
        query = request.parse_query(PurgeQuery)
        tenant, store = request.tenant, self._context.store
        search = _to_dead_letter_search(query)
        filter_names = [SEARCH_FIELDS[name].api_name for name in DEAD_LETTER_FILTERS]
        check_not_empty(search, filter_names, is_all=query.all)
        purged_count, cursor = 0, query.cursor
        try:
            for _ in range(_MAX_PURGE_CHUNKS):
                with problems.convert_errors("cursor"):
                    page = await self._tasks.finder.find_ids(
                        tenant, search, cursor=cursor, limit=_PURGE_CHUNK_TASKS
                    )
                purged_count += await store.delete_dead_letters(tenant, page.items)
                cursor = page.cursor
                if cursor is None:
                    break
        finally:  # the store may fail after some chunks
            if purged_count:
                request.report_change(query_fields(query), None, {"purged": purged_count})
        result = PurgeResult(purged=purged_count, more=cursor is not None, next_cursor=cursor)
        return json_response(200, result)

    @Operation(
        "POST",
        _REPLAYS_PATH,
        "createReplay",
        ReplayJob,
        statuses=(200, 201),
        errors=(429,),
        body=ReplayRequest,
    )
    async def start_replay(self, request: ApiRequest) -> ApiResponse:
        """Start a replay of dead letters, at `rate` per second. A dry run counts them."""
        body = await request.read_body(self._context.limits.max_request_bytes)
        replay_request = decode_json(_replay_decoder, body)
        replay_filter = replay_request.filter or ReplayFilter()
        rate = DEFAULT_REPLAY_RATE if replay_request.rate is None else replay_request.rate
        if 0 < rate < MIN_REPLAY_RATE:
            rule = f"must be at least {MIN_REPLAY_RATE}, or 0 to replay all at once"
            raise problems.invalid("rate", rule, rate)
        check_epoch_ms("filter.before", replay_filter.before)
        search = _to_dead_letter_search(replay_filter, "filter.")
        # A replay stores the bound in `before` only; 0: the store uses its current time.
        bounds = filter(None, (replay_filter.before, search.finished_before))
        replay = ReplayRecord(
            id=self._context.new_id(),
            tenant=request.tenant,
            search=msgspec.structs.replace(search, finished_before=None),
            before=min(bounds, default=0),
            rate=rate,
        )
        search = search_of_replay(replay)  # with the bound
        if not replay_request.dry_run:
            check_not_empty(
                search, ReplayFilter.__struct_encode_fields__, is_all=replay_request.all
            )
        replay.matched = await self._tasks.finder.count(request.tenant, search)
        if replay_request.dry_run:
            return json_response(200, replay_view(replay, dry_run=True))
        unfinished = await self._context.store.list_replays(running=True, tenant=request.tenant)
        if len(unfinished) >= _MAX_UNFINISHED_REPLAYS:
            raise problems.TENANT_LIMIT.error(
                f"{_MAX_UNFINISHED_REPLAYS} replays of the tenant have not finished. "
                "Wait for them, or cancel some: DELETE /dead-letters/replays/ID."
            )
        replay = await self._context.store.start_replay(replay)
        view = replay_view(replay)
        after = {"filter": view.filter, "rate": view.rate, "matched": view.matched}
        request.report_change(replay.id, None, msgspec.to_builtins(after))
        location = (b"location", f"{_REPLAYS_PATH}/{replay.id}".encode())
        return json_response(201, view, location)

    @Operation("GET", _REPLAYS_PATH, "listReplays", Page[ReplayJob])
    async def list_replays(self, request: ApiRequest) -> ApiResponse:
        """List the latest 100 replays, newest first."""
        request.parse_query(NoQuery)
        # running=False does not restrict the list to running replays.
        replays = await self._context.store.list_replays(running=False, tenant=request.tenant)
        return json_response(200, Page(items=list(map(replay_view, replays)), next_cursor=None))

    @Operation("GET", _REPLAY_PATH, "getReplay", ReplayJob)
    async def get_replay(self, request: ApiRequest) -> ApiResponse:
        """Get the progress of a replay."""
        request.parse_query(NoQuery)
        replay_id = request.path_parameter("replayId")
        replay = await self._context.store.get_replay(request.tenant, replay_id)
        if replay is None:
            raise problems.no_such("replay")
        return json_response(200, replay_view(replay))

    @Operation("DELETE", _REPLAY_PATH, "cancelReplay", ReplayJob, errors=(409,))
    async def cancel_replay(self, request: ApiRequest) -> ApiResponse:
        """Cancel a replay. Tasks that it has replayed are not affected."""
        request.parse_query(NoQuery)
        replay_id = request.path_parameter("replayId")
        before = await self._context.store.get_replay(request.tenant, replay_id)
        replay = await self._context.store.cancel_replay(request.tenant, replay_id)
        if replay is None:
            raise problems.no_such("replay")
        if replay.status == "done":
            raise problems.ALREADY_FINISHED.error("The replay is DONE.")
        view = replay_view(replay)
        status_before = None if before is None else {"status": replay_view(before).status}
        after = {"status": view.status, "replayed": view.replayed}
        request.report_change(replay_id, status_before, after)
        return json_response(200, view)


def _to_dead_letter_search(query: Search, parent_field: str = "") -> Search:
    return msgspec.structs.replace(check_search(query, parent_field), status="EXHAUSTED")
