"""Policies with their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.model import PolicyVersion
from tarry.service.rules.policies import decide_policy_write, must_write
from tarry.service.store import MAX_PAGE_BYTES, PolicyWriteStatus, RecordPage
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.queries import decode_row
from tarry.service.stores.sqlite.transaction import WriteTransaction

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import ReadTransaction

# The columns are in the order of the fields of the records.
_SELECT_POLICY = """
SELECT n.name, p.id, p.version, p.document, p.created_at
FROM policy AS p CROSS JOIN tenant AS n ON n.id = p.tenant
WHERE p.tenant = (SELECT id FROM tenant WHERE name = ?) AND
"""
_NEWEST_VERSION = _SELECT_POLICY + "p.id = ? ORDER BY p.version DESC LIMIT 1"
_ONE_VERSION = _SELECT_POLICY + "p.id = ? AND p.version = ?"
_VERSION_NUMBERS = """
SELECT (SELECT count(*) FROM policy WHERE tenant = ?1),
    ifnull((SELECT deleted_version FROM policy_use WHERE tenant = ?1 AND policy = ?2), 0)
"""
_NEXT_POLICY = _SELECT_POLICY + "p.id > ? ORDER BY p.id, p.version DESC LIMIT 1"


@write_operation
def put_policy(
    tx: WriteTransaction,
    policy: PolicyVersion,
    replace: bool,  # noqa: FBT001 - the writer process gets arguments by position
    quota: int | None = None,
) -> tuple[PolicyWriteStatus, PolicyVersion]:
    """Create a policy; with `replace`, add a new version to a policy that exists."""
    newest = get_policy(tx, policy.tenant, policy.id)
    tenant_id = tx.names.tenant_id(policy.tenant)
    [(version_count, deleted_version)] = tx.execute(_VERSION_NUMBERS, (tenant_id, policy.id))
    status, version = decide_policy_write(
        policy,
        newest,
        replace=replace,
        version_count=version_count,
        quota=quota,
        deleted_version=deleted_version,
        now=tx.now,
    )
    if must_write(status):
        _add_version(tx, tenant_id, version, newest)
    return status, version


def _add_version(
    tx: WriteTransaction, tenant_id: int, version: PolicyVersion, newest: PolicyVersion | None
) -> None:
    if newest is None:
        policy_row_id = tx.names.policy_id(version.tenant, version.id)
        tx.execute("UPDATE policy_use SET deleted_version = 0 WHERE id = ?", (policy_row_id,))
    else:
        statement = "UPDATE policy SET replaced_at = ? WHERE tenant = ? AND id = ? AND version = ?"
        tx.execute(statement, (tx.now, tenant_id, newest.id, newest.version))
    tx.execute(
        "INSERT INTO policy (tenant, id, version, document, created_at) VALUES (?, ?, ?, ?, ?)",
        (tenant_id, version.id, version.version, version.document, version.created_at),
    )


def get_policy(
    tx: ReadTransaction, tenant: str, policy_id: str, version: int | None = None
) -> PolicyVersion | None:
    """Return a version of a policy, by default the newest, or None if it does not exist."""
    statement = _NEWEST_VERSION if version is None else _ONE_VERSION
    version_parameter = () if version is None else (version,)
    row = tx.execute(statement, (tenant, policy_id, *version_parameter)).fetchone()
    return None if row is None else decode_row(row, PolicyVersion)


def list_policies(
    tx: ReadTransaction, tenant: str, cursor: str | None = None, limit: int = 100
) -> RecordPage[PolicyVersion]:
    """List the newest version of each policy; the cursor is the previous page's last policy id."""
    policies: list[PolicyVersion] = []
    after, page_bytes = cursor or "", 0
    while row := tx.execute(_NEXT_POLICY, (tenant, after)).fetchone():
        if len(policies) == limit or page_bytes >= MAX_PAGE_BYTES:
            return RecordPage(policies, after)
        policies.append(decode_row(row, PolicyVersion))
        after = policies[-1].id
        page_bytes += len(policies[-1].document)
    return RecordPage(policies, None)


@write_operation
def delete_policy(tx: WriteTransaction, tenant: str, policy_id: str) -> PolicyWriteStatus:
    """Delete all versions of a policy, unless live (PENDING or IN_FLIGHT) tasks use it."""
    newest = get_policy(tx, tenant, policy_id)
    if newest is None:
        return PolicyWriteStatus.MISSING
    tx.flush()  # writes `live_tasks`, which `delete_if_unused` reads
    policy_row_id = tx.names.policy_id(tenant, policy_id)
    delete_if_unused = "UPDATE policy_use SET deleted_version = ? WHERE id = ? AND live_tasks <= 0"
    if not tx.execute(delete_if_unused, (newest.version, policy_row_id)).rowcount:
        return PolicyWriteStatus.CONFLICT
    tenant_id = tx.names.tenant_id(tenant)
    tx.execute("DELETE FROM policy WHERE tenant = ? AND id = ?", (tenant_id, policy_id))
    return PolicyWriteStatus.DELETED
