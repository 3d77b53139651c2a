"""Which process starts the attempts of a lane whose rate is limited.

Each process has its own `AdaptiveLimit`. If several of them paced attempts to the same target, none
could tell its own effect from the effects of the others: a process that lowers its rate still sees
refused attempts, and takes them for tasks that always fail. Therefore one process, the *owner*,
starts the attempts of such a lane. All processes compute the owner from the names of the processes
that claim, by rendezvous hashing: when a process starts or ends, only its own lanes move.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


class LaneOwners:
    """The owners of lanes, as far as this process knows the other processes."""

    def __init__(self) -> None:
        self._process = ""
        self._blocked_lanes_by_process: Mapping[str, Container[str]] = {}

    def assign(self, process: str, blocked_lanes_by_process: Mapping[str, Container[str]]) -> None:
        """Set the name of this process, and all processes that claim.

        `blocked_lanes_by_process` has the lanes whose target a process does not allow.
        """
        self._process = process
        self._blocked_lanes_by_process = {process: (), **blocked_lanes_by_process}

    def is_own(self, lane: str) -> bool:
        """Return whether this process is the owner of a lane.

        If all processes block the lane, each is its owner.
        """
        if len(self._blocked_lanes_by_process) <= 1:
            return True
        names = [
            name for name, blocked in self._blocked_lanes_by_process.items() if lane not in blocked
        ]
        owner = max(names, key=lambda name: _weight(name, lane), default=self._process)
        return owner == self._process


def _weight(process: str, lane: str) -> bytes:
    return blake2b(f"{process}\n{lane}".encode(), digest_size=8).digest()
