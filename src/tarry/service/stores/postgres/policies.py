"""Policies with their versions, API keys and signing secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as copy_with

from tarry.service.model import ApiKeyRecord, PolicyVersion, SigningSecretRecord
from tarry.service.store import (
    MAX_LANE_SIGNING_SECRETS,
    MAX_PAGE_BYTES,
    MAX_SIGNING_SECRETS,
    PolicyWriteStatus,
    RecordPage,
)
from tarry.service.stores.postgres.rows import decode_row, encode_optional, encode_text

if TYPE_CHECKING:
    from tarry.service.stores.postgres.database import Database, Transaction

_MAX_LISTED_API_KEYS = 1000
_POLICY_LOCK, _SECRET_LOCK = 0x7461_0004, 0x7461_0005
"""Classes of advisory locks. Policies and secrets of a tenant are changed one after the other."""
_LOCK = "SELECT pg_advisory_xact_lock($1, hashtext($2))"
_TENANT_ID = "SELECT (tarry.tenants_1(ARRAY[$1::text]))[1], tarry.now_1($2)"
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
_LAST_DELETED_VERSION = """
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
_DELETE_IF_UNUSED = """
UPDATE tarry.policy_use SET deleted_version = $3
WHERE tenant = $1 AND policy = $2 AND live_tasks <= 0 RETURNING id
"""
_SELECT_API_KEY = "SELECT id, tenant, digest, name, created_at, revoked_at, role FROM tarry.api_key"
_INSERT_API_KEY = """
INSERT INTO tarry.api_key VALUES ($1, $2, $3, $4, tarry.now_1($5), NULL, $6)
ON CONFLICT (id) DO NOTHING
"""
_REVOKE_API_KEY = """
UPDATE tarry.api_key SET revoked_at = coalesce(revoked_at, tarry.now_1($2))
WHERE id = $1 RETURNING 1
"""
_LIST_SECRETS = """
SELECT tenant, id, lane, secret, public_key, created_at, expires_at FROM tarry.signing_secret
WHERE tenant = $1 AND (expires_at IS NULL OR expires_at > tarry.now_1($2)) ORDER BY id DESC
"""
_EXPIRE_SECRETS = """
UPDATE tarry.signing_secret SET expires_at = $1
WHERE tenant = $2 AND lane IS NOT DISTINCT FROM $3 AND (expires_at IS NULL OR expires_at > $1)
"""
_UPSERT_SIGNING_KEY = """
INSERT INTO tarry.signing_secret AS s VALUES ($1, $2, $3, $4, $5, $6, NULL)
ON CONFLICT (tenant, id) DO UPDATE SET lane = excluded.lane, secret = excluded.secret,
    public_key = excluded.public_key, created_at = excluded.created_at, expires_at = NULL
"""


async def put_policy(
    database: Database,
    policy: PolicyVersion,
    *,
    replace: bool,
    quota: int | None,
    now: int | None,
) -> tuple[PolicyWriteStatus, PolicyVersion]:
    """Create a policy; with `replace`, add a new version to a policy that exists."""
    name, policy_id = encode_text(policy.tenant), encode_text(policy.id)

    async def write(tx: Transaction) -> tuple[PolicyWriteStatus, PolicyVersion]:
        await tx.fetch(_LOCK, _POLICY_LOCK, name)
        newest = _decode_policy(await tx.fetch_row(_NEWEST_VERSION, name, policy_id))
        if newest is not None:
            if newest.document == policy.document:
                return PolicyWriteStatus.UNCHANGED, newest
            if not replace:
                return PolicyWriteStatus.CONFLICT, newest
        tenant, time = await tx.fetch_row(_TENANT_ID, name, now)
        if quota is not None:
            count = "SELECT count(*) FROM tarry.policy WHERE tenant = $1"
            if await tx.fetch_value(count, tenant) >= quota:
                return PolicyWriteStatus.OVER_QUOTA, newest or policy
        if newest is not None:
            last_version = newest.version
            await tx.fetch(_MARK_REPLACED, time, tenant, policy_id, last_version)
        else:
            # The numbers of a deleted policy are not reused: a task may refer to a version.
            use_id, last_version = await tx.fetch_row(_LAST_DELETED_VERSION, tenant, policy_id)
            reset = "UPDATE tarry.policy_use SET deleted_version = 0 WHERE id = $1"
            await tx.fetch(reset, use_id)
        new = copy_with(policy, version=last_version + 1, created_at=time)
        await tx.fetch(_INSERT_POLICY, tenant, policy_id, new.version, new.document, time)
        return PolicyWriteStatus.CREATED if newest is None else PolicyWriteStatus.REPLACED, new

    return await database.transact(write)


