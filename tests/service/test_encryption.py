from __future__ import annotations

import pytest
from cryptography.fernet import Fernet

from tarry.errors import ConfigurationError
from tarry.service.encryption import DecryptionFailed, EncryptedCodec, PlainCodec
from tarry.service.model import TaskContent

CONTENT = TaskContent(url="https://a.example/x?token=hush", headers={"x": "1"}, body=b"\x00\xff")


def test_content_comes_back_as_it_was() -> None:
    """Packed or sealed, everything is there again."""
    for way in (PlainCodec(), EncryptedCodec([Fernet.generate_key().decode()])):
        assert CONTENT == way.unpack(way.pack(CONTENT))


def test_sealed_content_tells_nothing() -> None:
    """Neither the URL's secret nor the body can be read in a store."""
    stored = EncryptedCodec([Fernet.generate_key().decode()]).pack(CONTENT)

    assert b"hush" not in stored
    assert b"example" not in stored


def test_keys_are_rotated_by_putting_the_new_one_first() -> None:
    """What an old key has sealed is opened as long as the key is there."""
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    stored = EncryptedCodec([old]).pack(CONTENT)

    assert CONTENT == EncryptedCodec([new, old]).unpack(stored)
    with pytest.raises(DecryptionFailed, match="not among the present ones"):
        EncryptedCodec([new]).unpack(stored)


def test_what_was_packed_before_there_were_keys_is_read() -> None:
    """Encryption can be turned on over data that is there."""
    assert CONTENT == EncryptedCodec([Fernet.generate_key().decode()]).unpack(
        PlainCodec().pack(CONTENT)
    )


def test_sealed_content_without_any_key_says_what_is_missing() -> None:
    """Encryption that was turned off leaves a clear error."""
    stored = EncryptedCodec([Fernet.generate_key().decode()]).pack(CONTENT)

    with pytest.raises(DecryptionFailed, match="TARRY_ENCRYPTION_KEYS"):
        PlainCodec().unpack(stored)


def test_key_that_is_none_is_refused() -> None:
    """The error says what a key is, and does not repeat what was given."""
    with pytest.raises(ConfigurationError, match="32 random bytes") as caught:
        EncryptedCodec(["hush"])
    assert "hush" not in str(caught.value)
