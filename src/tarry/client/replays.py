"""A replay of dead letters as the user holds it: what was last seen of it, and what can be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from tarry.client.flows import Flow, Flows
    from tarry.client.options import Duration
    from tarry.wire.tasks import ReplayJob


class ReplayHandle:
    """A replay of dead letters, as it stood when it was last looked at."""

    def __init__(self, job: ReplayJob, api: Flows) -> None:
        self._api = api
        self.job: ReplayJob = job
        """All that the service says of it."""

    @property
    def replay_id(self) -> str | None:
        """Its name; a dry run has none."""
        return self.job.replay_id

    @property
    def status(self) -> str:
        """RUNNING, DONE, CANCELLED or DRY_RUN."""
        return self.job.status

    @property
    def matched(self) -> int:
        """How many dead letters it is about."""
        return self.job.matched

    @property
    def replayed(self) -> int:
        """How many it has brought back."""
        return self.job.replayed

    def _seen(self, job: ReplayJob) -> Self:
        self.job = job
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.job!r})"


class Replay(ReplayHandle):
    """A replay of dead letters, as it stood when it was last looked at."""

    def __init__(
        self, job: ReplayJob, api: Flows, run: Callable[[Flow[ReplayJob]], ReplayJob]
    ) -> None:
        super().__init__(job, api)
        self._run = run

    def refresh(self) -> Self:
        """Look again."""
        return self._seen(self._run(self._api.look_at_replay(self.job)))

    def wait(self, timeout: Duration | None = None) -> Self:
        """Wait until it has ended; `NotFinished` when that takes longer."""
        return self._seen(self._run(self._api.wait_for_replay(self.job, timeout)))

    def cancel(self) -> Self:
        """End it; what it brought back stays. `Conflict` when it is done."""
        return self._seen(self._run(self._api.cancel_replay(self.job)))


class AsyncReplay(ReplayHandle):
    """What `Replay` is, to await."""

    def __init__(
        self, job: ReplayJob, api: Flows, run: Callable[[Flow[ReplayJob]], Awaitable[ReplayJob]]
    ) -> None:
        super().__init__(job, api)
        self._run = run

    async def refresh(self) -> Self:
        """Look again."""
        return self._seen(await self._run(self._api.look_at_replay(self.job)))

    async def wait(self, timeout: Duration | None = None) -> Self:
        """Wait until it has ended; `NotFinished` when that takes longer."""
        return self._seen(await self._run(self._api.wait_for_replay(self.job, timeout)))

    async def cancel(self) -> Self:
        """End it; what it brought back stays. `Conflict` when it is done."""
        return self._seen(await self._run(self._api.cancel_replay(self.job)))
