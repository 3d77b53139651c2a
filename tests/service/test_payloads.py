from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service import payloads as module
from tarry.service.encryption import Codec
from tarry.service.model import TaskContent
from tarry.service.payloads import BodyStore, BodyStoreUnavailable, BodyUnavailable
from tests.service.body_store_cases import CASES, Case, SyncRecorder
from tests.service.delivery.scripted_server import never_respond, run_server

KILLED_DURING_PUT = """
import asyncio, os, sys
from tarry.service.payloads import BodyStore
payloads = BodyStore(sys.argv[1], max_object_bytes=100)
asyncio.run(payloads.put("default", "before", b"x"))
os.fsync = lambda _: os._exit(9)
asyncio.run(payloads.put("default", "killed", b"x"))
"""


@pytest.mark.parametrize("storage", ["folder", "memory"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_body_store(case: Case, storage: str, tmp_path: Path) -> None:
    """Each case passes with bodies in a folder and in memory."""
    url = str(tmp_path / "bodies") if storage == "folder" else "memory:///"
    asyncio.run(case(BodyStore(url, max_object_bytes=1 << 20)))


@pytest.mark.parametrize(
    "ref", ["", "/etc/passwd", "../x", "default/../x", "default//x", "default", "other/x", "a\n/b"]
)
def test_ref_outside_the_tenant_is_rejected(ref: str) -> None:
    """A caller can refer only to objects of its tenant."""
    payloads = BodyStore("memory:///", max_object_bytes=10)
    with pytest.raises(ConfigurationError, match="bodyRef must"):
        payloads.check_ref("default", ref)


async def test_oversized_object_is_rejected() -> None:
    """An object larger than `max_object_bytes` is rejected when the task is created."""
    payloads = BodyStore("memory:///", max_object_bytes=10)
    await payloads._obstore.put_async(payloads._store, "default/x", b"x" * 11)
    with pytest.raises(
        ConfigurationError, match=r"at most 10 bytes .setting max_body_bytes., got 11"
    ):
        await payloads.head_object("default/x")


def test_unknown_url_is_rejected() -> None:
    """The error contains the URL."""
    with pytest.raises(ConfigurationError, match=r"cannot use .* for bodies: .*\. Set bodies to"):
        BodyStore("ftp://x", max_object_bytes=10)


def test_unwritable_folder_is_unavailable(tmp_path: Path) -> None:
    """A folder that cannot be written raises StoreUnavailable."""
    folder = tmp_path / "bodies"
    payloads = BodyStore(str(folder), max_object_bytes=10)
    (folder / ".tarry").write_text("a file, where a folder should be")
    with pytest.raises(StoreUnavailable, match="storage of bodies failed"):
        asyncio.run(payloads.put("default", "t", b"x"))
    with pytest.raises(BodyStoreUnavailable, match="storage of bodies failed"):
        asyncio.run(payloads.check())


async def test_bodies_can_be_encrypted(tmp_path: Path) -> None:
    """Bodies are encrypted on disk; older plain bodies can be read; a missing key is an error."""
    folder = str(tmp_path / "bodies")
    plain = BodyStore(folder, max_object_bytes=100)
    early, checksum = await plain.put("default", "early", b"hush hush")
    codec = Codec([Fernet.generate_key().decode()])
    encrypted = BodyStore(
        folder, max_object_bytes=100, encrypt=codec.encrypt_body, decrypt=codec.decrypt_body
    )
    late, _ = await encrypted.put("default", "late", b"hush hush")
    assert b"hush" not in (tmp_path / "bodies" / late).read_bytes()
    for ref in (early, late):
        content = TaskContent(url="", body_ref=ref, body_size=9, checksum=checksum)
        assert b"hush hush" == await encrypted.read(content)
    with pytest.raises(BodyUnavailable, match="key that is not configured"):
        await plain.read(TaskContent(url="", body_ref=late, body_size=9, checksum=checksum))


def test_folder_is_private(tmp_path: Path) -> None:
    """Other users of the machine cannot read the folder."""
    BodyStore(str(tmp_path / "bodies"), max_object_bytes=10)

    assert 0o700 == (tmp_path / "bodies").stat().st_mode & 0o777


async def test_bodies_of_an_unmounted_folder_are_unavailable_not_lost(tmp_path: Path) -> None:
    """Bodies can be read when their folder is mounted again or copied into the new folder."""
    folder, unmounted = tmp_path / "bodies", tmp_path / "unmounted"

    before = BodyStore(str(folder), max_object_bytes=100)
    refs = [await before.put("default", "t1", b"one")]
    folder.rename(unmounted)
    payloads = BodyStore(str(folder), max_object_bytes=100)
    contents = [TaskContent(url="", body_ref=ref, checksum=checksum) for ref, checksum in refs]
    for reader in (before, payloads):
        with pytest.raises(StoreUnavailable, match="mount or restore the storage"):
            await reader.read(contents[0])
    ref, checksum = await payloads.put("default", "t2", b"two")
    contents.append(TaskContent(url="", body_ref=ref, checksum=checksum))
    folder.rename(tmp_path / "second")
    unmounted.rename(folder)
    assert b"one" == await payloads.read(contents[0])
    with pytest.raises(StoreUnavailable, match="mount or restore the storage"):
        await payloads.read(contents[1])
    shutil.copytree(tmp_path / "second", folder, dirs_exist_ok=True)
    assert [b"one", b"two"] == [await payloads.read(content) for content in contents]


async def test_location_is_stable(tmp_path: Path) -> None:
    """Concurrent first bodies, restarts and other processes use the same location."""
    first, second = (BodyStore(str(tmp_path), max_object_bytes=100) for _ in range(2))
    put = await asyncio.gather(*(first.put("default", f"t{n}", b"x") for n in range(9)))
    put.append(await second.put("default", "t", b"x"))
    assert 1 == len({ref.split("/")[1] for ref, _ in put})


def test_body_in_a_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body, its marker and all parent folders are synced before the task is stored."""
    synced = SyncRecorder(monkeypatch)
    folder = tmp_path / "new" / "bodies"
    payloads = BodyStore(str(folder), max_object_bytes=10)
    root = folder / ".tarry"
    assert synced.has_synced([tmp_path, tmp_path / "new"])

    ref, _ = asyncio.run(payloads.put("default", "t1", b"x"))
    location = root / ref.split("/")[1]
    created = [tmp_path, tmp_path / "new", folder, root]
    marker = [root / "places" / location.name, root / "places", root, folder]
    body = [root, location, folder / ref, location / "default", location, root, folder]
    assert synced.has_synced([*created, *marker, *body])

    synced.inodes.clear()
    ref, _ = asyncio.run(payloads.put("default", "t2", b"x"))
    assert synced.has_synced([folder / ref, location / "default", location, root, folder])


def test_body_that_cannot_be_synced_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body whose sync fails raises StoreUnavailable, and its file is deleted."""
    payloads = BodyStore(str(tmp_path), max_object_bytes=10)
    ref, _ = asyncio.run(payloads.put("default", "t1", b"x"))
    SyncRecorder(monkeypatch, successes=0)
    with pytest.raises(StoreUnavailable, match="failed: no sync"):
        asyncio.run(payloads.put("default", "t2", b"x"))

    assert [tmp_path / ref] == [*(tmp_path / ref).parent.iterdir()]


def test_partial_body_of_a_killed_process_is_swept(tmp_path: Path) -> None:
    """The partial body has the path of a task that was never added, so it is unreferenced."""

    async def is_live(_tenant: str, task_id: str) -> bool:
        return task_id == "before"

    killed = subprocess.run([sys.executable, "-c", KILLED_DURING_PUT, str(tmp_path)], check=False)
    assert 9 == killed.returncode
    bodies = next(tmp_path.glob(".tarry/*/default"))
    assert {bodies / "before", bodies / "killed"} == {*bodies.iterdir()}

    payloads = BodyStore(str(tmp_path), max_object_bytes=100)
    assert 1 == asyncio.run(payloads.delete_unreferenced(is_live, now=4e9, limit=10))
    assert [bodies / "before"] == [*bodies.iterdir()]


@pytest.mark.parametrize("ref", ["default/m#1", "default/m/x", f"default/{'x' * 300}"])
def test_impossible_file_name_is_rejected(ref: str, tmp_path: Path) -> None:
    """A name that the file system cannot store is a ConfigurationError, which is not retried."""
    payloads = BodyStore(str(tmp_path), max_object_bytes=10)
    (tmp_path / "default").mkdir()
    (tmp_path / "default/m").write_text("a file")
    (tmp_path / "default/m#1").write_text("another")
    with pytest.raises(ConfigurationError, match="bodyRef"):
        asyncio.run(payloads.head_object(payloads.check_ref("default", ref)))


@pytest.mark.parametrize("name", ["m#1#2", "m##1", "m#", "m#1x", "m#1/x"])
def test_other_names_with_a_hash_are_valid(name: str, tmp_path: Path) -> None:
    """Only a name with a single #, followed by digits, is reserved."""
    payloads = BodyStore(str(tmp_path), max_object_bytes=10)
    (tmp_path / "default" / name).parent.mkdir(parents=True)
    (tmp_path / "default" / name).write_text("x")
    size, _ = asyncio.run(payloads.head_object(payloads.check_ref("default", f"default/{name}")))
    assert 1 == size


def test_reserved_file_names_are_valid_in_a_bucket() -> None:
    """Names like m#1 are temporary files in folders only."""
    payloads = BodyStore("memory:///", max_object_bytes=10)
    assert "default/m#1" == payloads.check_ref("default", "default/m#1")


@pytest.mark.parametrize("link", ["a/7.json", "a", "a/folder"])
def test_symbolic_links_are_not_followed(link: str, tmp_path: Path) -> None:
    """A caller's object is not read through a link, which could lead to any file."""
    bodies, secrets = tmp_path / "bodies", tmp_path / "secrets"
    (secrets / "folder").mkdir(parents=True)
    for name in ("7.json", "folder/7.json"):
        (secrets / name).write_bytes(b"secret")
    store = BodyStore(str(bodies), max_object_bytes=100)
    (bodies / link).parent.mkdir(exist_ok=True)
    (bodies / link).symlink_to(secrets / link.removeprefix("a").lstrip("/"))
    ref = "a/folder/7.json" if link == "a/folder" else "a/7.json"
    assert b"secret" == (bodies / ref).read_bytes()
    with pytest.raises(ConfigurationError, match="does not exist"):
        asyncio.run(store.head_object(ref))


def test_link_that_replaces_an_object_is_not_followed(tmp_path: Path) -> None:
    """The object was checked when the task was created; the link is a changed object."""
    store = BodyStore(str(tmp_path / "bodies"), max_object_bytes=100)
    (tmp_path / "secret").write_bytes(b"secret")
    path = tmp_path / "bodies" / "a" / "7.json"
    path.parent.mkdir()
    path.write_bytes(b"public")
    size, etag = asyncio.run(store.head_object("a/7.json"))
    content = TaskContent(url="", body_ref="a/7.json", body_size=size, etag=etag)
    assert b"public" == asyncio.run(store.read(content))
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(BodyUnavailable, match="was changed"):
        asyncio.run(store.read(content))


def test_object_whose_folder_became_a_file_is_missing(tmp_path: Path) -> None:
    """Reading such an object raises BodyUnavailable, so that its task fails."""
    payloads = BodyStore(str(tmp_path), max_object_bytes=10)
    (tmp_path / "default").write_text("a file")
    with pytest.raises(BodyUnavailable, match="no longer exists"):
        asyncio.run(payloads.read(TaskContent(url="", body_ref="default/x", body_size=1)))


async def _no_task_exists(_tenant: str, _task_id: str) -> bool:
    return False


def _s3_body_store(monkeypatch: pytest.MonkeyPatch, url: str) -> BodyStore:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    return BodyStore("s3://bucket/", max_object_bytes=10, endpoint=url.rstrip("/"))


async def test_hanging_storage_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call times out, including calls that wait for another call."""
    monkeypatch.setattr(module, "_CALL_TIMEOUT_S", 0.05)
    content = TaskContent(url="", body_ref="default/x", body_size=1)

    async with run_server(never_respond) as server:
        payloads = _s3_body_store(monkeypatch, server.url)
        errors = await asyncio.gather(
            payloads.put("default", "t1", b"x"),
            payloads.put("default", "t2", b"x"),
            payloads.head_object("default/x"),
            payloads.read(content),
            payloads.delete(["default/x"]),
            payloads.delete_unreferenced(_no_task_exists, now=4e9, limit=10),
            return_exceptions=True,
        )
    assert [BodyStoreUnavailable] * 6 == [type(error) for error in errors]
    assert {"the storage of bodies failed: no response within 0.05 seconds"} == {*map(str, errors)}


async def test_failing_storage_is_tried_four_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call raises StoreUnavailable after four requests."""
    requests: list[bytes] = []

    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()

    async with run_server(fail) as server:
        payloads = _s3_body_store(monkeypatch, server.url)
        with pytest.raises(StoreUnavailable, match="storage of bodies failed"):
            await payloads.delete_unreferenced(_no_task_exists, now=4e9, limit=10)
    assert 4 == len(requests)
