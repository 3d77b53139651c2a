"""Policies in their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import PolicyVersion
from tarry.service.store import Page, PolicyWriteStatus

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import Ledger, View

_POLICY = """
SELECT n.name, p.id, p.version, p.document, p.created_at
FROM policy AS p CROSS JOIN tenant AS n ON n.id = p.tenant
WHERE p.tenant = (SELECT id FROM tenant WHERE name = ?) AND
"""
_NEWEST = _POLICY + "p.id = ? ORDER BY p.version DESC LIMIT 1"
_VERSION = _POLICY + "p.id = ? AND p.version = ?"
_NEXT = _POLICY + "p.id > ? ORDER BY p.id, p.version DESC LIMIT 1"


def put_policy(
    ledger: Ledger,
    given: PolicyVersion,
    replace: bool,  # noqa: FBT001 - what is sent has its place
) -> tuple[PolicyWriteStatus, PolicyVersion]:
    """Write a policy, or a new version of it."""
    newest = policy(ledger, given.tenant, given.id, None)
    if newest is not None and newest.document == given.document:
        return PolicyWriteStatus.SAME, newest
    if newest is not None and not replace:
        return PolicyWriteStatus.CONFLICT, newest
    last = newest.version if newest is not None else _deleted(ledger, given.tenant, given.id)
    made = PolicyVersion(
        tenant=given.tenant,
        id=given.id,
        version=last + 1,
        document=given.document,
        created_at=ledger.now,
    )
    ledger.execute(
        "INSERT INTO policy (tenant, id, version, document, created_at) VALUES (?, ?, ?, ?, ?)",
        (ledger.names.tenant(made.tenant), made.id, made.version, made.document, made.created_at),
    )
    return PolicyWriteStatus.CREATED if newest is None else PolicyWriteStatus.DONE, made


def _deleted(ledger: Ledger, tenant: str, policy_id: str) -> int:
    """Return the last version that a policy had when it was deleted; 0: there was none."""
    number = ledger.names.policy(tenant, policy_id)
    [(version,)] = ledger.execute("SELECT version FROM used WHERE id = ?", (number,))
    return int(version)


def policy(view: View, tenant: str, policy_id: str, version: int | None) -> PolicyVersion | None:
    """Return a version of a policy, by default the newest."""
    if version is None:
        row = view.execute(_NEWEST, (tenant, policy_id)).fetchone()
    else:
        row = view.execute(_VERSION, (tenant, policy_id, version)).fetchone()
    return None if row is None else _policy_of(row)


def policies(view: View, tenant: str, cursor: str | None, limit: int) -> Page[PolicyVersion]:
    """List the newest version of each policy, by id; the cursor is the last id."""
    found: list[PolicyVersion] = []
    after = cursor or ""
    while row := view.execute(_NEXT, (tenant, after)).fetchone():
        if len(found) == limit:
            return Page(found, after)
        found.append(_policy_of(row))
        after = found[-1].id
    return Page(found, None)


def delete_policy(ledger: Ledger, tenant: str, policy_id: str) -> PolicyWriteStatus:
    """Forget all versions of a policy that no live task uses."""
    newest = policy(ledger, tenant, policy_id, None)
    if newest is None:
        return PolicyWriteStatus.MISSING
    ledger.flush()
    number = ledger.names.policy(tenant, policy_id)
    unused = "UPDATE used SET version = ? WHERE id = ? AND live <= 0"
    if not ledger.execute(unused, (newest.version, number)).rowcount:
        return PolicyWriteStatus.CONFLICT
    whose = ledger.names.tenant(tenant)
    ledger.execute("DELETE FROM policy WHERE tenant = ? AND id = ?", (whose, policy_id))
    return PolicyWriteStatus.DONE


def _policy_of(row: tuple[Any, ...]) -> PolicyVersion:
    tenant, policy_id, version, document, created_at = row
    return PolicyVersion(
        tenant=tenant, id=policy_id, version=version, document=document, created_at=created_at
    )
