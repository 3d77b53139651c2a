"""Results of functions, advisory locks, and parts of statements that several functions use."""

from __future__ import annotations

from tarry.service.model import Status

PENDING, IN_FLIGHT, SUCCEEDED, EXHAUSTED, CANCELLED = (int(status) for status in Status)
FINISHED_STATUSES = f"({SUCCEEDED}, {EXHAUSTED}, {CANCELLED})"
"""All statuses of `finished`. With this condition, a search by tenant and seq uses its index."""

SEARCH_PATH = "pg_catalog, pg_temp"
"""Without it, a function or operator that another role has created in a schema of the search_path,
such as `public.cardinality(integer[])`, could be called instead of the built-in one."""
SET_LOCAL_SEARCH_PATH = f"SET LOCAL search_path = {SEARCH_PATH}"
PLPGSQL = f"LANGUAGE plpgsql SET search_path = {SEARCH_PATH}"
PLAN_SETTINGS = f"""
{PLPGSQL}
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_bitmapscan = off SET join_collapse_limit = 1 SET plan_cache_mode = force_generic_plan
SET jit = off
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
IS_LEASED = f"l.queue + 0 = {LEASED_QUEUE}"
"""The condition for tasks that are found by their keys. Because of the addition, PostgreSQL does
not search `live_queue` for all leased tasks instead, which also reads entries of old versions."""

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


def newest(table: str, row_id: str) -> str:
    """Return a subquery for a row of `lane`, `tenant` or `policy_use`, see the schema.

    It reads the index entries of the latest generation first, so it skips nearly all versions of
    the row that a long transaction of another client keeps from being removed.
    """
    return f"(SELECT r.ctid AS tid, r.* FROM tarry.{table} AS r WHERE {newest_first(row_id)})"


def newest_first(row_id: str, alias: str = "r") -> str:
    """Return the condition, order and limit that find the row as in `newest`."""
    return f"{alias}.id = {row_id} ORDER BY {alias}.generation DESC LIMIT 1"


def lock_rows(table: str, ids: str) -> str:
    """Return a statement that locks rows, in the order of their ids."""
    return f"""PERFORM 1 FROM (
            SELECT DISTINCT i.id FROM unnest({ids}) AS i (id) ORDER BY i.id) AS i
        CROSS JOIN LATERAL (SELECT r.id FROM tarry.{table} AS r
            WHERE {newest_first("i.id")} FOR NO KEY UPDATE) AS r;"""


NEXT_GENERATION = "updates = {0}.updates + 1, generation = ({0}.updates + 1) / 32"
"""Assignments of each frequent update of `lane`, `tenant` and `policy_use`; see the schema."""
TASK_JOINS = f"""
    JOIN tarry.content AS c ON c.seq = s.seq
    JOIN tarry.tenant_name AS n ON n.id = s.tenant
    JOIN tarry.lane_name AS l ON l.id = s.lane
    CROSS JOIN LATERAL {newest("policy_use", "s.policy")} AS u
"""
FINISHED_INSERT = """INSERT INTO tarry.finished (tenant, status, seq, lane, policy, finished_at,
        next_attempt_at, first_due_at, created_at, version, attempts, attempts_before_replay,
        lost_attempts, backoff_offset, replays, previous_delay, last_outcome_kind, reason)"""
