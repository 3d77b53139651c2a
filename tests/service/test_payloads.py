from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from cryptography.fernet import Fernet

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.model import Content
from tarry.service.payloads import BodyUnusable, Payloads
from tarry.service.sealing import Sealed
from tests.service.payload_cases import CASES, Case


@pytest.mark.parametrize("place", ["folder", "memory"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bodies(case: Case, place: str, tmp_path: Path) -> None:
    """What holds wherever bodies are kept."""
    url = str(tmp_path / "bodies") if place == "folder" else "memory:///"
    asyncio.run(case(Payloads(url, most_bytes=1 << 20)))


@pytest.mark.parametrize(
    "ref", ["", "/etc/passwd", "../x", "default/../x", "default//x", "default", "other/x", "a\n/b"]
)
def test_name_outside_of_the_tenant_is_refused(ref: str) -> None:
    """A caller reaches its own objects only."""
    payloads = Payloads("memory:///", most_bytes=10)
    with pytest.raises(ConfigurationError, match="bodyRef must"):
        payloads.check_ref("default", ref)


def test_object_that_is_too_large_is_refused() -> None:
    """What could not be sent is not accepted."""

    async def main() -> None:
        payloads = Payloads("memory:///", most_bytes=10)
        await payloads._obstore.put_async(payloads._store, "default/x", b"x" * 11)
        with pytest.raises(ConfigurationError, match="at most 10 bytes, got 11"):
            await payloads.stamp("default/x")

    asyncio.run(main())


def test_address_that_nobody_knows_is_refused() -> None:
    """The error names the setting."""
    with pytest.raises(ConfigurationError, match="bodies: cannot use"):
        Payloads("ftp://x", most_bytes=10)


def test_store_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    """A folder that cannot be written is trouble of our own."""
    folder = tmp_path / "bodies"
    payloads = Payloads(str(folder), most_bytes=10)
    (folder / ".tarry").write_text("a file, where a folder should be")
    with pytest.raises(StoreUnavailable, match="does not answer"):
        asyncio.run(payloads.put("default", "t", b"x"))


def test_encrypted_bodies_tell_nothing_and_are_read_back(tmp_path: Path) -> None:
    """Also those that were kept before there was a key; with another key they are unusable."""

    async def main() -> None:
        folder = str(tmp_path / "bodies")
        plain = Payloads(folder, most_bytes=100)
        early, checksum = await plain.put("default", "early", b"hush hush")
        way = Sealed([Fernet.generate_key().decode()])
        sealed = Payloads(folder, most_bytes=100, seal=way.seal, open=way.open)
        late, _ = await sealed.put("default", "late", b"hush hush")
        assert b"hush" not in (tmp_path / "bodies" / late).read_bytes()
        for ref in (early, late):
            content = Content(url="", body_ref=ref, body_size=9, checksum=checksum)
            assert b"hush hush" == await sealed.read(content)
        with pytest.raises(BodyUnusable, match="key that is not here"):
            await plain.read(Content(url="", body_ref=late, body_size=9, checksum=checksum))

    asyncio.run(main())


def test_folder_is_nobody_elses_business(tmp_path: Path) -> None:
    """Others on the machine cannot look in."""
    Payloads(str(tmp_path / "bodies"), most_bytes=10)

    assert 0o700 == (tmp_path / "bodies").stat().st_mode & 0o777


def test_folder_that_is_not_mounted_loses_nothing(tmp_path: Path) -> None:
    """Bodies wait for their folder; those put meanwhile wait likewise, and both can be joined."""
    folder, away = tmp_path / "bodies", tmp_path / "away"

    async def main() -> None:
        before = Payloads(str(folder), most_bytes=100)
        refs = [await before.put("default", "t1", b"one")]
        folder.rename(away)
        payloads = Payloads(str(folder), most_bytes=100)
        contents = [Content(url="", body_ref=ref, checksum=checksum) for ref, checksum in refs]
        for reader in (before, payloads):
            with pytest.raises(StoreUnavailable, match="mount their place or copy it back"):
                await reader.read(contents[0])
        ref, checksum = await payloads.put("default", "t2", b"two")
        contents.append(Content(url="", body_ref=ref, checksum=checksum))
        folder.rename(tmp_path / "meanwhile")
        away.rename(folder)
        assert b"one" == await payloads.read(contents[0])
        with pytest.raises(StoreUnavailable, match="mount their place or copy it back"):
            await payloads.read(contents[1])
        shutil.copytree(tmp_path / "meanwhile", folder, dirs_exist_ok=True)
        assert [b"one", b"two"] == [await payloads.read(content) for content in contents]

    asyncio.run(main())


def test_place_keeps_its_name(tmp_path: Path) -> None:
    """Many first bodies at once, and those of another start or process, go to the same place."""

    async def main() -> set[str]:
        first, second = (Payloads(str(tmp_path), most_bytes=100) for _ in range(2))
        put = await asyncio.gather(*(first.put("default", f"t{n}", b"x") for n in range(9)))
        put.append(await second.put("default", "t", b"x"))
        return {ref.split("/")[1] for ref, _ in put}

    assert 1 == len(asyncio.run(main()))
