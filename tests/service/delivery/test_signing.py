from __future__ import annotations

import hmac
from base64 import b64decode, b64encode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tarry.errors import ConfigurationError
from tarry.service.delivery.signing import Signer

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the example of the standard
ID, TIMESTAMP_S, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_headers_match_the_test_vector_of_the_standard() -> None:
    """The headers match the test vector of Standard Webhooks 1.0.0."""
    assert [
        ("webhook-id", ID),
        ("webhook-timestamp", "1614265330"),
        ("webhook-signature", SIGNATURE),
    ] == Signer([SECRET]).headers(ID, TIMESTAMP_S, BODY)


def test_several_secrets_give_several_signatures() -> None:
    """The header has one signature per secret, in the order of the secrets."""
    other = b"another secret of 32 bytes here!"
    signer = Signer([f"whsec_{b64encode(other).decode()}", SECRET])
    first, second = dict(signer.headers(ID, TIMESTAMP_S, BODY))["webhook-signature"].split(" ")
    signed = f"{ID}.{TIMESTAMP_S}.".encode() + BODY
    assert hmac.digest(other, signed, "sha256") == b64decode(first.removeprefix("v1,"))
    assert SIGNATURE == second


@pytest.mark.parametrize("includes_public_key", [False, True])
def test_ed25519_signature_can_be_verified(includes_public_key: bool) -> None:
    """The public key verifies the signature, whether or not the secret contains that key."""
    private = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    public = private.public_key()
    key = private.private_bytes_raw() + (public.public_bytes_raw() if includes_public_key else b"")
    signer = Signer([f"whsk_{b64encode(key).decode()}"])
    signature = dict(signer.headers(ID, TIMESTAMP_S, b"\x00\xff"))["webhook-signature"]
    assert signature.startswith("v1a,")
    public.verify(b64decode(signature[4:]), f"{ID}.{TIMESTAMP_S}.".encode() + b"\x00\xff")


@pytest.mark.parametrize(
    ("secret", "rule"),
    [
        ("hunter2", "must start with whsec_"),
        ("whsec_hunter2!", "must have valid base64"),
        ("whsec_hunter2ä", "must have valid base64"),
        ("whsec_" + b64encode(b"hunter2").decode(), "24 to 64 bytes"),
        ("whsec_" + b64encode(b"hunter2" * 10).decode(), "24 to 64 bytes"),
        ("whpk_" + b64encode(bytes(32)).decode(), "cannot sign"),
        ("whsk_" + b64encode(b"hunter2").decode(), "32 bytes"),
        ("whsk_" + b64encode(bytes(64)).decode(), "belongs to its private key"),
    ],
)
def test_bad_secret_is_rejected_without_showing_it(secret: str, rule: str) -> None:
    """The message has the index of the secret, not its value."""
    with pytest.raises(ConfigurationError, match=rf"^secrets\[1\] .*{rule}") as raised:
        Signer([SECRET, secret])
    assert secret not in str(raised.value)


def test_invalid_list_of_secrets_is_rejected() -> None:
    """An empty list, a single string and values that are not strings are rejected."""
    with pytest.raises(ConfigurationError, match="at least one"):
        Signer([])
    with pytest.raises(TypeError, match="list of strings"):
        Signer(SECRET)
    with pytest.raises(TypeError, match=r"secrets\[0\] must be a string"):
        Signer([SECRET.encode()])  # type: ignore[list-item]


def test_id_with_a_dot_is_rejected() -> None:
    """An id with a dot is rejected: two messages could have the same signed bytes."""
    with pytest.raises(ConfigurationError, match=r"id must not contain '\.'"):
        Signer([SECRET]).headers("a.1", 2, b"")
