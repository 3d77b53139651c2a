"""API keys. Only digests are stored, never the keys themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import ApiKey

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

_MAX_LISTED_KEYS = 1000
_SELECT_KEY = "SELECT id, tenant, digest, name, created_at, revoked_at FROM api_key"


def put_key(tx: Transaction, api_key: ApiKey) -> None:
    """Store an API key, unless its id exists."""
    row = (api_key.id, api_key.tenant, api_key.digest, api_key.name, tx.now)
    tx.execute("INSERT INTO api_key VALUES (?, ?, ?, ?, ?, NULL) ON CONFLICT (id) DO NOTHING", row)


def find_key(tx: ReadTransaction, digest: bytes) -> ApiKey | None:
    """Return the API key with a digest, revoked or not."""
    row = tx.execute(f"{_SELECT_KEY} WHERE digest = ?", (digest,)).fetchone()
    return None if row is None else _decode_key(row)


def list_keys(tx: ReadTransaction, tenant: str | None) -> list[ApiKey]:
    """List the API keys of a tenant, or of all tenants (None)."""
    if tenant is None:
        rows = tx.execute(f"{_SELECT_KEY} ORDER BY id LIMIT ?", (_MAX_LISTED_KEYS,))
    else:
        statement = f"{_SELECT_KEY} WHERE tenant = ? ORDER BY id LIMIT ?"
        rows = tx.execute(statement, (tenant, _MAX_LISTED_KEYS))
    return [_decode_key(row) for row in rows]


def revoke_key(tx: Transaction, key_id: str) -> bool:
    """Revoke an API key; return whether it exists.

    A key that was revoked before keeps its time of revocation.
    """
    statement = "UPDATE api_key SET revoked_at = ifnull(revoked_at, ?) WHERE id = ?"
    return tx.execute(statement, (tx.now, key_id)).rowcount > 0


def _decode_key(row: tuple[Any, ...]) -> ApiKey:
    key_id, tenant, digest, name, created_at, revoked_at = row
    return ApiKey(
        id=key_id,
        tenant=tenant,
        digest=digest,
        name=name,
        created_at=created_at,
        revoked_at=revoked_at,
    )
