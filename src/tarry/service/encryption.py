"""Encoding of a task's content for the store: msgpack, encrypted when a key is configured.

Encrypted content starts with a byte that msgpack never uses, so one store can contain plain and
encrypted content, for example after the first key was configured. New content is encrypted with the
first key. All configured keys can decrypt, so that keys can be rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.errors import ConfigurationError, MissingExtra, TarryError
from tarry.service.model import TaskContent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.fernet import MultiFernet

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(TaskContent).decode
_ENCRYPTED_PREFIX = b"\xc1"  # the only byte with which msgpack data never starts


class DecryptionFailed(TarryError):
    """The content was encrypted with a key that is not configured."""


class Codec:
    """Encodes content, and encrypts it if there are `keys`: Fernet keys, the newest first."""

    _fernet: MultiFernet | None = None

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if not keys:
            return
        try:
            from cryptography.fernet import Fernet, InvalidToken, MultiFernet
        except ImportError as error:
            msg = "encryption needs the package cryptography: pip install 'tarry[service]'"
            raise MissingExtra(msg) from error
        try:
            self._fernet = MultiFernet([Fernet(key) for key in keys])
        except ValueError as error:
            rule = "must be 32 random bytes in URL-safe base64: openssl rand -base64 32 | tr +/ -_"
            raise ConfigurationError("an encryption key", rule) from error
        self._invalid_token = InvalidToken

    def encrypt(self, body: bytes) -> bytes:
        """Return a large body as it is stored."""
        return body if self._fernet is None else self._fernet.encrypt(body)

    def decrypt(self, stored: bytes) -> bytes:
        """Return a large body. A body that was stored without encryption is returned unchanged."""
        if self._fernet is None:
            return stored
        try:
            return self._fernet.decrypt(stored)
        except self._invalid_token:
            return stored  # the caller detects a wrong key by the checksum

    def pack(self, content: TaskContent) -> bytes:
        """Return the content of a task, encoded for the store."""
        if self._fernet is None:
            return _pack(content)
        return _ENCRYPTED_PREFIX + self._fernet.encrypt(_pack(content))

    def unpack(self, stored: bytes) -> TaskContent:
        """Decode the content of a task; raise DecryptionFailed if its key is not configured."""
        if stored[:1] != _ENCRYPTED_PREFIX:
            return _unpack(stored)
        if self._fernet is None:
            msg = "the content is encrypted, but no encryption key is set (TARRY_ENCRYPTION_KEYS)"
            raise DecryptionFailed(msg)
        try:
            return _unpack(self._fernet.decrypt(stored[1:]))
        except self._invalid_token as error:
            msg = "the content was encrypted with a key that is not configured"
            raise DecryptionFailed(msg) from error
