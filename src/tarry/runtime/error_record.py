"""What tarry writes on an error that ends a call: a note for people, the record for programs.

A mark also tells outer loops to pass the error on. But one exception object may be raised by
many calls: mocks and module constants are, later; a lost connection that fails all who wait for
it is, at the same time. So a loop heeds a mark only if it was made while its own attempt ran,
and if the error has come to it through the loop that made it.
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
"""The attribute of an error that holds its mark."""

_LONGEST_CHAIN = 10
"""How far back an error is followed to those that it comes from."""

_DRIVER_MODULES = ("tarry.runtime.", "tarry.adapters.http.")
_DRIVERS = frozenset({"call", "drive", "hedge", "hedge_sync"})
"""The functions of this package that an error passes when a loop has given up on it."""

_MOST_ENDS = 100
"""So many calls that were given up on are remembered for one request of a server."""

_serials = count(1)


class GiveUpLog:
    """The calls that were given up on while a server handles one request."""

    def __init__(self) -> None:
        self._known: deque[tuple[BaseException, CallRecord]] = deque(maxlen=_MOST_ENDS)

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, error: BaseException, record: CallRecord) -> None:
        """Remember a call."""
        self._known.append((error, record))

    def behind(self, error: BaseException) -> CallRecord | None:
        """Return the record of a call whose end this error is, or comes from."""
        known = list(self._known)  # a thread of the handler may add to it
        for link in _lineage(error, _LONGEST_CHAIN):
            # Adapters hand out the last answer. That is where `raise_for_status` has it.
            answer = getattr(link, "response", None)
            for given_up, record in known:
                if link is given_up or (
                    answer is not None
                    and isinstance(given_up, ResultNotAccepted)
                    and answer is given_up.result
                ):
                    return record
        return None

    def close(self) -> None:
        """Keep nothing any more: tasks that outlive the request share this."""
        self._known = deque(maxlen=0)


give_up_log: ContextVar[GiveUpLog | None] = ContextVar("tarry_ends", default=None)
"""What a server wants to know of the calls below it."""


class ErrorRecord(NamedTuple):
    """What is kept on an error."""

    serial: int
    """0 for an error that outer loops may retry."""
    record: CallRecord
    block: bool
    """Made by a block, which leaves no frame of ours in the traceback."""


def attach_record(
    error: BaseException, record: CallRecord, *, final: bool, block: bool = False
) -> None:
    """Keep the record on the error; `final` tells outer loops not to retry it."""
    serial = 0
    if final:
        bus.serial = serial = next(_serials)
        heard = give_up_log.get()
        # What was sent once and is not safe to repeat, nobody has retried. Whether the request
        # that this server handles may be repeated, its client knows: by its method or its key.
        if heard is not None and (record.reason is not Reason.UNSAFE or record.attempts > 1):
            heard.add(error, record)
    # Past any __setattr__ of the user's class, which may be frozen.
    object.__setattr__(error, RECORD_ATTRIBUTE, ErrorRecord(serial, record, block))


def add_note(error: BaseException, record: CallRecord) -> None:
    """Say on the error, in words, how its call ended."""
    opening = f"tarry: {record.operation} "
    before: list[str] = getattr(error, "__notes__", [])
    # An object that is raised again and again does not collect notes.
    notes = [other for other in before if not other.startswith(opening)]
    object.__setattr__(error, "__notes__", [*notes, opening + record.summary()])


def has_record_since(error: BaseException, serial: int) -> bool:
    """Say whether a loop below gave up on the error after the count `serial`.

    Or on what it comes from: its cause, the error that was being handled when it was raised, a
    member of its group.
    """
    for link in _lineage(error, _LONGEST_CHAIN):
        found: ErrorRecord | None = getattr(link, RECORD_ATTRIBUTE, None)
        if (
            found is not None
            and found.serial > serial
            and (found.block or _came_through(link, caught=link is error))
        ):
            return True
    return False


def _lineage(error: BaseException, depth: int) -> Iterator[BaseException]:
    """Yield the error, then what it comes from."""
    yield error
    if not depth:
        return
    members: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    links = list(members[:_LONGEST_CHAIN]) if isinstance(error, BaseExceptionGroup) else []
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if origin is not None:
        links.append(origin)
    for link in links:
        yield from _lineage(link, depth - 1)


def _came_through(error: BaseException, *, caught: bool) -> bool:
    """Say whether the error passed a loop on its way to whoever caught it, us or another.

    An object that is raised again, by `raise lost`, has the traceback of its earlier journey
    behind that statement. What lies there is not our way, unless the frame is one we came by:
    then somebody on our way caught the error and raised it again.
    """
    from opcode import opmap  # only ever needed here

    raises = opmap["RAISE_VARARGS"]
    seen: list[FrameType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        # What we caught ourselves begins with our own frame.
        if (seen or not caught) and frame.f_code.co_name in _DRIVERS and _is_ours(frame):
            return True
        seen.append(frame)
        following = traceback.tb_next
        raised_here = frame.f_code.co_code[traceback.tb_lasti] == raises and not _is_ours(frame)
        if raised_here and following is not None and following.tb_frame not in seen:
            return False
        traceback = following
    return False


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_DRIVER_MODULES)


def record_of(error: object) -> CallRecord | None:
    """Return the decision record of the call that ended with this error, if tarry saw it.

    Or with this answer, which an adapter has handed out: a 503 after four attempts.
    """
    found: ErrorRecord | None = getattr(error, RECORD_ATTRIBUTE, None)
    return None if found is None else found.record
