"""Large task bodies in object storage (or a folder). A `ref` is the path of a body in the storage.

A body is written before the row of its task, and deleted after that row. Its path is
`.tarry/STORAGE_ID/TENANT/TASK_ID`, so that the task of a body can be looked up by the path.
STORAGE_ID is generated when the first body is stored, together with the marker object
`.tarry/places/STORAGE_ID`. If a body and its marker are both missing, the storage itself is missing
(for example, a folder is not mounted), and the task waits. If only the body is missing, the task
fails. A task may instead refer to a caller's object under `TENANT/`, which is never deleted.

In a folder, a body is written directly to its final path. A temporary file is not needed, because
no task refers to the body yet, and an incomplete file is deleted like any body without a task.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tarry.core.extras import require_extra
from tarry.errors import ConfigurationError, StoreUnavailable, TarryError, short_repr
from tarry.service.redaction import redact_user_info

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tarry.service.model import TaskContent

_ROOT = ".tarry"
_MARKER_FOLDER = ".tarry/places"
_CHECK_REF = ".tarry/check"  # not a body, which has four parts in its path
_MARKER_TEXT = b"tarry stores request bodies in this storage. Keep this object with the bodies.\n"
_MAX_REF_BYTES = 1024
_MIN_UNREFERENCED_AGE = timedelta(hours=1)
"""A younger body may still get its task, which is stored after the body."""
_CALL_TIMEOUT_S = 30.0
"""Timeout of one storage call including its retries."""
_RETRY_CONFIG = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
_REQUEST_TIMEOUT = timedelta(seconds=20)
_RESERVED_NAME = re.compile(r"[^#]*#[0-9]+")
"""File names that `obstore` uses internally in a folder, and that it does not list."""
_INVALID_PATH_ERRORS = tuple(f"(os error {code})" for code in (errno.ENOTDIR, errno.ENAMETOOLONG))
"""Endings of the messages of `obstore` for a path that no file can have."""


class BodyStoreUnavailable(StoreUnavailable):
    """The storage of bodies is unreachable, full, missing or denies access. Try again later."""


class BodyUnavailable(TarryError):
    """No attempt can be made, because the body is missing, damaged or changed."""


class BodyStore:
    """Stores bodies at `url`: a folder, or a URL that `obstore` supports (s3://, gs://, az://).

    `endpoint` is the URL of an S3-compatible server. Credentials come from the environment
    variables of the provider. `max_object_bytes` limits objects of callers; `encrypt` and `decrypt`
    are applied to the bodies that `put` stores.
    """

    def __init__(
        self,
        url: str,
        *,
        max_object_bytes: int,
        endpoint: str = "",
        encrypt: Callable[[bytes], bytes] = bytes,
        decrypt: Callable[[bytes], bytes] = bytes,
    ) -> None:
        with require_extra("large bodies need obstore", "service"):
            import obstore
            from obstore.store import LocalStore, from_url
        self._obstore: Any = obstore
        self._max_object_bytes = max_object_bytes
        self._storage_id: str | None = None
        self._storage_id_lock = asyncio.Lock()
        self._missing_ref: str | None = None
        """A body whose storage was missing when `read` was called."""
        self._encrypt, self._decrypt = encrypt, decrypt
        try:
            if "://" in url:
                client: dict[str, Any] = {"timeout": _REQUEST_TIMEOUT}
                options: dict[str, Any] = {"retry_config": _RETRY_CONFIG, "client_options": client}
                if endpoint:
                    options["config"] = {"endpoint": endpoint}
                    client["allow_http"] = endpoint.startswith("http:")
                self._store: Any = from_url(url, **options)
            else:
                folder = Path(url).absolute()
                create_folder(folder, 0o700)
                self._store = LocalStore(folder)
            is_folder = isinstance(self._store, LocalStore)
            self._folder = Path(self._store.prefix) if is_folder else None
        except Exception as error:
            shown_url = short_repr(redact_user_info(url))
            reason = redact_user_info(_first_line(error))
            fix = "Set bodies to a folder that this user can write to, or to object storage"
            msg = f"cannot use {shown_url} for bodies: {reason}. {fix}"
            raise ConfigurationError(msg) from error

    async def check(self) -> None:
        """Write a small object; raise BodyStoreUnavailable if bodies cannot be stored.

        Also raised while the storage of a body that could not be read is still missing.
        """
        if self._missing_ref is not None:
            await self._check_storage(self._missing_ref)
            self._missing_ref = None
        await _call(self._obstore.put_async(self._store, _CHECK_REF, _MARKER_TEXT))

    async def put(self, tenant: str, task_id: str, body: bytes) -> tuple[str, bytes]:
        """Store a body; return its path and its SHA-256."""
        ref = f"{_ROOT}/{await _call(self._get_storage_id())}/{tenant}/{task_id}"
        await _call(self._write(ref, self._encrypt(body)))
        return ref, sha256(body).digest()

    def check_ref(self, tenant: str, ref: str) -> str:
        """Return `ref` if it can be the path of a caller's object, or raise ConfigurationError."""
        parts = ref.split("/")
        is_short_text = ref.isprintable() and len(ref.encode()) <= _MAX_REF_BYTES
        if not is_short_text or {"", ".", ".."} & {*parts}:
            rule = f"must be a path such as {tenant}/invoices/7.json"
            raise ConfigurationError("bodyRef", rule, ref)
        if parts[0] != tenant or len(parts) == 1:
            raise ConfigurationError("bodyRef", f"must start with {tenant}/", ref)
        if self._folder is not None and _RESERVED_NAME.fullmatch(parts[-1]):
            rule = "must not end with # and digits if bodies are stored in a folder"
            raise ConfigurationError("bodyRef", rule, ref)
        return ref

    async def head_object(self, ref: str) -> tuple[int, str | None]:
        """Return size and ETag of an object; raise ConfigurationError if missing or too large."""
        try:
            meta = await _call_existing(self._obstore.head_async(self._store, ref))
            # Later, `read` compares the ETag, so a link that replaces the file is detected there.
            if self._folder is not None:
                check = asyncio.to_thread(check_no_links, self._folder, ref, meta["e_tag"])
                await _call_existing(check)
        except FileNotFoundError:
            rule = f"names an object that does not exist: {short_repr(ref)}"
            raise ConfigurationError("bodyRef", rule) from None
        if meta["size"] > (limit := self._max_object_bytes):
            limit_text = f"{limit} bytes (setting max_body_bytes)"
            rule = f"must name an object of at most {limit_text}, got {meta['size']}"
            raise ConfigurationError("bodyRef", rule)
        return meta["size"], meta["e_tag"]

    async def read(self, content: TaskContent) -> bytes:
        """Return the body of a task; raise BodyUnavailable if it is missing, damaged or changed."""
        ref = content.body_ref
        assert ref is not None  # noqa: S101 - only called for a stored body
        has_checksum = content.checksum is not None  # if not: the object belongs to the caller
        try:
            stored_object = await _call_existing(self._obstore.get_async(self._store, ref))
        except FileNotFoundError:
            if has_checksum:
                await self._check_storage(ref)
            raise BodyUnavailable(f"the body {ref} no longer exists") from None
        if not has_checksum:
            meta = stored_object.meta
            if (meta["size"], meta["e_tag"]) != (content.body_size, content.etag):
                raise BodyUnavailable(f"the body {ref} was changed after the task was accepted")
            return bytes(await _call(stored_object.bytes_async()))
        body = self._decrypt(bytes(await _call(stored_object.bytes_async())))
        if sha256(body).digest() != content.checksum:
            msg = f"the body {ref} is damaged, or was encrypted with a key that is not configured"
            raise BodyUnavailable(msg)
        return body

    async def delete(self, refs: Sequence[str]) -> None:
        """Delete bodies; a body that does not exist is ignored."""
        for ref in refs:
            try:
                await _call_existing(self._obstore.delete_async(self._store, ref))
            except FileNotFoundError:
                continue

    async def delete_unreferenced(
        self, task_exists: Callable[[str, str], Awaitable[bool]], now: float, limit: int
    ) -> int:
        """Delete bodies without a task, at most about `limit`; return how many. `now`: epoch s."""
        modified_before = datetime.fromtimestamp(now, UTC) - _MIN_UNREFERENCED_AGE
        unreferenced: list[str] = []
        batches = self._obstore.list(self._store, prefix=_ROOT, chunk_size=limit)
        while (batch := await _call(anext(batches, None))) is not None:
            for entry in batch:
                match entry["path"].split("/"):
                    case [_, _, tenant, task_id] if entry["last_modified"] < modified_before:
                        if not await task_exists(tenant, task_id):
                            unreferenced.append(entry["path"])
                    case _:
                        pass  # a young body, a marker, or another object
            if len(unreferenced) >= limit:
                break
        await self.delete(unreferenced)
        return len(unreferenced)

    async def _get_storage_id(self) -> str:
        """Return the id of this storage; if it has none, generate an id and write its marker."""
        async with self._storage_id_lock:
            storage_id = self._storage_id
            if storage_id is None:
                batches = self._obstore.list(self._store, prefix=_MARKER_FOLDER)
                markers = [marker["path"] async for batch in batches for marker in batch]
                storage_id = min((path.rpartition("/")[2] for path in markers), default=None)
            if storage_id is None:
                storage_id = uuid4().hex[:8]
                await self._write(f"{_MARKER_FOLDER}/{storage_id}", _MARKER_TEXT)
            self._storage_id = storage_id
            return storage_id

    async def _write(self, ref: str, data: bytes) -> None:
        if self._folder is None:
            await self._obstore.put_async(self._store, ref, data)
        else:
            await asyncio.to_thread(create_file, self._folder, ref, data)

    async def _check_storage(self, ref: str) -> None:
        """Raise BodyStoreUnavailable if the marker of the missing body `ref` is missing, too."""
        marker = f"{_MARKER_FOLDER}/{ref.split('/')[1]}"
        try:
            await _call_existing(self._obstore.head_async(self._store, marker))
        except FileNotFoundError:
            self._storage_id, self._missing_ref = None, ref
            msg = (
                f"the storage of bodies is missing: neither {ref} nor its marker {marker} exists; "
                "mount or restore the storage, or create an empty object "
                "at the path of the marker to declare the bodies lost"
            )
            raise BodyStoreUnavailable(msg) from None


async def _call(operation: Any) -> Any:
    """Await a storage operation; raise BodyStoreUnavailable if it fails or takes too long."""
    try:
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            return await operation
    except Exception as error:
        cause = _first_line(error) or f"no response within {_CALL_TIMEOUT_S:g} seconds"
        raise BodyStoreUnavailable(f"the storage of bodies failed: {cause}") from error


async def _call_existing(operation: Any) -> Any:
    """Await an operation on one object; raise FileNotFoundError if the object does not exist."""
    try:
        return await _call(operation)
    except BodyStoreUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError) or str(error).endswith(_INVALID_PATH_ERRORS):
            raise FileNotFoundError from error
        raise


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def create_file(folder: Path, ref: str, data: bytes) -> None:
    """Create a file that only its owner can read; `ref` is its path relative to `folder`.

    Raise FileExistsError if the file exists. Every folder of the path is synced each time, because
    another process may have created a folder and not synced it yet.
    """
    path = folder / ref
    parents = path.parents[: len(path.relative_to(folder).parts)]
    for parent in reversed(parents):
        create_folder(parent, 0o700)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            for parent in parents:
                sync_folder(parent)
        except OSError:
            path.unlink()
            raise


def check_no_links(folder: Path, ref: str, etag: str) -> None:
    """Raise FileNotFoundError if the file of an ETag was reached through a symbolic link.

    A link could lead to a file outside `folder`. `etag` is computed by `obstore`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        for name in ref.split("/"):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would block
            parent, descriptor = descriptor, os.open(name, flags, dir_fd=descriptor)
            os.close(parent)
        status = os.fstat(descriptor)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileNotFoundError from error
        raise
    finally:
        os.close(descriptor)
    if f"{status.st_ino:x}-{status.st_mtime_ns // 1000:x}-" not in etag:
        raise FileNotFoundError


def create_folder(folder: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents."""
    if not folder.is_dir():
        create_folder(folder.parent)
        folder.mkdir(mode, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make new and renamed entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
