"""`record_calls`: the records of all calls in a block of code, also of those that succeeded.

The block is a scope without a deadline in the context's list of scopes: see `scopes`. Decorated
functions only test whether the list is empty, so calls outside of such blocks are not slower.
"""

from __future__ import annotations

from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING

from tarry.runtime import scopes

if TYPE_CHECKING:
    from collections.abc import Generator

    from tarry.core.verdict import CallRecord


@contextmanager
def record_calls() -> Generator[list[CallRecord]]:
    """Record the calls that end in the block: `with tarry.record_calls() as records:`.

    The list has a record for each call that returned or gave up, in the order in which the calls
    ended; a call that was cancelled has no record. The `reason` of a call that succeeded is None.
    Calls in asyncio and trio tasks that were started in the block are recorded too, if they end
    before the block. So are calls in threads that copy the context, such as `asyncio.to_thread`.
    """
    records: list[CallRecord] = []
    handle = scopes.enter(inf)
    handle.has_ended = True  # so that the scope sets no deadline
    handle.records = records
    try:
        yield records
    finally:
        handle.records = None  # tasks that still run have a copy of the scope
        scopes.leave(handle)
