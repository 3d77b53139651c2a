"""The rate limit for new tasks."""

from __future__ import annotations

import pytest

from tarry.service.api.task_creation import TenantRateLimiter


def test_burst_then_rate() -> None:
    """The burst at once, then tokens at the rate."""
    now = [0.0]
    rates = TenantRateLimiter(2.0, 3.0, lambda: now[0])
    assert [0, 0, 0, 0.5] == [rates.take("a", 1) for _ in range(4)]
    assert 0 == rates.take("b", 1)
    now[0] = 0.5
    assert [0, 0.5] == [rates.take("a", 1) for _ in range(2)]
    now[0] = 100.0
    assert [0, 0, 0, 0.5] == [rates.take("a", 1) for _ in range(4)]


def test_a_batch_can_overdraw_its_bucket() -> None:
    """It is accepted as a whole, and later requests wait for it."""
    now = [0.0]
    rates = TenantRateLimiter(10.0, 10.0, lambda: now[0])
    assert 0 == rates.take("a", 100)
    assert 9.1 == rates.take("a", 1)
    now[0] = 9.1
    assert 0 == rates.take("a", 1)


def test_the_number_of_buckets_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used one is dropped."""
    monkeypatch.setattr("tarry.service.api.task_creation._MAX_TENANT_BUCKETS", 2)
    rates = TenantRateLimiter(1.0, 1.0, lambda: 0.0)
    for tenant in "abc":
        rates.take(tenant, 1)
    assert ["b", "c"] == list(rates._buckets)
