"""The record and the note that tarry attaches to an error when a call is given up.

The note is for people. The record also prevents an outer retry loop from retrying an error that an
inner retry loop has given up on. But several calls may raise the same exception object, such as a
mock, a module constant or the error of a shared connection. The record may then come from another
call. An outer loop therefore considers a record only if both conditions hold:

- The record was attached during the outer loop's current attempt. Records are numbered from 1. The
  loop reads `bus.record_count` when an attempt begins. Records with a higher number are newer.
- The error was raised through the loop that attached the record, as its traceback shows.
"""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.verdict import Reason
from tarry.errors import ResultNotAccepted
from tarry.runtime.events import bus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tarry.core.verdict import CallRecord

RECORD_ATTRIBUTE = "__tarry__"
"""The attribute of an error that holds its `ErrorRecord`."""

MAX_SEARCH_DEPTH = 10
"""How deep the causes, contexts and group members of an error are searched for records."""
MAX_GROUP_MEMBERS = 10
"""How many members of each exception group are searched for records."""

_DRIVER_MODULES = ("tarry.runtime.", "tarry.adapters.http.")
_DRIVER_FUNCTIONS = frozenset({"call", "drive", "drive_async", "hedge", "hedge_sync"})
"""The drivers: functions in these modules that run a retry loop. An error whose traceback contains
one of them was raised through a retry loop. Update the names when a driver is renamed."""

MAX_GIVEN_UP_CALLS = 100
"""How many calls one `GivenUpCalls` keeps; the oldest are dropped."""

_record_numbers = count(1)


class GivenUpCalls:
    """The calls that a server has made and given up while it handles one request."""

    def __init__(self) -> None:
        self._entries: deque[tuple[BaseException, CallRecord]] = deque(maxlen=MAX_GIVEN_UP_CALLS)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, error: BaseException, record: CallRecord) -> None:
        """Add the record of a call and the error that the call ended with."""
        self._entries.append((error, record))

    def find(self, error: BaseException) -> CallRecord | None:
        """Return the record of the call that was given up with this error or one of its causes."""
        entries = list(self._entries)  # a copy: a thread of the handler may add entries meanwhile
        for related in _related_errors(error, MAX_SEARCH_DEPTH):
            # Adapters return the last response instead of raising; `raise_for_status` then
            # raises an error that holds that response.
            response = getattr(related, "response", None)
            for final_error, record in entries:
                if related is final_error or (
                    response is not None
                    and isinstance(final_error, ResultNotAccepted)
                    and response is final_error.result
                ):
                    return record
        return None

    def close(self) -> None:
        """Drop all entries, and ignore entries that background asyncio tasks add later."""
        self._entries = deque(maxlen=0)


current_given_up_calls: ContextVar[GivenUpCalls | None] = ContextVar("tarry_given", default=None)
"""Set for each request by the server middleware (ASGI) or interceptor (gRPC), which tells the
client not to retry if a call of the handler was given up."""


class ErrorRecord(NamedTuple):
    """The value of `RECORD_ATTRIBUTE`."""

    number: int
    """The number of this record, from 1; 0 if outer retry loops may retry the error."""
    call_record: CallRecord
    check_traceback: bool
    """False for attempts that leave no driver in the traceback, such as `with` blocks."""


def attach_record(
    error: BaseException, record: CallRecord, *, no_outer_retry: bool, check_traceback: bool = True
) -> None:
    """Attach the record of a call to its error."""
    number = 0
    if no_outer_retry:
        bus.record_count = number = next(_record_numbers)
        given_up_calls = current_given_up_calls.get()
        # Skip a call that was attempted only once because it is not repeatable. The client of this
        # server may then retry, if its own request is repeatable.
        is_single_attempt = record.reason is Reason.NOT_REPEATABLE and record.attempts <= 1
        if given_up_calls is not None and not is_single_attempt:
            given_up_calls.add(error, record)
    # Not `setattr`, because the class of the error may forbid that in its own `__setattr__`.
    object.__setattr__(error, RECORD_ATTRIBUTE, ErrorRecord(number, record, check_traceback))


def attach_record_and_note(
    error: BaseException,
    record: CallRecord,
    record_count: int,
    *,
    no_outer_retry: bool,
    check_traceback: bool = True,
) -> None:
    """Attach the record of a call that is given up, and a note that describes it, to its error.

    If an inner retry loop has attached a record during the last attempt, that record is kept.
    `record_count` is the value of `bus.record_count` when that attempt began.
    """
    if not has_record_since(error, record_count):
        attach_record(error, record, no_outer_retry=no_outer_retry, check_traceback=check_traceback)
    note_prefix = f"tarry: {record.operation} "
    previous: list[str] = getattr(error, "__notes__", [])
    # Replace the note of an earlier call, so that an exception object that is raised many times
    # does not collect notes.
    notes = [note for note in previous if not note.startswith(note_prefix)]
    object.__setattr__(error, "__notes__", [*notes, note_prefix + record.summary()])


def has_record_since(error: BaseException, record_count: int) -> bool:
    """Return whether an inner retry loop has attached a record with a number above `record_count`.

    Records on the causes, contexts and group members of the error count too.
    """
    for related in _related_errors(error, MAX_SEARCH_DEPTH):
        error_record: ErrorRecord | None = getattr(related, RECORD_ATTRIBUTE, None)
        if error_record is None or error_record.number <= record_count:
            continue
        if not error_record.check_traceback or _passed_driver(
            related, caught_here=related is error
        ):
            return True
    return False


def _related_errors(error: BaseException, depth: int) -> Iterator[BaseException]:
    """Yield the error, its group members, and its cause or context, recursively."""
    yield error
    if not depth:
        return
    members: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    related = list(members[:MAX_GROUP_MEMBERS]) if isinstance(error, BaseExceptionGroup) else []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        related.append(cause)
    for other in related:
        yield from _related_errors(other, depth - 1)


def _passed_driver(error: BaseException, *, caught_here: bool) -> bool:
    """Return whether the error passed a driver function on its way to the `except` clause.

    A traceback lists the frames from the `except` clause down to the place where the error was
    raised. If user code raises an error that was raised before (`raise error`), the entries below
    this statement come from the earlier raise and are ignored. There is one exception: if the next
    entry's frame was seen before, that frame has caught the error and raised it again.
    `caught_here` is whether the caller has caught this error itself, not its cause or context.
    """
    from opcode import opmap  # imported here, because it is needed only after a nested failure

    raise_opcode = opmap["RAISE_VARARGS"]
    seen: list[FrameType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        is_driver = frame.f_code.co_name in _DRIVER_FUNCTIONS and _is_in_driver_module(frame)
        # The first entry of an error that is caught here is the frame of the `except` clause.
        if is_driver and (seen or not caught_here):
            return True
        seen.append(frame)
        following = traceback.tb_next
        is_raise = frame.f_code.co_code[traceback.tb_lasti] == raise_opcode
        if (
            is_raise
            and not _is_in_driver_module(frame)
            and following is not None
            and following.tb_frame not in seen
        ):
            return False
        traceback = following
    return False


def _is_in_driver_module(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_DRIVER_MODULES)


def record_of(error: object) -> CallRecord | None:
    """Return the record of the call that ended with this error, or None.

    `error` may also be a response that an adapter returned after the last attempt, such as a 503.
    """
    error_record: ErrorRecord | None = getattr(error, RECORD_ATTRIBUTE, None)
    return None if error_record is None else error_record.call_record
