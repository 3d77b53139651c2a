"""Calls and their answers as they cross between two processes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec

from tarry import errors
from tarry.service.stores.sqlite.operations import NAMES, OPERATIONS, Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.stores.sqlite.database import Answer, Database
    from tarry.service.stores.sqlite.operations import Operation

LENGTH = struct.Struct("!Q")
"""What stands before each frame."""
_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
_told = msgspec.msgpack.Decoder(list[tuple[msgspec.Raw, tuple[str, str] | None]])


def frame_of(calls: Sequence[Call[Any]]) -> bytes:
    """Return calls as they are sent."""
    return _encode([(NAMES[call.run], call.arguments) for call in calls])


def carry_out(database: Database, frame: bytes) -> bytes:
    """Carry out calls as they are sent, and return the answers as they are."""
    calls = [_call_of(OPERATIONS[name], given) for name, given in _asked.decode(frame)]
    return _encode([_answer_of(*answer) for answer in database.apply(calls)])


def answers_of(calls: Sequence[Call[Any]], frame: bytes) -> list[Answer]:
    """Return the answers to calls, as they came back."""
    return [
        (OPERATIONS[NAMES[call.run]].given.decode(value), None)
        if error is None
        else (None, _error_of(*error))
        for call, (value, error) in zip(calls, _told.decode(frame), strict=True)
    ]


def _call_of(operation: Operation, given: msgspec.Raw) -> Call[Any]:
    return Call(operation.run, *operation.taken.decode(given))


def _answer_of(value: Any, error: Exception | None) -> tuple[Any, tuple[str, str] | None]:
    return (value, None) if error is None else (None, (type(error).__name__, str(error)))


def _error_of(kind: str, words: str) -> Exception:
    known = getattr(errors, kind, None)
    return known(words) if isinstance(known, type) else RuntimeError(f"{kind}: {words}")
