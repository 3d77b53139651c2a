from __future__ import annotations

import pytest
from cryptography.fernet import Fernet

from tarry.errors import ConfigurationError
from tarry.service.encryption import Codec, DecryptionFailed
from tarry.service.model import TaskContent

CONTENT = TaskContent(url="https://a.example/x?token=hush", headers={"x": "1"}, body=b"\x00\xff")


def test_packed_content_is_unpacked_unchanged() -> None:
    """Plain and encrypted content is unpacked to the original."""
    for codec in (Codec(), Codec([Fernet.generate_key().decode()])):
        assert CONTENT == codec.unpack(codec.pack(CONTENT))


def test_encrypted_content_is_unreadable() -> None:
    """The stored bytes contain no part of the URL in plain text."""
    stored = Codec([Fernet.generate_key().decode()]).pack(CONTENT)

    assert b"hush" not in stored
    assert b"example" not in stored


def test_content_of_an_old_key_can_be_decrypted() -> None:
    """Content can be decrypted while the key that encrypted it is configured."""
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    stored = Codec([old]).pack(CONTENT)

    assert CONTENT == Codec([new, old]).unpack(stored)
    with pytest.raises(DecryptionFailed, match="a key that is not configured"):
        Codec([new]).unpack(stored)


def test_plain_content_can_be_read_with_keys() -> None:
    """Content that was stored before encryption was enabled can be read."""
    assert CONTENT == Codec([Fernet.generate_key().decode()]).unpack(Codec().pack(CONTENT))


def test_encrypted_content_without_keys_is_an_error() -> None:
    """The error names the variable of the missing setting."""
    stored = Codec([Fernet.generate_key().decode()]).pack(CONTENT)

    with pytest.raises(DecryptionFailed, match="TARRY_ENCRYPTION_KEYS"):
        Codec().unpack(stored)


def test_invalid_key_is_rejected() -> None:
    """The error describes a valid key and does not show the invalid one."""
    with pytest.raises(ConfigurationError, match="32 random bytes") as raised:
        Codec(["hush"])
    assert "hush" not in str(raised.value)


def test_signing_secret_is_encrypted() -> None:
    """A secret is unreadable with keys, and can be read if it was stored before there were keys."""
    codec, other = (Codec([Fernet.generate_key().decode()]) for _ in range(2))
    stored = codec.encrypt_secret("whsec_hush")
    assert b"hush" not in stored
    assert "whsec_hush" == codec.decrypt_secret(stored)
    assert "whsec_hush" == codec.decrypt_secret(Codec().encrypt_secret("whsec_hush"))
    with pytest.raises(DecryptionFailed, match="a key that is not configured"):
        other.decrypt_secret(stored)
