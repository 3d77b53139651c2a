"""The operation `finish`: log attempts that have ended, and write the next states of their tasks.

`finish` ends an attempt. Its task then continues (PENDING, or IN_FLIGHT with a renewed lease), or
is *finished* (SUCCEEDED, EXHAUSTED or CANCELLED).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.json import Decoder

from tarry.service.model import Status, Task  # noqa: TC001 - msgspec needs them at runtime
from tarry.service.store import FinishStatus, LeaseTerms, NewTask
from tarry.service.stores.records import encode
from tarry.service.stores.sqlite.add import add_without_quota
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.queries import pack_ids
from tarry.service.stores.sqlite.statements import (
    NULL_NUMBER_PARAM,
    NULL_TEXT_PARAM,
    NULLABLE_NUMBER_SQL,
    NULLABLE_TEXT_SQL,
    MultiRowStatement,
    MultiRowUpdate,
)
from tarry.service.stores.sqlite.transaction import (
    CANCELLED,
    IN_FLIGHT,
    SUCCEEDED,
    WriteTransaction,
)
from tarry.service.stores.sqlite.transitions import log_attempts

if TYPE_CHECKING:
    from tarry.service.store import TaskResult
    from tarry.service.stores.sqlite.transitions import AttemptRow

    Row = tuple[Any, ...]

# `MultiRowStatement` repeats the part in brackets for each row. All states are returned as one JSON
# row: after each fetched row, this thread may have to wait for the GIL. The order of the states is
# not defined, so each has the position of its result in the batch. Status 1 is IN_FLIGHT.
_READ_STATES = MultiRowStatement("""
WITH wanted (position, id) AS (VALUES [?, ?])
SELECT json_group_array(json_array(
    wanted.position, s.seq, s.tenant, s.lane, s.policy, s.version, s.cancelling, s.attempts))
FROM wanted LEFT JOIN task AS t ON t.id = wanted.id
    LEFT JOIN state AS s ON s.seq = t.seq AND s.status = 1
""")
"""Reads the states of tasks; the columns after the position are NULL unless a task is IN_FLIGHT."""
_LANE_COLUMN = 3
# `wake_at` is the due time of a PENDING task, and the end of the lease of an IN_FLIGHT task.
_WRITE_LIVE_TASKS = MultiRowUpdate(f"""
UPDATE state SET status = ?, wake_at = ?, next_attempt_at = ?, worker = {NULLABLE_NUMBER_SQL},
    attempts = ?, previous_delay = {NULLABLE_NUMBER_SQL}, backoff_offset = ?,
    last_outcome_kind = ?, version = version + 1
WHERE seq = ?
""")
_WRITE_FINISHED_TASKS = MultiRowUpdate(f"""
UPDATE state SET status = ?, finished_at = ?, reason = {NULLABLE_TEXT_SQL}, attempts = ?,
    previous_delay = {NULLABLE_NUMBER_SQL}, backoff_offset = ?, last_outcome_kind = ?,
    version = version + 1, worker = NULL, wake_at = 0
