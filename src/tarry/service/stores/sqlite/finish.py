"""Attempts have ended: what came of them, and what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.json import Decoder

from tarry.service.store import Finished, New
from tarry.service.stores.sqlite.add import add_all
from tarry.service.stores.sqlite.bulk import Bulk
from tarry.service.stores.sqlite.ledger import CANCELLED, IN_FLIGHT, PENDING, SUCCEEDED
from tarry.service.stores.sqlite.life import log
from tarry.service.stores.sqlite.names import found

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.model import Attempt
    from tarry.service.store import Finish
    from tarry.service.stores.sqlite.ledger import Ledger

    Row = tuple[Any, ...]

_STATES = Bulk(
    """
WITH asked (place, id) AS (VALUES {rows})
SELECT json_group_array(json_array(
    asked.place, s.seq, s.tenant, s.lane, s.policy, s.version, s.status, s.cancelling, s.attempts))
FROM asked LEFT JOIN task AS t ON t.id = asked.id LEFT JOIN state AS s ON s.seq = t.seq
""",
    "(?, ?)",
)
"""Each row that is read lets go of the interpreter, so all come as one, in any order."""
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
    "(?, 0, 0, 0, 0, ?, ?, ?, ?, ?, ?, ?, ?)",
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
    "(?, 0, 0, 0, 0, 0, 0, ?, ?, ?, ?, ?, ?, ?)",
)

_decode = Decoder(list[tuple[Any, ...]]).decode


def finish(ledger: Ledger, results: Sequence[Finish]) -> list[Finished]:
    """Write attempt and next state, if the version still matches.

    All at once, if each is of another task: else one has to see what the one before it has done.
    """
    if len({result.task.id for result in results}) == len(results):
        return _finish(ledger, results)
    return [answer for result in results for answer in _finish(ledger, [result])]


def _finish(ledger: Ledger, results: Sequence[Finish]) -> list[Finished]:
    asked = [(place, found(result.task.id)) for place, result in enumerate(results)]
    rows: dict[int, Sequence[Any]] = {}
    for _, cursor in _STATES.parts(ledger, asked):
        rows.update((place, row) for place, *row in _decode(cursor.fetchone()[0]))
    step = _Step(ledger)
    answers = [step.take(result, rows[place]) for place, result in enumerate(results)]
    step.write()
    return answers


class _Step:
    """What several ends come to; `write` writes it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._attempts: list[tuple[int, int, int, Attempt]] = []
        self._ended: list[Row] = []
        self._going_on: list[Row] = []
        self._callbacks: list[New] = []

    def take(self, result: Finish, row: Sequence[Any]) -> Finished:
        """Take one end; `row` is where its task stands, all None if it is gone."""
        ledger = self._ledger
        seq, tenant, lane_id, policy, version, status, cancelling, attempts = row
        if version != result.task.version or status != IN_FLIGHT:
            ledger.superseded(ledger.names.tenant(result.task.tenant))
            return Finished.SUPERSEDED
        if result.attempt is not None:
            attempts += 1
            self._attempts.append((tenant, seq, attempts, result.attempt))
        status = int(result.status)
        cancelled = cancelling and status != SUCCEEDED
        progress = (attempts, result.previous_delay, result.restarted, result.last_kind)
        if cancelled or status >= SUCCEEDED:
            status = CANCELLED if cancelled else status
            reason = None if cancelled else result.reason
            self._ended.append((seq, status, ledger.now, reason, *progress))
            ledger.move(tenant, ledger.lane(lane_id), policy, IN_FLIGHT, status)
        else:
            self._go_on(result, seq, tenant, lane_id, policy, progress)
        if cancelled:
            return Finished.CANCELLED
        if result.callback is not None:
            self._callbacks.append(New(result.callback))
        return Finished.DONE

    def _go_on(
        self, result: Finish, seq: int, tenant: int, lane_id: int, policy: int, progress: Row
    ) -> None:
        """Let a task wait for its next attempt, in the hands of its worker or not."""
        ledger, due, keep = self._ledger, result.next_attempt_at, result.keep
        lane = ledger.lane(lane_id)
        if keep is None:
            self._going_on.append((seq, PENDING, due, due, None, *progress))
            ledger.move(tenant, lane, policy, IN_FLIGHT, PENDING)
            lane.due(due)
        else:
            wake_at = max(ledger.now, due) + keep.length
            worker = ledger.names.worker(keep.worker)
            self._going_on.append((seq, IN_FLIGHT, wake_at, due, worker, *progress))
            lane.leased(wake_at)

    def write(self) -> None:
        """Write attempts, states, and the tasks that report them."""
        log(self._ledger, self._attempts)
        _END.run(self._ledger, self._ended)
        _GO_ON.run(self._ledger, self._going_on)
        if self._callbacks:
            add_all(self._ledger, self._callbacks, None)
