"""Policies and their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import PolicyVersion
from tarry.service.store import Page, PolicyWriteStatus

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

_SELECT_POLICY = """
SELECT n.name, p.id, p.version, p.document, p.created_at
FROM policy AS p CROSS JOIN tenant AS n ON n.id = p.tenant
WHERE p.tenant = (SELECT id FROM tenant WHERE name = ?) AND
"""
_NEWEST_VERSION = _SELECT_POLICY + "p.id = ? ORDER BY p.version DESC LIMIT 1"
_ONE_VERSION = _SELECT_POLICY + "p.id = ? AND p.version = ?"
_NEXT_POLICY = _SELECT_POLICY + "p.id > ? ORDER BY p.id, p.version DESC LIMIT 1"


def put_policy(
    tx: Transaction,
    policy: PolicyVersion,
    replace: bool,  # noqa: FBT001 - operations are sent with positional arguments
) -> tuple[PolicyWriteStatus, PolicyVersion]:
    """Write a policy, or a new version of it if `replace` is set."""
    newest = get_policy(tx, policy.tenant, policy.id, None)
    if newest is not None and newest.document == policy.document:
        return PolicyWriteStatus.SAME, newest
    if newest is not None and not replace:
        return PolicyWriteStatus.CONFLICT, newest
    if newest is not None:
        last_version = newest.version
    else:
        # Version numbers are never reused: a task may have pinned a version of a deleted policy.
        last_version = _deleted_version(tx, policy.tenant, policy.id)
    new = PolicyVersion(
        tenant=policy.tenant,
        id=policy.id,
        version=last_version + 1,
        document=policy.document,
        created_at=tx.now,
    )
    tx.execute(
        "INSERT INTO policy (tenant, id, version, document, created_at) VALUES (?, ?, ?, ?, ?)",
        (tx.names.tenant_id(new.tenant), new.id, new.version, new.document, new.created_at),
    )
    return PolicyWriteStatus.CREATED if newest is None else PolicyWriteStatus.DONE, new


def _deleted_version(tx: Transaction, tenant: str, policy_id: str) -> int:
    """Return the last version of a policy before it was deleted; 0 if it never existed."""
    number = tx.names.policy_id(tenant, policy_id)
    [(version,)] = tx.execute("SELECT deleted_version FROM policy_use WHERE id = ?", (number,))
    return int(version)


def get_policy(
    tx: ReadTransaction, tenant: str, policy_id: str, version: int | None
) -> PolicyVersion | None:
    """Return a version of a policy, by default the newest."""
    if version is None:
        row = tx.execute(_NEWEST_VERSION, (tenant, policy_id)).fetchone()
    else:
        row = tx.execute(_ONE_VERSION, (tenant, policy_id, version)).fetchone()
    return None if row is None else _decode_policy(row)


def list_policies(
    tx: ReadTransaction, tenant: str, cursor: str | None, limit: int
) -> Page[PolicyVersion]:
    """List the newest version of each policy, by id; the cursor is the last id of a page."""
    policies: list[PolicyVersion] = []
    after = cursor or ""
    while row := tx.execute(_NEXT_POLICY, (tenant, after)).fetchone():
        if len(policies) == limit:
            return Page(policies, after)
        policies.append(_decode_policy(row))
        after = policies[-1].id
    return Page(policies, None)


def delete_policy(tx: Transaction, tenant: str, policy_id: str) -> PolicyWriteStatus:
    """Delete all versions of a policy, unless live tasks use it."""
    newest = get_policy(tx, tenant, policy_id, None)
    if newest is None:
        return PolicyWriteStatus.MISSING
    tx.flush()  # the number of live tasks is read with SQL
    number = tx.names.policy_id(tenant, policy_id)
    delete_if_unused = "UPDATE policy_use SET deleted_version = ? WHERE id = ? AND live_tasks <= 0"
    if not tx.execute(delete_if_unused, (newest.version, number)).rowcount:
        return PolicyWriteStatus.CONFLICT
    tenant_id = tx.names.tenant_id(tenant)
    tx.execute("DELETE FROM policy WHERE tenant = ? AND id = ?", (tenant_id, policy_id))
    return PolicyWriteStatus.DONE


def _decode_policy(row: tuple[Any, ...]) -> PolicyVersion:
    tenant, policy_id, version, document, created_at = row
    return PolicyVersion(
        tenant=tenant, id=policy_id, version=version, document=document, created_at=created_at
    )
