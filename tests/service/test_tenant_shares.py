"""Shares of a limited resource."""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from tarry.service.tenant_shares import TenantShares


def acquire_greedily(shares: TenantShares, tenants: list[str], rounds: int = 1_000) -> list[int]:
    """Acquire units for the tenants in turn; return how many units each tenant has got."""
    counts = dict.fromkeys(tenants, 0)
    for tenant in islice(cycle(tenants), rounds):
        if shares.is_available(tenant):
            shares.acquire(tenant)
            counts[tenant] += 1
    return list(counts.values())


@pytest.mark.parametrize(
    ("tenants", "expected"), [(["a"], [60]), (["a", "b"], [40] * 2), (list("abcde"), [20] * 5)]
)
def test_n_greedy_tenants_leave_a_share_for_others(tenants: list[str], expected: list[int]) -> None:
    """Each of n tenants gets 1 / (n + 1) of the units."""
    shares = TenantShares(120)
    assert expected == acquire_greedily(shares, tenants)
    assert shares.is_available("new")


def test_released_units_can_be_acquired_again() -> None:
    """After a tenant has released its units, another tenant gets half of all units."""
    shares = TenantShares(10)
    shares.acquire("a", 5)
    assert not shares.is_available("a")
    shares.release("a", 5)
    assert [5] == acquire_greedily(shares, ["b"])


def test_units_can_be_acquired_above_the_limit() -> None:
    """If more units are used than exist, none is available to any tenant until some are free."""
    shares = TenantShares(10)
    shares.acquire("a", 12)
    assert not shares.is_available("b")
    shares.release("a", 12)
    assert shares.is_available("b")
