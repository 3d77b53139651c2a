"""Policies, keys, numbers and maintenance of the store in memory."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import ApiKey, PolicyVersion, Status
from tarry.service.store import (
    Counters,
    Page,
    PolicyWriteStatus,
    Retention,
    SeriesPoint,
    SweepResult,
)
from tests.service.stores.model_store.base import Part, copy
from tests.service.stores.model_store.data import DAY, MINUTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.service.stores.model_store.rows import Row, Tenant

MOST_KEYS = 1000


class Upkeep(Part):
    """All that is not about one task."""

    # --- policies ---------------------------------------------------------------------------------

    async def put_policy(
        self, policy: PolicyVersion, *, replace: bool
    ) -> tuple[PolicyWriteStatus, PolicyVersion]:
        """Write a policy; `replace` makes a new version of other content, else it is a conflict."""
        owner = self.data.tenant(policy.tenant)
        versions = owner.policies.setdefault(policy.id, [])
        if versions and versions[-1].document == policy.document:
            return PolicyWriteStatus.SAME, copy(versions[-1])
        if versions and not replace:
            return PolicyWriteStatus.CONFLICT, copy(versions[-1])
        change = PolicyWriteStatus.DONE if versions else PolicyWriteStatus.CREATED
        version = owner.policy_versions[policy.id] + 1
        new = msgspec.structs.replace(policy, version=version, created_at=self._clock())
        owner.policy_versions[policy.id] = version
        versions.append(new)
        return change, copy(new)

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> PolicyVersion | None:
        """Return a version of a policy, by default the newest."""
        versions = self.data.tenant(tenant).policies.get(policy_id, [])
        if version is not None:
            versions = [one for one in versions if one.version == version]
        return copy(versions[-1]) if versions else None

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> Page[PolicyVersion]:
        """List the newest version of each policy, by id."""
        found = self.data.tenant(tenant).policies
        ids = sorted(policy_id for policy_id in found if cursor is None or policy_id > cursor)
        items = [copy(found[policy_id][-1]) for policy_id in ids[:limit]]
        return Page(items, ids[limit - 1] if len(ids) > limit else None)

    async def delete_policy(self, tenant: str, policy_id: str) -> PolicyWriteStatus:
        """Forget all versions of a policy that no live task uses."""
        owner = self.data.tenant(tenant)
        if policy_id not in owner.policies:
            return PolicyWriteStatus.MISSING
        if owner.policy_use[policy_id]:
            return PolicyWriteStatus.CONFLICT
        del owner.policies[policy_id]
        return PolicyWriteStatus.DONE

    # --- keys -------------------------------------------------------------------------------------

    async def put_key(self, key: ApiKey) -> None:
        """Keep an API key."""
        if key.id not in self.data.keys:
            new = msgspec.structs.replace(key, created_at=self._clock(), revoked_at=None)
            self.data.keys[key.id] = new
            self.data.digests[key.digest] = key.id

    async def find_key(self, digest: bytes) -> ApiKey | None:
        """Return the key with a digest, revoked or not."""
        key_id = self.data.digests.get(digest)
        return None if key_id is None else copy(self.data.keys[key_id])

    async def list_keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Return the keys."""
        keys = [copy(key) for key in self.data.keys.values() if tenant in {None, key.tenant}]
        return keys[:MOST_KEYS]

    async def revoke_key(self, key_id: str) -> bool:
        """End a key."""
        key = self.data.keys.get(key_id)
        if key is not None and key.revoked_at is None:
            key.revoked_at = self._clock()
        return key is not None

    # --- numbers ----------------------------------------------------------------------------------

    async def counters(self, tenant: str | None = None) -> Counters:
        """Return the counts of a tenant's tasks, or of all."""
        tenants = self._tenants(tenant)
        tasks = {status: sum(one.counts[status] for one in tenants) for status in Status}
        return Counters(tasks, sum(one.superseded for one in tenants))

    async def series(self, tenant: str | None, *, since: int) -> list[SeriesPoint]:
        """Return what happened in each minute from that of `since` on."""
        first = max(since, self._clock() - DAY)
        total: dict[int, Counter[str]] = {}
        for one in self._tenants(tenant):
            for minute, outcomes in one.series.items():
                if minute > first - MINUTE:
                    total.setdefault(minute, Counter()).update(outcomes)
        return [SeriesPoint(minute, dict(total[minute])) for minute in sorted(total)]

    def _tenants(self, tenant: str | None) -> list[Tenant]:
        return [one for one in self.data.tenants.values() if tenant in {None, one.name}]

    # --- maintenance ------------------------------------------------------------------------------

    async def sweep(self, retention: Retention, limit: int) -> SweepResult:
        """Remove up to `limit` terminal tasks whose time is up, their logs too."""
        now, tasks = self._clock(), 0
        kinds = ((False, now - retention.succeeded), (True, now - retention.dead))
        jobs = self.data.replays.values()
        replaying = {job.tenant for job in jobs if job.status == "running"}
        spared: list[tuple[int, int, int]] = []
        for dead, until in kinds:
            while tasks < limit and (row := self._ended(until, dead=dead)):
                note = heappop(self.data.ended[dead])
                if dead and row.task.tenant in replaying:
                    spared.append(note)
                else:
                    self.data.remove(row)
                    tasks += 1
        more = any(self._ended(until, dead=dead) for dead, until in kinds)
        for note in spared:
            heappush(self.data.ended[True], note)
        self._forget_replays(now - retention.dead)
        return SweepResult(tasks, more)

    def _forget_replays(self, until: int) -> None:
        jobs = self.data.replays
        ended = [one.id for one in jobs.values() if one.finished_at and one.finished_at <= until]
        for job_id in ended:
            del jobs[job_id]

    def _ended(self, until: int, *, dead: bool) -> Row | None:
        """Return the task that ended first, if it did so by then."""
        notes = self.data.ended[dead]
        while notes:
            ended, number, version = notes[0]
            row = self.data.rows.get(number)
            if row is not None and row.task.version == version:
                return row if ended <= until else None
            heappop(notes)
        return None

    async def orphans(self, limit: int) -> list[str]:
        """Return the bodies of tasks that are gone."""
        return list(self.data.orphans)[:limit]

    async def forget_orphans(self, refs: Sequence[str]) -> None:
        """Forget orphans that were deleted."""
        for ref in refs:
            self.data.orphans.pop(ref, None)
