"""The signers of each tenant: its own signing secrets in the store, or those of the settings."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service.delivery.signing import Signer
from tarry.service.records.signing_secrets import list_signing_secrets

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.model import SigningSecretRecord, Task
    from tarry.service.store import Store

_MAX_CACHED_TENANTS = 10_000
_TTL_MS = 5_000
"""Secrets are loaded again after this time, because another process may have changed them."""
_MAX_STALE_MS = 5_000
"""Stale signers are used for this time while they are loaded again. After that, attempts wait."""


class TenantSigners(msgspec.Struct):
    """The signers of one tenant."""

    records: list[SigningSecretRecord]
    by_lane: dict[str | None, Signer]  # None: for lanes without secrets of their own
    stale_at: float  # in ms; then the secrets are loaded again
    expires_at: float  # in ms; then the first secret expires, and the signers must not be used
    unix_time: Callable[[], float]
    usable_until: float = 0.0  # in ms; computed by `set_stale_at`

    def __post_init__(self) -> None:
        self.set_stale_at(self.stale_at)

    def set_stale_at(self, stale_at: float) -> None:
        """Set when the secrets are loaded again, in ms; at the latest when a secret expires."""
        self.stale_at = min(stale_at, self.expires_at)
        self.usable_until = min(self.stale_at + _MAX_STALE_MS, self.expires_at)

    def sign(self, task: Task, body: bytes) -> list[tuple[str, str]]:
        """Return the signature headers of an attempt; none if there is no secret for its lane."""
        signer = self._find(task.lane)
        return [] if signer is None else signer.headers(task.id, int(self.unix_time()), body)

    def token_key(self, task: Task) -> bytes | None:
        """Return the key that signs tokens; None if there is no HMAC secret for the lane."""
        signer = self._find(task.lane)
        return None if signer is None else signer.token_key

    def _find(self, lane: str) -> Signer | None:
        by_lane = self.by_lane
        return (by_lane.get(lane) or by_lane.get(None)) if by_lane else None


class SignerCache:
    """A cache of the signers of each tenant.

    `fallback` signs the attempts of lanes for which the store has no secret, if the lanes belong to
    `fallback_tenant` (None: to any tenant).
    """

    def __init__(
        self,
        store: Store,
        now_ms: Callable[[], int],
        decrypt: Callable[[bytes], str],
        unix_time: Callable[[], float],
        *,
        fallback: Signer | None = None,
        fallback_tenant: str | None = None,
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._decrypt = decrypt
        self._unix_time = unix_time
        self._fallback = fallback
        self._fallback_tenant = fallback_tenant
        self._signers: dict[str, TenantSigners] = {}
        self._change_count = 0  # calls of `invalidate`

    def get_cached(self, tenant: str, now_ms: int) -> TenantSigners | None:
        """Return the signers of a tenant, or None if they must be loaded first."""
        cached = self._signers.get(tenant)
        return None if cached is None or now_ms >= cached.usable_until else cached

    async def load(self, tenant: str) -> None:
        """Load the signers of a tenant, unless they are cached and fresh.

        Raises DecryptionFailed if the encryption key of a secret is not configured.
        """
        cached, now = self._signers.get(tenant), self._now_ms()
        if cached is not None and now < cached.stale_at:
            return
        change_count = self._change_count
        try:
            records = await list_signing_secrets(self._store, tenant)
        except StoreUnavailable:
            if cached is not None:
                cached.set_stale_at(now + _TTL_MS)
            raise
        if change_count != self._change_count:  # the records may be from before the change
            await self.load(tenant)
            return
        if cached is not None and cached.records == records:
            by_lane = cached.by_lane
        else:
            secrets: dict[str | None, list[str]] = {}
            for record in records:
                secrets.setdefault(record.lane, []).append(self._decrypt(record.secret))
            by_lane = {lane: Signer(lane_secrets) for lane, lane_secrets in secrets.items()}
            if self._fallback is not None and self._fallback_tenant in {None, tenant}:
                by_lane.setdefault(None, self._fallback)
        # At the expiry of a secret, the signers are loaded again without it.
        expiry_times = (record.expires_at for record in records if record.expires_at is not None)
        expires_at = min(expiry_times, default=inf)
        if tenant not in self._signers and len(self._signers) >= _MAX_CACHED_TENANTS:
            del self._signers[next(iter(self._signers))]
        self._signers[tenant] = TenantSigners(
            records, by_lane, now + _TTL_MS, expires_at, self._unix_time
        )

    def invalidate(self, tenant: str) -> None:
        """Remove the signers of a tenant from the cache, because its secrets were changed."""
        self._change_count += 1
        self._signers.pop(tenant, None)
