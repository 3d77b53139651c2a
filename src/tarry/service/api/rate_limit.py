"""How many tasks a tenant may add: a bucket of tokens for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST = 10_000


class TenantRateLimiter:
    """Token buckets by tenant. A batch may go into debt, which later requests wait for."""

    def __init__(self, rate: float, burst: float, monotonic: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._now = monotonic
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, tenant: str, tasks: int) -> float:
        """Take tokens; return 0, or the seconds after which there are some again."""
        now = self._now()
        balance, at = self._buckets.pop(tenant, (self._burst, now))
        balance = min(self._burst, balance + (now - at) * self._rate)
        wait = (1.0 - balance) / self._rate if balance < 1.0 else 0.0
        if not wait:
            balance -= tasks
        if len(self._buckets) >= _MOST:
            # The one that was used the longest ago: it is the likeliest to be full again.
            del self._buckets[next(iter(self._buckets))]
        self._buckets[tenant] = balance, now
        return wait
