"""One hedged call as both drivers run it: the core's `HedgedCall` with lock, clock and events.

run.begin()             send the first copy, or raise
run.late()              time is up: another copy, more waiting, or raise
run.accepted(result)    the result, or raise it as a failure
run.won(number)         a copy has the answer
run.lost(number, error) another copy, more waiting, or the end
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tarry.core.events import GaveUp, HedgeFired, HedgeWon, Succeeded
from tarry.core.hedging import HedgedCall
from tarry.core.outcome import SUCCESS, Kind
from tarry.core.record import CallRecord
from tarry.core.verdict import Reason, Stop
from tarry.errors import DeadlineExceeded, Rejected, ResultNotAccepted
from tarry.runtime import deadlines
from tarry.runtime.bus import bus
from tarry.runtime.clocks import world
from tarry.runtime.marks import mark, marked_since, note
from tarry.runtime.run import rejection

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never

    from tarry.core.hedging import Hedging
    from tarry.core.outcome import Outcome
    from tarry.core.verdict import Attempt
    from tarry.runtime.downstream import Downstream

T = TypeVar("T")


class HedgedRun:
    """The live state of one hedged call."""

    __slots__ = (
        "_call",
        "_classify",
        "_deadline",
        "_detail",
        "_downstream",
        "_error",
        "_judge",
        "_operation",
        "_outcome",
        "_serial",
    )

    def __init__(
        self,
        operation: str,
        hedging: Hedging,
        classify: Callable[[Exception, int], Outcome],
        downstream: Downstream,
        judge: Callable[[Any], Outcome] | None = None,
    ) -> None:
        self._operation = operation
        self._downstream = downstream
        self._call = HedgedCall(hedging, downstream)
        self._classify = classify
        self._judge = judge
        self._outcome: Outcome | None = None
        """What the last result was judged to be."""
        self._deadline = deadlines.current()
        self._serial = bus.serial
        self._error: Exception | None = None
        self._detail = ""
        """What the last failure was, for listeners."""

    def begin(self) -> Attempt:
        """Send the first copy, or raise a rejection."""
        now = world.now()
        if self._deadline is not None and now >= self._deadline:
            raise self._too_late()
        command = self._call.start(now)
        if isinstance(command, Stop):
            self._stop(command)
        return command

    def left(self) -> float | None:
        """Return the seconds until something is due, or None."""
        moments = [m for m in (self._call.hedge_at, self._deadline) if m is not None]
        return max(0.0, min(moments) - world.now()) if moments else None

    def late(self) -> Attempt | None:
        """Time is up: send another copy if it may go, or raise at the deadline."""
        now = world.now()
        if self._deadline is not None and now >= self._deadline:
            raise self._too_late()
        if self._call.hedge_at is None or now < self._call.hedge_at:
            return None
        command = self._call.hedge(now)
        if isinstance(command, Stop):  # a server had named a later time, and now it may not go
            self._stop(command)
        self._fired(command)
        return command

    def accepted(self, result: T) -> T:
        """Return a result that ends the call, or raise a failure wrapped in an error."""
        if self._judge is not None:
            self._outcome = outcome = self._judge(result)
            if outcome.kind not in (Kind.SUCCESS, Kind.PERMANENT):
                raise ResultNotAccepted(f"{self._operation}: {outcome.detail}", result)
        return result

    def won(self, number: int) -> None:
        """One copy has the answer."""
        self._error = None  # its traceback holds us: leave no cycle behind
        outcome = self._outcome or SUCCESS
        good = outcome.kind is Kind.SUCCESS
        if good:
            self._call.succeeded(number, world.now(), world.draw())
        else:
            self._call.cancelled(world.now())  # an answer like any other, and no sign of health
        if bus.listeners or (number > 1 and bus.watched()):
            if number > 1:
                bus.emit(HedgeWon(self._operation, self._downstream.name, number))
            if good:
                bus.emit(Succeeded(self._operation, self._downstream.name, self._call.launched))
            else:
                self._tell_gave_up(Stop(Reason.PERMANENT), None, outcome.detail)

    def lost(self, number: int, error: Exception) -> Attempt | Stop | None:
        """One copy failed: another, more waiting, or the end."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            classify = self._classify
            outcome = classify(error, self._serial)
        self._detail = outcome.detail
        command = self._call.failed(number, outcome, world.now(), world.draw())
        if isinstance(command, Stop):
            self._give_up(command, error)
        else:
            self._error = error
            self._fired(command)
        return command

    def unsent(self, number: int) -> None:
        """There was no thread for a copy: go on without it, or raise the error of the last."""
        if not self._call.unsent(number, world.now()):
            self._stop(Stop(Reason.LIMIT))

    def forget(self) -> None:
        """The answer of the copy that failed last is gone: the call cannot end with it."""
        self._error = None

    def drop(self) -> None:
        """Forget the copies that still run."""
        self._call.cancelled(world.now())

    def _stop(self, stop: Stop) -> Never:
        """End the call, in which no copy runs, with the error of the one that failed last."""
        error, self._error = self._error, None
        if error is None:
            error = rejection(stop, self._operation, self._downstream.name, self._detail)
        self._give_up(stop, error)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame: leave no cycle behind

    def _fired(self, attempt: Attempt | None) -> None:
        if attempt is not None and bus.watched():
            bus.emit(HedgeFired(self._operation, self._downstream.name, attempt.number))

    def _too_late(self) -> DeadlineExceeded:
        error = DeadlineExceeded(f"{self._operation}: the deadline has passed")
        self._give_up(Stop(Reason.DEADLINE), error)
        return error

    def _give_up(self, stop: Stop, error: Exception) -> None:
        name, copies_sent = self._downstream.name, self._call.launched
        record = CallRecord(
            self._operation, name, copies_sent, 0.0, stop.reason, stop.retry_after, ()
        )
        if not marked_since(error, self._serial):
            mark(error, record, final=copies_sent != 1)
        note(error, record)
        if bus.watched():
            rejected = isinstance(error, Rejected)
            self._tell_gave_up(stop, error, (not rejected and self._detail) or type(error).__name__)

    def _tell_gave_up(self, stop: Stop, error: Exception | None, detail: str) -> None:
        bus.emit(
            GaveUp(
                self._operation,
                self._downstream.name,
                self._call.launched,
                stop.reason,
                0.0,
                stop.retry_after,
                stop.hint,
                error,
                detail=detail,
            )
        )
