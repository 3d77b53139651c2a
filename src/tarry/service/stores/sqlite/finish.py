"""Results of attempts: log the attempt and write the task's next state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.json import Decoder

from tarry.service.model import Status, Task  # noqa: TC001 - msgspec needs them at runtime
from tarry.service.store import FinishStatus, Lease, NewTask
from tarry.service.stores.sqlite.add import add_without_quota
from tarry.service.stores.sqlite.queries import encode, pack_ids
from tarry.service.stores.sqlite.transaction import (
    CANCELLED,
    IN_FLIGHT,
    NULL_NUMBER,
    NULL_TEXT,
    NULLABLE_NUMBER,
    NULLABLE_TEXT,
    PENDING,
    SUCCEEDED,
    MultiRowStatement,
)
from tarry.service.stores.sqlite.transitions import log_attempts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.store import TaskResult
    from tarry.service.stores.sqlite.transaction import Transaction
    from tarry.service.stores.sqlite.transitions import AttemptRow

    Row = tuple[Any, ...]

# All states come as one JSON row, because each fetched row releases the GIL (see `multirow`). Their
# order is not defined, so each has its position in the batch.
_READ_STATES = MultiRowStatement(
    """
WITH wanted (position, id) AS (VALUES {rows})
SELECT json_group_array(json_array(
    wanted.position, s.seq, s.tenant, s.lane, s.policy, s.version, s.cancelling, s.attempts))
FROM wanted LEFT JOIN task AS t ON t.id = wanted.id
    LEFT JOIN state AS s ON s.seq = t.seq AND s.status = 1
""",
    "(?, ?)",
)
"""Reads the states of tasks that are IN_FLIGHT (status 1)."""
_LANE_COLUMN = 3
_CONTINUE_TASKS = MultiRowStatement(
    """
INSERT INTO state (seq, tenant, lane, policy, started_at, status, wake_at, next_attempt_at, worker,
    attempts, previous_delay, restarted, last_kind)
VALUES {rows}
ON CONFLICT (seq) DO UPDATE SET status = excluded.status, wake_at = excluded.wake_at,
    next_attempt_at = excluded.next_attempt_at, worker = excluded.worker,
    attempts = excluded.attempts, previous_delay = excluded.previous_delay,
    restarted = excluded.restarted, last_kind = excluded.last_kind, version = version + 1
""",
    f"(?, 0, 0, 0, 0, ?, ?, ?, {NULLABLE_NUMBER}, ?, {NULLABLE_NUMBER}, ?, ?)",
)
_END_TASKS = MultiRowStatement(
    """
INSERT INTO state (seq, tenant, lane, policy, started_at, wake_at, next_attempt_at, status,
    finished_at, reason, attempts, previous_delay, restarted, last_kind)
VALUES {rows}
ON CONFLICT (seq) DO UPDATE SET status = excluded.status, finished_at = excluded.finished_at,
    reason = excluded.reason, worker = NULL, wake_at = 0, attempts = excluded.attempts,
    previous_delay = excluded.previous_delay, restarted = excluded.restarted,
    last_kind = excluded.last_kind, version = version + 1
