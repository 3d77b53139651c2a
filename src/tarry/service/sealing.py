"""How a task's content lies in a store: packed, and encrypted when there is a key.

A sealed content begins with a byte that a packed one never has, so that both can lie side by side
while keys are introduced. The first key seals; all of them open, which is how keys are rotated.
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
_SEALED = b"\xc1"
"""The one byte that msgpack never uses."""


class CannotOpen(TarryError):
    """A content was sealed with a key that is not here."""


class Plain:
    """Packs, and seals nothing."""

    def seal(self, body: bytes) -> bytes:
        """Return a large body as it is kept."""
        return body

    def open(self, kept: bytes) -> bytes:
        """Return what `seal` was given."""
        return kept

    def pack(self, content: TaskContent) -> bytes:
        """Return a content as a store keeps it."""
        return _pack(content)

    def unpack(self, stored: bytes) -> TaskContent:
        """Return what `pack` was given."""
        if stored[:1] == _SEALED:
            msg = "this content is encrypted, and no encryption key is set (TARRY_ENCRYPTION_KEYS)"
            raise CannotOpen(msg)
        return _unpack(stored)


class Sealed:
    """Packs and encrypts with Fernet keys, the newest first."""

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
        self._invalid = InvalidToken

    def seal(self, body: bytes) -> bytes:
        """Return a large body as it is kept."""
        return self._fernet.encrypt(body)

    def open(self, kept: bytes) -> bytes:
        """Return what `seal` was given; what was kept before there were keys is as it is."""
        try:
            return self._fernet.decrypt(kept)
        except self._invalid:
            return kept  # its checksum says whether it is what was accepted

    def pack(self, content: TaskContent) -> bytes:
        """Return a content as a store keeps it."""
        return _SEALED + self._fernet.encrypt(_pack(content))

    def unpack(self, stored: bytes) -> TaskContent:
        """Return what `pack` was given, by whichever key."""
        if stored[:1] != _SEALED:
            return _unpack(stored)
        try:
            return _unpack(self._fernet.decrypt(stored[1:]))
        except self._invalid as error:
            msg = "this content was encrypted with a key that is not among the present ones"
            raise CannotOpen(msg) from error
