"""The partition of a tenant. Scripts on partitions are tested with real servers."""

from __future__ import annotations

from tarry.service.stores.redis.partitions import GLOBAL_PARTITION, find_partition


def test_the_partition_of_a_tenant_never_changes() -> None:
    """The partition is computed from the name, in the same way in every version."""
    assert [14, 3, 15, 15] == [
        find_partition(name, 16) for name in ("acme", "beta", "default", "kä")
    ]
    assert 0 == find_partition("acme", 1)


def test_the_empty_name_is_in_the_global_partition() -> None:
    """Records of the service have the empty name as their owner."""
    assert {GLOBAL_PARTITION} == {find_partition("", count) for count in (1, 2, 16, 1024)}
