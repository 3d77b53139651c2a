"""Signing secrets. All secrets of a tenant are one record, so that a change sees all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tarry.service.model import SigningSecretRecord
from tarry.service.records.collection import RecordCollection

if TYPE_CHECKING:
    from tarry.service.store import RecordStore

MAX_SIGNING_SECRETS = 1_000
"""Maximum number of signing secrets of a tenant that have not expired."""
MAX_LANE_SIGNING_SECRETS = 10
"""Maximum number of these secrets with the same lane. Each adds a signature to every attempt."""
_SECRETS = RecordCollection[list[SigningSecretRecord]]("signing secrets", list[SigningSecretRecord])


async def put_signing_secret(
    store: RecordStore, secret: SigningSecretRecord, *, expire_previous_ms: int
) -> SigningSecretRecord | None:
    """Store a signing secret, unless a secret with this id is stored already; return it.

    Other secrets of the same tenant and lane expire after `expire_previous_ms`, unless they expire
    sooner. Returns None if the tenant has `MAX_SIGNING_SECRETS` secrets, or
    `MAX_LANE_SIGNING_SECRETS` with the same lane.
    """

    def add(stored: list[SigningSecretRecord] | None, now: int) -> list[SigningSecretRecord] | None:
        secrets = _drop_expired(stored, now)
        is_stored = any(each.id == secret.id for each in secrets)
        of_lane = sum(each.lane == secret.lane for each in secrets)
        if is_stored or len(secrets) >= MAX_SIGNING_SECRETS or of_lane >= MAX_LANE_SIGNING_SECRETS:
            return stored
        expires_at = now + expire_previous_ms
        return [
            *(
                replace(each, expires_at=min(expires_at, each.expires_at or expires_at))
                if each.lane == secret.lane
                else each
                for each in secrets
            ),
            replace(secret, created_at=now, expires_at=None),
        ]

    secrets = await _SECRETS.update(store, add, secret.tenant)
    return next((each for each in secrets or () if each.id == secret.id), None)


async def list_signing_secrets(store: RecordStore, tenant: str) -> list[SigningSecretRecord]:
    """Return the signing secrets of a tenant that have not expired, sorted by id, descending.

    The ids of the service are UUIDv7, so the newest secret is the first.
    """
    now, secrets = await _SECRETS.get_with_time(store, tenant)
    return sorted(_drop_expired(secrets, now), key=lambda secret: secret.id, reverse=True)


async def delete_signing_secret(store: RecordStore, tenant: str, secret_id: str) -> bool:
    """Delete a signing secret; return whether it existed."""
    existed = False

    def delete(
        stored: list[SigningSecretRecord] | None, now: int
    ) -> list[SigningSecretRecord] | None:
        nonlocal existed
        secrets = _drop_expired(stored, now)
        kept = [secret for secret in secrets if secret.id != secret_id]
        existed = len(kept) < len(secrets)
        return kept or None

    await _SECRETS.update(store, delete, tenant)
    return existed


def _drop_expired(secrets: list[SigningSecretRecord] | None, now: int) -> list[SigningSecretRecord]:
    return [each for each in secrets or () if each.expires_at is None or each.expires_at > now]
