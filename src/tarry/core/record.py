"""The decision record of a call that ended without a result."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tarry.core.explain import duration

if TYPE_CHECKING:
    from tarry.core.verdict import Reason, Step


class CallRecord(NamedTuple):
    """How a call went: attempts, waits, balances, reasons."""

    operation: str
    downstream: str | None
    attempts: int
    waited: float
    reason: Reason
    retry_after: float | None
    steps: tuple[Step, ...]

    def sentence(self) -> str:
        """Say it in words: how many attempts were made and why they ended."""
        plural = "" if self.attempts == 1 else "s"
        waits = f" and {duration(self.waited)} of waiting" if self.waited else ""
        after = "" if self.retry_after is None else f"; retry after {duration(self.retry_after)}"
        return f"gave up after {self.attempts} attempt{plural}{waits}: {self.reason.words}{after}"
