"""The encoding that all stores share."""

from __future__ import annotations

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import LaneRecord, ReplayRecord
from tarry.service.stores.records import (
    build_lane_export,
    decode_replay_for_export,
    encode,
    encode_limits,
    is_task_id,
    parse_cursor,
)
from tarry.wire.tasks import DownstreamLimits


@pytest.mark.parametrize("task_id", ["", "x", "0195D000-0000-7000-8000-000000000001", "a" * 36])
def test_a_malformed_id_is_recognised(task_id: str) -> None:
    """Only ids in the usual form of a UUID reach the database."""
    assert not is_task_id(task_id)
    assert is_task_id("0195d000-0000-7000-8000-000000000001")


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1" * 19, "²"])
def test_a_malformed_cursor_is_an_error(cursor: str) -> None:
    """A cursor is a number of up to 18 digits."""
    with pytest.raises(ConfigurationError, match="cursor must be the cursor of an earlier page"):
        parse_cursor(cursor)


def test_an_exported_lane_has_its_limits() -> None:
    """Limits are stored as JSON; a lane without limits has none, or an empty text."""
    lane, limits = LaneRecord(name="acme/a", tenant="acme"), DownstreamLimits(concurrency=3)

    assert limits == build_lane_export(lane, encode_limits(limits), 1.0, 2, 3.0, 4).limits
    assert encode_limits(None) is None
    for empty in (None, b""):
        assert build_lane_export(lane, empty, None, None, 0.0, 0).limits is None


def test_an_exported_replay_has_no_cursors() -> None:
    """The format of cursors depends on the store, so another store cannot use them."""
    replay = ReplayRecord(id="r", tenant="acme", replayed=3, cursor="7", count_cursor="8")

    assert ReplayRecord(id="r", tenant="acme", replayed=3) == decode_replay_for_export(
        encode(replay)
    )
