"""Encoding of a task's content for the store: msgpack, encrypted if keys are configured.

The texts of attempts (errors and excerpts of responses) and signing secrets are encrypted, too.

Encrypted content starts with a byte with which msgpack data never starts. A store can therefore
also contain content that was stored before keys were configured. New content is encrypted with the
first key. The other keys still decrypt older content, so that keys can be rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tarry.core.extras import require_extra
from tarry.errors import ConfigurationError, TarryError
from tarry.service.model import TaskContent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.fernet import MultiFernet

    from tarry.service.model import AttemptRecord

_encode_msgpack = msgspec.msgpack.Encoder().encode
_decode_content = msgspec.msgpack.Decoder(TaskContent).decode
_decode_texts = msgspec.msgpack.Decoder(tuple[str | None, str | None]).decode
_ENCRYPTED_PREFIX = b"\xc1"  # not used by msgpack


class DecryptionFailed(TarryError):
    """The content was encrypted with a key that is not configured."""


class Codec:
    """Encodes and decodes task content, large bodies, the texts of attempts and signing secrets.

    `keys` are Fernet keys, newest first.
    """

    _fernet: MultiFernet | None = None

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if not keys:
            return
        with require_extra("encryption needs the package cryptography", "service"):
            from cryptography.fernet import Fernet, InvalidToken, MultiFernet
        try:
            self._fernet = MultiFernet([Fernet(key) for key in keys])
        except ValueError as error:
            rule = "must be 32 random bytes in URL-safe base64: openssl rand -base64 32 | tr +/ -_"
            raise ConfigurationError("an encryption key", rule) from error
        self._invalid_token = InvalidToken

    def encrypt_body(self, body: bytes) -> bytes:
        """Encrypt a body for the `BodyStore`; return it unchanged if no keys are configured."""
        return body if self._fernet is None else self._fernet.encrypt(body)

    def decrypt_body(self, stored: bytes) -> bytes:
        """Decrypt a body from the `BodyStore`; return it unchanged if no key can decrypt it."""
        if self._fernet is None:
            return stored
        try:
            return self._fernet.decrypt(stored)
        except self._invalid_token:
            return stored  # not encrypted, or its key is missing: then the checksum is wrong

    def pack(self, content: TaskContent) -> bytes:
        """Encode the content of a task, and encrypt it if keys are configured."""
        if self._fernet is None:
            return _encode_msgpack(content)
        return _ENCRYPTED_PREFIX + self._fernet.encrypt(_encode_msgpack(content))

    def unpack(self, stored: bytes) -> TaskContent:
        """Decrypt and decode content; raise DecryptionFailed if its key is not configured."""
        if stored[:1] != _ENCRYPTED_PREFIX:
            return _decode_content(stored)
        return _decode_content(self._decrypt(stored[1:]))

    def encrypt_secret(self, secret: str) -> bytes:
        """Encrypt a signing secret for the store; only encode it if no keys are configured."""
        if self._fernet is None:
            return secret.encode()
        return _ENCRYPTED_PREFIX + self._fernet.encrypt(secret.encode())

    def decrypt_secret(self, stored: bytes) -> str:
        """Decrypt a signing secret; raise DecryptionFailed if its key is not configured."""
        is_encrypted = stored[:1] == _ENCRYPTED_PREFIX
        return (self._decrypt(stored[1:]) if is_encrypted else stored).decode()

    def encrypt_attempt(self, attempt: AttemptRecord) -> AttemptRecord:
        """Return an attempt for the store: its error and its excerpt are encrypted.

        The attempt is returned unchanged if it has neither, or if no keys are configured.
        """
        texts = (attempt.error_message, attempt.response_excerpt)
        if self._fernet is None or texts == (None, None):
            return attempt
        encrypted_texts = self._fernet.encrypt(_encode_msgpack(texts))
        return replace(
            attempt, error_message=None, response_excerpt=None, encrypted_texts=encrypted_texts
        )

    def decrypt_attempt(self, stored: AttemptRecord) -> AttemptRecord:
        """Decrypt an attempt of the store; raise DecryptionFailed if its key is not configured."""
        if stored.encrypted_texts is None:
            return stored
        error, excerpt = _decode_texts(self._decrypt(stored.encrypted_texts))
        return replace(stored, error_message=error, response_excerpt=excerpt, encrypted_texts=None)

    def _decrypt(self, encrypted: bytes) -> bytes:
        if self._fernet is None:
            msg = "the content is encrypted, but no encryption key is set (TARRY_ENCRYPTION_KEYS)"
            raise DecryptionFailed(msg)
        try:
            return self._fernet.decrypt(encrypted)
        except self._invalid_token as error:
            msg = "the content was encrypted with a key that is not configured"
            raise DecryptionFailed(msg) from error
