"""Conversion between records and the values that PostgreSQL stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tarry.service.model import LOST, AttemptRecord, Task
from tarry.service.stores import records
from tarry.service.stores.postgres import constants

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

R = TypeVar("R", bound=msgspec.Struct)

FINISHED_STATUSES = f"({constants.SUCCEEDED}, {constants.EXHAUSTED}, {constants.CANCELLED})"
"""All statuses of `finished`. With this condition, a search by tenant and seq uses its index."""
FINISHED_COLUMNS = """
    c.id::text, n.name, l.name, c.key, c.fingerprint, c.content, c.body_ref, u.policy,
    c.policy_version, s.created_at, s.next_attempt_at, s.first_due_at, s.status, s.reason,
    s.attempts, s.attempts_before_replay, s.lost_attempts, s.previous_delay, s.backoff_offset,
    s.last_outcome_kind, s.version, NULL::text, 0::bigint, false, s.replays, s.finished_at, s.seq
"""
"""The fields of `Task` in their order, and `seq`, of a row of `finished`; see `LIVE_COLUMNS`."""
_TASK_FIELD_COUNT = len(Task.__struct_fields__)
_TEXT_FIELDS = tuple(
    Task.__struct_fields__.index(name)
    for name in (
        "tenant",
        "lane",
        "key",
        "owned_body_ref",
        "policy_id",
        "reason",
        "last_outcome_kind",
        "worker",
    )
)
_ESCAPE = "\x1a"
"""The control character SUBSTITUTE, which texts hardly ever contain."""


def encode_text(text: str) -> str:
    """Return a text that PostgreSQL can store: it has no NUL character."""
    if "\0" in text or _ESCAPE in text:
        return text.replace(_ESCAPE, _ESCAPE + "1").replace("\0", _ESCAPE + "0")
    return text


def decode_text(text: str) -> str:
    """Return the text that `encode_text` has encoded."""
    if _ESCAPE in text:
        return text.replace(_ESCAPE + "0", "\0").replace(_ESCAPE + "1", _ESCAPE)
    return text


def encode_optional(text: str | None) -> str | None:
    """Encode a text; None stays None."""
    return None if text is None else encode_text(text)


def decode_optional(text: str | None) -> str | None:
    """Decode a text; None stays None."""
    return None if text is None else decode_text(text)


def encode_texts(texts: Iterable[str]) -> list[str]:
    """Encode several texts."""
    return [encode_text(text) for text in texts]


def encode_optionals(texts: Sequence[str | None]) -> list[str | None] | None:
    """Encode several texts; return None if all are None, which `unnest` takes as NULLs."""
    if texts.count(None) == len(texts):
        return None
    return [encode_optional(text) for text in texts]


# asyncpg checks for each item of a list whether it is a nested list, which takes 0.5 us. The text
# of an array takes 0.1 us for each number, and the server reads it as fast as the binary format.
def encode_numbers(numbers: Sequence[float | None]) -> str | None:
    """Return a list of numbers as the text of an array; None if all are None."""
    if numbers.count(None) == len(numbers):
        return None
    return f"{{{repr(numbers)[1:-1]}}}".replace("None", "NULL")


def encode_ids(ids: Iterable[str]) -> str:
    """Return task ids as the text of an array."""
    return f"{{{','.join(ids)}}}"


def decode_task(fields: Sequence[Any]) -> Task:
    """Convert the columns of a task, which are in the order of its fields, into a task."""
    values = list(fields[:_TASK_FIELD_COUNT])
    for index in _TEXT_FIELDS:
        text = values[index]
        if text is not None and _ESCAPE in text:
            values[index] = decode_text(text)
    # `convert` takes half as long as a call of `Task` with 26 keyword arguments.
    return msgspec.convert(values, Task)


def decode_row(row: Sequence[Any], record_type: type[R]) -> R:
    """Convert a row into a record; the columns are in the order of the record's fields."""
    values = [decode_text(value) if isinstance(value, str) else value for value in row]
    fields = dict(zip(record_type.__struct_fields__, values, strict=True))
    return msgspec.convert(fields, record_type, strict=False)


def decode_attempt(
    number: int, due_at: int | None, worker: str | None, log: bytes | None
) -> AttemptRecord:
    """Convert the columns of an attempt. Claims store lost attempts without a log entry."""
    if log is not None:
        return records.decode_attempt(log)
    due = due_at or 0
    return AttemptRecord(
        attempt_number=number,
        scheduled_at=due,
        started_at=due,
        outcome=LOST,
        worker=decode_optional(worker),
    )
