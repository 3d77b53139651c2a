"""Small integers for names that recur in many rows: tenants, lanes, policies, workers.

A name keeps its number for ever, so cached numbers stay valid although other processes write to the
file. Only numbers that a failed transaction assigned have to be dropped from the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

_MAX_CACHED_NAMES = 100_000


class InternedNames:
    """Maps names to their numbers, and assigns a number to a new name.

    `lock_token` is the token of this process's `WorkerLock`; None if it has no lock.
    """

    def __init__(self, connection: sqlite3.Connection, lock_token: str | None = None) -> None:
        self._execute = connection.execute
        self._lock_token = lock_token
        self._cache: dict[str | tuple[str, ...], int] = {}

    def clear(self) -> None:
        """Empty the cache after a failed transaction, which may have assigned some numbers."""
        self._cache.clear()

    def tenant_id(self, name: str) -> int:
        """Return the number of a tenant."""
        number = self._cache.get(name)
        if number is None:
            number = self._find_or_insert(
                "SELECT id FROM tenant WHERE name = ?",
                "INSERT INTO tenant (name) VALUES (?) RETURNING id",
                (name,),
            )
            self._remember(name, number)
        return number

    def lane_id(self, name: str) -> int:
        """Return the number of a lane; the tenant is the part of the name before the slash."""
        number = self._cache.get(("lane", name))
        if number is None:
            row = self._execute("SELECT id FROM lane WHERE name = ?", (name,)).fetchone()
            if row is None:
                tenant = self.tenant_id(name.partition("/")[0])
                insert = "INSERT INTO lane (tenant, name) VALUES (?, ?) RETURNING id"
                row = self._execute(insert, (tenant, name)).fetchone()
            number = int(row[0])
            self._remember(("lane", name), number)
        return number

    def policy_id(self, tenant: str, policy: str) -> int:
        """Return the number of a tenant's policy; the policy itself need not be stored."""
        number = self._cache.get(("policy", tenant, policy))
        if number is None:
            number = self._find_or_insert(
                "SELECT id FROM policy_use WHERE tenant = ? AND policy = ?",
                "INSERT INTO policy_use (tenant, policy) VALUES (?, ?) RETURNING id",
                (self.tenant_id(tenant), policy),
            )
            self._remember(("policy", tenant, policy), number)
        return number

    def worker_id(self, name: str) -> int:
        """Return the number of a worker of this process, stored with the token of its lock."""
        number = self._cache.get(("worker", name, ""))
        if number is None:
            number = self._find_or_insert(
                "SELECT id FROM worker WHERE name = ? AND lock IS ?",
                "INSERT INTO worker (name, lock) VALUES (?, ?) RETURNING id",
                (name, self._lock_token),
            )
            self._remember(("worker", name, ""), number)
        return number

    def _find_or_insert(self, select: str, insert: str, values: tuple[object, ...]) -> int:
        row = self._execute(select, values).fetchone()
        if row is None:
            row = self._execute(insert, values).fetchone()
        return int(row[0])

    def _remember(self, key: str | tuple[str, ...], number: int) -> None:
        if len(self._cache) >= _MAX_CACHED_NAMES:
            self._cache.clear()
        self._cache[key] = number
