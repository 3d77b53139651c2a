from __future__ import annotations

import msgspec
import pytest

from tarry.service.model import TRANSITIONS, Status


@pytest.mark.parametrize("status", Status)
def test_terminal_is_what_no_attempt_follows(status: Status) -> None:
    """Nothing leads from there to IN_FLIGHT in one step; a number read from a store knows it."""
    follows = Status.IN_FLIGHT in TRANSITIONS[status] or status is Status.IN_FLIGHT
    read = msgspec.convert(int(status), Status)

    assert read is status
    assert follows is not read.is_terminal
