"""Calls of more than one request: each says what to send next, or how long to wait. Pure.

A flow is a generator that the drivers run: it yields a request and is sent its result, or yields
seconds to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from tarry.client.errors import NotFinished
from tarry.client.newtask import batches, seconds_of
from tarry.client.requests import Requests
from tarry.core.policy import Policy
from tarry.errors import TarryError
from tarry.runtime.clocks import world
from tarry.runtime.deadlines import earliest

if TYPE_CHECKING:
    from tarry.client.options import Duration, LetterFilter, NewTasks
    from tarry.client.request import Request
    from tarry.wire.tasks import BatchResult, ReplayJob, RetryTask

T = TypeVar("T")
Flow: TypeAlias = Generator["Request[Any] | float", Any, T]

FINISHED = frozenset({"SUCCEEDED", "EXHAUSTED", "CANCELLED"})

_LOOKS = Policy(initial_delay=0.05, multiplier=1.5, max_delay=2.0, jitter="equal")
"""The delays between two looks at something that is waited for."""
_LONGEST_LOOK = 20
"""Seconds that the service is asked to wait at a time: proxies close what is silent for longer."""
_SPARE = 0.5
"""Seconds that an answer may take beyond the wait, so that it is there before the time is over."""
_WAITED = 1.0
"""Seconds of a look that the service did wait for; one that it answers at once has a pause."""


class Flows(Requests):
    """The calls of the API, and those made of several."""

    def enqueue_many(self, tasks: NewTasks) -> Flow[list[BatchResult]]:
        """Add any number of tasks; the verdicts are in their order."""
        results: list[BatchResult] = []
        try:
            for content in batches(tasks):
                answer = yield self.batch(content)
                results += answer.results
        except TarryError as error:
            if results:
                error.add_note(
                    f"tarry: the first {len(results)} tasks got their verdicts before; with keys "
                    "of your own (key=) all can be sent again"
                )
            raise
        return results

    def cancel(self, task: str | RetryTask) -> Flow[RetryTask]:
        """Cancel a task; one that is cancelled already is what was asked for."""
        cancelled: RetryTask | None = yield self.try_cancel(task)
        if cancelled is None:
            cancelled = yield self.get(task)
        return cast("RetryTask", cancelled)

    def purge(self, which: LetterFilter) -> Flow[int]:
        """Remove dead letters until none is left, and count them."""
        total, more = 0, True
        while more:
            answer = yield self.purge_some(which)
            total += answer.purged
            more = answer.more
        return total

    def wait(self, task: str | RetryTask, timeout: Duration | None) -> Flow[RetryTask]:
        """Wait for the end of a task."""
        return _until(
            lambda wait: self.get(task, wait), lambda found: found.status in FINISHED, timeout
        )

    def look_at_replay(self, job: ReplayJob) -> Flow[ReplayJob]:
        """Look at a replay again; a dry run is as it was."""
        if job.replay_id is not None:
            job = yield self.replay_job(job.replay_id, "GET")
        return job

    def cancel_replay(self, job: ReplayJob) -> Flow[ReplayJob]:
        """End a replay; a dry run has ended."""
        if job.replay_id is not None:
            job = yield self.replay_job(job.replay_id, "DELETE")
        return job

    def wait_for_replay(self, job: ReplayJob, timeout: Duration | None) -> Flow[ReplayJob]:
        """Wait for the end of a replay; a dry run has ended."""
        if job.replay_id is None:
            return job
        look = self.replay_job(job.replay_id, "GET")
        return (yield from _until(lambda _: look, lambda found: found.status != "RUNNING", timeout))


def _until(
    look: Callable[[int], Request[T]], is_over: Callable[[T], bool], timeout: Duration | None
) -> Flow[T]:
    """Look until it is over; `look` is told how many seconds the service may wait."""
    seconds = inf if timeout is None else seconds_of("timeout", timeout)
    end = earliest(world.now() + seconds)
    delay: float | None = None
    number = 0
    while True:
        began = world.now()
        request = look(int(max(0.0, min(end - began - _SPARE, _LONGEST_LOOK))))
        found: T = yield request
        if is_over(found):
            return found
        now = world.now()
        left = end - now
        if left <= 0:
            status = getattr(found, "status", None)
            raise NotFinished(f"{request.path} is still {status}", found)
        if request.waits and now - began >= _WAITED:
            continue
        number += 1
        delay = _LOOKS.delay(_LOOKS.ceiling(number), delay, world.draw())
        yield min(delay, left)
