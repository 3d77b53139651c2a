"""`/retry-tasks`: to look at tasks, cancel them and retry them now."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from tarry.core.verdict import Reason
from tarry.errors import ConfigurationError, short_repr
from tarry.service.api import problem_types, problems
from tarry.service.api.explanation import explain_task
from tarry.service.api.prefer import WAIT_HEADER, wait_applied
from tarry.service.api.problems import from_configuration_error
from tarry.service.api.redact import secrets_of
from tarry.service.api.request import NoQuery, PageQuery
from tarry.service.api.response import json_response
from tarry.service.api.routing import Operation
from tarry.service.api.views import attempt_view, internal_lane_name, read_content, stored_task_view
from tarry.service.model import Status
from tarry.service.store import CancelStatus, RetryNowStatus, TaskFilter
from tarry.wire.tasks import (
    AttemptLog,
    Explanation,
    LaneName,
    Page,
    PolicyName,
    ReasonName,
    RetryTask,
    StatusName,
)

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.prefer import ResultWaiter
    from tarry.service.api.request import ApiRequest
    from tarry.service.api.response import ApiResponse
    from tarry.service.model import Task

_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_REASONS = tuple(Reason)
_MOST_EXPLAINED = 100
_BREATH = 100
"""Tasks of a page that are unpacked before others get their turn."""


class DeadLetterQuery(PageQuery, frozen=True):
    """Which dead letters to list."""

    policy_id: PolicyName | None = None
    lane: LaneName | None = None
    reason: ReasonName | None = None


class TaskQuery(DeadLetterQuery, frozen=True):
    """Which tasks to list. By status, a task is IN_FLIGHT from a moment before its attempt."""

    status: StatusName | None = None


class AttemptQuery(PageQuery, frozen=True):
    """Which attempts to list."""


class TaskResource:
    """What a tenant may see of his tasks, and do with them."""

    def __init__(self, around: ApiContext, waiting: ResultWaiter) -> None:
        self._around = around
        self._waiting = waiting

    def operations(self) -> list[Operation]:
        """Return the rows of the API about tasks."""
        return [
            Operation(
                method="GET", path="/retry-tasks", name="listTasks",
                does="List tasks, newest first.", handler=self.search,
                query=TaskQuery, answers={200: Page[RetryTask]}, refuses=(400, 422, 503),
            ),
            Operation(
                method="GET", path="/retry-tasks/{taskId}", name="getTask",
                does="Tell a task: its status, attempts made, and the next time.",
                handler=self.get, query=NoQuery,
                answers={200: RetryTask}, refuses=(400, 404, 422, 503), more_headers=WAIT_HEADER,
            ),
            Operation(
                method="DELETE", path="/retry-tasks/{taskId}", name="cancelTask",
                does="Cancel a task. 202: an attempt is running and may finish; none follows.",
                handler=self.cancel, query=NoQuery,
                answers={200: RetryTask, 202: RetryTask}, refuses=(400, 404, 409, 422, 503),
            ),
            Operation(
                method="GET", path="/retry-tasks/{taskId}/attempts", name="listAttempts",
                does="List the attempts of a task, in their order.", handler=self.attempts,
                query=AttemptQuery, answers={200: Page[AttemptLog]}, refuses=(400, 404, 422, 503),
            ),
            Operation(
                method="GET", path="/retry-tasks/{taskId}/explain", name="explainTask",
                does="Say in words why a task was retried or not, and what comes next.",
                handler=self.explain, query=NoQuery,
                answers={200: Explanation}, refuses=(400, 404, 422, 503),
            ),
            Operation(
                method="POST", path="/retry-tasks/{taskId}/retry", name="retryTask",
                does="Make the next attempt now; a dead letter begins anew. 202: one is running.",
                handler=self.retry, query=NoQuery,
                answers={200: RetryTask, 202: RetryTask}, refuses=(400, 404, 409, 422, 503),
            ),
        ]  # fmt: skip

    async def search(self, asked: ApiRequest) -> ApiResponse:
        """List tasks."""
        query = asked.query(TaskQuery)
        status = None if query.status is None else Status[query.status]
        return json_response(200, await self.page(asked.tenant, query, status))

    async def page(
        self, tenant: str, query: DeadLetterQuery, status: Status | None
    ) -> Page[RetryTask]:
        """Return a page of tasks."""
        check_reason("reason", query.reason)
        wanted = TaskFilter(
            status=status,
            policy_id=query.policy_id,
            lane=None if query.lane is None else internal_lane_name(tenant, query.lane),
            reason=query.reason,
        )
        try:
            page = await self._around.store.list_tasks(
                tenant, wanted, cursor=query.cursor, limit=query.limit
            )
        except ConfigurationError as error:
            raise from_configuration_error("cursor", error) from None
        items: list[RetryTask] = []
        for i, task in enumerate(page.items, 1):
            items.append(self._view(task))
            if not i % _BREATH:
                await asyncio.sleep(0)
        return Page(items=items, next_cursor=page.cursor)

    async def get(self, asked: ApiRequest) -> ApiResponse:
        """Tell one task, at once or when it has ended."""
        asked.query(NoQuery)
        task = await self._find(asked)
        view = self._view(task)
        if b"prefer" in asked.fields and (wait := self._waiting.asked_for(asked)) is not None:
            return json_response(
                200, await self._waiting.outcome(task, view, wait), wait_applied(wait)
            )
        return json_response(200, view)

    async def cancel(self, asked: ApiRequest) -> ApiResponse:
        """Cancel a task."""
        asked.query(NoQuery)
        task_id = _id_of(asked)
        answer = await self._around.engine.cancel(asked.tenant, task_id)
        task = await self._find(asked)
        if answer is CancelStatus.TERMINAL:
            raise problems.conflict(
                problem_types.ENDED, f"The task is {task.status.name}.", taskStatus=task.status.name
            )
        return json_response(202 if answer is CancelStatus.REQUESTED else 200, self._view(task))

    async def retry(self, asked: ApiRequest) -> ApiResponse:
        """Make the next attempt now."""
        asked.query(NoQuery)
        task_id = _id_of(asked)
        answer = await self._around.engine.retry_now(asked.tenant, task_id)
        task = await self._find(asked)
        status = task.status.name
        if answer is RetryNowStatus.FINISHED:
            detail = f"The task is {status}: send a new one."
            raise problems.conflict(problem_types.ENDED, detail, taskStatus=status)
        if answer is RetryNowStatus.RUNNING and task.cancelling:
            detail = "The task is being cancelled, and no attempt follows: send a new one."
            raise problems.conflict(problem_types.ENDED, detail, taskStatus=status)
        return json_response(202 if answer is RetryNowStatus.RUNNING else 200, self._view(task))

    async def attempts(self, asked: ApiRequest) -> ApiResponse:
        """List a task's attempts."""
        query = asked.query(AttemptQuery)
        after = 0
        if query.cursor is not None:
            if not (query.cursor.isascii() and query.cursor.isdigit() and len(query.cursor) < 10):  # noqa: PLR2004 - a number of attempts
                raise problems.invalid("cursor", "cursor must be a nextCursor of this list.")
            after = int(query.cursor)
        task = await self._find(asked)
        found = await self._around.store.list_attempts(
            asked.tenant, task.id, after=after, limit=query.limit + 1
        )
        shown, more = found[: query.limit], len(found) > query.limit
        secrets = secrets_of(read_content(self._around, task))
        return json_response(
            200,
            Page(
                items=[attempt_view(task.id, attempt, secrets) for attempt in shown],
                next_cursor=str(shown[-1].number) if more else None,
            ),
        )

    async def explain(self, asked: ApiRequest) -> ApiResponse:
        """Say why."""
        asked.query(NoQuery)
        around = self._around
        task = await self._find(asked)
        after = max(0, task.attempts - _MOST_EXPLAINED)
        found = await around.store.list_attempts(
            asked.tenant, task.id, after=after, limit=_MOST_EXPLAINED
        )
        chosen = await around.engine.policies.read(task.tenant, task.policy_id, task.policy_version)
        return json_response(
            200,
            explain_task(
                task,
                read_content(around, task),
                found,
                chosen=None if chosen is None else chosen.policy,
                lane=await around.store.get_lane(task.lane),
                now=around.engine.clock.now(),
            ),
        )

    async def _find(self, asked: ApiRequest) -> Task:
        task = await self._around.store.get_task(asked.tenant, _id_of(asked))
        if task is None:
            raise problems.no_such("task")
        return task

    def _view(self, task: Task) -> RetryTask:
        return stored_task_view(self._around, task)


def check_reason(field: str, reason: str | None) -> None:
    """Refuse a reason that no task has: it would find nothing, which looks as if all were well."""
    if reason is not None and reason not in _REASONS:
        detail = f"{field} must be {' or '.join(_REASONS)}, got {short_repr(reason)}."
        raise problems.invalid(field, detail)


def _id_of(asked: ApiRequest) -> str:
    task_id = asked.params["taskId"]
    if not _ID.fullmatch(task_id):
        raise problems.no_such("task")
    return task_id