WHERE seq = ?
""")


class PackedResult(Struct, array_like=True, gc=False):
    """A `TaskResult` as it is sent to the writer process.

    It has only the id, tenant and version of the task, and the attempt as it is stored in the
    attempt log. So 270 results take 75 KB instead of 480 KB.
    """

    id: str
    tenant: str
    version: int
    outcome: str | None
    """The outcome of the attempt; None: there is no attempt to log."""
    attempt: bytearray
    """The encoded `AttemptRecord`. The fields below are those of `TaskResult`."""
    status: Status
    reason: str | None
    next_attempt_at: int
    renewed_lease: LeaseTerms | None
    previous_delay: float | None
    backoff_offset: int
    last_outcome_kind: str | None
    callback_task: Task | None


_get_result_fields = attrgetter(*PackedResult.__struct_fields__[5:])  # from `status` on


def pack_result(result: TaskResult) -> PackedResult:
    """Convert a result into the form in which it is sent to the writer process."""
    task, attempt = result.task, result.attempt
    outcome = None if attempt is None else attempt.outcome
    encoded = bytearray() if attempt is None else bytearray(encode(attempt))
    return PackedResult(
        task.id, task.tenant, task.version, outcome, encoded, *_get_result_fields(result)
    )


_decode_states = Decoder(list[tuple[Any, ...]]).decode


@write_operation
def finish(tx: WriteTransaction, results: Sequence[PackedResult]) -> list[FinishStatus]:
    """Log attempts and write the next states of tasks that still have the version of the lease."""
    if len({result.id for result in results}) == len(results):
        return _write_results(tx, results)
    # A task has several results: each must match the version that the previous result has set.
    return [status for result in results for status in _write_results(tx, [result])]


def _write_results(tx: WriteTransaction, results: Sequence[PackedResult]) -> list[FinishStatus]:
    """Write the results of different tasks, with a few statements for all of them."""
    now = tx.now
    statuses: list[FinishStatus] = []
    attempt_rows: list[AttemptRow] = []
    finished_parameters: list[Any] = []  # parameters of `_WRITE_FINISHED_TASKS`
    live_parameters: list[Any] = []  # parameters of `_WRITE_LIVE_TASKS`
    task_counts: dict[tuple[int, int, int, int], int] = {}  # by tenant, lane, policy, new status
    callbacks: list[NewTask] = []
    for result, row in zip(results, _read_states(tx, results), strict=True):
        _, seq, tenant, lane_id, policy, version, cancelling, attempts = row
        if version != result.version:  # `version` is None if the task is not IN_FLIGHT
            tx.count_superseded(tx.names.tenant_id(result.tenant))
            statuses.append(FinishStatus.SUPERSEDED)
            continue
        if result.outcome is not None:
            attempts += 1
            attempt_rows.append((tenant, seq, attempts, result.outcome, result.attempt))
        status, delay, due = int(result.status), result.previous_delay, result.next_attempt_at
        is_cancelled = cancelling and status != SUCCEEDED
        stored_delay = NULL_NUMBER_PARAM if delay is None else delay
        progress_and_seq = (
            attempts,
            stored_delay,
            result.backoff_offset,
            result.last_outcome_kind,
            seq,
        )
        if is_cancelled:
            status = CANCELLED
            finished_parameters += (status, now, NULL_TEXT_PARAM, *progress_and_seq)
        elif status >= SUCCEEDED:  # any finished status
            reason = NULL_TEXT_PARAM if result.reason is None else result.reason
            finished_parameters += (status, now, reason, *progress_and_seq)
        elif result.renewed_lease is None:
            live_parameters += (status, due, due, NULL_NUMBER_PARAM, *progress_and_seq)
            tx.lane(lane_id).lower_due_at(due)
        else:
            status = IN_FLIGHT  # the worker keeps its lease
            wake_at = max(now, due) + result.renewed_lease.length_ms
            worker = tx.names.worker_id(result.renewed_lease.worker)
            live_parameters += (status, wake_at, due, worker, *progress_and_seq)
            tx.lane(lane_id).lower_lease_end_at(wake_at)
        if status != IN_FLIGHT:
            transition = (tenant, lane_id, policy, status)
            task_counts[transition] = task_counts.get(transition, 0) + 1
        if result.callback_task is not None and not is_cancelled:
            callbacks.append(NewTask(result.callback_task))
        statuses.append(FinishStatus.CANCELLED if is_cancelled else FinishStatus.APPLIED)
    log_attempts(tx, attempt_rows)
    _WRITE_FINISHED_TASKS.execute(tx.execute, finished_parameters)
    _WRITE_LIVE_TASKS.execute(tx.execute, live_parameters)
    for (tenant, lane_id, policy, status), count in task_counts.items():
        tx.count_transition(tenant, tx.lane(lane_id), policy, IN_FLIGHT, status, count)
    if callbacks:
        add_without_quota(tx, callbacks, None)
    return statuses


def _read_states(tx: WriteTransaction, results: Sequence[PackedResult]) -> list[Row]:
    """Return the columns of `_READ_STATES` for each result, and load the lanes of the tasks."""
    wanted: list[Any] = []
    for position_and_id in enumerate(pack_ids([result.id for result in results])):
        wanted += position_and_id
    rows: list[Row] = [()] * len(results)
    for _, cursor in _READ_STATES.execute_chunks(tx.execute, wanted):
        for row in _decode_states(cursor.fetchone()[0]):
            rows[row[0]] = row
    tx.load_lanes({row[_LANE_COLUMN] for row in rows if row[_LANE_COLUMN] is not None})
    return rows
