"""The error record and the note that tarry attaches to an error when a call is given up.

The note is for people. The error record contains the call record (`CallRecord`), which `record_of`
returns. It also prevents an outer retry loop from retrying an error that an inner retry loop has
given up on. But several calls may raise the same exception object, such as a mock, a module
constant or the error of a shared connection. Its error record may then come from another call. An
outer loop therefore obeys an error record only if both conditions hold:

- The error record was attached during the outer loop's current attempt. Error records are numbered
  from 1. The loop reads `bus.last_record_number` when an attempt begins. Higher numbers are newer.
- The error was raised through the loop that attached the error record, as its traceback shows.

Adapters attach an error record to the last response too, which they return instead of raising. An
outer loop finds it through an error that holds the response: `httpx.HTTPStatusError.response`.
"""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.verdict import Reason
from tarry.errors import ConfigurationError, ResultNotAccepted
from tarry.runtime.events import bus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tarry.core.verdict import CallRecord

RECORD_ATTRIBUTE = "__tarry__"
"""The attribute of an error that holds its `ErrorRecord`."""

MAX_SEARCH_DEPTH = 10
"""How deep the causes, contexts and group members of an error are searched."""
MAX_GROUP_MEMBERS = 10
"""How many members of each exception group are searched."""

_DRIVER_MODULES = ("tarry.runtime.", "tarry.adapters.http.")
_DRIVER_FUNCTIONS = frozenset({"call", "drive", "drive_async", "hedge", "hedge_sync"})
"""The drivers: functions in these modules that run a retry loop. An error whose traceback contains
one of them was raised through a retry loop. Update the names when a driver is renamed."""

MAX_GIVEN_UP_CALLS = 100
"""How many calls one `GivenUpCalls` keeps; the oldest are dropped."""

_error_record_numbers = count(1)


class GivenUpCalls:
    """The calls that a server has made and given up while it handles one request."""

    def __init__(self) -> None:
        self._entries: deque[tuple[BaseException, CallRecord]] = deque(maxlen=MAX_GIVEN_UP_CALLS)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, error: BaseException, call_record: CallRecord) -> None:
        """Add a call; `error` is the error that the call ended with."""
        self._entries.append((error, call_record))

    def find(self, error: BaseException) -> CallRecord | None:
        """Return the record of the call that ended with this error or one of its causes, if any."""
        entries = list(self._entries)  # a copy: a thread of the handler may add entries meanwhile
        for related in _related_errors(error, MAX_SEARCH_DEPTH):
            # Adapters return the last response instead of raising; `raise_for_status` then
            # raises an error that holds that response.
            response = _response_of(related)
            for final_error, call_record in entries:
                if related is final_error or (
                    response is not None
                    and isinstance(final_error, ResultNotAccepted)
                    and response is final_error.result
                ):
                    return call_record
        return None

    def close(self) -> None:
        """Drop all entries, and ignore entries that background asyncio tasks add later."""
        self._entries = deque(maxlen=0)


current_given_up_calls: ContextVar[GivenUpCalls | None] = ContextVar("tarry_given", default=None)
"""Set for each request by the server middleware (ASGI) or interceptor (gRPC), which forbids
the client to retry if the handler made a call that was given up."""


class ErrorRecord(NamedTuple):
    """The value of `RECORD_ATTRIBUTE`."""

    number: int
    """The number of this error record, from 1; 0 if outer retry loops may retry the error."""
    call_record: CallRecord
    check_traceback: bool
    """False for attempts that leave no driver in the traceback, such as `with` blocks."""


