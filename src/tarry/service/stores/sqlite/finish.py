"""Attempts have ended: what came of them, and what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.json import Decoder

from tarry.service.model import Status, Task  # noqa: TC001 - structs are sent
from tarry.service.store import FinishStatus, Lease, NewTask
from tarry.service.stores.sqlite.add import add_all
from tarry.service.stores.sqlite.multirow import NO_NUMBER, NO_TEXT, NUMBER, TEXT, Bulk
from tarry.service.stores.sqlite.task_rows import all_found, encode
from tarry.service.stores.sqlite.transaction import CANCELLED, IN_FLIGHT, PENDING, SUCCEEDED
from tarry.service.stores.sqlite.transitions import LogLine, log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.store import TaskResult
    from tarry.service.stores.sqlite.transaction import Ledger

    Row = tuple[Any, ...]

_STATES = Bulk(
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
_GO_ON = Bulk(
    """
INSERT INTO state (seq, tenant, lane, policy, started_at, status, wake_at, next_attempt_at, worker,
    attempts, previous_delay, restarted, last_kind)
VALUES {rows}
ON CONFLICT (seq) DO UPDATE SET status = excluded.status, wake_at = excluded.wake_at,
    next_attempt_at = excluded.next_attempt_at, worker = excluded.worker,
    attempts = excluded.attempts, previous_delay = excluded.previous_delay,
    restarted = excluded.restarted, last_kind = excluded.last_kind, version = version + 1
""",
    f"(?, 0, 0, 0, 0, ?, ?, ?, {NUMBER}, ?, {NUMBER}, ?, ?)",
)
_END = Bulk(
    """
INSERT INTO state (seq, tenant, lane, policy, started_at, wake_at, next_attempt_at, status,
    finished_at, reason, attempts, previous_delay, restarted, last_kind)
VALUES {rows}
ON CONFLICT (seq) DO UPDATE SET status = excluded.status, finished_at = excluded.finished_at,
    reason = excluded.reason, worker = NULL, wake_at = 0, attempts = excluded.attempts,
    previous_delay = excluded.previous_delay, restarted = excluded.restarted,
    last_kind = excluded.last_kind, version = version + 1
""",
    f"(?, 0, 0, 0, 0, 0, 0, ?, ?, {TEXT}, ?, {NUMBER}, ?, ?)",
)


class End(Struct, array_like=True, gc=False):
    """A `Finish`, with as much of its task as says which it is, and its attempt as it is kept."""

    id: str
    tenant: str
    version: int
    outcome: str | None
    """Of the attempt; None: there was none."""
    log: bytearray
    status: Status
    reason: str | None
    next_attempt_at: int
    keep: Lease | None
    previous_delay: float | None
    restarted: int
    last_kind: str | None
    callback: Task | None


def end_of(finish: TaskResult) -> End:
    """Return what the file has to know of a result."""
    task, attempt = finish.task, finish.attempt
    return End(
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


def finish(ledger: Ledger, results: Sequence[End]) -> list[FinishStatus]:
    """Write attempt and next state, if the version still matches.

    All at once, if each is of another task: else one has to see what the one before it has done.
    """
    if len({result.id for result in results}) == len(results):
        return _finish(ledger, results)
    return [answer for result in results for answer in _finish(ledger, [result])]


def _finish(ledger: Ledger, results: Sequence[End]) -> list[FinishStatus]:
    asked: list[Any] = []
    for asking in enumerate(all_found([result.id for result in results])):
        asked += asking
    rows: list[Row] = [()] * len(results)
    for _, cursor in _STATES.parts(ledger.execute, asked):
        for row in _decode(cursor.fetchone()[0]):
            rows[row[0]] = row
    ledger.load({row[_LANE] for row in rows if row[_LANE] is not None})
    step = _Step(ledger)
    answers = [step.take(result, row) for result, row in zip(results, rows, strict=True)]
    step.write()
    return answers


class _Step:
    """What several ends come to; `write` writes it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._attempts: list[LogLine] = []
        self._ended: list[Any] = []
        self._going_on: list[Any] = []
        self._moves: dict[tuple[int, int, int, int], int] = {}
        self._callbacks: list[NewTask] = []

    def take(self, result: End, row: Row) -> FinishStatus:
        """Take one end; `row` is where its task stands, all None if it is not in flight."""
        _, seq, tenant, lane_id, policy, version, cancelling, attempts = row
        if version != result.version:
            ledger = self._ledger
            ledger.superseded(ledger.names.tenant(result.tenant))
            return FinishStatus.SUPERSEDED
        if result.outcome is not None:
            attempts += 1
            self._attempts.append((tenant, seq, attempts, result.outcome, result.log))
        status, delay = int(result.status), result.previous_delay
        cancelled = cancelling and status != SUCCEEDED
        progress = (
            attempts,
            NO_NUMBER if delay is None else delay,
            result.restarted,
            result.last_kind,
        )
        if cancelled or status >= SUCCEEDED:
            status = CANCELLED if cancelled else status
            reason = None if cancelled else result.reason
            why = NO_TEXT if reason is None else reason
            self._ended += (seq, status, self._ledger.now, why, *progress)
            self._move((tenant, lane_id, policy, status))
        else:
            self._go_on(result, seq, tenant, lane_id, policy, progress)
        if cancelled:
            return FinishStatus.CANCELLED
        if result.callback is not None:
            self._callbacks.append(NewTask(result.callback))
        return FinishStatus.DONE

    def _go_on(
        self, result: End, seq: int, tenant: int, lane_id: int, policy: int, progress: Row
    ) -> None:
        """Let a task wait for its next attempt, in the hands of its worker or not."""
        ledger, due, keep = self._ledger, result.next_attempt_at, result.keep
        lane = ledger.lane(lane_id)
        if keep is None:
            self._going_on += (seq, PENDING, due, due, NO_NUMBER, *progress)
            self._move((tenant, lane_id, policy, PENDING))
            lane.due(due)
        else:
            wake_at = max(ledger.now, due) + keep.length
            worker = ledger.names.worker(keep.worker)
            self._going_on += (seq, IN_FLIGHT, wake_at, due, worker, *progress)
            lane.leased(wake_at)

    def _move(self, move: tuple[int, int, int, int]) -> None:
        """Count a task of a tenant, lane and policy that is no longer in flight, but that."""
        self._moves[move] = self._moves.get(move, 0) + 1

    def write(self) -> None:
        """Write attempts, states, and the tasks that report them."""
        ledger = self._ledger
        log(ledger, self._attempts)
        _END.run(ledger.execute, self._ended)
        _GO_ON.run(ledger.execute, self._going_on)
        for (tenant, lane_id, policy, status), tasks in self._moves.items():
            ledger.move(tenant, ledger.lane(lane_id), policy, IN_FLIGHT, status, tasks)
        if self._callbacks:
            add_all(ledger, self._callbacks, None)
