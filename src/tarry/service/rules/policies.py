"""Decides what a write of a policy does: nothing, a new policy, or another version of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace as copy_with

from tarry.service.store import PolicyWriteStatus

if TYPE_CHECKING:
    from tarry.service.model import PolicyVersion


def decide_policy_write(
    policy: PolicyVersion,
    newest: PolicyVersion | None,
    *,
    replace: bool,
    version_count: int,
    quota: int | None,
    deleted_version: int,
    now: int,
) -> tuple[PolicyWriteStatus, PolicyVersion]:
    """Return the result of `TaskStore.put_policy`; `must_write` tells whether to add the version.

    `newest` is the stored version with the largest number, `version_count` the number of versions
    of all policies of the tenant, and `deleted_version` the last version before the policy was
    deleted: its numbers are not reused, because a task may refer to one of them.
    """
    if newest is not None:
        if newest.document == policy.document:
            return PolicyWriteStatus.UNCHANGED, newest
        if not replace:
            return PolicyWriteStatus.CONFLICT, newest
    if quota is not None and version_count >= quota:
        return PolicyWriteStatus.OVER_QUOTA, newest or policy
    last_version = deleted_version if newest is None else newest.version
    status = PolicyWriteStatus.CREATED if newest is None else PolicyWriteStatus.REPLACED
    return status, copy_with(policy, version=last_version + 1, created_at=now)


def must_write(status: PolicyWriteStatus) -> bool:
    """Return whether the version of a decision has to be added."""
    return status in {PolicyWriteStatus.CREATED, PolicyWriteStatus.REPLACED}
