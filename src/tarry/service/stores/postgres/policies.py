"""Policies with their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import PolicyVersion
from tarry.service.rules.policies import decide_policy_write, must_write
from tarry.service.store import MAX_PAGE_BYTES, PolicyWriteStatus, RecordPage
from tarry.service.stores.postgres.rows import decode_row, encode_text

if TYPE_CHECKING:
    from tarry.service.stores.postgres.database import Database, Transaction

_POLICY_LOCK = 0x7461_0004
"""The class of advisory locks with which policies of a tenant are changed one after the other."""
_LOCK = "SELECT pg_advisory_xact_lock($1, hashtext($2))"
_TENANT_ID_AND_NOW = "SELECT (tarry.tenants_1(ARRAY[$1::text]))[1], tarry.now_1($2)"
# The columns are in the order of the fields of the records.
_SELECT_POLICY = """
SELECT n.name, p.id, p.version, p.document, p.created_at
FROM tarry.policy AS p JOIN tarry.tenant AS n ON n.id = p.tenant WHERE n.name = $1 AND
"""
_NEWEST_VERSION = _SELECT_POLICY + "p.id = $2 ORDER BY p.version DESC LIMIT 1"
_ONE_VERSION = _SELECT_POLICY + "p.id = $2 AND p.version = $3"
# Finds the newest version of one policy after the other with the primary key.
_LIST_POLICIES = """
WITH RECURSIVE newest AS (
    (SELECT 1 AS number, p.* FROM tarry.policy AS p
        WHERE p.tenant = (SELECT id FROM tarry.tenant WHERE name = $1) AND p.id > $2
        ORDER BY p.id, p.version DESC LIMIT 1)
    UNION ALL
    SELECT last.number + 1, p.* FROM newest AS last CROSS JOIN LATERAL (
        SELECT p.* FROM tarry.policy AS p WHERE p.tenant = last.tenant AND p.id > last.id
        ORDER BY p.id, p.version DESC LIMIT 1) AS p
    WHERE last.number < $3
)
SELECT n.name, p.id, p.version, p.document, p.created_at
FROM newest AS p JOIN tarry.tenant AS n ON n.id = p.tenant ORDER BY p.number
"""
# Sorted by `generation`, so that few old versions of the row are read: see schema.py.
_VERSION_NUMBERS = """
SELECT (SELECT count(*) FROM tarry.policy WHERE tenant = $1), coalesce((
    SELECT deleted_version FROM tarry.policy_use WHERE tenant = $1 AND policy = $2
    ORDER BY generation DESC LIMIT 1), 0)
"""
# The update changes nothing: it locks an existing row, and makes RETURNING return it.
_CREATE_AND_LOCK_USE = """
INSERT INTO tarry.policy_use AS u (tenant, policy) VALUES ($1, $2)
ON CONFLICT (tenant, policy) DO UPDATE SET tenant = excluded.tenant
RETURNING u.id, u.deleted_version
"""
_INSERT_POLICY = """
INSERT INTO tarry.policy (tenant, id, version, document, created_at) VALUES ($1, $2, $3, $4, $5)
"""
_MARK_REPLACED = """
UPDATE tarry.policy SET replaced_at = $1 WHERE tenant = $2 AND id = $3 AND version = $4
"""
_MARK_DELETED_IF_UNUSED = """
UPDATE tarry.policy_use SET deleted_version = $3
WHERE tenant = $1 AND policy = $2 AND live_tasks <= 0 RETURNING id
"""


async def put_policy(
    database: Database,
    policy: PolicyVersion,
    *,
    replace: bool,
    quota: int | None = None,
) -> tuple[PolicyWriteStatus, PolicyVersion]:
    """Create a policy; with `replace`, add a new version to a policy that exists."""
    name, policy_id = encode_text(policy.tenant), encode_text(policy.id)

    async def write(tx: Transaction) -> tuple[PolicyWriteStatus, PolicyVersion]:
        await tx.fetch(_LOCK, _POLICY_LOCK, name)
        newest = _decode_policy(await tx.fetch_row(_NEWEST_VERSION, name, policy_id))
        tenant, time = await tx.fetch_row(_TENANT_ID_AND_NOW, name, database.now())
        version_count, deleted_version = await tx.fetch_row(_VERSION_NUMBERS, tenant, policy_id)
        status, version = decide_policy_write(
            policy,
            newest,
            replace=replace,
            version_count=version_count,
            quota=quota,
            deleted_version=deleted_version,
            now=time,
        )
        if must_write(status):
            if newest is None:
                use_id, _ = await tx.fetch_row(_CREATE_AND_LOCK_USE, tenant, policy_id)
                reset = "UPDATE tarry.policy_use SET deleted_version = 0 WHERE id = $1"
                await tx.fetch(reset, use_id)
            else:
                await tx.fetch(_MARK_REPLACED, time, tenant, policy_id, newest.version)
            values = (version.version, version.document, version.created_at)
            await tx.fetch(_INSERT_POLICY, tenant, policy_id, *values)
        return status, version

    return await database.transact(write)


def _decode_policy(row: Any) -> PolicyVersion | None:
    return None if row is None else decode_row(tuple(row), PolicyVersion)


async def get_policy(
    database: Database, tenant: str, policy_id: str, version: int | None = None
) -> PolicyVersion | None:
    """Return a version of a policy, by default the newest, or None if it does not exist."""
    names = (encode_text(tenant), encode_text(policy_id))
    if version is None:
        return _decode_policy(await database.fetch_row(_NEWEST_VERSION, *names))
    return _decode_policy(await database.fetch_row(_ONE_VERSION, *names, version))


async def list_policies(
    database: Database, tenant: str, *, cursor: str | None = None, limit: int = 100
) -> RecordPage[PolicyVersion]:
    """List the newest version of each policy; the cursor is the previous page's last policy id."""
    after = encode_text(cursor or "")
    policies: list[PolicyVersion] = []
    page_bytes = 0
    rows = await database.fetch(_LIST_POLICIES, encode_text(tenant), after, limit + 1)
    for row in rows:
        if len(policies) == limit or page_bytes >= MAX_PAGE_BYTES:
            return RecordPage(policies, policies[-1].id)
        policies.append(decode_row(tuple(row), PolicyVersion))
        page_bytes += len(policies[-1].document)
    return RecordPage(policies, None)


async def delete_policy(database: Database, tenant: str, policy_id: str) -> PolicyWriteStatus:
    """Delete all versions of a policy, unless live (PENDING or IN_FLIGHT) tasks use it."""
    name, id_text = encode_text(tenant), encode_text(policy_id)

    async def delete(tx: Transaction) -> PolicyWriteStatus:
        await tx.fetch(_LOCK, _POLICY_LOCK, name)
        newest = _decode_policy(await tx.fetch_row(_NEWEST_VERSION, name, id_text))
        if newest is None:
            return PolicyWriteStatus.MISSING
        tenant_id, _ = await tx.fetch_row(_TENANT_ID_AND_NOW, name, None)
        await tx.fetch(_CREATE_AND_LOCK_USE, tenant_id, id_text)
        if not await tx.fetch(_MARK_DELETED_IF_UNUSED, tenant_id, id_text, newest.version):
            return PolicyWriteStatus.CONFLICT
        statement = "DELETE FROM tarry.policy WHERE tenant = $1 AND id = $2"
        await tx.fetch(statement, tenant_id, id_text)
        return PolicyWriteStatus.DELETED

    return await database.transact(delete)
