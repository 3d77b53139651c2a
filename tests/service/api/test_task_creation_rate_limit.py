"""The rate limit for new tasks."""

from __future__ import annotations

import pytest

from tarry.service.api.task_creation import TenantRateLimiter


def test_a_tenant_has_a_burst_and_a_rate() -> None:
    """A tenant can use its burst at once, and tokens are refilled at the rate."""
    now = [0.0]
    limiter = TenantRateLimiter(2.0, 3.0, lambda: now[0])
    assert [0, 0, 0, 0.5] == [limiter.take("a", 1) for _ in range(4)]
    assert 0 == limiter.take("b", 1)
    now[0] = 0.5
    assert [0, 0.5] == [limiter.take("a", 1) for _ in range(2)]
    now[0] = 100.0
    assert [0, 0, 0, 0.5] == [limiter.take("a", 1) for _ in range(4)]


def test_a_batch_can_overdraw_its_bucket() -> None:
    """A batch is accepted completely, and later requests wait until the tokens are refilled."""
    now = [0.0]
    limiter = TenantRateLimiter(10.0, 10.0, lambda: now[0])
    assert 0 == limiter.take("a", 100)
    assert 9.1 == limiter.take("a", 1)
    now[0] = 9.1
    assert 0 == limiter.take("a", 1)


def test_the_number_of_buckets_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used bucket is dropped."""
    monkeypatch.setattr("tarry.service.api.task_creation._MAX_TENANT_BUCKETS", 2)
    limiter = TenantRateLimiter(1.0, 1.0, lambda: 0.0)
    for tenant in "abc":
        limiter.take(tenant, 1)
    assert ["b", "c"] == list(limiter._buckets)
