"""The rate limit of a tenant for new, retried and replayed tasks."""

from __future__ import annotations

import pytest

from tarry.service.engine.rate_limits import TenantRateLimiter


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


def test_unused_tokens_can_be_refunded() -> None:
    """A caller can take all available tokens, and some can be refunded, up to the burst."""
    limiter = TenantRateLimiter(10.0, 5.0, lambda: 0.0)
    assert [3, 2, 0] == [limiter.take_up_to("a", 3) for _ in range(3)]
    limiter.refund("a", 2)
    assert 2 == limiter.take_up_to("a", 3)
    limiter.refund("a", 100)
    assert 5 == limiter.take_up_to("a", 100)
    limiter.refund("a", 1)
    limiter.take("a", 10)  # the balance is negative
    assert 0 == limiter.take_up_to("a", 3)


def test_the_number_of_buckets_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used bucket is dropped."""
    monkeypatch.setattr("tarry.service.engine.rate_limits._MAX_TENANT_BUCKETS", 2)
    limiter = TenantRateLimiter(1.0, 1.0, lambda: 0.0)
    for tenant in "abc":
        limiter.take(tenant, 1)
    assert ["b", "c"] == list(limiter._buckets)


def test_processes_share_the_rate() -> None:
    """Each process has an equal share of rate and burst, and at least one token."""
    now = [0.0]
    limiter = TenantRateLimiter(8.0, 12.0, lambda: now[0])
    limiter.share(4)
    assert 3 == limiter.take_up_to("a", 100)
    now[0] = 0.5
    assert 1 == limiter.take_up_to("a", 100)
    limiter.share(100)
    assert (1, 8.0) == (limiter.take_up_to("b", 100), limiter.rate)
    limiter.share(0)
    assert 12 == limiter.take_up_to("c", 100)
