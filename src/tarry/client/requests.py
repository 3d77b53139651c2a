"""The calls about tasks as requests: what is sent, and how the answer is read. Pure."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec

from tarry.client.newtask import content_of, epoch_ms, new_task
from tarry.client.operating import OperatorRequests
from tarry.client.options import check_names
from tarry.client.paths import identified, page, path_of, repeatable
from tarry.client.request import Answer, Request, decoded, problem_of
from tarry.core.checks import positive
from tarry.wire.tasks import (
    AttemptLog,
    BatchResults,
    Explanation,
    NewReplay,
    Page,
    Purged,
    ReplayFilter,
    ReplayJob,
    RetryTask,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.client.options import LetterFilter, ReplayOptions, TaskFilter, TaskOptions

T = TypeVar("T")

_JSON = {"content-type": "application/json"}
_CONFLICT = 409
_encode = msgspec.json.Encoder().encode

_task = decoded(RetryTask)
_results = decoded(BatchResults)
_tasks = decoded(Page[RetryTask])
_attempts = decoded(Page[AttemptLog])
_explanation = decoded(Explanation)
_replay = decoded(ReplayJob)
_replays = decoded(Page[ReplayJob])
_purged = decoded(Purged)


class Requests(OperatorRequests):
    """The API, one method for each of its calls."""

    # --- tasks ------------------------------------------------------------------------------------

    def enqueue(
        self, url: str, body: Any, wait: float | None, options: TaskOptions
    ) -> Request[RetryTask]:
        """Add a task, and wait for its end when asked to."""
        check_names("enqueue", options)
        task = new_task(url, body, **options)
        headers = _JSON | repeatable(task.idempotency_key)
        waits = 0 if wait is None else ceil(positive("wait", wait))
        if waits:
            headers["prefer"] = f"wait={waits}"
        return Request(
            method="POST",
            path="/retry-tasks",
            read=_task,
            headers=headers,
            content=content_of(task),
            waits=waits,
        )

    def batch(self, content: bytes) -> Request[BatchResults]:
        """Add many tasks, each with a key of its own, so that all may be sent again."""
        return Request(
            method="POST",
            path="/retry-tasks/batch",
            read=_results,
            headers=_JSON | repeatable(),
            content=content,
        )

    def get(self, task: str | RetryTask, wait: int = 0) -> Request[RetryTask]:
        """Look at a task, now or when it has ended, if that is within so many seconds."""
        if not wait:
            return Request(method="GET", path=_of(task), read=_task)
        headers = {"prefer": f"wait={wait}"}
        return Request(
            method="GET", path=_of(task), read=_task, headers=headers, waits=wait, manner="waited"
        )

    def tasks(self, cursor: str | None, which: TaskFilter) -> Request[Page[RetryTask]]:
        """List tasks."""
        check_names("tasks", which)
        return page("/retry-tasks", _tasks, cursor, _query(which))

    def attempts(self, cursor: str | None, task: str | RetryTask) -> Request[Page[AttemptLog]]:
        """List the attempts of a task."""
        return page(f"{_of(task)}/attempts", _attempts, cursor)

    def explain(self, task: str | RetryTask) -> Request[Explanation]:
        """Ask why a task was retried or not."""
        return Request(method="GET", path=f"{_of(task)}/explain", read=_explanation)

    def try_cancel(self, task: str | RetryTask) -> Request[RetryTask | None]:
        """Cancel a task; None when it was cancelled before, by a request whose answer was lost."""

        def read(answer: Answer) -> RetryTask | None:
            if answer.status != _CONFLICT:
                return _task(answer)
            if problem_of(answer.content).get("taskStatus") == "CANCELLED":
                return None
            raise request.error(answer, 0.0)

        request: Request[RetryTask | None] = Request(
            method="DELETE", path=_of(task), read=read, also=frozenset({_CONFLICT})
        )
        return request

    def retry(self, task: str | RetryTask) -> Request[RetryTask]:
        """Make the next attempt now. Without a key: a second one would be a second attempt."""
        return Request(method="POST", path=f"{_of(task)}/retry", read=_task)

    # --- dead letters -----------------------------------------------------------------------------

    def dead_letters(self, cursor: str | None, which: LetterFilter) -> Request[Page[RetryTask]]:
        """List dead letters."""
        check_names("dead_letters", which)
        return page("/dead-letters", _tasks, cursor, _query(which))

    def purge_some(self, which: LetterFilter) -> Request[Purged]:
        """Remove dead letters, as many as the service removes at a time."""
        check_names("purge", which)
        return Request(method="DELETE", path=path_of("/dead-letters", _query(which)), read=_purged)

    def replay(self, options: ReplayOptions) -> Request[ReplayJob]:
        """Begin to bring dead letters back. Without a key: a second one would be a second job."""
        check_names("replay", options)
        before, rate = options.get("before"), options.get("rate")
        form = NewReplay(
            filter=ReplayFilter(
                lane=options.get("lane"),
                policy_id=options.get("policy"),
                reason=options.get("reason"),
                before=None if before is None else epoch_ms("before", before),
            ),
            rate=None if rate is None else positive("rate", rate),
            dry_run=options.get("dry_run", False),
        )
        return Request(
            method="POST",
            path="/dead-letters/replays",
            read=_replay,
            headers=_JSON,
            content=_encode(form),
        )

    def replays(self) -> Request[Page[ReplayJob]]:
        """List the latest replays."""
        return Request(method="GET", path="/dead-letters/replays", read=_replays)

    def replay_job(self, replay_id: str, method: Literal["GET", "DELETE"]) -> Request[ReplayJob]:
        """Look at a replay, or end it."""
        path = f"/dead-letters/replays/{identified('replay_id', replay_id)}"
        return Request(method=method, path=path, read=_replay)


def _of(task: str | RetryTask) -> str:
    task_id = task.task_id if isinstance(task, RetryTask) else task
    return f"/retry-tasks/{identified('task', task_id)}"


def _query(which: TaskFilter | LetterFilter) -> Mapping[str, str | None]:
    """Return a filter with the names of the API."""
    given = cast("Mapping[str, str | None]", which)
    return {"policyId" if name == "policy" else name: value for name, value in given.items()}
