"""The record and the note that tarry attaches to an error when a call is given up.

The note is for people. The record also prevents an outer retry loop from retrying an error that an
inner loop has given up on. But a record on an error may come from another call, because several
calls may raise the same exception object: one after another, if it is a mock or a module constant,
or at the same time, if the connection that they share is lost. An outer loop therefore considers a
record only if both conditions hold:

- The record was attached during the outer loop's current attempt. `bus.serial` is the number of the
  record that was attached last; a record from before the attempt has no higher number.
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

MAX_CHAIN_LENGTH = 10
"""How deep the causes, contexts and group members of an error are searched."""

_DRIVER_MODULES = ("tarry.runtime.", "tarry.adapters.http.")
_DRIVER_FUNCTIONS = frozenset({"call", "drive", "drive_async", "hedge", "hedge_sync"})
"""The functions in these modules that run a retry loop. If one of them is in the traceback of an
error, the error was raised through a retry loop. Update the names when a driver is renamed."""

MAX_GIVE_UPS = 100
"""Limit of the calls in one `GiveUpLog`."""

_serials = count(1)


class GiveUpLog:
    """The calls that gave up while a server handles one request."""

    def __init__(self) -> None:
        self._entries: deque[tuple[BaseException, CallRecord]] = deque(maxlen=MAX_GIVE_UPS)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, error: BaseException, record: CallRecord) -> None:
        """Add a call and the error that it ended with."""
        self._entries.append((error, record))

    def find(self, error: BaseException) -> CallRecord | None:
        """Return the record of the call that was given up with this error or one of its causes."""
        entries = list(self._entries)  # a copy: a thread of the handler may add entries meanwhile
        for link in _chain(error, MAX_CHAIN_LENGTH):
            # Adapters return the last response instead of raising; `raise_for_status` then
            # raises an error that holds that response.
            response = getattr(link, "response", None)
            for final_error, record in entries:
                if link is final_error or (
                    response is not None
                    and isinstance(final_error, ResultNotAccepted)
                    and response is final_error.result
                ):
                    return record
        return None

    def close(self) -> None:
        """Drop all entries, and ignore those that tasks add after the request has ended."""
        self._entries = deque(maxlen=0)


give_up_log: ContextVar[GiveUpLog | None] = ContextVar("tarry_give_up_log", default=None)
"""Set by the server middleware, which sends `X-Should-Retry: false` if a call was given up."""


class ErrorRecord(NamedTuple):
    """The value of `RECORD_ATTRIBUTE`."""

    serial: int
    """The number of this record, counted from 1; 0 if outer loops may retry the error."""
    record: CallRecord
    block: bool
    """Whether the attempts were `with` blocks, which leave no driver function in the traceback."""


def attach_record(
    error: BaseException, record: CallRecord, *, final: bool, block: bool = False
) -> None:
    """Attach the record of a call to its error; `final` means that outer loops do not retry it."""
    serial = 0
    if final:
        bus.serial = serial = next(_serials)
        log = give_up_log.get()
        # Skip a call that was made only once because it is not repeatable: it was not retried, so
        # the client may retry. It knows from the method and the idempotency key of its own request
        # whether that is repeatable.
        if log is not None and (record.reason is not Reason.UNSAFE or record.attempts > 1):
            log.add(error, record)
    # Bypasses a __setattr__ of the user's class, which may be frozen.
    object.__setattr__(error, RECORD_ATTRIBUTE, ErrorRecord(serial, record, block))


def attach_give_up(
    error: BaseException, record: CallRecord, serial: int, *, final: bool, block: bool = False
) -> None:
    """Attach the record of a call that is given up, and a note that describes it, to its error.

    If an inner loop gave up on the error after `bus.serial` was `serial`, its record is kept.
    """
    if not has_record_since(error, serial):
        attach_record(error, record, final=final, block=block)
    prefix = f"tarry: {record.operation} "
    previous: list[str] = getattr(error, "__notes__", [])
    # Replace the note of an earlier call, so that an exception object that is raised many times
    # does not collect notes.
    notes = [note for note in previous if not note.startswith(prefix)]
    object.__setattr__(error, "__notes__", [*notes, prefix + record.summary()])


def has_record_since(error: BaseException, serial: int) -> bool:
    """Return whether an inner loop gave up on the error after `bus.serial` was `serial`.

    The causes, contexts and group members of the error count too.
    """
    for link in _chain(error, MAX_CHAIN_LENGTH):
        error_record: ErrorRecord | None = getattr(link, RECORD_ATTRIBUTE, None)
        if (
            error_record is not None
            and error_record.serial > serial
            and (error_record.block or _passed_driver(link, is_caught_here=link is error))
        ):
            return True
    return False


def _chain(error: BaseException, depth: int) -> Iterator[BaseException]:
    """Yield the error, then its group members, cause and context, recursively."""
    yield error
    if not depth:
        return
    members: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    links = list(members[:MAX_CHAIN_LENGTH]) if isinstance(error, BaseExceptionGroup) else []
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if origin is not None:
        links.append(origin)
    for link in links:
        yield from _chain(link, depth - 1)


def _passed_driver(error: BaseException, *, is_caught_here: bool) -> bool:
    """Return whether the error was raised through a driver function on its way to the handler.

    If an exception object that was raised before is raised again by `raise error`, the traceback
    entries after this statement belong to the first time and must be ignored. There is one
    exception: if the frame of the next entry was already seen, the error was caught and raised
    again on the way to this handler, and the entries count.
    """
    from opcode import opmap  # needed only here, after a nested failure

    raise_opcode = opmap["RAISE_VARARGS"]
    seen: list[FrameType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        is_driver = frame.f_code.co_name in _DRIVER_FUNCTIONS and _is_in_driver_module(frame)
        # The first entry of an error that is caught here is the frame of the handler itself.
        if is_driver and (seen or not is_caught_here):
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
    """Return the decision record of the call that ended with this error, or None.

    `error` may also be a response that an adapter returned after the last attempt, such as a 503.
    """
    error_record: ErrorRecord | None = getattr(error, RECORD_ATTRIBUTE, None)
    return None if error_record is None else error_record.record