def _decode_policy(row: Any) -> PolicyVersion | None:
    return None if row is None else decode_row(tuple(row), PolicyVersion)


async def get_policy(
    database: Database, tenant: str, policy_id: str, version: int | None
) -> PolicyVersion | None:
    """Return a version of a policy, by default the newest, or None if it does not exist."""
    names = (encode_text(tenant), encode_text(policy_id))
    if version is None:
        return _decode_policy(await database.fetch_row(_NEWEST_VERSION, *names))
    return _decode_policy(await database.fetch_row(_ONE_VERSION, *names, version))


async def list_policies(
    database: Database, tenant: str, cursor: str | None, limit: int
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
        tenant_id, _ = await tx.fetch_row(_TENANT_ID, name, None)
        await tx.fetch(_LAST_DELETED_VERSION, tenant_id, id_text)
        if not await tx.fetch(_DELETE_IF_UNUSED, tenant_id, id_text, newest.version):
            return PolicyWriteStatus.CONFLICT
        statement = "DELETE FROM tarry.policy WHERE tenant = $1 AND id = $2"
        await tx.fetch(statement, tenant_id, id_text)
        return PolicyWriteStatus.DELETED

    return await database.transact(delete)


async def put_api_key(database: Database, key: ApiKeyRecord, now: int | None) -> None:
    """Store an API key, unless a key with this id is stored already."""
    texts = (encode_text(key.id), encode_text(key.tenant))
    name, role = encode_text(key.name), encode_text(key.role)
    await database.fetch(_INSERT_API_KEY, *texts, key.digest, name, now, role)


async def find_api_key(database: Database, digest: bytes) -> ApiKeyRecord | None:
    """Return the API key with this digest, revoked or not, or None if it does not exist."""
    row = await database.fetch_row(f"{_SELECT_API_KEY} WHERE digest = $1", digest)
    return None if row is None else decode_row(tuple(row), ApiKeyRecord)


async def list_api_keys(database: Database, tenant: str | None) -> list[ApiKeyRecord]:
    """List the API keys of a tenant, or of all tenants (None)."""
    statement = (
        f"{_SELECT_API_KEY} WHERE $1::text IS NULL OR tenant = $1 "
        f"ORDER BY id LIMIT {_MAX_LISTED_API_KEYS}"
    )
    rows = await database.fetch(statement, encode_optional(tenant))
    return [decode_row(tuple(row), ApiKeyRecord) for row in rows]


async def revoke_api_key(database: Database, key_id: str, now: int | None) -> bool:
    """Revoke an API key, unless it is revoked already; return whether the key exists."""
    return bool(await database.fetch(_REVOKE_API_KEY, encode_text(key_id), now))


async def put_signing_secret(
    database: Database, secret: SigningSecretRecord, expire_previous_ms: int, now: int | None
) -> SigningSecretRecord | None:
    """Store a signing secret, and let others of its lane expire; None if there are too many."""
    tenant = encode_text(secret.tenant)

    async def write(tx: Transaction) -> SigningSecretRecord | None:
        await tx.fetch(_LOCK, _SECRET_LOCK, tenant)
        rows = await tx.fetch(_LIST_SECRETS, tenant, now)
        others = [decode_row(tuple(row), SigningSecretRecord) for row in rows]
        for other in others:
            if other.id == secret.id:
                return other
        lane_count = sum(other.lane == secret.lane for other in others)
        if len(others) >= MAX_SIGNING_SECRETS or lane_count >= MAX_LANE_SIGNING_SECRETS:
            return None
        time = await tx.fetch_value("SELECT tarry.now_1($1)", now)
        lane = encode_optional(secret.lane)
        await tx.fetch(_EXPIRE_SECRETS, time + expire_previous_ms, tenant, lane)
        new = copy_with(secret, created_at=time, expires_at=None)
        public_key = encode_optional(new.public_key)
        values = (tenant, encode_text(new.id), lane, new.secret, public_key, time)
        await tx.fetch(_UPSERT_SIGNING_KEY, *values)
        return new

    return await database.transact(write)


async def list_signing_secrets(
    database: Database, tenant: str, now: int | None
) -> list[SigningSecretRecord]:
    """List the signing secrets of a tenant that have not expired, newest first."""
    rows = await database.fetch(_LIST_SECRETS, encode_text(tenant), now)
    return [decode_row(tuple(row), SigningSecretRecord) for row in rows]


async def delete_signing_secret(database: Database, tenant: str, secret_id: str) -> bool:
    """Delete a signing secret; return whether it existed."""
    statement = "DELETE FROM tarry.signing_secret WHERE tenant = $1 AND id = $2 RETURNING 1"
    return bool(await database.fetch(statement, encode_text(tenant), encode_text(secret_id)))
