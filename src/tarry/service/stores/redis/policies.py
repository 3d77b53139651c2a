"""Policies with their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.rules.policies import decide_policy_write, must_write
from tarry.service.store import MAX_PAGE_BYTES, PolicyWriteStatus, RecordPage
from tarry.service.stores.redis.codec import to_policies

if TYPE_CHECKING:
    from tarry.service.model import PolicyVersion
    from tarry.service.stores.redis.partitions import Partitions


async def put_policy(
    partitions: Partitions, policy: PolicyVersion, *, replace: bool, quota: int | None = None
) -> tuple[PolicyWriteStatus, PolicyVersion]:
    """Create a policy; with `replace`, add a version to a policy that exists."""
    while True:
        state = ("read", policy.tenant, policy.id)
        reply = await partitions.run_for_tenant(policy.tenant, "policies", *state)
        now, version_count, deleted_version, *fields = reply
        newest = next(iter(to_policies(policy.tenant, fields)), None)
        status, version = decide_policy_write(
            policy,
            newest,
            replace=replace,
            version_count=version_count,
            quota=quota,
            deleted_version=deleted_version,
            now=now,
        )
        if not must_write(status):
            return status, version
        expected = 0 if newest is None else newest.version
        arguments = ("write", version.tenant, version.id, expected, version.version, quota, now)
        if await partitions.run_for_tenant(
            version.tenant, "policies", *arguments, values=[version.document]
        ):
            return status, version


async def get_policy(
    partitions: Partitions, tenant: str, policy_id: str, version: int | None = None
) -> PolicyVersion | None:
    """Return a version of a policy, by default the newest, or None if it does not exist."""
    _, *fields = await partitions.run_for_tenant(
        tenant, "policies", "get", tenant, policy_id, version
    )
    return to_policies(tenant, fields)[0] if fields else None


async def list_policies(
    partitions: Partitions, tenant: str, *, cursor: str | None = None, limit: int = 100
) -> RecordPage[PolicyVersion]:
    """List the newest version of each policy, sorted by id."""
    arguments = ("list", tenant, cursor or "", limit, MAX_PAGE_BYTES)
    status, *fields = await partitions.run_for_tenant(tenant, "policies", *arguments)
    policies = to_policies(tenant, fields)
    return RecordPage(policies, policies[-1].id if status == b"more" and policies else None)


async def delete_policy(partitions: Partitions, tenant: str, policy_id: str) -> PolicyWriteStatus:
    """Delete all versions of a policy, unless live tasks use it."""
    [status] = await partitions.run_for_tenant(tenant, "policies", "delete", tenant, policy_id)
    return PolicyWriteStatus(status.decode())
