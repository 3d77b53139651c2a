"""Signatures of Standard Webhooks 1.0.0, by which a target verifies the sender of an attempt.

The signed text is `id.timestamp.body`, with the body exactly as it is sent. The id stays the same
over retries; the timestamp is that of the attempt. Several secrets give several signatures, so that
a secret can be replaced without a gap: sign with both until every target has the new one.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError, ConfigurationTypeError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 24, 64
_ED25519_BYTES = 32
"""Size of a private key; some libraries append the public key."""


class Signer:
    """Signs with every secret: `whsec_` + base64 (HMAC-SHA256), `whsk_` + base64 (ed25519)."""

    def __init__(self, secrets: Sequence[str]) -> None:
        if isinstance(secrets, str):
            raise ConfigurationTypeError("secrets", "must be a list of texts, got one text")
        if not secrets:
            raise ConfigurationError("secrets", "must hold at least one secret")
        self._signers = [
            _create_signer(f"secrets[{at}]", secret) for at, secret in enumerate(secrets)
        ]

    def headers(self, id: str, timestamp: int, body: bytes) -> list[tuple[str, str]]:  # noqa: A002 - the standard's word
        """Return the three headers of an attempt made at `timestamp` (epoch seconds)."""
        if "." in id:
            raise ConfigurationError("id", "must have no '.', which divides what is signed", id)
        signed = b"%b.%d.%b" % (id.encode(), timestamp, body)
        return [
            ("webhook-id", id),
            ("webhook-timestamp", str(timestamp)),
            ("webhook-signature", " ".join([sign(signed) for sign in self._signers])),
        ]


def _create_signer(field: str, secret: str) -> Callable[[bytes], str]:
    """Return a function that signs with a secret. Error messages never show the secret."""
    if not isinstance(secret, str):
        raise ConfigurationTypeError(field, f"must be text, got {type(secret).__name__}")
    prefix, _, text = secret.partition("_")
    if prefix == "whpk":
        rule = "must be a private key (whsk_...): a public one (whpk_...) cannot sign"
        raise ConfigurationError(field, rule)
    if prefix not in {"whsec", "whsk"}:
        raise ConfigurationError(field, "must start with whsec_ (HMAC-SHA256) or whsk_ (ed25519)")
    try:
        key = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigurationError(field, f"must be base64 after {prefix}_") from None
    return (
        _create_hmac_signer(field, key) if prefix == "whsec" else _create_ed25519_signer(field, key)
    )


def _create_hmac_signer(field: str, key: bytes) -> Callable[[bytes], str]:
    if not _MIN_SECRET_BYTES <= len(key) <= _MAX_SECRET_BYTES:
        rule = f"must be {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes in base64, got {len(key)}"
        raise ConfigurationError(field, rule)
    return lambda signed: f"v1,{b64encode(hmac.digest(key, signed, 'sha256')).decode()}"


def _create_ed25519_signer(field: str, key: bytes) -> Callable[[bytes], str]:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        msg = "ed25519 signatures need cryptography: pip install 'tarry[service]'"
        raise MissingExtra(msg) from None

    if len(key) not in {_ED25519_BYTES, 2 * _ED25519_BYTES}:
        rule = f"must be an ed25519 private key of {_ED25519_BYTES} bytes in base64, got {len(key)}"
        raise ConfigurationError(field, rule)
    private = Ed25519PrivateKey.from_private_bytes(key[:_ED25519_BYTES])
    if key[_ED25519_BYTES:] not in {b"", private.public_key().public_bytes_raw()}:
        raise ConfigurationError(field, "must hold a public key that belongs to its private key")
    return lambda signed: f"v1a,{b64encode(private.sign(signed)).decode()}"
