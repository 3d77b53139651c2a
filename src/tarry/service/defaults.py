"""Default limits and durations, for `Settings` and for components that are built without it."""

from __future__ import annotations

from typing import Final

MAX_REQUEST_BYTES: Final = 10_485_760
"""Largest JSON body of one API request (10 MiB), except a batch."""
INLINE_BODY_BYTES: Final = 16_384
"""Largest task body that is stored with its task; larger bodies go to object storage."""
MAX_RESPONSE_BYTES: Final = 1_048_576
"""Largest part of a target's response that is read (1 MiB)."""
MAX_ATTEMPT_TIMEOUT_MS: Final = 60_000
"""Largest `attemptTimeoutMs` that a policy may have."""
LEASE_GRACE_MS: Final = 5_000
"""Time that is left of a lease after the longest attempt, to store the result."""
MAX_IN_FLIGHT: Final = 512
"""Concurrent attempts of one process."""
MAX_LANE_IN_FLIGHT: Final = 128
"""Concurrent attempts of one process to one downstream."""
