"""Large bodies: kept in object storage, written before the row that names them, deleted after it.

A body of ours lies at `.tarry/PLACE/TENANT/TASK`, which is how a stray is known: its task is not
there. PLACE is a name that was drawn when the first body was kept, and `.tarry/places/PLACE` says
that these are its bodies: where it is missing, so is the place (a folder that is not mounted), and
no body counts as gone. A caller may also name an object of his own, under `TENANT/`, and it is
never deleted.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tarry.core.checks import short
from tarry.errors import ConfigurationError, MissingExtra, StoreUnavailable, TarryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tarry.service.model import Content

_OURS = ".tarry"
_PLACES = ".tarry/places"
_MARK = b"The bodies of tasks lie here. Keep this with them.\n"
_LONGEST_REF = 1024
_STRAY_AFTER = timedelta(hours=1)
"""A body is written before its task: one that is younger may still get it."""


class BodyUnusable(TarryError):
    """A body is gone, or is not the one that was accepted; no attempt can be made with it."""


class Payloads:
    """Bodies at `url`: a folder, or an address that `obstore` knows (s3://, gs://, az://).

    `endpoint` is the server of an S3 that is not Amazon's. Keys come from the usual variables.
    `seal` and `open` encrypt and decrypt the bodies that are ours.
    """

    def __init__(
        self,
        url: str,
        *,
        most_bytes: int,
        endpoint: str = "",
        seal: Callable[[bytes], bytes] = bytes,
        open: Callable[[bytes], bytes] = bytes,  # noqa: A002 - the other half of `seal`
    ) -> None:
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            msg = "large bodies need obstore: pip install 'tarry[service]'"
            raise MissingExtra(msg) from error
        self._obstore: Any = obstore
        self._most = most_bytes
        self._place: str | None = None
        self._finding = asyncio.Lock()
        self._seal, self._open = seal, open
        try:
            if "://" in url:
                options: dict[str, Any] = {}
                if endpoint:
                    options["config"] = {"endpoint": endpoint}
                    options["client_options"] = {"allow_http": endpoint.startswith("http:")}
                self._store: Any = from_url(url, **options)
            else:
                Path(url).mkdir(mode=0o700, parents=True, exist_ok=True)
                self._store = LocalStore(Path(url).absolute())
        except Exception as error:
            msg = f"bodies: cannot use {short(url)}: {_first_line(error)}"
            raise ConfigurationError(msg) from error

    async def put(self, tenant: str, task_id: str, body: bytes) -> tuple[str, bytes]:
        """Keep a body; return its name and its SHA-256."""
        ref = f"{_OURS}/{await self._known_place()}/{tenant}/{task_id}"
        await _tried(self._obstore.put_async(self._store, ref, self._seal(body)))
        return ref, sha256(body).digest()

    def check_ref(self, tenant: str, ref: str) -> str:
        """Return the name of a caller's object, or say what is wrong with it."""
        parts = ref.split("/")
        if not ref.isprintable() or len(ref) > _LONGEST_REF or {"", ".", ".."} & {*parts}:
            msg = f"bodyRef must be a path such as {tenant}/invoices/7.json, got {short(ref)}"
            raise ConfigurationError(msg)
        if parts[0] != tenant or len(parts) == 1:
            msg = f"bodyRef must lie under {tenant}/, got {short(ref)}"
            raise ConfigurationError(msg)
        return ref

    async def stamp(self, ref: str) -> tuple[int, str | None]:
        """Return the size and the tag of a caller's object, which must be there."""
        try:
            meta = await _tried(self._obstore.head_async(self._store, ref))
        except FileNotFoundError:
            msg = f"bodyRef names an object that is not there: {short(ref)}"
            raise ConfigurationError(msg) from None
        if meta["size"] > self._most:
            msg = f"bodyRef must name an object of at most {self._most} bytes, got {meta['size']}"
            raise ConfigurationError(msg)
        return meta["size"], meta["e_tag"]

    async def read(self, content: Content) -> bytes:
        """Return the body of a task, whole and unchanged."""
        ref = content.body_ref
        assert ref is not None  # noqa: S101 - asked for with one
        try:
            found = await _tried(self._obstore.get_async(self._store, ref))
        except FileNotFoundError:
            if content.checksum is not None:
                await self._check_place(ref)
            msg = f"the body {ref} is gone"
            raise BodyUnusable(msg) from None
        if content.checksum is None:
            if (found.meta["size"], found.meta["e_tag"]) != (content.body_size, content.etag):
                msg = f"the body {ref} was changed after the task was accepted"
                raise BodyUnusable(msg)
            return bytes(await _tried(found.bytes_async()))
        body = self._open(bytes(await _tried(found.bytes_async())))
        if sha256(body).digest() != content.checksum:
            msg = f"the body {ref} is damaged, or was encrypted with a key that is not here"
            raise BodyUnusable(msg)
        return body

    async def delete(self, refs: Sequence[str]) -> None:
        """Delete bodies of ours; one that is gone already is no error."""
        for ref in refs:
            try:
                await _tried(self._obstore.delete_async(self._store, ref))
            except FileNotFoundError:
                continue

    async def sweep(
        self, is_live: Callable[[str, str], Awaitable[bool]], now: float, limit: int
    ) -> int:
        """Delete bodies whose task was never added; `is_live` looks a task up by tenant and id."""
        before = datetime.fromtimestamp(now, UTC) - _STRAY_AFTER
        strays: list[str] = []
        async for batch in self._obstore.list(self._store, prefix=_OURS, chunk_size=limit):
            for found in batch:
                match found["path"].split("/"):
                    case [_, _, tenant, task_id] if found["last_modified"] < before:
                        if not await is_live(tenant, task_id):
                            strays.append(found["path"])
                    case _:
                        pass  # too young, the mark of a place, or no body of ours
            if len(strays) >= limit:
                break
        await self.delete(strays)
        return len(strays)

    async def _known_place(self) -> str:
        """Return the name of the place; one that has none gets it now."""
        async with self._finding:
            place = self._place
            if place is None:
                marks = await _tried(_all(self._obstore.list(self._store, prefix=_PLACES)))
                place = min((mark["path"].rpartition("/")[2] for mark in marks), default=None)
            if place is None:
                place = uuid4().hex[:8]
                await _tried(self._obstore.put_async(self._store, f"{_PLACES}/{place}", _MARK))
            self._place = place
            return place

    async def _check_place(self, ref: str) -> None:
        """Say so if a body is missing together with the place where it was put."""
        mark = f"{_PLACES}/{ref.split('/')[1]}"
        try:
            await _tried(self._obstore.head_async(self._store, mark))
        except FileNotFoundError:
            self._place = None
            msg = (
                f"the bodies are away: neither {ref} is there nor {mark}, which was kept with it; "
                "mount their place or copy it back, or make that object if they are lost for good"
            )
            raise StoreUnavailable(msg) from None


async def _all(batches: Any) -> list[Any]:
    return [found async for batch in batches for found in batch]


async def _tried(work: Any) -> Any:
    """Await something of the object store; what is not about one object is a store that is away."""
    try:
        return await work
    except FileNotFoundError:
        raise
    except Exception as error:
        msg = f"the store of bodies does not answer: {_first_line(error)}"
        raise StoreUnavailable(msg) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
