"""Rate limit for new tasks: one token bucket per tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_BUCKETS = 10_000


class TenantRateLimiter:
    """One token bucket per tenant.

    A batch is accepted if its bucket has at least one token, and may make the balance negative.
    Later requests then wait longer.
    """

    def __init__(self, rate: float, burst: float, monotonic: Callable[[], float]) -> None:
        """`rate` is in tokens per second, `burst` the size of a bucket."""
        self._rate = rate
        self._burst = burst
        self._now = monotonic
        self._buckets: dict[str, tuple[float, float]] = {}
        """By tenant: the number of tokens, and the time of the last change; least recent first."""

    def take(self, tenant: str, tokens: int) -> float:
        """Take tokens and return 0. If there is no token, return the seconds until there is one."""
        now = self._now()
        balance, updated_at = self._buckets.pop(tenant, (self._burst, now))
        balance = min(self._burst, balance + (now - updated_at) * self._rate)
        wait_s = (1.0 - balance) / self._rate if balance < 1.0 else 0.0
        if not wait_s:
            balance -= tokens
        if len(self._buckets) >= _MAX_BUCKETS:
            # The least recently used bucket is the most likely to be full again.
            del self._buckets[next(iter(self._buckets))]
        self._buckets[tenant] = balance, now
        return wait_s
