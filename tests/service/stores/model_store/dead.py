"""Dead letters in memory: counted, replayed, purged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import ReplayRecord, Status
from tarry.service.store import TaskFilter, next_replay_step_at
from tests.service.stores.model_store.asking import matches
from tests.service.stores.model_store.base import Part, copy

if TYPE_CHECKING:
    from tests.service.stores.model_store.rows import Row

MOST_JOBS = 100


class Dead(Part):
    """What becomes of tasks that are EXHAUSTED."""

    def _letters(self, replay: ReplayRecord, now: int) -> list[Row]:
        """Return the letters of a job that lie behind its cursor, oldest task first."""
        tenant = self.data.tenant(replay.tenant)
        query = TaskFilter(policy_id=replay.policy_id, lane=replay.lane, reason=replay.reason)
        before, after = replay.before or now, int(replay.cursor or 0)
        rows = [self.data.rows[number] for number in sorted(tenant.dead) if number > after]
        return [
            row
            for row in rows
            if (row.task.finished_at or 0) <= before and matches(row.task, query)
        ]

    async def count_dead(self, replay: ReplayRecord) -> int:
        """Say how many letters a replay would bring back."""
        return len(self._letters(replay, self._clock()))

    async def start_replay(self, replay: ReplayRecord) -> ReplayRecord:
        """Keep a replay job; the same id again is the same job."""
        now = self._clock()
        if replay.id not in self.data.replays:
            job = msgspec.structs.replace(
                replay,
                before=min(replay.before or now, now),
                replayed=0,
                cursor=None,
                status="running",
                created_at=now,
                next_at=now,
                finished_at=None,
            )
            job.matched = len(self._letters(job, now))
            self.data.replays[job.id] = job
        return copy(self.data.replays[replay.id])

    async def get_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """Return a job."""
        job = self.data.replays.get(replay_id)
        return None if job is None or job.tenant != tenant else copy(job)

    async def list_replays(self, *, running: bool, tenant: str | None = None) -> list[ReplayRecord]:
        """Return jobs: the latest, or of those that run the ones that are due first."""
        jobs = [
            copy(job)
            for job in self.data.replays.values()
            if tenant in {None, job.tenant} and (not running or job.status == "running")
        ]
        if running:
            jobs.sort(key=lambda job: (job.next_at, job.id))
        else:
            jobs.sort(key=lambda job: (job.created_at, job.id), reverse=True)
        return jobs[:MOST_JOBS]

    async def replay_step(self, replay_id: str, limit: int) -> ReplayRecord | None:
        """Bring back up to `limit` letters if the job is due, and set when it is due again."""
        job, now = self.data.replays.get(replay_id), self._clock()
        if job is None:
            return None
        if job.status == "running" and job.next_at <= now:
            rows = self._letters(job, now)[:limit]
            for row in rows:
                self.data.revive(row, now)
                job.cursor = str(row.number)
            job.replayed += len(rows)
            job.next_at = next_replay_step_at(job, len(rows), now)
            if len(rows) < limit:
                job.status, job.finished_at = "done", now
        return copy(job)

    async def cancel_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        """End a job that runs."""
        job = self.data.replays.get(replay_id)
        if job is None or job.tenant != tenant:
            return None
        if job.status == "running":
            job.status, job.finished_at = "cancelled", self._clock()
        return copy(job)

    async def purge(self, tenant: str, query: TaskFilter, limit: int) -> int:
        """Remove up to `limit` dead letters, oldest first."""
        if query.status not in {None, Status.EXHAUSTED}:
            return 0
        rows = [self.data.rows[number] for number in sorted(self.data.tenant(tenant).dead)]
        rows = [row for row in rows if matches(row.task, query)][:limit]
        for row in rows:
            self.data.remove(row)
        return len(rows)
