"""The schedule of replays. `tests/service/stores/conformance` tests the stores."""

from __future__ import annotations

import pytest

from tarry.service.model import ReplayRecord
from tarry.service.rules.replays import MAX_REPLAY_LAG_MS, next_replay_step_at

NOW = 1_800_000_000_000


@pytest.mark.parametrize(
    ("rate", "due", "expected"),
    [
        (0.0, NOW, NOW),
        (10.0, NOW, NOW + 500),
        (10.0, NOW - 200, NOW + 300),
        (10.0, NOW - 60_000, NOW - MAX_REPLAY_LAG_MS + 500),
    ],
    ids=["no rate", "on time", "late", "later than the maximum lag"],
)
def test_the_next_step_is_due_after_the_pause_of_the_rate(
    rate: float, due: int, expected: int
) -> None:
    """The pause starts at the due time of the step, or at most MAX_REPLAY_LAG_MS ago."""
    replay = ReplayRecord(id="1", tenant="t", rate=rate, next_at=due)
    assert expected == next_replay_step_at(replay, 5, NOW)


def test_a_very_small_rate_does_not_overflow_the_time() -> None:
    """The time is valid for a 64-bit integer column."""
    replay = ReplayRecord(id="1", tenant="t", rate=1e-300, next_at=NOW)
    assert NOW < next_replay_step_at(replay, 1, NOW) < 1 << 62
