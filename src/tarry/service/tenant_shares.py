"""Divides a limited resource of the process among tenants."""

from __future__ import annotations


class TenantShares:
    """A number of units, of which a tenant may use at most as many as are still free.

    One tenant alone can use half of the units. If n tenants use as many as they can, each has
    1 / (n + 1) of them, and as many stay free for other tenants. So no set of tenants can use up
    the units, and unused shares are not reserved (Choudhury and Hahne: Dynamic Queue Length
    Thresholds).
    """

    def __init__(self, total: int) -> None:
        self._free = total
        self._used_by_tenant: dict[str, int] = {}

    def used_by(self, tenant: str) -> int:
        """Return the number of units that the tenant uses."""
        return self._used_by_tenant.get(tenant, 0)

    def is_available(self, tenant: str) -> bool:
        """Return whether the tenant may use one more unit."""
        return self.used_by(tenant) < self._free

    def acquire(self, tenant: str, count: int = 1) -> None:
        """Count units as used by a tenant, whether or not they are available."""
        self._used_by_tenant[tenant] = self.used_by(tenant) + count
        self._free -= count

    def release(self, tenant: str, count: int = 1) -> None:
        """Free units that the tenant has acquired."""
        self._free += count
        self._used_by_tenant[tenant] -= count
        if not self._used_by_tenant[tenant]:
            del self._used_by_tenant[tenant]
