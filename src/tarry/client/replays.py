"""Handles of a replay of dead letters, as the clients return them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from tarry.client.operations import Operation, Operations
    from tarry.client.options import Duration
    from tarry.wire.tasks import ReplayJob


class ReplayHandle:
    """A replay of dead letters, as last fetched from the service."""

    def __init__(self, job: ReplayJob, api: Operations) -> None:
        self._api = api
        self.job: ReplayJob = job
        """The replay job as the service returned it."""

    @property
    def replay_id(self) -> str | None:
        """Id of the replay; None for a dry run."""
        return self.job.replay_id

    @property
    def status(self) -> str:
        """RUNNING, DONE, CANCELLED or DRY_RUN."""
        return self.job.status

    @property
    def matched(self) -> int:
        """Number of dead letters that matched the filter."""
        return self.job.matched

    @property
    def replayed(self) -> int:
        """Number of dead letters that were replayed so far."""
        return self.job.replayed

    def _update(self, job: ReplayJob) -> Self:
        self.job = job
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.job!r})"


class Replay(ReplayHandle):
    """A replay of dead letters, as last fetched from the service."""

    def __init__(
        self, job: ReplayJob, api: Operations, run: Callable[[Operation[ReplayJob]], ReplayJob]
    ) -> None:
        super().__init__(job, api)
        self._run = run

    def refresh(self) -> Self:
        """Fetch the current state."""
        return self._update(self._run(self._api.refresh_replay(self.job)))

    def wait(self, timeout: Duration | None = None) -> Self:
        """Wait until the replay has finished; raise `NotFinished` after the timeout."""
        return self._update(self._run(self._api.wait_for_replay(self.job, timeout)))

    def cancel(self) -> Self:
        """Cancel the rest of the replay; raise `Conflict` if the replay has finished."""
        return self._update(self._run(self._api.cancel_replay(self.job)))


class AsyncReplay(ReplayHandle):
    """The asynchronous version of `Replay`."""

    def __init__(
        self,
        job: ReplayJob,
        api: Operations,
        run: Callable[[Operation[ReplayJob]], Awaitable[ReplayJob]],
    ) -> None:
        super().__init__(job, api)
        self._run = run

    async def refresh(self) -> Self:
        """Fetch the current state."""
        return self._update(await self._run(self._api.refresh_replay(self.job)))

    async def wait(self, timeout: Duration | None = None) -> Self:
        """Wait until the replay has finished; raise `NotFinished` after the timeout."""
        return self._update(await self._run(self._api.wait_for_replay(self.job, timeout)))

    async def cancel(self) -> Self:
        """Cancel the rest of the replay; raise `Conflict` if the replay has finished."""
        return self._update(await self._run(self._api.cancel_replay(self.job)))
