from __future__ import annotations

import pytest
from cryptography.fernet import Fernet

from tarry.errors import ConfigurationError
from tarry.service.encryption import Codec, DecryptionFailed
from tarry.service.model import TaskContent

CONTENT = TaskContent(url="https://a.example/x?token=hush", headers={"x": "1"}, body=b"\x00\xff")


def test_round_trip() -> None:
    """Plain and encrypted content decode to the original."""
    for way in (Codec(), Codec([Fernet.generate_key().decode()])):
        assert CONTENT == way.unpack(way.pack(CONTENT))


def test_encrypted_content_is_unreadable() -> None:
    """The stored bytes show neither the URL nor the body."""
    stored = Codec([Fernet.generate_key().decode()]).pack(CONTENT)

    assert b"hush" not in stored
    assert b"example" not in stored


def test_key_rotation() -> None:
    """Content of an old key can be decrypted while that key is configured."""
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    stored = Codec([old]).pack(CONTENT)

    assert CONTENT == Codec([new, old]).unpack(stored)
    with pytest.raises(DecryptionFailed, match="a key that is not configured"):
        Codec([new]).unpack(stored)


def test_plain_content_is_read_with_keys() -> None:
    """Encryption can be turned on for existing data."""
    assert CONTENT == Codec([Fernet.generate_key().decode()]).unpack(Codec().pack(CONTENT))


def test_encrypted_content_without_keys() -> None:
    """The error names the missing setting."""
    stored = Codec([Fernet.generate_key().decode()]).pack(CONTENT)

    with pytest.raises(DecryptionFailed, match="TARRY_ENCRYPTION_KEYS"):
        Codec().unpack(stored)


def test_invalid_key_is_rejected() -> None:
    """The error describes a valid key and does not show the invalid one."""
    with pytest.raises(ConfigurationError, match="32 random bytes") as caught:
        Codec(["hush"])
    assert "hush" not in str(caught.value)
