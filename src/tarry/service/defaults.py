"""Default limits and durations, also for components that are built without `Settings`."""

from __future__ import annotations

from typing import Final

MAX_REQUEST_BYTES: Final = 10_485_760
"""Largest JSON body of one API request (10 MiB), except a batch."""
INLINE_BODY_BYTES: Final = 16_384
"""Largest task body that is stored in the row of its task; `BodyStore` stores larger bodies."""
MAX_RESPONSE_BYTES: Final = 1_048_576
"""Length of a target's response body after which the rest is not read (1 MiB)."""
MAX_ATTEMPT_TIMEOUT_MS: Final = 60_000
"""Largest attempt timeout that a policy may have."""
LEASE_GRACE_MS: Final = 5_000
"""How much longer than the longest attempt a lease must be, so that the result can be stored."""
MAX_IN_FLIGHT: Final = 512
"""Maximum number of attempts in flight in one process."""
MAX_LANE_IN_FLIGHT: Final = 128
"""Maximum number of attempts in flight of one lane (the queue of a downstream), in one process."""
