"""The map of slots and nodes. Redirections and failovers are tested with real servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.stores.redis.cluster import ClusterMap, NodeAddress, SlotRange, parse_slots

SEED, OTHER = NodeAddress("seed", 6379), NodeAddress("10.0.0.2", 7000)
REPLY = [
    [0, 99, [b"", 6379, b"id"], [b"10.0.0.9", 7000, b"replica"]],
    [100, 199, [b"10.0.0.2", 7000, b"id"]],
]


def test_slots_belong_to_primaries() -> None:
    """Replicas are ignored, and a node that does not know its host has that of the responder."""
    assert [SlotRange(0, 99, SEED), SlotRange(100, 199, OTHER)] == parse_slots(REPLY, SEED)


async def test_concurrent_calls_read_the_map_once() -> None:
    """The map is read before the first call, and again only after an error."""
    asked: list[NodeAddress] = []

    async def read_slots(address: NodeAddress) -> list[Any]:
        asked.append(address)
        await asyncio.sleep(0)
        return REPLY

    cluster = ClusterMap([SEED], read_slots)
    found = await asyncio.gather(*(cluster.find_primary(slot) for slot in (0, 99, 100, 199)))
    assert ([SEED, SEED, OTHER, OTHER], [SEED]) == (found, asked)
    cluster.record_move(5, OTHER)
    assert [OTHER, SEED] == [await cluster.find_primary(slot) for slot in (5, 6)]
    with pytest.raises(StoreUnavailable, match="no node of the Cluster has slot 200"):
        await cluster.find_primary(200)


async def test_other_nodes_are_asked_if_one_does_not_respond() -> None:
    """Each known primary and the node of the URL are asked; if none responds, calls fail."""
    down: set[NodeAddress] = set()

    async def read_slots(address: NodeAddress) -> list[Any]:
        if address in down:
            raise ConnectionRefusedError
        return [[0, 99, [b"seed", 6379]], [100, 199, [b"10.0.0.2", 7000]]]

    cluster = ClusterMap([SEED], read_slots)
    await cluster.refresh()
    cluster._read_at = float("-inf")  # as if some time had passed
    down.add(SEED)
    await cluster.refresh()
    cluster._read_at = float("-inf")
    down.add(OTHER)
    with pytest.raises(StoreUnavailable, match="no node of the Cluster responds"):
        await cluster.refresh()


async def test_each_node_of_the_url_is_tried() -> None:
    """A process starts while the first node is down; the error names a node and its reply."""
    replies: dict[NodeAddress, Any] = {OTHER: [[0, 99, [b"seed", 6379]]]}

    async def read_slots(address: NodeAddress) -> list[Any]:
        if address not in replies:
            raise ValueError("This instance has cluster support disabled")
        slots: list[Any] = replies[address]
        return slots

    cluster = ClusterMap([SEED, OTHER], read_slots)
    await cluster.refresh()
    assert [SEED] == cluster.primaries

    replies.clear()
    single_server = ClusterMap([SEED], read_slots)
    message = "responds: seed:6379: .* cluster support disabled. Use redis://HOST"
    with pytest.raises(StoreUnavailable, match=message):
        await single_server.refresh()


async def test_concurrent_calls_fail_together() -> None:
    """If no node responds, the calls that wait for the map fail with the first one."""
    asked: list[NodeAddress] = []

    async def read_slots(address: NodeAddress) -> list[Any]:
        asked.append(address)
        await asyncio.sleep(0)
        raise ConnectionRefusedError

    cluster = ClusterMap([SEED], read_slots)
    for count in (1, 2):  # a later call tries again
        calls = (cluster.find_primary(slot) for slot in range(9))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [StoreUnavailable] * 9 == [type(result) for result in results]
        assert [SEED] * count == asked


async def test_few_nodes_of_a_large_cluster_are_asked() -> None:
    """One refresh tries three primaries and the node of the URL, and the next one others."""
    primaries = [NodeAddress(f"10.0.0.{number}", 7000) for number in range(1, 8)]
    asked: list[NodeAddress] = []
    is_down = False

    async def read_slots(address: NodeAddress) -> list[Any]:
        asked.append(address)
        if is_down:
            raise ConnectionRefusedError
        return [[n, n, [node.host.encode(), node.port]] for n, node in enumerate(primaries)]

    cluster = ClusterMap([SEED], read_slots)
    await cluster.refresh()
    is_down = True
    cluster._read_at = float("-inf")  # as if some time had passed
    found: set[NodeAddress] = set()
    for _ in range(3):
        asked.clear()
        with pytest.raises(StoreUnavailable):
            await cluster.refresh()
        assert (4, SEED) == (len(asked), asked[-1])
        found.update(asked[:-1])
    assert set(primaries) == found
