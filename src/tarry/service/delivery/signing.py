"""Signatures of Standard Webhooks 1.0.0, by which a target verifies the sender of an attempt.

The signed text is `id.timestamp.body`, with the body exactly as it is sent. All attempts of a task
have the same id; each attempt has its own timestamp. An attempt has one signature per secret: while
a secret is replaced, the old and the new secret sign, until every target knows the new one.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode, b64encode
from secrets import token_bytes
from typing import TYPE_CHECKING

from tarry.core.extras import require_extra
from tarry.errors import ConfigurationError, ConfigurationTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.wire.tasks import SecretType

_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 24, 64
_GENERATED_KEY_BYTES = 32
_ED25519_KEY_BYTES = 32  # of the private key, and of the public key that some libraries append


class Signer:
    """Signs attempts with every secret.

    A secret is `whsec_` + base64 for HMAC-SHA256, or `whsk_` + base64 for ed25519.
    """

    def __init__(self, secrets: Sequence[str]) -> None:
        if isinstance(secrets, str):
            raise ConfigurationTypeError("secrets", "must be a list of strings, got a string")
        if not secrets:
            raise ConfigurationError("secrets", "must contain at least one secret")
        self.token_key: bytes | None = None
        """The key of tokens (JWT), which have one signature: the oldest HMAC secret, which is the
        last. So receivers can be given a new secret before it is used."""
        hmac_secrets = [secret for secret in secrets if str(secret).startswith("whsec_")]
        if hmac_secrets:
            self.token_key = hmac_secrets[-1].encode()
        self._sign_functions = [
            _create_sign_function(f"secrets[{index}]", secret)
            for index, secret in enumerate(secrets)
        ]

    def headers(self, id: str, timestamp: int, body: bytes) -> list[tuple[str, str]]:  # noqa: A002 - the standard's word
        """Return the signature headers of an attempt made at `timestamp` (epoch seconds)."""
        if "." in id:
            rule = "must not contain '.', which separates the parts of the signed text"
            raise ConfigurationError("id", rule, id)
        signed_text = b"%b.%d.%b" % (id.encode(), timestamp, body)
        return [
            ("webhook-id", id),
            ("webhook-timestamp", str(timestamp)),
            ("webhook-signature", " ".join([sign(signed_text) for sign in self._sign_functions])),
        ]


def generate_secret(type_: SecretType) -> str:
    """Return a new random secret."""
    prefix = "whsk" if type_ == "ED25519" else "whsec"
    return f"{prefix}_{b64encode(token_bytes(_GENERATED_KEY_BYTES)).decode()}"


def derive_public_key(secret: str) -> str | None:
    """Return the public key (`whpk_...`) of a valid ed25519 secret; None for HMAC-SHA256."""
    if not secret.startswith("whsk_"):
        return None
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = b64decode(secret.removeprefix("whsk_"))[:_ED25519_KEY_BYTES]
    public_key = Ed25519PrivateKey.from_private_bytes(key).public_key()
    return f"whpk_{b64encode(public_key.public_bytes_raw()).decode()}"


def _create_sign_function(field: str, secret: str) -> Callable[[bytes], str]:
    """Return a function that signs a text with `secret`. No error message shows the secret."""
    if not isinstance(secret, str):
        raise ConfigurationTypeError(field, f"must be a string, got {type(secret).__name__}")
    prefix, _, encoded_key = secret.partition("_")
    if prefix == "whpk":
        rule = "must be a private key (whsk_...), because a public key (whpk_...) cannot sign"
        raise ConfigurationError(field, rule)
    if prefix not in {"whsec", "whsk"}:
        raise ConfigurationError(field, "must start with whsec_ (HMAC-SHA256) or whsk_ (ed25519)")
    try:
        key = b64decode(encoded_key, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigurationError(field, f"must have valid base64 after {prefix}_") from None
    if prefix == "whsk":
        return _create_ed25519_sign_function(field, key)
    if not _MIN_SECRET_BYTES <= len(key) <= _MAX_SECRET_BYTES:
        rule = f"must encode {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} bytes in base64"
        raise ConfigurationError(field, f"{rule}, got {len(key)} bytes")
    return lambda text: f"v1,{b64encode(hmac.digest(key, text, 'sha256')).decode()}"


def _create_ed25519_sign_function(field: str, key: bytes) -> Callable[[bytes], str]:
    with require_extra("ed25519 signatures need cryptography", "service"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if len(key) not in {_ED25519_KEY_BYTES, 2 * _ED25519_KEY_BYTES}:
        rule = f"must encode an ed25519 private key of {_ED25519_KEY_BYTES} bytes in base64"
        raise ConfigurationError(field, f"{rule}, got {len(key)} bytes")
    private_key = Ed25519PrivateKey.from_private_bytes(key[:_ED25519_KEY_BYTES])
    if key[_ED25519_KEY_BYTES:] not in {b"", private_key.public_key().public_bytes_raw()}:
        rule = "must have the public key that belongs to its private key, or no public key"
        raise ConfigurationError(field, rule)
    return lambda text: f"v1a,{b64encode(private_key.sign(text)).decode()}"
