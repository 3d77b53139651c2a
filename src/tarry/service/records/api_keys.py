"""API keys. They belong to the service, and are found by their digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tarry.service.model import ApiKeyRecord
from tarry.service.records.collection import RecordCollection

if TYPE_CHECKING:
    from tarry.service.store import RecordStore

MAX_LISTED_API_KEYS = 1_000
_KEYS = RecordCollection[ApiKeyRecord]("API keys", ApiKeyRecord)
"""By digest, as hexadecimal digits."""


async def put_api_key(store: RecordStore, key: ApiKeyRecord) -> None:
    """Store an API key, unless a key with this id is stored already."""
    if await _find_by_id(store, key.id) is not None:
        return

    def add(stored: ApiKeyRecord | None, now: int) -> ApiKeyRecord:
        return replace(key, created_at=now, revoked_at=None) if stored is None else stored

    await _KEYS.update(store, add, key=key.digest.hex())


async def find_api_key(store: RecordStore, digest: bytes) -> ApiKeyRecord | None:
    """Return the API key with this digest, revoked or not, or None if it does not exist."""
    return await _KEYS.get(store, key=digest.hex())


async def list_api_keys(store: RecordStore, tenant: str | None = None) -> list[ApiKeyRecord]:
    """Return at most 1,000 API keys of one tenant, or of all tenants (None), sorted by id."""
    keys = [entry.value for entry in await _KEYS.list_all(store)]
    found = [key for key in keys if tenant is None or key.tenant == tenant]
    return sorted(found, key=lambda key: key.id)[:MAX_LISTED_API_KEYS]


async def revoke_api_key(store: RecordStore, key_id: str) -> bool:
    """Revoke an API key, unless it is revoked already; return whether the key exists."""

    def revoke(key: ApiKeyRecord | None, now: int) -> ApiKeyRecord | None:
        if key is None or key.revoked_at is not None:
            return key
        return replace(key, revoked_at=now)

    key = await _find_by_id(store, key_id)
    if key is None:
        return False
    await _KEYS.update(store, revoke, key=key.digest.hex())
    return True


async def _find_by_id(store: RecordStore, key_id: str) -> ApiKeyRecord | None:
    """Return the key with this id. Reads all keys: only operators create and revoke keys."""
    keys = (entry.value for entry in await _KEYS.list_all(store))
    return next((key for key in keys if key.id == key_id), None)
