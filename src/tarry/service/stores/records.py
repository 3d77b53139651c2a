"""The encoding of records, task ids and cursors, which is the same in every store."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from tarry.errors import ConfigurationError
from tarry.service.model import (
    AttemptRecord,
    LaneRecord,
    ReplayRecord,
)
from tarry.service.store import LaneExport
from tarry.wire.tasks import DownstreamLimits

if TYPE_CHECKING:
    from collections.abc import Callable

TASK_ID_PATTERN = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
LANE_FIELD_COUNT = len(LaneRecord.__struct_fields__)
_CURSOR_PATTERN = re.compile(r"[0-9]{1,18}", re.ASCII)
_MAX_SHOWN_CURSOR_LENGTH = 50

_match_id = re.compile(TASK_ID_PATTERN).fullmatch
encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode
decode_attempt: Callable[[bytes], AttemptRecord] = msgspec.msgpack.Decoder(AttemptRecord).decode
decode_replay: Callable[[bytes], ReplayRecord] = msgspec.msgpack.Decoder(ReplayRecord).decode
decode_limits: Callable[[str | bytes], DownstreamLimits] = msgspec.json.Decoder(
    DownstreamLimits
).decode


def encode_limits(limits: DownstreamLimits | None) -> str | None:
    """Return limits as JSON; None stays None."""
    return None if limits is None else msgspec.json.encode(limits).decode()


def build_lane_export(
    lane: LaneRecord,
    limits: str | bytes | None,
    rate: float | None,
    concurrency: int | None,
    budget: float,
    budget_at: int,
) -> LaneExport:
    """Return a lane for `Store.export_records`; `limits` are encoded, and may be empty."""
    decoded_limits = decode_limits(limits) if limits else None
    return LaneExport(lane, decoded_limits, rate, concurrency, budget, budget_at)


def decode_replay_for_export(encoded: bytes) -> ReplayRecord:
    """Decode a replay without its cursors, see `RecordKind.REPLAY`."""
    return msgspec.structs.replace(decode_replay(encoded), cursor=None, count_cursor=None)


def is_task_id(text: str) -> bool:
    """Return whether a text has the format of task ids."""
    return _match_id(text) is not None


def parse_cursor(cursor: str) -> int:
    """Return the number in a cursor; raise `ConfigurationError` if the cursor is malformed."""
    if not _CURSOR_PATTERN.fullmatch(cursor):
        rule = "must be the cursor of an earlier page"
        raise ConfigurationError("cursor", rule, cursor[:_MAX_SHOWN_CURSOR_LENGTH])
    return int(cursor)
