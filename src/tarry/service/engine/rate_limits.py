"""The rate at which a tenant may add, retry and replay tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_TENANT_BUCKETS = 10_000


class TenantRateLimiter:
    """One token bucket per tenant. Of several processes, each has an equal share of the rate."""

    def __init__(self, rate: float, burst: float, monotonic: Callable[[], float]) -> None:
        """`rate` is in tokens per second, `burst` the size of a bucket."""
        self.rate: float = rate  # of all processes together
        self._total_burst = burst
        self._rate_share, self._burst = rate, burst
        self._now = monotonic
        self._buckets: dict[str, tuple[float, float]] = {}
        """By tenant: balance in tokens, and time of the last change. Least recently used first."""

    def share(self, process_count: int) -> None:
        """Use an equal share of the rate and the burst, of which at least one token is left."""
        process_count = max(1, process_count)
        self._rate_share = self.rate / process_count
        self._burst = max(1.0, self._total_burst / process_count)

    def take(self, tenant: str, token_count: int) -> float:
        """If there is a token, take `token_count` and return 0. The balance may become negative.

        Otherwise, take none and return the seconds until there is a token.
        """
        balance = self._balance(tenant)
        wait_s = (1.0 - balance) / self._rate_share if balance < 1.0 else 0.0
        self._set_balance(tenant, balance if wait_s else balance - token_count)
        return wait_s

    def take_up_to(self, tenant: str, token_count: int) -> int:
        """Take as many tokens as there are, but at most `token_count`; return their number."""
        balance = self._balance(tenant)
        taken = max(0, min(token_count, int(balance)))
        self._set_balance(tenant, balance - taken)
        return taken

    def refund(self, tenant: str, token_count: int) -> None:
        """Return tokens that were taken and not used."""
        self._set_balance(tenant, self._balance(tenant) + token_count)

    def _balance(self, tenant: str) -> float:
        now = self._now()
        balance, updated_at = self._buckets.get(tenant, (self._burst, now))
        return min(self._burst, balance + (now - updated_at) * self._rate_share)

    def _set_balance(self, tenant: str, balance: float) -> None:
        self._buckets.pop(tenant, None)
        if len(self._buckets) >= _MAX_TENANT_BUCKETS:
            # The least recently used bucket is probably full again; a full bucket is like none.
            del self._buckets[next(iter(self._buckets))]
        self._buckets[tenant] = balance, self._now()
