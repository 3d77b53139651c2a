from __future__ import annotations

import msgspec
import pytest

from tarry.service.model import TRANSITIONS, Status


@pytest.mark.parametrize("status", Status)
def test_no_attempt_follows_a_terminal_status(status: Status) -> None:
    """A status that is decoded from its number is finished exactly if no attempt can follow."""
    can_follow = Status.IN_FLIGHT in TRANSITIONS[status] or status is Status.IN_FLIGHT
    decoded = msgspec.convert(int(status), Status)

    assert decoded is status
    assert can_follow is not decoded.is_finished
