"""The operations that change the status of tasks: add, finish, release, cancel and others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.service.store import (
    AddResult,
    AddStatus,
    CancelStatus,
    FinishStatus,
    NewTask,
    RetryNowStatus,
)
from tarry.service.stores.records import encode, is_task_id
from tarry.service.stores.redis.codec import (
    decode_task,
    encode_fixed,
    pack_id,
    pack_ids,
    split_rows,
    task_arguments,
    to_raw,
)
from tarry.service.stores.redis.partitions import gather

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tarry.service.store import LeaseTerms, Release, TaskResult
    from tarry.service.stores.redis.partitions import Partitions

_MAX_LANES_READ, _MAX_LEASES_READ = 200, 200
"""How many lanes and leases one script reads to find the leases of a worker, in about 2 ms. To
release so many takes about 4 ms."""
_MISSING_ID = to_raw(b"")
"""Replaces a malformed id; no task has this id."""


async def add(
    partitions: Partitions,
    tasks: Sequence[NewTask],
    terms: LeaseTerms | None,
    quota: int | None,
    lane_quota: int | None,
) -> list[AddResult]:
    """Add tasks."""
    packed_terms = None if terms is None else _pack_terms(terms)

    async def add_to(partition: int, batch: list[NewTask]) -> list[AddResult]:
        now, *results = await partitions.run(
            partition,
            "add",
            [task_arguments(new) for new in batch],
            packed_terms,
            quota,
            lane_quota,
            values=[encode_fixed(new.task) for new in batch],
        )
        pairs = zip(batch, results, strict=True)
        return [_to_add_result(new, result, now, terms) for new, result in pairs]

    return await partitions.map_in_groups(tasks, lambda new: new.task.tenant, add_to)


def _to_add_result(
    new: NewTask, result: list[Any], now: int, terms: LeaseTerms | None
) -> AddResult:
    """Convert the result of `add.lua` for one task into an `AddResult`."""
    status, *values = result
    if status == b"added":
        due, lease_end = values
        worker = terms.worker if terms is not None and lease_end else None
        new.task.set_added(now, due, wake_at=lease_end or None, worker=worker)
        return AddResult(AddStatus.ADDED, new.task, worker is not None)
    if status == b"existing":
        _, stored = decode_task(values)
        is_same = stored.fingerprint == new.task.fingerprint
        return AddResult(AddStatus.EXISTING if is_same else AddStatus.CONFLICT, stored)
    if status == b"same_id":
        rule = f"must be new: {new.task.id} is the id of a task with another idempotency key"
        raise ConfigurationError("id", rule)
    return AddResult(AddStatus(status.decode()), new.task)


async def finish(partitions: Partitions, results: Sequence[TaskResult]) -> list[FinishStatus]:
    """Write the results of attempts."""

    async def finish_on(partition: int, batch: list[TaskResult]) -> list[FinishStatus]:
        reply = await partitions.run(partition, "finish", [_pack_result(each) for each in batch])
        return [FinishStatus(status.decode()) for status in reply]

    return await partitions.map_in_groups(results, lambda each: each.task.tenant, finish_on)


def _pack_terms(terms: LeaseTerms) -> tuple[str, int, int]:
    return terms.worker, terms.length_ms, terms.horizon_ms


def _pack_result(result: TaskResult) -> tuple[Any, ...]:
    """Return a result as an argument of a script, see `finish.lua`."""
    task, attempt, callback = result.task, result.attempt, result.callback_task
    lease = result.renewed_lease
    return (
        pack_id(task.id) or _MISSING_ID,
        task.tenant,
        task.version,
        None if attempt is None else attempt.outcome,
        None if attempt is None else to_raw(encode(attempt)),
        int(result.status),
        result.reason,
        result.next_attempt_at,
        None if lease is None else _pack_terms(lease),
        result.previous_delay,
        result.backoff_offset,
        result.last_outcome_kind,
        None if callback is None else task_arguments(NewTask(callback)),
        None if callback is None else to_raw(encode_fixed(callback)),
    )


async def release(partitions: Partitions, releases: Sequence[Release]) -> list[FinishStatus]:
    """Release leases before the attempts start."""

    async def release_on(partition: int, batch: list[Release]) -> list[FinishStatus]:
        reply = await partitions.run(partition, "release", [_pack_release(each) for each in batch])
        return [FinishStatus(status.decode()) for status in reply]

    return await partitions.map_in_groups(releases, lambda each: each.task.tenant, release_on)


def _pack_release(release: Release) -> tuple[Any, ...]:
    """Return a release as an argument of a script, see `release.lua`."""
    task = release.task
    return pack_id(task.id) or _MISSING_ID, task.tenant, task.version, release.deferred_until


async def release_unknown_leases(
    partitions: Partitions,
    terms: LeaseTerms,
    known_ids: Collection[str],
    partition: int | None = None,
) -> int:
    """Release the leases of a worker that it does not know."""
    known = {bytes.fromhex(each.replace("-", "")) for each in known_ids if is_task_id(each)}

    async def release_on(partition: int) -> int:
        # Two scripts: a request that Redis executes late, after the client has given up, must not
        # release a lease that the worker has got meanwhile. `release` checks the version.
        count = 0
        lane, cursor = b"", b"0"
        while True:
            position = (to_raw(lane), to_raw(cursor), _MAX_LANES_READ, _MAX_LEASES_READ)
            lane, cursor, *fields = await partitions.run(
                partition, "unknown_leases", terms.worker, terms.length_ms, *position
            )
            leases = [
                (to_raw(packed_id), tenant.decode(), version, deferred_until)
                for packed_id, tenant, version, deferred_until in split_rows(fields, 4)
                if packed_id not in known
            ]
            if leases:
                statuses = await partitions.run(partition, "release", leases)
                count += sum(status != b"superseded" for status in statuses)
            if not lane:
                return count

    numbers = range(partitions.partition_count) if partition is None else [partition]
    return sum(await gather(map(release_on, numbers)))


async def cancel(partitions: Partitions, tenant: str, task_id: str) -> CancelStatus | None:
    """Cancel a task."""
    packed_id = pack_id(task_id)
    if packed_id is None:
        return None
    status = await partitions.run_for_tenant(tenant, "change_task", "cancel", tenant, packed_id)
    return None if status is None else CancelStatus(status.decode())


async def retry_now(
    partitions: Partitions, tenant: str, task_id: str, *, quota: int | None = None
) -> RetryNowStatus | None:
    """Make a task due now."""
    packed_id = pack_id(task_id)
    if packed_id is None:
        return None
    arguments = ("retry", tenant, packed_id, quota)
    status = await partitions.run_for_tenant(tenant, "change_task", *arguments)
    return None if status is None else RetryNowStatus(status.decode())


async def delete_dead_letters(partitions: Partitions, tenant: str, task_ids: Sequence[str]) -> int:
    """Delete the dead letters among tasks."""
    arguments = (tenant, pack_ids(task_ids))
    count: int = await partitions.run_for_tenant(tenant, "delete_dead_letters", *arguments)
    return count
