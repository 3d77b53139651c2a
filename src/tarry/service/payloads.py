"""Large bodies: kept in object storage, written before the row that names them, deleted after it.

A body of ours lies at `.tarry/PLACE/TENANT/TASK`, which is how a stray is known: its task is not
there. PLACE is a name that was drawn when the first body was kept, and `.tarry/places/PLACE` says
that these are its bodies: where it is missing, so is the place (a folder that is not mounted), and
no body counts as gone. A caller may also name an object of his own, under `TENANT/`, and it is
never deleted.

In a folder a body gets its name at once, without a temporary file: nobody reads it before its task
is there, and what a kill leaves of it is a stray like any other.
"""

from __future__ import annotations

import asyncio
import errno
import re
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tarry.errors import ConfigurationError, MissingExtra, StoreUnavailable, TarryError, short_repr
from tarry.service.files import make_folder, write_new

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tarry.service.model import TaskContent

_OURS = ".tarry"
_PLACES = ".tarry/places"
_MARK = b"The bodies of tasks lie here. Keep this with them.\n"
_LONGEST_REF = 1024
_STRAY_AFTER = timedelta(hours=1)
"""A body is written before its task: one that is younger may still get it."""
_PATIENCE = 30.0
"""Seconds that one call of the store may take, with its retries."""
_RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
_REQUEST_TIMEOUT = timedelta(seconds=20)
_UNLISTED = re.compile(r"[^#]*#[0-9]+")
"""Names that `obstore` keeps for itself in a folder."""
_NEVER_THERE = tuple(f"(os error {code})" for code in (errno.ENOTDIR, errno.ENAMETOOLONG))
"""How `obstore` ends what it says of a path that no file can have."""


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
                client: dict[str, Any] = {"timeout": _REQUEST_TIMEOUT}
                options: dict[str, Any] = {"retry_config": _RETRIES, "client_options": client}
                if endpoint:
                    options["config"] = {"endpoint": endpoint}
                    client["allow_http"] = endpoint.startswith("http:")
                self._store: Any = from_url(url, **options)
            else:
                folder = Path(url).absolute()
                make_folder(folder, 0o700)
                self._store = LocalStore(folder)
            is_folder = isinstance(self._store, LocalStore)
            self._folder = Path(self._store.prefix) if is_folder else None
        except Exception as error:
            msg = f"cannot use {short_repr(url)} for bodies: {_first_line(error)}"
            raise ConfigurationError(msg) from error

    async def put(self, tenant: str, task_id: str, body: bytes) -> tuple[str, bytes]:
        """Keep a body; return its name and its SHA-256."""
        ref = f"{_OURS}/{await _tried(self._known_place())}/{tenant}/{task_id}"
        await _tried(self._write(ref, self._seal(body)))
        return ref, sha256(body).digest()

    def check_ref(self, tenant: str, ref: str) -> str:
        """Return the name of a caller's object, or say what is wrong with it."""
        parts = ref.split("/")
        if not ref.isprintable() or len(ref.encode()) > _LONGEST_REF or {"", ".", ".."} & {*parts}:
            rule = f"must be a path such as {tenant}/invoices/7.json"
            raise ConfigurationError("bodyRef", rule, ref)
        if parts[0] != tenant or len(parts) == 1:
            raise ConfigurationError("bodyRef", f"must lie under {tenant}/", ref)
        if self._folder is not None and _UNLISTED.fullmatch(parts[-1]):
            rule = "cannot end with # and digits where bodies are files"
            raise ConfigurationError("bodyRef", rule, ref)
        return ref

    async def stamp(self, ref: str) -> tuple[int, str | None]:
        """Return the size and the tag of a caller's object, which must be there."""
        try:
            meta = await _found(self._obstore.head_async(self._store, ref))
        except FileNotFoundError:
            rule = f"names an object that is not there: {short_repr(ref)}"
            raise ConfigurationError("bodyRef", rule) from None
        if meta["size"] > self._most:
            rule = f"must name an object of at most {self._most} bytes, got {meta['size']}"
            raise ConfigurationError("bodyRef", rule)
        return meta["size"], meta["e_tag"]

    async def read(self, content: TaskContent) -> bytes:
        """Return the body of a task, whole and unchanged."""
        ref = content.body_ref
        assert ref is not None  # noqa: S101 - asked for with one
        try:
            found = await _found(self._obstore.get_async(self._store, ref))
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
                await _found(self._obstore.delete_async(self._store, ref))
            except FileNotFoundError:
                continue

    async def sweep(
        self, is_live: Callable[[str, str], Awaitable[bool]], now: float, limit: int
    ) -> int:
        """Delete bodies whose task was never added; `is_live` looks a task up by tenant and id."""
        before = datetime.fromtimestamp(now, UTC) - _STRAY_AFTER
        strays: list[str] = []
        batches = self._obstore.list(self._store, prefix=_OURS, chunk_size=limit)
        while (batch := await _tried(anext(batches, None))) is not None:
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
                batches = self._obstore.list(self._store, prefix=_PLACES)
                marks = [mark["path"] async for batch in batches for mark in batch]
                place = min((mark.rpartition("/")[2] for mark in marks), default=None)
            if place is None:
                place = uuid4().hex[:8]
                await self._write(f"{_PLACES}/{place}", _MARK)
            self._place = place
            return place

    async def _write(self, ref: str, data: bytes) -> None:
        if self._folder is None:
            await self._obstore.put_async(self._store, ref, data)
        else:
            await asyncio.to_thread(write_new, self._folder, ref, data)

    async def _check_place(self, ref: str) -> None:
        """Say so if a body is missing together with the place where it was put."""
        mark = f"{_PLACES}/{ref.split('/')[1]}"
        try:
            await _found(self._obstore.head_async(self._store, mark))
        except FileNotFoundError:
            self._place = None
            msg = (
                f"the bodies are away: neither {ref} is there nor {mark}, which was kept with it; "
                "mount their place or copy it back, or make that object if they are lost for good"
            )
            raise StoreUnavailable(msg) from None


async def _tried(work: Any) -> Any:
    """Await something of the object store; where that fails or takes too long, it is away."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return await work
    except Exception as error:
        said = _first_line(error) or f"nothing in {_PATIENCE:g} seconds"
        msg = f"the store of bodies does not answer: {said}"
        raise StoreUnavailable(msg) from error


async def _found(work: Any) -> Any:
    """Await something about one object; one that cannot be there is a `FileNotFoundError`."""
    try:
        return await _tried(work)
    except StoreUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError) or str(error).endswith(_NEVER_THERE):
            raise FileNotFoundError from error
        raise


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
