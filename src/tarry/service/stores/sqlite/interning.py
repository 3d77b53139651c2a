"""Small integers for the names that recur: tenants, lanes, policies, workers.

A name keeps its number for good, so what is known stays true, whoever else writes to the file.
Only what a transaction that failed has made has to be forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

_MOST = 100_000


class InternedNames:
    """The numbers of names, remembered; a new name gets one."""

    def __init__(self, connection: sqlite3.Connection, lock: str | None = None) -> None:
        self._execute = connection.execute
        self._lock = lock
        self._known: dict[str | tuple[str, ...], int] = {}

    def forget(self) -> None:
        """Forget what may never have been written."""
        self._known.clear()

    def tenant_id(self, name: str) -> int:
        """Return a tenant's number."""
        known = self._known.get(name)
        if known is None:
            known = self._number(
                "SELECT id FROM tenant WHERE name = ?",
                "INSERT INTO tenant (name) VALUES (?) RETURNING id",
                (name,),
            )
            self._remember(name, known)
        return known

    def lane_id(self, name: str) -> int:
        """Return a lane's number; its name begins with its tenant's."""
        known = self._known.get(("lane", name))
        if known is None:
            found = self._execute("SELECT id FROM lane WHERE name = ?", (name,)).fetchone()
            if found is None:
                whose = self.tenant_id(name.partition("/")[0])
                insert = "INSERT INTO lane (tenant, name) VALUES (?, ?) RETURNING id"
                found = self._execute(insert, (whose, name)).fetchone()
            known = int(found[0])
            self._remember(("lane", name), known)
        return known

    def policy_id(self, tenant: str, policy: str) -> int:
        """Return the number of a tenant's policy, whether it was written or not."""
        known = self._known.get(("policy", tenant, policy))
        if known is None:
            known = self._number(
                "SELECT id FROM used WHERE tenant = ? AND policy = ?",
                "INSERT INTO used (tenant, policy) VALUES (?, ?) RETURNING id",
                (self.tenant_id(tenant), policy),
            )
            self._remember(("policy", tenant, policy), known)
        return known

    def worker_id(self, name: str) -> int:
        """Return the number of a worker of this process: its lock says whether it lives."""
        known = self._known.get(("worker", name, ""))
        if known is None:
            known = self._number(
                "SELECT id FROM worker WHERE name = ? AND lock IS ?",
                "INSERT INTO worker (name, lock) VALUES (?, ?) RETURNING id",
                (name, self._lock),
            )
            self._remember(("worker", name, ""), known)
        return known

    def _number(self, select: str, insert: str, values: tuple[object, ...]) -> int:
        found = self._execute(select, values).fetchone()
        if found is None:
            found = self._execute(insert, values).fetchone()
        return int(found[0])

    def _remember(self, key: str | tuple[str, ...], number: int) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = number
