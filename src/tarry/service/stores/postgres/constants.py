"""Constants that the `.sql` files name as `${NAME}`; Python uses some of them, too."""

from __future__ import annotations

from tarry.service.model import Status
from tarry.service.rules import transitions
from tarry.service.rules.transitions import sql_assignments, sql_counts, sql_values

PENDING, IN_FLIGHT, SUCCEEDED, EXHAUSTED, CANCELLED = (int(status) for status in Status)

SEARCH_PATH = "pg_catalog, pg_temp"
"""Without it, a function or operator that another role has created in a schema of the search_path,
such as `public.cardinality(integer[])`, could be called instead of the built-in one."""
PLPGSQL = f"LANGUAGE plpgsql SET search_path = {SEARCH_PATH}"
PLAN_SETTINGS = f"""{PLPGSQL}
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_bitmapscan = off SET join_collapse_limit = 1 SET plan_cache_mode = force_generic_plan
SET jit = off"""
"""Tables are joined in the order in which they are written: arguments first, then indexes."""

SEQ_DAY_BITS = 40
"""Number of bits of `seq` after the day."""
MAX_TASK_NUMBER = (1 << SEQ_DAY_BITS) - 1
OFTEN_UPDATED = (
    "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, "
    "autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0"
)
"""Storage parameters of tables whose rows are often updated: vacuum them early, without pauses."""

ADDED, ADDED_LEASED, EXISTS, OVER_QUOTA, TOO_MANY_LANES = range(5)
"""Results of `add_1`."""
APPLIED, SUPERSEDED, ENDED_AS_CANCELLED = range(3)
"""Results of `finish_1` and `release_1`."""
CANCEL_DONE, CANCEL_REQUESTED, CANCEL_TOO_LATE = range(3)
"""Results of `cancel_1`."""
RETRY_DUE, RETRY_IN_FLIGHT, RETRY_SUCCEEDED, RETRY_OVER_QUOTA = range(4)
"""Results of `retry_now_1`."""
HEADER_ROW, LEASED_ROW, RENEWED_ROW, HALF_OPEN_ROW = range(4)
"""Kinds of rows of `claim_1`."""
ID_CONFLICT_STATE = "TY001"
"""The SQLSTATE of `add_1` if the id of a new task is that of a task with another key."""

FIRST_ATTEMPT_QUEUE, RETRY_QUEUE, LEASED_QUEUE = range(3)
"""Values of `live.queue`: PENDING without a failed attempt, PENDING with one, and IN_FLIGHT."""

# Classes of advisory locks, which end with the transaction.
QUOTA_LOCK, LANE_QUOTA_LOCK, PROBE_LOCK = 0x7461_0001, 0x7461_0002, 0x7461_0003

MAX_UPDATE_TRIES = 10
MAX_TENANTS_VISITED = 1000
MAX_TENANTS_READ = 32
"""Up to this number of tenants, a claim reads all of them by their ids. With more, it uses indexes,
which contain entries of old row versions, see the top of `claim.sql`."""
MAX_CHECKS_CORRECTED = 16
MIN_NEXT_CLAIM_MS = 5
"""Earliest `next_at` of a claim that has leased nothing. Due tasks may be locked for a moment by
another transaction."""

LIVE_COLUMNS = """c.id::text, n.name, l.name, c.key, c.fingerprint, c.content, c.body_ref, u.policy,
    c.policy_version, s.created_at, s.next_attempt_at, s.first_due_at, (s.queue / 2)::smallint,
    NULL::text, s.attempts, s.attempts_before_replay, s.lost_attempts, s.previous_delay,
    s.backoff_offset, s.last_outcome_kind, s.version, s.worker, s.wake_at, s.cancelling, s.replays,
    NULL::bigint, s.seq"""
"""The fields of `Task` in their order, and `seq`, of a row of `live`."""
TASK_JOINS = """JOIN tarry.content AS c ON c.seq = s.seq
    JOIN tarry.tenant_name AS n ON n.id = s.tenant
    JOIN tarry.lane_name AS l ON l.id = s.lane
    CROSS JOIN LATERAL (
        SELECT r.policy FROM tarry.policy_use AS r WHERE r.id = s.policy
        ORDER BY r.generation DESC LIMIT 1) AS u"""
FINISHED_INSERT = """INSERT INTO tarry.finished (tenant, status, seq, lane, policy, finished_at,
        next_attempt_at, first_due_at, created_at, version, attempts, attempts_before_replay,
        lost_attempts, backoff_offset, replays, previous_delay, last_outcome_kind, reason)"""

_DUE_AT = "CASE WHEN l.pending + d.pending > 0 THEN least(l.due_at, d.due) END"
_LEASE_END_AT = (
    "CASE WHEN l.in_flight + d.in_flight > 0 THEN least(l.lease_end_at, d.lease_end) END"
)
_TASKS = " + ".join(f"d.{counter}" for counter in transitions.COUNTERS)
_LIVE = " + ".join(f"d.{transitions.COUNTERS[status]}" for status in transitions.LIVE_STATUSES)
LANE_CHANGES = f"""pending = l.pending + d.pending, in_flight = l.in_flight + d.in_flight,
    updates = l.updates + 1, generation = (l.updates + 1) / 32,
    exhausted = l.exhausted + d.exhausted, tasks = l.tasks + {_TASKS},
    unused = l.tasks + {_TASKS} = 0, due_at = {_DUE_AT}, lease_end_at = {_LEASE_END_AT},
    due_check_at = CASE WHEN NOT l.ready
        THEN tarry.due_check_1(l.paused, l.parked_until, {_DUE_AT}) END,
    expiry_check_at = CASE WHEN NOT l.ready
        THEN tarry.expiry_check_1(l.paused, l.parked_until, {_DUE_AT}, {_LEASE_END_AT}) END"""
TENANT_CHANGES = f"""{", ".join(f"{name} = t.{name} + d.{name}" for name in transitions.COUNTERS)},
    superseded = t.superseded + d.superseded, lanes = t.lanes + d.new_lanes,
    updates = t.updates + 1, generation = (t.updates + 1) / 32"""
POLICY_CHANGES = f"""live_tasks = u.live_tasks + {_LIVE},
    tasks = u.tasks + {_TASKS}, updates = u.updates + 1, generation = (u.updates + 1) / 32"""
"""Assignments for the sum `d` of changes, see `counters.sql`."""

COUNTS_OF_ADDED = sql_counts([None], [PENDING, IN_FLIGHT], "i.status")
COUNTS_OF_FINISHED = sql_counts(
    [IN_FLIGHT], [PENDING, IN_FLIGHT, SUCCEEDED, EXHAUSTED, CANCELLED], "i.new_status"
)
COUNTS_OF_RELEASED = sql_counts([IN_FLIGHT], [PENDING, CANCELLED], "i.new_status")
COUNTS_OF_LOST = sql_counts([IN_FLIGHT], [CANCELLED])
COUNTS_OF_REPLAYED = sql_counts([EXHAUSTED, CANCELLED], [PENDING], "i.status")
COUNTS_OF_DELETED = sql_counts([SUCCEEDED, EXHAUSTED, CANCELLED], [None], "i.status")
"""Columns that count the tasks `i` of a group by their old or new status."""
COUNTS_OF_CANCELLED = sql_values(PENDING, CANCELLED)
COUNTS_OF_RETRIED = sql_values(PENDING, PENDING)
LANE_COUNTS_OF_LEASED = sql_assignments(PENDING, IN_FLIGHT, "l", "x.leased")
TENANT_COUNTS_OF_LEASED = sql_assignments(PENDING, IN_FLIGHT, "t", "x.leased")
