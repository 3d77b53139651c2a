"""Encoding of a task's content for the store: msgpack, encrypted when a key is configured.

Encrypted content starts with a byte that msgpack never uses, so plain and encrypted content can be
stored side by side while keys are introduced. The first key encrypts and all keys decrypt, which is
how keys are rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.errors import ConfigurationError, MissingExtra, TarryError
from tarry.service.model import TaskContent

if TYPE_CHECKING:
    from collections.abc import Sequence

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(TaskContent).decode
_ENCRYPTED_PREFIX = b"\xc1"
"""The one byte that msgpack never uses."""


class DecryptionFailed(TarryError):
    """The content was encrypted with a key that is not configured."""


class PlainCodec:
    """Encodes content without encryption."""

    def encrypt(self, body: bytes) -> bytes:
        """Return a large body unchanged."""
        return body

    def decrypt(self, stored: bytes) -> bytes:
        """Return a large body unchanged."""
        return stored

    def pack(self, content: TaskContent) -> bytes:
        """Return the stored form of a content."""
        return _pack(content)

    def unpack(self, stored: bytes) -> TaskContent:
        """Return the content of its stored form; raise DecryptionFailed if it is encrypted."""
        if stored[:1] == _ENCRYPTED_PREFIX:
            msg = "this content is encrypted, and no encryption key is set (TARRY_ENCRYPTION_KEYS)"
            raise DecryptionFailed(msg)
        return _unpack(stored)


class EncryptedCodec:
    """Encodes and encrypts content with Fernet keys, the newest key first."""

    def __init__(self, keys: Sequence[str]) -> None:
        try:
            from cryptography.fernet import Fernet, InvalidToken, MultiFernet
        except ImportError as error:
            msg = "encryption keys need cryptography: pip install 'tarry[service]'"
            raise MissingExtra(msg) from error
        try:
            self._fernet = MultiFernet([Fernet(key) for key in keys])
        except ValueError as error:
            rule = "must be 32 random bytes in URL-safe base64: openssl rand -base64 32 | tr +/ -_"
            raise ConfigurationError("an encryption key", rule) from error
        self._invalid_token = InvalidToken

    def encrypt(self, body: bytes) -> bytes:
        """Return a large body encrypted."""
        return self._fernet.encrypt(body)

    def decrypt(self, stored: bytes) -> bytes:
        """Return a large body decrypted; one that was stored before encryption is unchanged."""
        try:
            return self._fernet.decrypt(stored)
        except self._invalid_token:
            return stored  # the caller compares the checksum with that of the accepted body

    def pack(self, content: TaskContent) -> bytes:
        """Return the stored, encrypted form of a content."""
        return _ENCRYPTED_PREFIX + self._fernet.encrypt(_pack(content))

    def unpack(self, stored: bytes) -> TaskContent:
        """Return the content of its stored form; raise DecryptionFailed without its key."""
        if stored[:1] != _ENCRYPTED_PREFIX:
            return _unpack(stored)
        try:
            return _unpack(self._fernet.decrypt(stored[1:]))
        except self._invalid_token as error:
            msg = "this content was encrypted with a key that is not among the present ones"
            raise DecryptionFailed(msg) from error
