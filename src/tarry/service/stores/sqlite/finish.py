"""Attempts have ended: what came of them, and what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.json import Decoder

from tarry.service.model import Status, Task  # noqa: TC001 - structs are sent
from tarry.service.store import FinishStatus, Lease, NewTask
from tarry.service.stores.sqlite.add import add_without_quota
from tarry.service.stores.sqlite.multirow import (
    NULL_NUMBER,
    NULL_TEXT,
    NULLABLE_NUMBER,
    NULLABLE_TEXT,
    MultiRowStatement,
)
from tarry.service.stores.sqlite.task_rows import encode, pack_ids
from tarry.service.stores.sqlite.transaction import CANCELLED, IN_FLIGHT, PENDING, SUCCEEDED
from tarry.service.stores.sqlite.transitions import AttemptRow, log_attempts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.store import TaskResult
    from tarry.service.stores.sqlite.transaction import Transaction

    Row = tuple[Any, ...]

_STATES = MultiRowStatement(
    """
WITH asked (place, id) AS (VALUES {rows})
SELECT json_group_array(json_array(
    asked.place, s.seq, s.tenant, s.lane, s.policy, s.version, s.cancelling, s.attempts))
FROM asked LEFT JOIN task AS t ON t.id = asked.id
    LEFT JOIN state AS s ON s.seq = t.seq AND s.status = 1
""",
    "(?, ?)",
)
"""Each row that is read lets go of the interpreter, so all come as one, in any order."""
_LANE = 3
_GO_ON = MultiRowStatement(
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
_END = MultiRowStatement(
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
    """A `Finish`, with as much of its task as says which it is, and its attempt as it is kept."""

    id: str
    tenant: str
    version: int
    outcome: str | None
    """Of the attempt; None: there was none."""
    log_attempts: bytearray
    status: Status
    reason: str | None
    next_attempt_at: int
    keep: Lease | None
    previous_delay: float | None
    restarted: int
    last_kind: str | None
    callback: Task | None


def pack_result(finish: TaskResult) -> PackedResult:
    """Return what the file has to know of a result."""
    task, attempt = finish.task, finish.attempt
    return PackedResult(
        task.id,
        task.tenant,
        task.version,
        None if attempt is None else attempt.outcome,
        bytearray() if attempt is None else bytearray(encode(attempt)),
        finish.status,
        finish.reason,
        finish.next_attempt_at,
        finish.keep,
        finish.previous_delay,
        finish.restarted,
        finish.last_kind,
        finish.callback,
    )


_decode = Decoder(list[tuple[Any, ...]]).decode


def finish(tx: Transaction, results: Sequence[PackedResult]) -> list[FinishStatus]:
    """Write attempt and next state, if the version still matches.

    All at once, if each is of another task: else one has to see what the one before it has done.
    """
    if len({result.id for result in results}) == len(results):
        return _finish(tx, results)
    return [answer for result in results for answer in _finish(tx, [result])]


def _finish(tx: Transaction, results: Sequence[PackedResult]) -> list[FinishStatus]:
    asked: list[Any] = []
    for asking in enumerate(pack_ids([result.id for result in results])):
        asked += asking
    rows: list[Row] = [()] * len(results)
    for _, cursor in _STATES.parts(tx.execute, asked):
        for row in _decode(cursor.fetchone()[0]):
            rows[row[0]] = row
    tx.load_lanes({row[_LANE] for row in rows if row[_LANE] is not None})
    step = _Step(tx)
    answers = [step.take(result, row) for result, row in zip(results, rows, strict=True)]
    step.write()
    return answers


class _Step:
    """What several ends come to; `write` writes it."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._attempts: list[AttemptRow] = []
        self._ended: list[Any] = []
        self._going_on: list[Any] = []
        self._moves: dict[tuple[int, int, int, int], int] = {}
        self._callbacks: list[NewTask] = []

    def take(self, result: PackedResult, row: Row) -> FinishStatus:
        """Take one end; `row` is where its task stands, all None if it is not in flight."""
        _, seq, tenant, lane_id, policy, version, cancelling, attempts = row
        if version != result.version:
            tx = self._tx
            tx.count_superseded(tx.names.tenant_id(result.tenant))
            return FinishStatus.SUPERSEDED
        if result.outcome is not None:
            attempts += 1
            self._attempts.append((tenant, seq, attempts, result.outcome, result.log_attempts))
        status, delay = int(result.status), result.previous_delay
        cancelled = cancelling and status != SUCCEEDED
        progress = (
            attempts,
            NULL_NUMBER if delay is None else delay,
            result.restarted,
            result.last_kind,
        )
        if cancelled or status >= SUCCEEDED:
            status = CANCELLED if cancelled else status
            reason = None if cancelled else result.reason
            why = NULL_TEXT if reason is None else reason
            self._ended += (seq, status, self._tx.now, why, *progress)
            self._move((tenant, lane_id, policy, status))
        else:
            self._go_on(result, seq, tenant, lane_id, policy, progress)
        if cancelled:
            return FinishStatus.CANCELLED
        if result.callback is not None:
            self._callbacks.append(NewTask(result.callback))
        return FinishStatus.DONE

    def _go_on(
        self, result: PackedResult, seq: int, tenant: int, lane_id: int, policy: int, progress: Row
    ) -> None:
        """Let a task wait for its next attempt, in the hands of its worker or not."""
        tx, due, keep = self._tx, result.next_attempt_at, result.keep
        lane = tx.lane(lane_id)
        if keep is None:
            self._going_on += (seq, PENDING, due, due, NULL_NUMBER, *progress)
            self._move((tenant, lane_id, policy, PENDING))
            lane.due(due)
        else:
            wake_at = max(tx.now, due) + keep.length
            worker = tx.names.worker_id(keep.worker)
            self._going_on += (seq, IN_FLIGHT, wake_at, due, worker, *progress)
            lane.leased(wake_at)

    def _move(self, count_transition: tuple[int, int, int, int]) -> None:
        """Count a task of a tenant, lane and policy that is no longer in flight, but that."""
        self._moves[count_transition] = self._moves.get(count_transition, 0) + 1

    def write(self) -> None:
        """Write attempts, states, and the tasks that report them."""
        tx = self._tx
        log_attempts(tx, self._attempts)
        _END.run(tx.execute, self._ended)
        _GO_ON.run(tx.execute, self._going_on)
        for (tenant, lane_id, policy, status), tasks in self._moves.items():
            tx.count_transition(tenant, tx.lane(lane_id), policy, IN_FLIGHT, status, tasks)
        if self._callbacks:
            add_without_quota(tx, self._callbacks, None)