def attach_record(
    error: BaseException, call_record: CallRecord, *, no_outer_retry: bool, check_traceback: bool
) -> None:
    """Attach an error record to the error that a call ends with."""
    number = 0
    if no_outer_retry:
        bus.last_record_number = number = next(_error_record_numbers)
        given_up_calls = current_given_up_calls.get()
        # Skip a call that was attempted only once because it is not repeatable. The client of this
        # server may then retry, if its own request is repeatable.
        is_repeatable = call_record.reason is not Reason.NOT_REPEATABLE
        if given_up_calls is not None and (is_repeatable or call_record.attempts > 1):
            given_up_calls.add(error, call_record)
    # Not `setattr`, because the class of the error may forbid that in its own `__setattr__`.
    object.__setattr__(error, RECORD_ATTRIBUTE, ErrorRecord(number, call_record, check_traceback))


def attach_record_and_note(
    error: BaseException,
    call_record: CallRecord,
    last_record_number: int,
    *,
    no_outer_retry: bool,
    check_traceback: bool = True,
) -> None:
    """Attach an error record and a note to the error of a call that is given up.

    If an inner retry loop has attached an error record since `last_record_number`, that is kept.
    A `ConfigurationError` gets no note.
    """
    if not has_record_since(error, last_record_number):
        attach_record(
            error, call_record, no_outer_retry=no_outer_retry, check_traceback=check_traceback
        )
    if isinstance(error, ConfigurationError):
        return  # a mistake in the program: its message says what to change, a note only distracts
    note_prefix = f"tarry: {call_record.operation} "
    previous_notes: list[str] = getattr(error, "__notes__", [])
    # Replace the note of an earlier call, so that an exception object that is raised many times
    # does not collect notes.
    notes = [note for note in previous_notes if not note.startswith(note_prefix)]
    object.__setattr__(error, "__notes__", [*notes, note_prefix + call_record.summary()])


def has_record_since(error: BaseException, last_record_number: int) -> bool:
    """Return whether the error, a cause or a group member has an error record that is newer."""
    for related in _related_errors(error, MAX_SEARCH_DEPTH):
        # An adapter has given up on the response, and `raise_for_status` or `until` rejected it.
        error_record: ErrorRecord | None = getattr(_response_of(related), RECORD_ATTRIBUTE, None)
        if error_record is not None and error_record.number > last_record_number:
            return True
        error_record = getattr(related, RECORD_ATTRIBUTE, None)
        if error_record is None or error_record.number <= last_record_number:
            continue
        if not error_record.check_traceback:
            return True
        if _passed_driver(related, is_caught_error=related is error):
            return True
    return False


def _response_of(error: object) -> object:
    """Return the response that an error is about, such as a 503; None for other errors."""
    if isinstance(error, ResultNotAccepted):
        return error.result
    return getattr(error, "response", None)


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


def _passed_driver(error: BaseException, *, is_caught_error: bool) -> bool:
    """Return whether the error passed a driver function on its way to the `except` clause.

    A traceback lists the frames from the `except` clause to the place of the first raise. If a
    frame of user code runs `raise error`, the later entries are from an earlier raise of the same
    object, perhaps by an unrelated call, and are not searched. They are searched if the next entry
    is a frame that was listed before: that frame caught the error of its own call and raised it
    again, as in `except OSError as error: raise error`. `is_caught_error` is False if the caller
    caught another error, to which `error` is related.
    """
    from opcode import opmap  # imported here, because it is needed only after a nested failure

    raise_opcode = opmap["RAISE_VARARGS"]
    seen: list[FrameType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        is_driver = frame.f_code.co_name in _DRIVER_FUNCTIONS and _is_in_driver_module(frame)
        # The first entry of a caught error is the frame of the `except` clause.
        if is_driver and (seen or not is_caught_error):
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
    """Return the record of the call that ended with this error; None if no call did.

    `error` may also be a response that an adapter returned after the last attempt, such as a 503,
    or the error that `raise_for_status` raised for it.
    """
    error_record: ErrorRecord | None = getattr(error, RECORD_ATTRIBUTE, None)
    if error_record is None:
        error_record = getattr(_response_of(error), RECORD_ATTRIBUTE, None)
    return None if error_record is None else error_record.call_record
