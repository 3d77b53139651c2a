"""The record that tarry attaches to an error that ends a call, and a note for people.

The record also tells an outer retry loop not to retry the error again. But one exception object
may be raised by many calls: later, if it is a mock or a module constant; at the same time, if a
lost connection fails every request that used it. So an outer loop considers a record only if it
was attached during the loop's own attempt (`serial`), and if the error was raised through the loop
that attached it (its traceback).
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
"""How many causes, contexts and group members of an error are followed."""

_DRIVER_MODULES = ("tarry.runtime.", "tarry.adapters.http.")
_DRIVER_FUNCTIONS = frozenset({"call", "drive", "hedge", "hedge_sync"})
"""Functions in these modules that an error passes through when a retry loop has given up on it.
Keep the names in step with the drivers."""

MAX_GIVE_UPS_PER_REQUEST = 100

_serials = count(1)


class GiveUpLog:
    """The calls that gave up while a server handles one request."""

    def __init__(self) -> None:
        self._entries: deque[tuple[BaseException, CallRecord]] = deque(
            maxlen=MAX_GIVE_UPS_PER_REQUEST
        )

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, error: BaseException, record: CallRecord) -> None:
        """Add a call and the error that it ended with."""
        self._entries.append((error, record))

    def find(self, error: BaseException) -> CallRecord | None:
        """Return the record of the call that this error, or one of its causes, ended."""
        entries = list(self._entries)  # a thread of the handler may add entries meanwhile
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
        """Drop all entries, now and later: tasks that outlive the request share this object."""
        self._entries = deque(maxlen=0)


give_up_log: ContextVar[GiveUpLog | None] = ContextVar("tarry_give_up_log", default=None)
"""Set by the server middleware, which answers `X-Should-Retry: false` after a call gave up."""


class ErrorRecord(NamedTuple):
    """The value of `RECORD_ATTRIBUTE`."""

    serial: int
    """The position among all final records; 0 if outer loops may retry the error."""
    record: CallRecord
    block: bool
    """Whether the attempts were `with` blocks, which leave no driver in the traceback."""


def attach_record(
    error: BaseException, record: CallRecord, *, final: bool, block: bool = False
) -> None:
    """Attach the record of a call to its error; `final` means that outer loops do not retry it."""
    serial = 0
    if final:
        bus.serial = serial = next(_serials)
        log = give_up_log.get()
        # A request that is unsafe to repeat and was sent once was not retried. Whether the request
        # that this server handles can be repeated, its client knows by its method or its key.
        if log is not None and (record.reason is not Reason.UNSAFE or record.attempts > 1):
            log.add(error, record)
    # Bypasses a __setattr__ of the user's class, which may be frozen.
    object.__setattr__(error, RECORD_ATTRIBUTE, ErrorRecord(serial, record, block))


def add_note(error: BaseException, record: CallRecord) -> None:
    """Add a note to the error that says how its call ended."""
    prefix = f"tarry: {record.operation} "
    previous: list[str] = getattr(error, "__notes__", [])
    # Replaces an earlier note: an exception object that is raised many times keeps one.
    notes = [note for note in previous if not note.startswith(prefix)]
    object.__setattr__(error, "__notes__", [*notes, prefix + record.summary()])


def has_record_since(error: BaseException, serial: int) -> bool:
    """Return whether an inner loop gave up on the error after `bus.serial` was `serial`.

    Also if it gave up on an error that this one comes from: its cause, its context, a member of
    its group.
    """
    for link in _chain(error, MAX_CHAIN_LENGTH):
        found: ErrorRecord | None = getattr(link, RECORD_ATTRIBUTE, None)
        if (
            found is not None
            and found.serial > serial
            and (found.block or _passed_driver(link, is_caught_here=link is error))
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
    """Return whether the error passed a driver function between its origin and the handler.

    An exception object that is raised a second time, by `raise lost`, has the traceback entries of
    its first journey after the entry of that statement. They are not part of the way to this
    handler, unless the next entry's frame was already seen: then code on this way caught the error
    and raised it again.
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

    Also for a response that an adapter returned after the last attempt, such as a 503.
    """
    found: ErrorRecord | None = getattr(error, RECORD_ATTRIBUTE, None)
    return None if found is None else found.record
