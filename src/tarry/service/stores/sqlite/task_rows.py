"""Conversion between rows and `Task`, `AttemptRecord`, and between task ids and their 16 bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.errors import ConfigurationError
from tarry.service.model import AttemptRecord, Status, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SELECT_TASK = """
SELECT s.seq, t.id, n.name, l.name, t.key, t.fingerprint, t.content, t.body_ref, u.policy,
       t.policy_version, t.created_at, s.next_attempt_at, s.started_at, s.status, s.reason,
       s.attempts, s.forgiven, s.previous_delay, s.restarted, s.last_kind, s.version, w.name,
       s.wake_at, s.cancelling, s.replays, s.finished_at, s.tenant, s.lane, s.policy,
       s.lost
FROM state AS s
CROSS JOIN task AS t ON t.seq = s.seq
CROSS JOIN tenant AS n ON n.id = s.tenant
CROSS JOIN lane AS l ON l.id = s.lane
CROSS JOIN policy_use AS u ON u.id = s.policy
LEFT JOIN worker AS w ON w.id = s.worker
"""
"""Start of a query for tasks, to which a WHERE clause on `s` is appended. In SQLite, CROSS JOIN
fixes the join order: `s` is read first, and the other tables are looked up for each of its rows."""

SEQ, STATUS, WAKE_AT, TENANT, LANE, POLICY = 0, 13, 22, 26, 27, 28
"""Positions of columns of `SELECT_TASK`."""

_STATUSES: tuple[Status, ...] = tuple(Status)  # indexing is faster than calling Status(number)
_ATTEMPT_NUMBER_BITS = 24
_ID_PATTERN = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_ID_LINE_LENGTH = 37  # an id and a newline
_match_id = re.compile(_ID_PATTERN).fullmatch
_match_id_lines = re.compile(f"(?:{_ID_PATTERN}\n)*+").fullmatch

encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
decode_attempt: Callable[[bytes], AttemptRecord] = msgspec.msgpack.Decoder(AttemptRecord).decode


def decode_task(row: Sequence[Any]) -> Task:
    """Return the task in a row of `SELECT_TASK`."""
    return Task(
        id=unpack_id(row[1]),
        tenant=row[2],
        lane=row[3],
        key=row[4],
        fingerprint=row[5],
        content=row[6],
        body_ref=row[7],
        policy_id=row[8],
        policy_version=row[9],
        created_at=row[10],
        next_attempt_at=row[11],
        started_at=row[12],
        status=_STATUSES[int(row[STATUS])],
        reason=row[14],
        attempts=row[15],
        forgiven=row[16],
        previous_delay=row[17],
        restarted=row[18],
        last_kind=row[19],
        version=row[20],
        worker=row[21],
        wake_at=row[22],
        cancelling=bool(row[23]),
        replays=row[24],
        finished_at=row[25],
        lost=row[29],
    )


def attempt_row_id(seq: int, number: int) -> int:
    """Return the row id of an attempt; the attempts of a task have adjacent row ids, in order."""
    return seq << _ATTEMPT_NUMBER_BITS | number


def pack_valid_ids(task_ids: Sequence[str]) -> list[bytearray]:
    """Return task ids as 16 bytes each; raise `ConfigurationError` if an id is not a UUID."""
    valid: list[bytearray] = []
    for task_id, packed in zip(task_ids, pack_ids(task_ids), strict=True):
        if packed is None:
            raise ConfigurationError("id", "must be a UUID in its usual form", task_id)
        valid.append(packed)
    return valid


def pack_ids(task_ids: Sequence[str]) -> list[bytearray | None]:
    """Return each task id as 16 bytes, or None if it is malformed; see `pack_id`.

    To check and convert all ids as one string takes half as long as to call `pack_id` for each.
    """
    lines = "\n".join([*task_ids, ""])
    if len(lines) != _ID_LINE_LENGTH * len(task_ids) or not _match_id_lines(lines):
        return [pack_id(task_id) for task_id in task_ids]
    packed = bytearray.fromhex(lines.replace("-", ""))
    return [packed[begin : begin + 16] for begin in range(0, len(packed), 16)]


def pack_id(task_id: str) -> bytearray | None:
    """Return a task id as 16 bytes, or None if it is malformed: no task has such an id."""
    return bytearray.fromhex(task_id.replace("-", "")) if _match_id(task_id) else None


def unpack_id(packed: bytes) -> str:
    """Return the text form of a task id that is stored as 16 bytes."""
    text = packed.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
