"""Redaction of secrets."""

from __future__ import annotations

import pytest

from tarry.service.api import views
from tarry.service.model import TaskContent


@pytest.mark.parametrize(
    "name",
    [
        "Authorization", "Proxy-Authorization", "Cookie", "X-API-Key", "api_key", "apikey",
        "X-Auth-Token", "access_token", "client_secret", "password", "X-Amz-Signature", "sig",
        "Ocp-Apim-Subscription-Key", "X-Goog-Credential", "key", "session_id", "jwt",
        "X-Hub-Signature-256",
    ],
)  # fmt: skip
def test_a_name_is_recognized_as_secret(name: str) -> None:
    """Secret names are recognized in upper and lower case."""
    assert views.is_secret_name(name)
    assert views.is_secret_name(name.upper())


@pytest.mark.parametrize(
    "name", ["Content-Type", "X-Order", "monkey", "design", "Accept", "keyword", "page", "signal"]
)
def test_a_name_is_not_secret(name: str) -> None:
    """Names that only resemble a secret name are not secret."""
    assert not views.is_secret_name(name)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://a/b", "https://a/b"),
        ("https://a/b?c=d", "https://a/b?c=d"),
        ("https://a/?token=x", "https://a/?token=[redacted]"),
        ("https://a/?c=d&token=x=y&e", "https://a/?c=d&token=[redacted]&e"),
        ("https://a/?%74oken=x;sig=y", "https://a/?%74oken=[redacted];sig=[redacted]"),
        ("https://a/?token=", "https://a/?token="),
        ("https://a/token=x?c", "https://a/token=x?c"),
        ("https://a/?a?token=x", "https://a/?a?token=[redacted]"),
    ],
)
def test_secrets_in_a_query_are_redacted(url: str, expected: str) -> None:
    """The values of secret parameters are redacted, the rest is unchanged."""
    assert expected == views.redact_url(url)


def test_secrets_in_a_text_of_the_target_are_redacted() -> None:
    """Parts of header values, and plain or percent-encoded parameters are redacted."""
    content = TaskContent(
        url="https://a/?token=s%2Fecret-1&pin=12",
        headers={"Authorization": "Bearer longest-secret", "X-A": "visible"},
    )
    secrets = views.find_secrets(content)
    echoed = "longest-secret s/ecret-1 s%2Fecret-1 visible 12 Bearer longest-secret"
    assert "[redacted] [redacted] [redacted] visible 12 [redacted]" == views.redact_text(
        echoed, secrets
    )
    assert views.redact_text(None, secrets) is None


def test_a_truncated_secret_is_redacted() -> None:
    """At the end of a truncated text, six characters of a secret are enough."""
    assert "a [redacted]" == views.redact_text("a longest-s", ["longest-secret"], is_truncated=True)
    assert "a longe" == views.redact_text("a longe", ["longest-secret"], is_truncated=True)
    assert "a longest-s" == views.redact_text("a longest-s", ["longest-secret"])
    assert b"\xff [redacted]" == views.redact_bytes(
        b"\xff longest-s", ["longest-secret"], is_truncated=True
    )


def test_unknown_secrets_redact_the_whole_text() -> None:
    """If the content cannot be decrypted, any word may be a secret."""
    assert views.find_secrets(None) is None
    assert ("[redacted]", "", None) == tuple(
        views.redact_text(text, None) for text in ("x", "", None)
    )
