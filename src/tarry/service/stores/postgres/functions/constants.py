"""Results of functions, advisory locks, and parts of statements that several functions use."""

from __future__ import annotations

from tarry.service.model import Status

PENDING, IN_FLIGHT, SUCCEEDED, EXHAUSTED, CANCELLED = (int(status) for status in Status)
FINISHED_STATUSES = f"({SUCCEEDED}, {EXHAUSTED}, {CANCELLED})"
"""All statuses of `finished`. With this condition, a search by tenant and seq uses its index."""

PLAN_SETTINGS = """
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET join_collapse_limit = 1 SET plan_cache_mode = force_generic_plan SET jit = off
"""
"""Tables are joined in the order in which they are written: arguments first, then indexes."""

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
LIVE_COLUMNS = """
    c.id::text, n.name, l.name, c.key, c.fingerprint, c.content, c.body_ref, u.policy,
    c.policy_version, s.created_at, s.next_attempt_at, s.first_due_at, (s.queue / 2)::smallint,
    NULL::text, s.attempts, s.attempts_before_replay, s.lost_attempts, s.previous_delay,
    s.backoff_offset, s.last_outcome_kind, s.version, s.worker, s.wake_at, s.cancelling, s.replays,
    NULL::bigint, s.seq
"""
FINISHED_COLUMNS = """
    c.id::text, n.name, l.name, c.key, c.fingerprint, c.content, c.body_ref, u.policy,
    c.policy_version, s.created_at, s.next_attempt_at, s.first_due_at, s.status, s.reason,
    s.attempts, s.attempts_before_replay, s.lost_attempts, s.previous_delay, s.backoff_offset,
    s.last_outcome_kind, s.version, NULL::text, 0::bigint, false, s.replays, s.finished_at, s.seq
"""
"""The fields of `Task` in their order, and `seq`."""
TASK_JOINS = """
    JOIN tarry.content AS c ON c.seq = s.seq
    JOIN tarry.tenant AS n ON n.id = s.tenant
    JOIN tarry.lane AS l ON l.id = s.lane
    JOIN tarry.policy_use AS u ON u.id = s.policy
"""
FINISHED_INSERT = """INSERT INTO tarry.finished (tenant, status, seq, lane, policy, finished_at,
        next_attempt_at, first_due_at, created_at, version, attempts, attempts_before_replay,
        lost_attempts, backoff_offset, replays, previous_delay, last_outcome_kind, reason)"""
