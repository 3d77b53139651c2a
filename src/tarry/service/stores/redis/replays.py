"""Replays of dead letters, step by step.

A step reads what it depends on in one script, decides in Python (`rules.replays`), and writes with
another script, which changes nothing if a value that was read has changed. Then the step is
repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tarry.service.model import ReplayRecord, Status
from tarry.service.rules import replays as rules
from tarry.service.stores.records import decode_replay, encode
from tarry.service.stores.redis.codec import pack_ids, split_rows, to_raw, unpack_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.stores.redis.partitions import Partitions


class DeadLetter(NamedTuple):
    """A dead letter that a step of a replay may replay."""

    id: bytes
    number: int
    version: int
    is_replayed: int
    """Whether the replay has replayed it before, and not counted it as finished."""


class ReplayedTaskStatus(NamedTuple):
    """A task that a replay has replayed and not counted as finished."""

    id: bytes
    status: int
    """-1: the task was deleted."""

    @property
    def is_finished(self) -> bool:
        """Whether the task was finished, or deleted."""
        return self.status < 0 or Status(self.status).is_finished

    def get_status(self) -> Status | None:
        """Return the status; None: the task was deleted."""
        return None if self.status < 0 else Status(self.status)


class ReplayState(NamedTuple):
    """What a step of a replay depends on, see `read_replay.lua`."""

    now: int
    packed: bytes = b""
    """The encoded replay; empty: it does not exist."""
    replay: ReplayRecord | None = None
    live_count: int = 0
    dead_letters: Sequence[DeadLetter] = ()
    replayed: Sequence[ReplayedTaskStatus] = ()


async def start_replay(partitions: Partitions, replay: ReplayRecord) -> ReplayRecord:
    """Store a replay and return it; if its id is stored already, return the stored replay."""
    partition = partitions.partition_of(replay.tenant)
    while True:
        state = await _read_replay(partitions, partition, replay.id)
        if state.replay is not None:
            return state.replay
        new = rules.start_replay(replay, state.now)
        if await _write_replay(partitions, partition, state, new):
            return new


async def get_replay(partitions: Partitions, tenant: str, replay_id: str) -> ReplayRecord | None:
    """Return a replay of this tenant, or None if it does not exist."""
    state = await _read_replay(partitions, partitions.partition_of(tenant), replay_id)
    replay = state.replay
    return replay if replay is not None and replay.tenant == tenant else None


async def cancel_replay(partitions: Partitions, tenant: str, replay_id: str) -> ReplayRecord | None:
    """End a replay; see `TaskStore.cancel_replay`."""
    partition = partitions.partition_of(tenant)
    while True:
        state = await _read_replay(partitions, partition, replay_id)
        replay = state.replay
        if replay is None or replay.tenant != tenant:
            return None
        if not rules.cancel_replay(replay, state.now):
            return replay
        if await _write_replay(partitions, partition, state, replay):
            return replay


async def list_replays(
    partitions: Partitions, *, running: bool, tenant: str | None = None
) -> list[ReplayRecord]:
    """List replays, newest first; with `running`, those that need steps, by due time."""
    arguments = (running, tenant, rules.MAX_LISTED_REPLAYS)
    numbers = partitions.partitions_of(tenant)
    replies = await partitions.run_on_available(numbers, "list_replays", *arguments)
    replays = [decode_replay(packed) for reply in replies.values() for packed in reply]
    if running:
        replays.sort(key=lambda replay: (replay.next_at, replay.id))
    else:
        replays.sort(key=lambda replay: (replay.created_at, replay.id), reverse=True)
    return replays[: rules.MAX_LISTED_REPLAYS]


async def replay_step(
    partitions: Partitions,
    replay_id: str,
    cursor: str | None,
    task_ids: Sequence[str],
    next_cursor: str | None,
    *,
    quota: int | None = None,
) -> ReplayRecord | None:
    """Make a step of a replay, if it is due; see `TaskStore.replay_step`."""
    known = partitions.replay_partitions.get(replay_id)
    for partition in range(partitions.partition_count) if known is None else [known]:
        replay = await _make_step(
            partitions, partition, replay_id, cursor, task_ids, next_cursor, quota
        )
        if replay is not None:
            # Only replays that need another step are cached, so that the cache stays small.
            partitions.replay_partitions[replay_id] = partition
            if not replay.needs_steps:
                del partitions.replay_partitions[replay_id]
            return replay
    partitions.replay_partitions.pop(replay_id, None)
    return None


async def _make_step(
    partitions: Partitions,
    partition: int,
    replay_id: str,
    cursor: str | None,
    task_ids: Sequence[str],
    next_cursor: str | None,
    quota: int | None,
) -> ReplayRecord | None:
    """Make a step of a replay that is in a partition, if it is due; return the replay."""
    while True:
        state = await _read_replay(partitions, partition, replay_id, task_ids)
        replay, now = state.replay, state.now
        if replay is None or not rules.is_step_due(replay, cursor, now):
            return replay
        allowed: Sequence[DeadLetter] = ()
        if replay.status == "running":
            found = state.dead_letters
            allowed = found[: rules.count_allowed_tasks(len(found), quota, state.live_count)]
            rules.add_replayed_tasks(
                replay,
                [each.number for each in found],
                len(allowed),
                replayed_count=len(allowed),
                added_count=sum(not each.is_replayed for each in allowed),
                next_cursor=next_cursor,
                now=now,
            )
        finished = [each for each in state.replayed if each.is_finished]
        last_id = unpack_id(state.replayed[-1].id) if state.replayed else None
        statuses = [each.get_status() for each in finished]
        rules.end_step(replay, statuses, len(state.replayed), last_id, now)
        counted_ids = [each.id for each in finished]
        if await _write_replay(partitions, partition, state, replay, allowed, quota, counted_ids):
            return replay


async def _read_replay(
    partitions: Partitions, partition: int, replay_id: str, task_ids: Sequence[str] = ()
) -> ReplayState:
    arguments = (replay_id, pack_ids(task_ids), rules.MAX_COUNTED_TASKS)
    now, packed, *others = await partitions.run(partition, "read_replay", *arguments)
    if packed is None:
        return ReplayState(now)
    live_count, dead_letters, replayed = others
    return ReplayState(
        now,
        packed,
        decode_replay(packed),
        live_count,
        [DeadLetter(*values) for values in split_rows(dead_letters, 4)],
        [ReplayedTaskStatus(*values) for values in split_rows(replayed, 2)],
    )


async def _write_replay(
    partitions: Partitions,
    partition: int,
    state: ReplayState,
    replay: ReplayRecord,
    dead_letters: Sequence[DeadLetter] = (),
    quota: int | None = None,
    counted_ids: Sequence[bytes] = (),
) -> bool:
    tasks = [value for each in dead_letters for value in (to_raw(each.id), each.version)]
    arguments = (replay.id, tasks, quota, [to_raw(each) for each in counted_ids])
    values = [state.packed, encode(replay)]
    return bool(await partitions.run(partition, "write_replay", *arguments, values=values))