""",
    f"(?, 0, 0, 0, 0, 0, 0, ?, ?, {NULLABLE_TEXT}, ?, {NULLABLE_NUMBER}, ?, ?)",
)


class PackedResult(Struct, array_like=True, gc=False):
    """A `TaskResult` as it is sent to the writer process.

    It has only the id and the version of the task, and the attempt encoded as the log stores it:
    270 calls take 75 KB instead of 480 KB.
    """

    id: str
    tenant: str
    version: int
    outcome: str | None
    """Outcome of the attempt; None if no attempt is logged."""
    attempt: bytearray
    """Encoded `AttemptRecord`."""
    status: Status
    reason: str | None
    next_attempt_at: int
    keep: Lease | None
    previous_delay: float | None
    restarted: int
    last_kind: str | None
    callback: Task | None


def pack_result(result: TaskResult) -> PackedResult:
    """Return the parts of a result that the store needs."""
    task, attempt = result.task, result.attempt
    return PackedResult(
        task.id,
        task.tenant,
        task.version,
        None if attempt is None else attempt.outcome,
        bytearray() if attempt is None else bytearray(encode(attempt)),
        result.status,
        result.reason,
        result.next_attempt_at,
        result.keep,
        result.previous_delay,
        result.restarted,
        result.last_kind,
        result.callback,
    )


_decode_states = Decoder(list[tuple[Any, ...]]).decode


def finish(tx: Transaction, results: Sequence[PackedResult]) -> list[FinishStatus]:
    """Log attempts and write next states, for tasks whose version still matches.

    In general, a batch has one result for each task. If a task has several, the results are written
    one by one, because each must see the version that the previous result has set.
    """
    if len({result.id for result in results}) == len(results):
        return _finish_batch(tx, results)
    return [status for result in results for status in _finish_batch(tx, [result])]


def _finish_batch(tx: Transaction, results: Sequence[PackedResult]) -> list[FinishStatus]:
    wanted: list[Any] = []
    for position_and_id in enumerate(pack_ids([result.id for result in results])):
        wanted += position_and_id
    rows: list[Row] = [()] * len(results)
    for _, cursor in _READ_STATES.execute_chunks(tx.execute, wanted):
        for row in _decode_states(cursor.fetchone()[0]):
            rows[row[0]] = row
    tx.load_lanes({row[_LANE_COLUMN] for row in rows if row[_LANE_COLUMN] is not None})
    batch = _FinishBatch(tx)
    statuses = [batch.add(result, row) for result, row in zip(results, rows, strict=True)]
    batch.write()
    return statuses


class _FinishBatch:
    """Collects the rows that results change, so that `write` needs few statements."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._attempts: list[AttemptRow] = []
        self._ended: list[Any] = []
        self._continued: list[Any] = []
        self._transitions: dict[tuple[int, int, int, int], int] = {}
        """Number of tasks by tenant, lane, policy and new status."""
        self._callbacks: list[NewTask] = []

    def add(self, result: PackedResult, row: Row) -> FinishStatus:
        """Add a result; the columns of `row` are None if its task is not IN_FLIGHT."""
        _, seq, tenant, lane_id, policy, version, cancelling, attempts = row
        if version != result.version:
            tx = self._tx
            tx.count_superseded(tx.names.tenant_id(result.tenant))
            return FinishStatus.SUPERSEDED
        if result.outcome is not None:
            attempts += 1
            self._attempts.append((tenant, seq, attempts, result.outcome, result.attempt))
        status, delay = int(result.status), result.previous_delay
        is_cancelled = cancelling and status != SUCCEEDED
        progress = (
            attempts,
            NULL_NUMBER if delay is None else delay,
            result.restarted,
            result.last_kind,
        )
        if is_cancelled or status >= SUCCEEDED:
            status = CANCELLED if is_cancelled else status
            reason = None if is_cancelled else result.reason
            stored_reason = NULL_TEXT if reason is None else reason
            self._ended += (seq, status, self._tx.now, stored_reason, *progress)
            self._count((tenant, lane_id, policy, status))
        else:
            self._continue(result, seq, tenant, lane_id, policy, progress)
        if is_cancelled:
            return FinishStatus.CANCELLED
        if result.callback is not None:
            self._callbacks.append(NewTask(result.callback))
        return FinishStatus.DONE

    def _continue(
        self, result: PackedResult, seq: int, tenant: int, lane_id: int, policy: int, progress: Row
    ) -> None:
        """Schedule the next attempt: put the task into the queue, or extend its lease."""
        tx, due, keep = self._tx, result.next_attempt_at, result.keep
        lane = tx.lane(lane_id)
        if keep is None:
            self._continued += (seq, PENDING, due, due, NULL_NUMBER, *progress)
            self._count((tenant, lane_id, policy, PENDING))
            lane.note_due(due)
        else:
            wake_at = max(tx.now, due) + keep.length_ms
            worker = tx.names.worker_id(keep.worker)
            self._continued += (seq, IN_FLIGHT, wake_at, due, worker, *progress)
            lane.note_lease(wake_at)

    def _count(self, transition: tuple[int, int, int, int]) -> None:
        self._transitions[transition] = self._transitions.get(transition, 0) + 1

    def write(self) -> None:
        """Write attempts, states, counters, and add the callback tasks."""
        tx = self._tx
        log_attempts(tx, self._attempts)
        _END_TASKS.execute(tx.execute, self._ended)
        _CONTINUE_TASKS.execute(tx.execute, self._continued)
        for (tenant, lane_id, policy, status), tasks in self._transitions.items():
            tx.count_transition(tenant, tx.lane(lane_id), policy, IN_FLIGHT, status, tasks)
        if self._callbacks:
            add_without_quota(tx, self._callbacks, None)
