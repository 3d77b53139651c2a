"""The steps of a replay: which dead letters it replays, when the next step is due, when it ends.

A store reads a replay, its dead letters and its replayed tasks, calls a function of this module,
and writes the changed replay together with the tasks. It must not write if one of them was changed
in between.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.service.model import ReplayRecord, Status

MAX_REPLAY_LAG_MS = 1000
"""A replay that is behind its rate catches up on at most this much time."""
REPLAY_QUOTA_PAUSE_MS = 1000
"""The pause of a replay whose tenant has as many live tasks as its quota allows."""
MAX_REPLAY_PAUSE_MS = 1e12
"""About thirty years: a longer pause, due to a tiny rate, could overflow an integer column."""
MIN_REPLAY_COUNT_INTERVAL_MS, MAX_REPLAY_COUNT_INTERVAL_MS = 1_000, 30_000
"""Limits of the interval between two counts of finished tasks, if a replay waits for its tasks."""
MAX_COUNTED_TASKS = 500
"""Maximum number of replayed tasks that one step reads to find finished ones."""
MAX_LISTED_REPLAYS = 100
_DELETED = "DELETED"


def start_replay(replay: ReplayRecord, now: int) -> ReplayRecord:
    """Return a replay as it is first stored: its first step is due now."""
    return msgspec.structs.replace(
        replay,
        before=min(replay.before or now, now),
        status="running",
        replayed=0,
        cursor=None,
        unfinished=0,
        finished={},
        count_cursor=None,
        created_at=now,
        next_at=now,
        finished_at=None,
    )


def is_step_due(replay: ReplayRecord, cursor: str | None, now: int) -> bool:
    """Return whether a step is due. A step of another cursor has been made already."""
    if not replay.needs_steps or replay.next_at > now:
        return False
    return replay.status != "running" or replay.cursor == cursor


def count_allowed_tasks(found_count: int, quota: int | None, live_count: int) -> int:
    """Return how many of the dead letters that a step has found it may replay."""
    if quota is None:
        return found_count
    return max(0, min(found_count, quota - live_count))


def add_replayed_tasks(
    replay: ReplayRecord,
    positions: Sequence[int],
    allowed_count: int,
    *,
    replayed_count: int,
    added_count: int,
    next_cursor: str | None,
    now: int,
) -> None:
    """Update a running replay that has replayed the first `allowed_count` dead letters.

    `positions` are those of all dead letters that the step has found, in the format of a cursor.
    `replayed_count` of them were still dead letters, and `added_count` were added to the replayed
    tasks. `next_cursor` is the cursor of the next page; None: all dead letters were replayed.
    """
    replay.replayed += replayed_count
    replay.unfinished += added_count
    replay.next_at = next_replay_step_at(replay, allowed_count, now)
    if allowed_count < len(positions):
        replay.next_at = max(replay.next_at, now + REPLAY_QUOTA_PAUSE_MS)
        if allowed_count:
            replay.cursor = str(positions[allowed_count - 1])
    elif next_cursor is None:
        replay.status = "waiting"
    else:
        replay.cursor = next_cursor


def end_step(
    replay: ReplayRecord,
    finished: Iterable[Status | None],
    read_count: int,
    last_id: str | None,
    now: int,
) -> None:
    """Count replayed tasks that have finished, and set when the next step is due.

    The step has read `read_count` tasks after `ReplayRecord.count_cursor`, up to `last_id`.
    `finished` has the statuses of those that have finished (None: deleted). The next step continues
    after `last_id`, or begins again if these were the last ones.
    """
    for status in finished:
        name = _DELETED if status is None else status.name
        replay.finished[name] = replay.finished.get(name, 0) + 1
        replay.unfinished -= 1
    replay.count_cursor = last_id if read_count == MAX_COUNTED_TASKS else None
    if replay.status != "running":
        is_complete_pass = replay.count_cursor is None
        replay.next_at = next_replay_count_at(replay, now) if is_complete_pass else now
    if replay.status == "waiting" and not replay.unfinished:
        replay.status, replay.finished_at = "done", now


def cancel_replay(replay: ReplayRecord, now: int) -> bool:
    """End a replay that has not ended; return whether it was changed."""
    if replay.status not in {"running", "waiting"}:
        return False
    replay.status, replay.finished_at, replay.next_at = "cancelled", now, now
    return True


def replay_columns(replay: ReplayRecord) -> tuple[int, int]:
    """Return the columns `running` and `next_at`, by which an engine finds replays.

    `running` is 1 if the replay replays dead letters, 2 if it only counts finished tasks, and 0 if
    it needs no more steps. Then `next_at` is the time of its end, for retention.
    """
    next_at = replay.next_at
    if not replay.needs_steps and replay.finished_at is not None:
        next_at = replay.finished_at
    running = 1 if replay.status == "running" else 2 if replay.unfinished else 0
    return running, next_at


def next_replay_step_at(replay: ReplayRecord, task_count: int, now: int) -> int:
    """Return when the next step of a replay is due; the last step replayed `task_count` tasks."""
    if replay.rate <= 0:
        return now
    pause = min(task_count * 1000 / replay.rate, MAX_REPLAY_PAUSE_MS)
    return max(replay.next_at, now - MAX_REPLAY_LAG_MS) + ceil(pause)


def next_replay_count_at(replay: ReplayRecord, now: int) -> int:
    """Return when a replay counts its finished tasks again: after a tenth of its age."""
    interval = max((now - replay.created_at) // 10, MIN_REPLAY_COUNT_INTERVAL_MS)
    return now + min(interval, MAX_REPLAY_COUNT_INTERVAL_MS)
