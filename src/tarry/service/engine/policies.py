"""Which policy a task goes by: the tenant's newest version, or the one it pinned, and its own
changes on top.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from tarry.errors import ConfigurationError
from tarry.wire.policies import SERVICE_PRESETS, policy_from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from tarry.core.policy import Policy
    from tarry.service.model import Task
    from tarry.service.store import Store

_logger = logging.getLogger("tarry.service")
_MOST = 10_000
_FRESH_FOR = 1_000
"""Milliseconds after which a policy is looked at again: another process may have changed it."""


class EffectivePolicy(msgspec.Struct, gc=False):
    """The policy of a task and its version; None for a policy that comes with the service."""

    policy: Policy
    version: int | None
    old_at: int
    """When to look it up again."""


class Policies:
    """Policies as this process knows them, read from the store when they are first needed."""

    def __init__(self, store: Store, now: Callable[[], int]) -> None:
        self._store = store
        self._now = now
        self._known: dict[tuple[str, str, int | None], EffectivePolicy] = {}
        self._asked: set[tuple[str, str, int | None]] = set()
        """What somebody looks up anew; meanwhile all go by what is known."""
        self._changed: dict[tuple[Any, ...], tuple[EffectivePolicy, EffectivePolicy]] = {}

    def known(self, task: Task, overrides: Mapping[str, Any] | None) -> EffectivePolicy | None:
        """Return a task's policy if it is at hand."""
        chosen = self._known.get((task.tenant, task.policy_id, task.policy_version))
        if chosen is None or not overrides:
            return chosen
        return self._with(task, overrides, chosen)

    def is_first(self, task: Task) -> bool:
        """Say whether to look up a policy that is old; only the first is told so, and has to."""
        key = (task.tenant, task.policy_id, task.policy_version)
        if key in self._asked:
            return False
        self._asked.add(key)
        return True

    async def look_up(self, task: Task) -> None:
        """Have a task's policy at hand; a policy that is gone leaves the default one."""
        tenant, policy_id, version = task.tenant, task.policy_id, task.policy_version
        try:
            if await self.read(tenant, policy_id, version) is None:
                gone = EffectivePolicy(SERVICE_PRESETS["default"], None, self._now() + _FRESH_FOR)
                self._keep(tenant, policy_id, version, gone)
        finally:
            self._asked.discard((tenant, policy_id, version))

    async def read(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> EffectivePolicy | None:
        """Look a policy up: the tenant's own, else the one that comes with the service."""
        stored = await self._store.get_policy(tenant, policy_id, version)
        default, old_at = SERVICE_PRESETS["default"], self._now() + _FRESH_FOR
        if stored is not None:
            document = msgspec.json.decode(stored.document)
            chosen = EffectivePolicy(policy_from_wire(document, default), stored.version, old_at)
        elif version is None and policy_id in SERVICE_PRESETS:
            chosen = EffectivePolicy(SERVICE_PRESETS[policy_id], None, old_at)
        else:
            return None
        self._keep(tenant, policy_id, version, chosen)
        return chosen

    def forget(self, tenant: str, policy_id: str) -> None:
        """Look a policy up again the next time: it was changed."""
        for key in [key for key in self._known if key[:2] == (tenant, policy_id)]:
            del self._known[key]

    def _keep(
        self, tenant: str, policy_id: str, version: int | None, chosen: EffectivePolicy
    ) -> None:
        if len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[tenant, policy_id, version] = chosen

    def _with(
        self, task: Task, overrides: Mapping[str, Any], chosen: EffectivePolicy
    ) -> EffectivePolicy:
        key = (task.tenant, task.policy_id, task.policy_version, msgspec.json.encode(overrides))
        made = self._changed.get(key)
        if made is None or made[0] is not chosen:
            try:
                policy = policy_from_wire(overrides, chosen.policy)
            except ConfigurationError as error:  # the policy was changed since it was checked
                _logger.warning(
                    "tasks of tenant %s go by policy %s as it is: their changes of it do not fit "
                    "any more (%s)",
                    task.tenant,
                    task.policy_id,
                    error,
                )
                policy = chosen.policy
            made = chosen, EffectivePolicy(policy, chosen.version, chosen.old_at)
            if len(self._changed) >= _MOST:
                del self._changed[next(iter(self._changed))]
            self._changed[key] = made
        return made[1]
