from __future__ import annotations

import msgspec
import pytest

from tarry.service.model import TRANSITIONS, Status


@pytest.mark.parametrize("status", Status)
def test_no_attempt_follows_a_terminal_status(status: Status) -> None:
    """No transition leads from it to IN_FLIGHT, also for a status read as a number."""
    follows = Status.IN_FLIGHT in TRANSITIONS[status] or status is Status.IN_FLIGHT
    read = msgspec.convert(int(status), Status)

    assert read is status
    assert follows is not read.is_finished
