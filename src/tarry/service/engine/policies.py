"""Which policy a task goes by: the tenant's newest version, or the one it pinned, and its own
changes on top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.wire.policies import SERVICE_PRESETS, policy_from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from tarry.core.policy import Policy
    from tarry.service.model import Task
    from tarry.service.store import Store

_MOST = 10_000
_FRESH_FOR = 1_000
"""Milliseconds after which a policy is looked at again: another process may have changed it."""


class Chosen(msgspec.Struct, gc=False):
    """The policy of a task and its version; None for a policy that comes with the service."""

    policy: Policy
    version: int | None
    read_at: int


class Policies:
    """Policies as this process knows them, read from the store when they are first needed."""

    def __init__(self, store: Store, now: Callable[[], int]) -> None:
        self._store = store
        self._now = now
        self._known: dict[tuple[str, str, int | None], Chosen] = {}
        self._asked: set[tuple[str, str, int | None]] = set()
        """What somebody looks up anew; the others go by what is known meanwhile."""
        self._changed: dict[tuple[Any, ...], tuple[Chosen, Chosen]] = {}

    def known(self, task: Task, overrides: Mapping[str, Any] | None) -> Chosen | None:
        """Return a task's policy if it is at hand; one that is old is asked for by the first."""
        key = (task.tenant, task.policy_id, task.policy_version)
        chosen = self._known.get(key)
        if chosen is None:
            return None
        if self._now() - chosen.read_at >= _FRESH_FOR and key not in self._asked:
            self._asked.add(key)
            return None
        return chosen if not overrides else self._with(task, overrides, chosen)

    async def look_up(self, task: Task) -> None:
        """Have a task's policy at hand; a policy that is gone leaves the default one."""
        tenant, policy_id, version = task.tenant, task.policy_id, task.policy_version
        try:
            if await self.read(tenant, policy_id, version) is None:
                gone = Chosen(SERVICE_PRESETS["default"], None, self._now())
                self._keep(tenant, policy_id, version, gone)
        finally:
            self._asked.discard((tenant, policy_id, version))

    async def read(self, tenant: str, policy_id: str, version: int | None = None) -> Chosen | None:
        """Look a policy up: the tenant's own, else the one that comes with the service."""
        stored = await self._store.policy(tenant, policy_id, version)
        default = SERVICE_PRESETS["default"]
        if stored is not None:
            document = msgspec.json.decode(stored.document)
            chosen = Chosen(policy_from_wire(document, default), stored.version, self._now())
        elif version is None and policy_id in SERVICE_PRESETS:
            chosen = Chosen(SERVICE_PRESETS[policy_id], None, self._now())
        else:
            return None
        self._keep(tenant, policy_id, version, chosen)
        return chosen

    def forget(self, tenant: str, policy_id: str) -> None:
        """Look a policy up again the next time: it was changed."""
        for key in [key for key in self._known if key[:2] == (tenant, policy_id)]:
            del self._known[key]

    def _keep(self, tenant: str, policy_id: str, version: int | None, chosen: Chosen) -> None:
        if len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[tenant, policy_id, version] = chosen

    def _with(self, task: Task, overrides: Mapping[str, Any], chosen: Chosen) -> Chosen:
        key = (task.tenant, task.policy_id, task.policy_version, msgspec.json.encode(overrides))
        made = self._changed.get(key)
        if made is None or made[0] is not chosen:
            policy = policy_from_wire(overrides, chosen.policy)
            made = chosen, Chosen(policy, chosen.version, chosen.read_at)
            if len(self._changed) >= _MOST:
                del self._changed[next(iter(self._changed))]
            self._changed[key] = made
        return made[1]
