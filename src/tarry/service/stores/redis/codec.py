"""The encoding of tasks and lanes in Redis, and the conversion into records.

A task has two values, because every transition rewrites the first one:

    state:ID   `TaskState`, which the scripts read and write
    task:ID    written once, and read only if the task is returned or deleted: the length of the
               next part as four bytes, an array of the idempotency key (nil if it is the id of the
               task) and the owned body, and an array of fingerprint and content. Scripts decode
               only the first array.

All values are MessagePack. The `cmsgpack` of Redis does not support the binary type of MessagePack,
so bytes in arguments of scripts are encoded as strings, see `to_raw`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import field

from tarry.errors import ConfigurationError
from tarry.service.model import (
    LaneRecord,
    PolicyVersion,
    Status,
    Task,
)
from tarry.service.stores.records import encode, is_task_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tarry.service.store import NewTask

TASK_LENGTH = 5
"""The number of values of a task in a reply: id, state, fixed part, names of lane and policy."""

TaskArguments: TypeAlias = tuple[
    msgspec.Raw, str, str, int | None, str, msgspec.Raw | None, int | None, int, bool
]
"""A new task as an argument of a script, see `add_task` in `tasks.lua`."""

_LENGTH_BYTES = 4
_MAX_FIXSTR_LENGTH = 32


class TaskState(msgspec.Struct, gc=False, omit_defaults=True):
    """The state of a task. The stored names are short to save memory: each task has them.

    `tasks.lua` has the same names. Fields without a comment are those of `Task`.
    """

    number: int = field(name="n")
    """In the order of adding."""
    lane_id: int = field(name="l")
    policy_use_id: int = field(name="p")
    """`use:ID` has the record of the policy."""
    created_at: int = field(name="c")
    next_attempt_at: int = field(name="d")
    version: int = field(name="i")
    status: Status = field(name="s")
    policy_version: int | None = field(name="v", default=None)
    first_due_after_ms: int = field(name="f", default=0)
    """`first_due_at` minus `created_at`."""
    wake_at: int = field(name="w", default=0)
    """The end of the lease of an IN_FLIGHT task, or of the deferral of a PENDING task."""
    reason: str | None = field(name="r", default=None)
    attempts: int = field(name="a", default=0)
    attempts_before_replay: int = field(name="b", default=0)
    lost_attempts: int = field(name="x", default=0)
    previous_delay: float | None = field(name="y", default=None)
    backoff_offset: int = field(name="o", default=0)
    last_outcome_kind: str | None = field(name="k", default=None)
    worker: str | None = field(name="h", default=None)
    cancelling: int = field(name="z", default=0)
    replays: int = field(name="m", default=0)
    finished_at: int | None = field(name="e", default=None)
    key_is_id: int = field(name="u", default=0)
    """1 if the idempotency key is the id of the task: then the key has no entry of its own."""


class StoredLane(msgspec.Struct, gc=False):
    """A lane as the scripts store it, see `create_lane` in `records.lua`."""

    id: int
    name: str
    tenant: str
    parked_until: int | None = None
    probes: int = 0
    opens: int = 0
    paused: bool = False
    pending: int = 0
    in_flight: int = 0
    exhausted: int = 0
    last_claim_at: int | None = None
    rate: float | None = None
    concurrency: int | None = None
    budget: float = 0.0
    budget_at: int = 0

    def to_record(self) -> LaneRecord:
        """Convert the lane into a record of the store interface."""
        return LaneRecord(
            name=self.name,
            tenant=self.tenant,
            parked_until=self.parked_until,
            probes=self.probes,
            consecutive_opens=self.opens,
            paused=self.paused,
            pending=self.pending,
            in_flight=self.in_flight,
            exhausted=self.exhausted,
            last_claim_at=self.last_claim_at,
        )


decode_lane: Callable[[bytes], StoredLane] = msgspec.msgpack.Decoder(StoredLane).decode
_decode_state = msgspec.msgpack.Decoder(TaskState).decode
_decode_head = msgspec.msgpack.Decoder(tuple[str | None, str | None]).decode
_decode_tail = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode


def to_raw(data: bytes) -> msgspec.Raw:
    """Return bytes as a MessagePack string, for arguments of scripts."""
    size = len(data)
    if size < _MAX_FIXSTR_LENGTH:
        return msgspec.Raw(bytes((0xA0 | size,)) + data)
    return msgspec.Raw(b"\xdb" + size.to_bytes(4) + data)


def pack_id(task_id: str) -> msgspec.Raw | None:
    """Return a task id as 16 bytes, for arguments of scripts, or None if it is malformed."""
    if not is_task_id(task_id):
        return None
    return msgspec.Raw(b"\xb0" + bytes.fromhex(task_id.replace("-", "")))  # a string of 16 bytes


def pack_ids(task_ids: Iterable[str]) -> list[msgspec.Raw]:
    """Return task ids for arguments of scripts, without malformed ones."""
    return [packed for packed in map(pack_id, task_ids) if packed is not None]


def unpack_id(packed: bytes) -> str:
    """Return the text form of a task id that is stored as 16 bytes."""
    text = packed.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def task_arguments(new: NewTask) -> TaskArguments:
    """Return a new task as an argument of a script."""
    task = new.task
    packed_id = pack_id(task.id)
    if packed_id is None:
        raise ConfigurationError("id", "must be a UUID in its usual form", task.id)
    return (
        packed_id,
        task.lane,
        task.policy_id,
        task.policy_version,
        task.key,
        pack_id(task.key),
        new.delay_ms,
        task.next_attempt_at,
        new.lease_on_add,
    )


def encode_fixed(task: Task) -> bytes:
    """Return the part of a task that never changes, as it is stored."""
    key = None if task.key == task.id else task.key
    head = encode((key, task.owned_body_ref))
    tail = encode((task.fingerprint, task.packed_content))
    return b"".join((len(head).to_bytes(_LENGTH_BYTES), head, tail))


def split_rows(values: Sequence[Any], width: int) -> Iterator[Sequence[Any]]:
    """Yield `width` values at a time: scripts return tables and maps as flat lists."""
    for start in range(0, len(values), width):
        yield values[start : start + width]


def decode_tasks(reply: Sequence[bytes]) -> Iterator[tuple[int, Task]]:
    """Return the number and the task for each task of a reply, see `append_task` in `tasks.lua`."""
    return map(decode_task, split_rows(reply, TASK_LENGTH))


def decode_task(values: Sequence[bytes]) -> tuple[int, Task]:
    """Return a task and its number in the order of adding."""
    packed_id, packed_state, packed_fixed, lane, policy = values
    state = _decode_state(packed_state)
    tail_start = _LENGTH_BYTES + int.from_bytes(packed_fixed[:_LENGTH_BYTES])
    key, owned_body_ref = _decode_head(packed_fixed[_LENGTH_BYTES:tail_start])
    fingerprint, packed_content = _decode_tail(packed_fixed[tail_start:])
    task_id, lane_name = unpack_id(packed_id), lane.decode()
    wake_at = state.wake_at
    if state.status is Status.PENDING:
        wake_at = wake_at or state.next_attempt_at
    fields: list[Any] = [
        task_id,
        lane_name.partition("/")[0],
        lane_name,
        task_id if key is None else key,
        fingerprint,
        packed_content,
        owned_body_ref,
        policy.decode(),
        state.policy_version,
        state.created_at,
        state.next_attempt_at,
        state.created_at + state.first_due_after_ms,
        state.status,
        state.reason,
        state.attempts,
        state.attempts_before_replay,
        state.lost_attempts,
        state.previous_delay,
        state.backoff_offset,
        state.last_outcome_kind,
        state.version,
        state.worker,
        wake_at,
        bool(state.cancelling),
        state.replays,
        state.finished_at,
    ]
    # `convert` takes half as long as a call of `Task` with 26 keyword arguments.
    return state.number, msgspec.convert(fields, Task)


def to_policies(tenant: str, fields: Sequence[Any]) -> list[PolicyVersion]:
    """Convert a reply of `policies.lua`."""
    return [
        PolicyVersion(
            tenant=tenant,
            id=policy_id.decode(),
            version=version,
            created_at=created_at,
            document=document,
        )
        for policy_id, version, created_at, document in split_rows(fields, 4)
    ]
