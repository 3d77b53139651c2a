"""API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import ApiKey

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

_MOST_KEYS = 1000
_KEY = "SELECT id, tenant, digest, name, created_at, revoked_at FROM api_key"


def put_key(tx: Transaction, given: ApiKey) -> None:
    """Keep an API key."""
    row = (given.id, given.tenant, given.digest, given.name, tx.now)
    tx.execute("INSERT INTO api_key VALUES (?, ?, ?, ?, ?, NULL) ON CONFLICT (id) DO NOTHING", row)


def find_key(tx: ReadTransaction, digest: bytes) -> ApiKey | None:
    """Return the key with a digest, revoked or not."""
    row = tx.execute(f"{_KEY} WHERE digest = ?", (digest,)).fetchone()
    return None if row is None else _key_of(row)


def list_keys(tx: ReadTransaction, tenant: str | None) -> list[ApiKey]:
    """Return the keys."""
    if tenant is None:
        rows = tx.execute(f"{_KEY} ORDER BY id LIMIT ?", (_MOST_KEYS,))
    else:
        rows = tx.execute(f"{_KEY} WHERE tenant = ? ORDER BY id LIMIT ?", (tenant, _MOST_KEYS))
    return [_key_of(row) for row in rows]


def revoke_key(tx: Transaction, key_id: str) -> bool:
    """End a key; one that has ended keeps its time."""
    statement = "UPDATE api_key SET revoked_at = ifnull(revoked_at, ?) WHERE id = ?"
    return tx.execute(statement, (tx.now, key_id)).rowcount > 0


def _key_of(row: tuple[Any, ...]) -> ApiKey:
    key_id, tenant, digest, name, created_at, revoked_at = row
    return ApiKey(
        id=key_id,
        tenant=tenant,
        digest=digest,
        name=name,
        created_at=created_at,
        revoked_at=revoked_at,
    )
