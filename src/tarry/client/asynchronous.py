"""The client that awaits: what `sync.py` is, call for call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.client.awaiting import AsyncSender
from tarry.client.replays import AsyncReplay

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping
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


class AsyncClient(AsyncSender):
    """What `Client` is, to await: `async with tarry.AsyncClient(url) as client`. Or on trio.

    `transport` is an `httpx.AsyncHTTPTransport`. Leave `events()` before its end with
    `contextlib.aclosing`, as any asynchronous generator.
    """

    # --- tasks ------------------------------------------------------------------------------------

    async def enqueue(
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
        return await self._send(self._api.enqueue(url, body, wait, options))

    async def enqueue_many(self, tasks: NewTasks) -> list[BatchResult]:
        """Enqueue any number, each given as a dict of `enqueue`'s arguments; one verdict each."""
        return await self._run(self._api.enqueue_many(tasks))

    async def get(self, task: str | RetryTask) -> RetryTask:
        """Look at a task, by its id or as it was."""
        return await self._send(self._api.get(task))

    def tasks(self, **which: Unpack[TaskFilter]) -> AsyncIterator[RetryTask]:
        """List tasks, newest first, page after page: by status, policy, lane, reason."""
        return self._items(lambda cursor: self._api.tasks(cursor, which))

    def attempts(self, task: str | RetryTask) -> AsyncIterator[AttemptLog]:
        """List the attempts of a task, in their order."""
        return self._items(lambda cursor: self._api.attempts(cursor, task))

    async def explain(self, task: str | RetryTask) -> Explanation:
        """Ask why a task was retried or not, and what comes next."""
        return await self._send(self._api.explain(task))

    async def wait(self, task: str | RetryTask, timeout: Duration | None = None) -> RetryTask:
        """Wait until a task has ended, well or not; `NotFinished` when that takes longer."""
        return await self._run(self._api.wait(task, timeout))

    async def cancel(self, task: str | RetryTask) -> RetryTask:
        """Cancel a task. An attempt that runs may finish (`task.cancelling`); none follows."""
        return await self._run(self._api.cancel(task))

    async def retry(self, task: str | RetryTask) -> RetryTask:
        """Make the next attempt now; a dead letter begins anew."""
        return await self._send(self._api.retry(task))

    # --- dead letters -----------------------------------------------------------------------------

    def dead_letters(self, **which: Unpack[LetterFilter]) -> AsyncIterator[RetryTask]:
        """List dead letters, newest first: by policy, lane, reason."""
        return self._items(lambda cursor: self._api.dead_letters(cursor, which))

    async def replay(self, **which: Unpack[ReplayOptions]) -> AsyncReplay:
        """Bring dead letters back: by policy, lane, reason, before; `rate` a second; `dry_run`."""
        return AsyncReplay(await self._send(self._api.replay(which)), self._api, self._run)

    async def replays(self) -> list[AsyncReplay]:
        """List the latest replays, newest first."""
        jobs = (await self._send(self._api.replays())).items
        return [AsyncReplay(job, self._api, self._run) for job in jobs]

    async def purge(self, **which: Unpack[LetterFilter]) -> int:
        """Remove dead letters for good, all of them unless told which; return how many."""
        return await self._run(self._api.purge(which))

    # --- policies and downstreams -----------------------------------------------------------------

    def policies(self) -> AsyncIterator[RetryPolicy]:
        """List policies, those that come with the service at the end."""
        return self._items(self._api.policies)

    async def policy(self, policy_id: str, version: int | None = None) -> RetryPolicy:
        """Look at a policy, in its newest version or another."""
        return await self._send(self._api.policy(policy_id, version))

    async def put_policy(self, policy_id: str, policy: Policy | Mapping[str, Any]) -> RetryPolicy:
        """Write a policy, or a new version of it; as a dict it has the API's names."""
        return await self._send(self._api.put_policy(policy_id, policy))

    async def delete_policy(self, policy_id: str) -> None:
        """Forget a policy; `Conflict` while live tasks use it."""
        await self._send(self._api.delete_policy(policy_id))

    def downstreams(self) -> AsyncIterator[Downstream]:
        """List the targets' hosts: breaker, backlog, latency."""
        return self._items(self._api.downstreams)

    async def pause(self, lane: str) -> Downstream:
        """Send nothing to a downstream until it is resumed."""
        return await self._send(self._api.hand(lane, "pause"))

    async def resume(self, lane: str) -> Downstream:
        """Open a downstream again, whether it was paused or its breaker is open."""
        return await self._send(self._api.hand(lane, "resume"))

    async def reset(self, lane: str) -> Downstream:
        """Forget what was learnt of a downstream, and open it."""
        return await self._send(self._api.hand(lane, "reset"))

    # --- the service itself -----------------------------------------------------------------------

    def events(self) -> AsyncGenerator[EventNews, None]:
        """Listen to what happens from now on. A connection that is lost is made again."""
        return self._events()

    async def health(self) -> Health:
        """Ask whether the service takes tasks and works on them."""
        return await self._send(self._api.health())
