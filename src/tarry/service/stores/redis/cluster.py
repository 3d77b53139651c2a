"""The map from the slots of a Redis Cluster to its nodes.

The Cluster client of redis-py is not used: when a node fails, its concurrent calls close each
other's connections, and may continue to do so when the node is available again. A partition is one
slot, so a client for each node and a map that is read again after an error are sufficient.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.errors import StoreUnavailable
from tarry.service.shutdown import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_MIN_REFRESH_INTERVAL_S = 0.1
_REFRESH_TIMEOUT_S = 1.0
"""How long one node may take to return the map, before another one is tried."""
_MAX_PRIMARIES_READ = 3
"""How many of the known primaries are tried, besides the nodes of the URL. The next refresh tries
others."""


class NodeAddress(NamedTuple):
    """Host and port of a node."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return the address as it is shown in messages."""
        return f"{self.host}:{self.port}"


class SlotRange(NamedTuple):
    """Consecutive slots, and the primary that has them."""

    first: int
    last: int
    primary: NodeAddress


def parse_slots(reply: list[Any], responder: NodeAddress) -> list[SlotRange]:
    """Convert a reply of CLUSTER SLOTS; a node without a host has the host of the responder."""
    ranges: list[SlotRange] = []
    for first, last, primary, *_ in reply:
        host = primary[0].decode() if primary[0] else responder.host
        ranges.append(SlotRange(first, last, NodeAddress(host, int(primary[1]))))
    return ranges


def _describe(error: Exception) -> str:
    """Return why a node did not return the map."""
    if isinstance(error, TimeoutError):
        return "no reply in time"
    text = str(error) or type(error).__name__
    if "cluster support disabled" in text:
        text += ". Use redis://HOST in `store` for a single server"
    return text


def _rotate(addresses: list[NodeAddress], start: int) -> list[NodeAddress]:
    start %= len(addresses) or 1
    return addresses[start:] + addresses[:start]


class ClusterMap:
    """The primaries of a Cluster.

    `seeds` are the nodes of the URL. `read_slots` sends CLUSTER SLOTS to a node.
    """

    def __init__(
        self,
        seeds: list[NodeAddress],
        read_slots: Callable[[NodeAddress], Awaitable[list[Any]]],
    ) -> None:
        self._seeds = seeds
        self._read_slots = read_slots
        self._ranges: list[SlotRange] = []
        self._moved: dict[int, NodeAddress] = {}
        """Slots that were moved since the map was read."""
        self._is_stale = True
        self._suspects: set[NodeAddress] = set()
        """Primaries of which a call has failed since the map was read."""
        self._refreshing: asyncio.Task[None] | None = None
        self._read_at = float("-inf")
        self._read_count = 0
        self._failure: str | None = None
        """Why the last refresh failed; None if it succeeded or was cancelled."""
        self._lock = asyncio.Lock()

    @property
    def primaries(self) -> list[NodeAddress]:
        """The known primaries."""
        return sorted({entry.primary for entry in self._ranges})

    async def find_primary(self, slot: int) -> NodeAddress:
        """Return the primary of a slot.

        If the map may be outdated, it is read first if it may be wrong for this slot, and else in
        the background: calls to nodes that work do not wait because another one has failed.
        """
        primary = self.look_up(slot)
        if self._is_stale:
            if primary is None or primary in self._suspects:
                await self.refresh()
                primary = self.look_up(slot)
            elif self._refreshing is None or self._refreshing.done():
                self._refreshing = asyncio.get_running_loop().create_task(self._try_refresh())
        if primary is None:
            self._is_stale = True
            raise StoreUnavailable(f"Redis is unavailable: no node of the Cluster has slot {slot}")
        return primary

    def look_up(self, slot: int) -> NodeAddress | None:
        """Return the primary of a slot as far as it is known, or None."""
        if slot in self._moved:
            return self._moved[slot]
        for entry in self._ranges:
            if entry.first <= slot <= entry.last:
                return entry.primary
        return None

    async def _try_refresh(self) -> None:
        with suppress(StoreUnavailable):
            await self.refresh()

    async def close(self) -> None:
        """Stop the refresh in the background."""
        if self._refreshing is not None:
            await cancel_and_wait([self._refreshing])

    def mark_stale(self, suspect: NodeAddress | None = None) -> None:
        """Read the map again. Called after an error of a node (`suspect`, if it is known)."""
        self._is_stale = True
        if suspect is not None:
            self._suspects.add(suspect)

    def record_move(self, slot: int, primary: NodeAddress) -> None:
        """Use another primary for a slot, which a MOVED response has named."""
        self._moved[slot] = primary

    async def refresh(self) -> None:
        """Read the map from the first node that responds. Concurrent calls read it once."""
        loop = asyncio.get_running_loop()
        has_waited = self._lock.locked()
        async with self._lock:
            if loop.time() < self._read_at + _MIN_REFRESH_INTERVAL_S and self._ranges:
                return
            if has_waited and self._failure is not None:
                # A concurrent call has failed. If each call tried the nodes again, one after the
                # other, the last one would wait for minutes.
                raise StoreUnavailable(self._failure)
            # Not always the same nodes first: the call ends before many nodes have timed out.
            count = self._read_count
            primaries = _rotate(self.primaries, count * _MAX_PRIMARIES_READ)[:_MAX_PRIMARIES_READ]
            self._read_count += 1
            self._failure = None
            error, reason = None, ""
            addresses = dict.fromkeys(primaries + _rotate(self._seeds, count))
            for address in sorted(addresses, key=self._suspects.__contains__):
                try:
                    async with asyncio.timeout(_REFRESH_TIMEOUT_S):
                        ranges = parse_slots(await self._read_slots(address), address)
                except Exception as failed:  # noqa: BLE001 - another node may respond
                    error, reason = failed, f"{address}: {_describe(failed)}"
                    continue
                if ranges:
                    self._ranges, self._moved = ranges, {}
                    self._suspects.clear()
                    self._is_stale, self._read_at = False, loop.time()
                    return
            self._failure = f"Redis is unavailable: no node of the Cluster responds: {reason}"
            raise StoreUnavailable(self._failure) from error
