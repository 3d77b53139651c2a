"""Client operations that take several requests. This module sends nothing.

An operation is a generator, which `Client` or `AsyncClient` runs. It yields either a request, which
the client sends, or a number of seconds, which the client sleeps. For a request, the value of the
`yield` expression is the parsed response. The generator's return value is the operation's result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from tarry.client.api import ServiceApi
from tarry.client.errors import NotFinished
from tarry.client.options import task_batches, to_seconds
from tarry.core.policy import Policy
from tarry.errors import TarryError
from tarry.runtime.clocks import system
from tarry.runtime.deadlines import earliest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tarry.client.api import ClientRequest
    from tarry.client.options import DeadLetterFilter, Duration, EnqueueArguments
    from tarry.wire.tasks import BatchResult, ReplayJob, RetryTask

T = TypeVar("T")
Operation: TypeAlias = Generator["ClientRequest[Any] | float", Any, T]

FINAL_STATUSES = frozenset({"SUCCEEDED", "EXHAUSTED", "CANCELLED"})

_POLL_BACKOFF = Policy(initial_delay=0.05, multiplier=1.5, max_delay=2.0, jitter="equal")
_MAX_LONG_POLL_S = 20
"""Short enough for proxies, many of which close a connection that is silent for longer."""
_LONG_POLL_MARGIN_S = 0.5
"""How long before the caller's timeout a long poll ends, so that its response still arrives."""
_MIN_LONG_POLL_S = 1.0
"""A long poll that returns sooner than this is followed by a pause, because the service did not
wait before it responded."""


class Operations(ServiceApi):
    """The single API calls of `ServiceApi`, and the operations that combine several calls."""

    def enqueue_many(self, tasks: Iterable[EnqueueArguments]) -> Operation[list[BatchResult]]:
        """Add any number of tasks in batches; the results are in the order of the tasks."""
        results: list[BatchResult] = []
        try:
            for content in task_batches(tasks):
                response = yield self.enqueue_batch(content)
                results += response.results
        except TarryError as error:
            if results:
                error.add_note(
                    f"tarry: the first {len(results)} tasks were processed before this error. "
                    "If each task has its own key=, it is safe to send all of them again."
                )
            raise
        return results

    def cancel(self, task: str | RetryTask) -> Operation[RetryTask]:
        """Cancel a task and return it. For a task that was already cancelled, only return it."""
        cancelled: RetryTask | None = yield self.try_cancel(task)
        if cancelled is None:
            cancelled = yield self.get(task)
        return cast("RetryTask", cancelled)

    def purge(self, filters: DeadLetterFilter) -> Operation[int]:
        """Delete all matching dead letters; return how many were deleted."""
        total, has_more = 0, True
        while has_more:
            response = yield self.purge_batch(filters)
            total += response.purged
            has_more = response.more
        return total

    def wait(self, task: str | RetryTask, timeout: Duration | None) -> Operation[RetryTask]:
        """Wait until a task has finished."""
        return _poll_until(
            lambda wait_s: self.get(task, wait_s),
            lambda polled: polled.status in FINAL_STATUSES,
            timeout,
        )

    def refresh_replay(self, job: ReplayJob) -> Operation[ReplayJob]:
        """Get the current state of a replay; a dry run is returned unchanged."""
        if job.replay_id is not None:
            job = yield self.replay_job(job.replay_id, "GET")
        return job

    def cancel_replay(self, job: ReplayJob) -> Operation[ReplayJob]:
        """Cancel a replay; a dry run, which has already finished, is returned unchanged."""
        if job.replay_id is not None:
            job = yield self.replay_job(job.replay_id, "DELETE")
        return job

    def wait_for_replay(self, job: ReplayJob, timeout: Duration | None) -> Operation[ReplayJob]:
        """Wait until a replay has finished; a dry run is returned at once."""
        if job.replay_id is None:
            return job
        request = self.replay_job(job.replay_id, "GET")
        return (
            yield from _poll_until(
                lambda _: request, lambda polled: polled.status != "RUNNING", timeout
            )
        )


def _poll_until(
    build_request: Callable[[int], ClientRequest[T]],
    is_finished: Callable[[T], bool],
    timeout: Duration | None,
) -> Operation[T]:
    """Poll until a task or replay has finished; raise `NotFinished` after the timeout.

    `build_request` takes the seconds that the service may wait before it responds.
    """
    timeout_s = inf if timeout is None else to_seconds("timeout", timeout)
    deadline = earliest(system.now() + timeout_s)
    delay: float | None = None
    pause_count = 0
    while True:
        started_at = system.now()
        wait_s = max(0.0, min(deadline - started_at - _LONG_POLL_MARGIN_S, _MAX_LONG_POLL_S))
        request = build_request(int(wait_s))
        polled: T = yield request
        if is_finished(polled):
            return polled
        now = system.now()
        remaining_s = deadline - now
        if remaining_s <= 0:
            status = getattr(polled, "status", None)
            raise NotFinished(f"{request.path} is still {status}", polled)
        if request.wait_s and now - started_at >= _MIN_LONG_POLL_S:
            continue
        pause_count += 1
        max_delay = _POLL_BACKOFF.ceiling(pause_count)  # before jitter
        delay = _POLL_BACKOFF.delay(max_delay, delay, system.draw())
        yield min(delay, remaining_s)
