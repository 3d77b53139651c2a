"""Policies in their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import PolicyVersion
from tarry.service.store import Page, PolicyWriteStatus

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

_POLICY = """
SELECT n.name, p.id, p.version, p.document, p.created_at
FROM policy AS p CROSS JOIN tenant AS n ON n.id = p.tenant
WHERE p.tenant = (SELECT id FROM tenant WHERE name = ?) AND
"""
_NEWEST = _POLICY + "p.id = ? ORDER BY p.version DESC LIMIT 1"
_VERSION = _POLICY + "p.id = ? AND p.version = ?"
_NEXT = _POLICY + "p.id > ? ORDER BY p.id, p.version DESC LIMIT 1"


def put_policy(
    tx: Transaction,
    given: PolicyVersion,
    replace: bool,  # noqa: FBT001 - what is sent has its place
) -> tuple[PolicyWriteStatus, PolicyVersion]:
    """Write a policy, or a new version of it."""
    newest = get_policy(tx, given.tenant, given.id, None)
    if newest is not None and newest.document == given.document:
        return PolicyWriteStatus.SAME, newest
    if newest is not None and not replace:
        return PolicyWriteStatus.CONFLICT, newest
    last = newest.version if newest is not None else _deleted(tx, given.tenant, given.id)
    made = PolicyVersion(
        tenant=given.tenant,
        id=given.id,
        version=last + 1,
        document=given.document,
        created_at=tx.now,
    )
    tx.execute(
        "INSERT INTO policy (tenant, id, version, document, created_at) VALUES (?, ?, ?, ?, ?)",
        (tx.names.tenant_id(made.tenant), made.id, made.version, made.document, made.created_at),
    )
    return PolicyWriteStatus.CREATED if newest is None else PolicyWriteStatus.DONE, made


def _deleted(tx: Transaction, tenant: str, policy_id: str) -> int:
    """Return the last version that a policy had when it was deleted; 0: there was none."""
    number = tx.names.policy_id(tenant, policy_id)
    [(version,)] = tx.execute("SELECT version FROM used WHERE id = ?", (number,))
    return int(version)


def get_policy(
    tx: ReadTransaction, tenant: str, policy_id: str, version: int | None
) -> PolicyVersion | None:
    """Return a version of a policy, by default the newest."""
    if version is None:
        row = tx.execute(_NEWEST, (tenant, policy_id)).fetchone()
    else:
        row = tx.execute(_VERSION, (tenant, policy_id, version)).fetchone()
    return None if row is None else _policy_of(row)


def list_policies(
    tx: ReadTransaction, tenant: str, cursor: str | None, limit: int
) -> Page[PolicyVersion]:
    """List the newest version of each policy, by id; the cursor is the last id."""
    found: list[PolicyVersion] = []
    after = cursor or ""
    while row := tx.execute(_NEXT, (tenant, after)).fetchone():
        if len(found) == limit:
            return Page(found, after)
        found.append(_policy_of(row))
        after = found[-1].id
    return Page(found, None)


def delete_policy(tx: Transaction, tenant: str, policy_id: str) -> PolicyWriteStatus:
    """Forget all versions of a policy that no live task uses."""
    newest = get_policy(tx, tenant, policy_id, None)
    if newest is None:
        return PolicyWriteStatus.MISSING
    tx.flush()
    number = tx.names.policy_id(tenant, policy_id)
    unused = "UPDATE used SET version = ? WHERE id = ? AND live <= 0"
    if not tx.execute(unused, (newest.version, number)).rowcount:
        return PolicyWriteStatus.CONFLICT
    whose = tx.names.tenant_id(tenant)
    tx.execute("DELETE FROM policy WHERE tenant = ? AND id = ?", (whose, policy_id))
    return PolicyWriteStatus.DONE


def _policy_of(row: tuple[Any, ...]) -> PolicyVersion:
    tenant, policy_id, version, document, created_at = row
    return PolicyVersion(
        tenant=tenant, id=policy_id, version=version, document=document, created_at=created_at
    )
