"""The policy of each task: the newest or a pinned version of a policy, plus overrides."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tarry.errors import ConfigurationError
from tarry.wire.policies import SERVICE_PRESETS, policy_from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias

    from tarry.core.policy import Policy
    from tarry.service.model import Task
    from tarry.service.store import Store

    PolicyKey: TypeAlias = tuple[str, str, int | None]
    """Tenant, policy id, and the version to which a task is pinned (None: the newest version)."""

K = TypeVar("K")
V = TypeVar("V")

_logger = logging.getLogger("tarry.service")
_MAX_CACHED_POLICIES = 10_000
_TTL_MS = 1_000
"""A cached policy is loaded again after this time, because another process may have changed it."""


class EffectivePolicy(msgspec.Struct, gc=False):
    """The policy that applies to a task."""

    policy: Policy
    version: int | None  # None for a preset that comes with the service
    stale_at: int  # epoch ms after which the policy is loaded again


class PolicyCache:
    """A cache of the policies in the store and of presets, filled when a policy is needed."""

    def __init__(self, store: Store, now: Callable[[], int]) -> None:
        self._store = store
        self._now = now
        self._policies: dict[PolicyKey, EffectivePolicy] = {}
        self._with_overrides: dict[tuple[Any, ...], tuple[EffectivePolicy, EffectivePolicy]] = {}
        """A cached policy, and the policy that results from its combination with overrides."""

    def get_cached(self, task: Task, overrides: Mapping[str, Any] | None) -> EffectivePolicy | None:
        """Return the policy of a task if it is cached, else None."""
        effective_policy = self._policies.get((task.tenant, task.policy_id, task.policy_version))
        if effective_policy is None or not overrides:
            return effective_policy
        return self._apply_overrides(task, overrides, effective_policy)

    def get_for_new_task(self, task: Task) -> EffectivePolicy | None:
        """Return the policy that a new task names if it is cached, else None.

        A pinned version is not returned if its entry is stale or the default policy: the store
        removes versions that no task uses.
        """
        cached = self.get_cached(task, None)
        if cached is None or task.policy_version is None:
            return cached
        is_current = cached.version == task.policy_version and self._now() < cached.stale_at
        return cached if is_current else None

    async def load_for_task(self, task: Task) -> None:
        """Load the policy of a task into the cache, or the default policy if it was deleted."""
        tenant, policy_id, version = task.tenant, task.policy_id, task.policy_version
        if await self.load(tenant, policy_id, version) is None:
            default = EffectivePolicy(SERVICE_PRESETS["default"], None, self._now() + _TTL_MS)
            _put(self._policies, (tenant, policy_id, version), default)

    async def load(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> EffectivePolicy | None:
        """Cache and return a policy (version None: the newest) or a preset, or None if unknown."""
        stored = await self._store.get_policy(tenant, policy_id, version)
        base_policy, stale_at = SERVICE_PRESETS["default"], self._now() + _TTL_MS
        if stored is not None:
            policy = policy_from_json(msgspec.json.decode(stored.document), base_policy)
            effective_policy = EffectivePolicy(policy, stored.version, stale_at)
        elif version is None and policy_id in SERVICE_PRESETS:
            effective_policy = EffectivePolicy(SERVICE_PRESETS[policy_id], None, stale_at)
        else:
            return None
        _put(self._policies, (tenant, policy_id, version), effective_policy)
        return effective_policy

    def invalidate(self, tenant: str, policy_id: str) -> None:
        """Remove all versions of a changed policy from the cache."""
        for key in [key for key in self._policies if key[:2] == (tenant, policy_id)]:
            del self._policies[key]

    def _apply_overrides(
        self, task: Task, overrides: Mapping[str, Any], base: EffectivePolicy
    ) -> EffectivePolicy:
        key = (task.tenant, task.policy_id, task.policy_version, msgspec.json.encode(overrides))
        # An entry is valid only while the policy that it was derived from is the cached policy.
        entry = self._with_overrides.get(key)
        if entry is None or entry[0] is not base:
            try:
                policy = policy_from_json(overrides, base.policy)
            except ConfigurationError as error:  # the policy was changed after the task was added
                message = "policy overrides ignored because the changed policy makes them invalid, "
                message += "tenant=%s policy=%s: %s"
                _logger.warning(message, task.tenant, task.policy_id, error)
                policy = base.policy
            entry = base, EffectivePolicy(policy, base.version, base.stale_at)
            _put(self._with_overrides, key, entry)
        return entry[1]


def _put(cache: dict[K, V], key: K, value: V) -> None:
    """Add an entry to a cache; if the cache is full, remove the oldest entry first."""
    if len(cache) >= _MAX_CACHED_POLICIES:
        del cache[next(iter(cache))]
    cache[key] = value
