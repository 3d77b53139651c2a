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
MAX_IN_FLIGHT: Final = 2_048
"""Maximum number of attempts in flight in one process.

A hanging attempt holds its slot for the attempt timeout. With 512 slots, a new target of a tenant
with 600 hanging targets was not attempted for 180 s."""
MAX_TENANT_TASKS_PER_S: Final = 50_000.0
"""Tasks that one tenant may add, retry and replay per second, in all processes together.

About what eight processes accept (7,000 per second each, in batches), so a single tenant at full
speed does not reach it. It bounds what a tenant can add before an operator notices."""
MAX_TENANT_UNFINISHED_TASKS: Final = 1_000_000
"""Maximum number of unfinished tasks (PENDING or IN_FLIGHT) of one tenant."""
MAX_TENANT_LANES: Final = 100_000
"""Maximum number of lanes (the queues of downstreams) of one tenant."""
MAX_TENANT_POLICY_VERSIONS: Final = 1_000
"""Maximum number of versions of all policies of one tenant."""
MAX_TRANSACTION_TASKS: Final = 64
"""Number of tasks that one transaction claims or releases, about 5 ms for 128 tasks.

New tasks wait for the transaction. Then the event loop starts or reports its attempts in one go.
Groups of 500 to 1,000 tasks took 25 to 75 ms, and the p99 delay of retries was 240 ms instead of
115 ms. After a start with 40,000 overdue tasks of 5 or 50 hosts, the p50 of a POST was 4 to 10
times as long with 500 tasks as with 128, and the number of deliveries per second was the same.
After a start with 20,000 overdue tasks of one host, on a busy machine with 2 cores, the p50 was 56
to 67 ms with 128 tasks and 39 to 47 ms with 64, at 3,100 and 2,800 deliveries per second."""
MAX_LANE_CLAIMED: Final = 128
"""Maximum number of tasks of one lane (the queue of a downstream) that one claim leases. In all, a
claim leases up to `MAX_TRANSACTION_TASKS` tasks, or twice as many if several processes share the
store: see `ClaimTurns.claim_factor`."""
MAX_LANE_IN_FLIGHT: Final = 128
"""Maximum number of attempts in flight of one lane (the queue of a downstream), in one process."""
