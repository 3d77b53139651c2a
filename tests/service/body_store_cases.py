"""Test cases for every storage of bodies: a folder, memory and S3."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.model import TaskContent
from tarry.service.payloads import BodyStore, BodyStoreUnavailable, BodyUnavailable

BODY = bytes(range(256)) * 100
Case = Callable[[BodyStore], Coroutine[Any, Any, None]]


class SyncRecorder:
    """Records synced files and folders in order; `fsync` fails after `successes` calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, successes: int = 1000) -> None:
        self.inodes: list[int] = []
        self._successes = successes
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        if len(self.inodes) == self._successes:
            raise OSError("no sync")
        self.inodes.append(os.fstat(descriptor).st_ino)
        self._sync(descriptor)

    def has_synced(self, paths: Sequence[Path]) -> bool:
        """Return whether exactly these paths were synced, in this order."""
        return self.inodes == [path.stat().st_ino for path in paths]


async def body_is_read_back(payloads: BodyStore) -> None:
    """A stored body can be read."""
    ref, checksum = await payloads.put("default", "t1", BODY)
    content = TaskContent(url="", body_ref=ref, body_size=len(BODY), checksum=checksum)

    assert BODY == await payloads.read(content)
    await payloads.delete([ref])


async def damaged_body_is_not_used(payloads: BodyStore) -> None:
    """A body with a wrong checksum and a missing body raise BodyUnavailable."""
    ref, checksum = await payloads.put("default", "t2", BODY)
    content = TaskContent(url="", body_ref=ref, body_size=len(BODY), checksum=b"other")
    with pytest.raises(BodyUnavailable, match="t2 is damaged"):
        await payloads.read(content)
    await payloads.delete([ref])
    content = TaskContent(url="", body_ref=ref, body_size=len(BODY), checksum=checksum)
    with pytest.raises(BodyUnavailable, match="no longer exists"):
        await payloads.read(content)


async def missing_storage_is_not_a_lost_body(payloads: BodyStore) -> None:
    """A missing body whose marker is missing too raises StoreUnavailable."""
    ref, checksum = await payloads.put("default", "t4", BODY)
    _, location, *_ = ref.split("/")
    content = TaskContent(url="", body_ref=ref, body_size=len(BODY), checksum=checksum)
    await payloads.delete([ref, f".tarry/places/{location}"])

    with pytest.raises(
        StoreUnavailable, match=f"neither {ref} nor its marker .tarry/places/{location}"
    ):
        await payloads.read(content)
    content.checksum = None
    with pytest.raises(BodyUnavailable, match="no longer exists"):
        await payloads.read(content)
    with pytest.raises(BodyStoreUnavailable, match=f"nor its marker .tarry/places/{location}"):
        await payloads.check()
    other, _ = await payloads.put("default", "t4", BODY)
    assert location != other.split("/")[1]
    await payloads._obstore.put_async(payloads._store, f".tarry/places/{location}", b"")
    await payloads.check()
    content.checksum = checksum
    with pytest.raises(BodyUnavailable, match="no longer exists"):
        await payloads.read(content)
    await payloads.delete([other])


async def check_can_be_repeated(payloads: BodyStore) -> None:
    """A check leaves one object, which is not taken for a body without a task."""

    async def is_live(_tenant: str, _task_id: str) -> bool:
        return False

    for _ in range(2):
        await payloads.check()
    assert 0 == await payloads.delete_unreferenced(is_live, now=4e9, limit=10)


async def deleting_twice_is_no_error(payloads: BodyStore) -> None:
    """Deleting a deleted body succeeds, because maintenance may be interrupted and repeated."""
    ref, _ = await payloads.put("default", "t3", BODY)
    await payloads.delete([ref, ref])
    await payloads.delete([ref])


async def changed_object_of_the_caller_is_rejected(payloads: BodyStore) -> None:
    """An object that has changed since the task was created is not sent."""
    await payloads._obstore.put_async(payloads._store, "default/inv/7.json", b"{}")
    ref = payloads.check_ref("default", "default/inv/7.json")
    size, etag = await payloads.head_object(ref)
    content = TaskContent(url="", body_ref=ref, body_size=size, etag=etag)
    assert b"{}" == await payloads.read(content)

    await payloads._obstore.put_async(payloads._store, "default/inv/7.json", b"[]")
    with pytest.raises(BodyUnavailable, match="changed"):
        await payloads.read(content)
    with pytest.raises(ConfigurationError, match="does not exist"):
        await payloads.head_object("default/nothing")


async def unreferenced_bodies_are_deleted(payloads: BodyStore) -> None:
    """A body without a task is deleted after an hour; other objects are not deleted."""
    await payloads._obstore.put_async(payloads._store, ".tarry/default/other", b"not a body")
    stray, _ = await payloads.put("default", "stray", BODY)
    live, checksum = await payloads.put("default", "live", BODY)

    async def is_live(_tenant: str, task_id: str) -> bool:
        return task_id == "live"

    assert 0 == await payloads.delete_unreferenced(is_live, now=0.0, limit=10)
    assert 1 == await payloads.delete_unreferenced(is_live, now=4e9, limit=10)
    assert 0 == await payloads.delete_unreferenced(is_live, now=4e9, limit=10)
    content = TaskContent(url="", body_ref=live, body_size=len(BODY), checksum=checksum)
    assert BODY == await payloads.read(content)
    content.body_ref = stray
    with pytest.raises(BodyUnavailable):
        await payloads.read(content)


CASES: list[Case] = [
    body_is_read_back,
    missing_storage_is_not_a_lost_body,
    damaged_body_is_not_used,
    check_can_be_repeated,
    deleting_twice_is_no_error,
    changed_object_of_the_caller_is_rejected,
    unreferenced_bodies_are_deleted,
]
