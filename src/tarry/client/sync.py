"""The client that blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.client.blocking import Sender
from tarry.client.replays import Replay

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from typing import Unpack

    from tarry.client.operating import Health
    from tarry.client.options import (
        Duration,
        LetterFilter,
        NewTasks,
        ReplayOptions,
        TaskFilter,
        TaskOptions,
    )
    from tarry.core.policy import Policy
    from tarry.wire.tasks import (
        AttemptLog,
        BatchResult,
        Downstream,
        EventNews,
        Explanation,
        RetryPolicy,
        RetryTask,
    )


class Client(Sender):
    """Talks to a retry service: `tarry.Client("http://127.0.0.1:8080", key="...")`.

    Its own requests are retried, as `policy` says; an attempt may be silent for `timeout` seconds.
    `transport` is an `httpx.HTTPTransport`, for certificates and proxies of your own. What the
    service refuses is a `ServiceError`. A client may be shared by threads.
    """

    # --- tasks ------------------------------------------------------------------------------------

    def enqueue(
        self,
        url: str,
        body: Any = None,
        *,
        wait: float | None = None,
        **options: Unpack[TaskOptions],
    ) -> RetryTask:
        """Give the service a call to make. When this returns, the task is durable.

        With `wait`, return its outcome if it comes within so many seconds. Options: method,
        headers, body_ref, policy, policy_version, key, delay, at, overrides, callback.
        """
        return self._send(self._api.enqueue(url, body, wait, options))

    def enqueue_many(self, tasks: NewTasks) -> list[BatchResult]:
        """Enqueue any number, each given as a dict of `enqueue`'s arguments; one verdict each."""
        return self._run(self._api.enqueue_many(tasks))

    def get(self, task: str | RetryTask) -> RetryTask:
        """Look at a task, by its id or as it was."""
        return self._send(self._api.get(task))

    def tasks(self, **which: Unpack[TaskFilter]) -> Iterator[RetryTask]:
        """List tasks, newest first, page after page: by status, policy, lane, reason."""
        return self._items(lambda cursor: self._api.tasks(cursor, which))

    def attempts(self, task: str | RetryTask) -> Iterator[AttemptLog]:
        """List the attempts of a task, in their order."""
        return self._items(lambda cursor: self._api.attempts(cursor, task))

    def explain(self, task: str | RetryTask) -> Explanation:
        """Ask why a task was retried or not, and what comes next."""
        return self._send(self._api.explain(task))

    def wait(self, task: str | RetryTask, timeout: Duration | None = None) -> RetryTask:
        """Wait until a task has ended, well or not; `NotFinished` when that takes longer."""
        return self._run(self._api.wait(task, timeout))

    def cancel(self, task: str | RetryTask) -> RetryTask:
        """Cancel a task. An attempt that runs may finish (`task.cancelling`); none follows."""
        return self._run(self._api.cancel(task))

    def retry(self, task: str | RetryTask) -> RetryTask:
        """Make the next attempt now; a dead letter begins anew."""
        return self._send(self._api.retry(task))

    # --- dead letters -----------------------------------------------------------------------------

    def dead_letters(self, **which: Unpack[LetterFilter]) -> Iterator[RetryTask]:
        """List dead letters, newest first: by policy, lane, reason."""
        return self._items(lambda cursor: self._api.dead_letters(cursor, which))

    def replay(self, **which: Unpack[ReplayOptions]) -> Replay:
        """Bring dead letters back: by policy, lane, reason, before; `rate` a second; `dry_run`."""
        return Replay(self._send(self._api.replay(which)), self._api, self._run)

    def replays(self) -> list[Replay]:
        """List the latest replays, newest first."""
        jobs = self._send(self._api.replays()).items
        return [Replay(job, self._api, self._run) for job in jobs]

    def purge(self, **which: Unpack[LetterFilter]) -> int:
        """Remove dead letters for good, all of them unless told which; return how many."""
        return self._run(self._api.purge(which))

    # --- policies and downstreams -----------------------------------------------------------------

    def policies(self) -> Iterator[RetryPolicy]:
        """List policies, those that come with the service at the end."""
        return self._items(self._api.policies)

    def policy(self, policy_id: str, version: int | None = None) -> RetryPolicy:
        """Look at a policy, in its newest version or another."""
        return self._send(self._api.policy(policy_id, version))

    def put_policy(self, policy_id: str, policy: Policy | Mapping[str, Any]) -> RetryPolicy:
        """Write a policy, or a new version of it; as a dict it has the API's names."""
        return self._send(self._api.put_policy(policy_id, policy))

    def delete_policy(self, policy_id: str) -> None:
        """Forget a policy; `Conflict` while live tasks use it."""
        self._send(self._api.delete_policy(policy_id))

    def downstreams(self) -> Iterator[Downstream]:
        """List the targets' hosts: breaker, backlog, latency."""
        return self._items(self._api.downstreams)

    def pause(self, lane: str) -> Downstream:
        """Send nothing to a downstream until it is resumed."""
        return self._send(self._api.hand(lane, "pause"))

    def resume(self, lane: str) -> Downstream:
        """Open a downstream again, whether it was paused or its breaker is open."""
        return self._send(self._api.hand(lane, "resume"))

    def reset(self, lane: str) -> Downstream:
        """Forget what was learnt of a downstream, and open it."""
        return self._send(self._api.hand(lane, "reset"))

    # --- the service itself -----------------------------------------------------------------------

    def events(self) -> Generator[EventNews, None, None]:
        """Listen to what happens from now on. A connection that is lost is made again."""
        return self._events()

    def health(self) -> Health:
        """Ask whether the service takes tasks and works on them."""
        return self._send(self._api.health())
