"""URLs of stores: engines, and redaction."""

from __future__ import annotations

import pytest

from tarry.errors import ConfigurationError
from tarry.service.settings import Settings
from tarry.service.store_url import StoreEngine, find_engine, redact_store_url


@pytest.mark.parametrize(
    ("url", "engine"),
    [
        ("memory:", StoreEngine.MEMORY),
        ("tasks.db", StoreEngine.SQLITE),
        ("C:tasks.db", StoreEngine.SQLITE),
        ("sqlite:tasks.db", StoreEngine.SQLITE),
        (Settings().store, StoreEngine.SQLITE),
        ("postgresql://host/db", StoreEngine.POSTGRES),
        ("postgres://u:p@h1,h2/db?schema=s", StoreEngine.POSTGRES),
    ],
)
def test_the_scheme_of_a_url_names_the_engine(url: str, engine: StoreEngine) -> None:
    """A URL without a scheme is the path of a SQLite file."""
    assert engine is find_engine(url)


@pytest.mark.parametrize("url", ["memory", "sqlite", "mysql://u:s3cret@host/db", "memory:x"])
def test_an_unknown_engine_is_an_error(url: str) -> None:
    """The error has the rule for the setting, and not the password."""
    with pytest.raises(ConfigurationError, match="store must be a path") as raised:
        find_engine(url)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgres:u:s3cret@h",
        "postgresql:/u:s3cret@h/db",
        "postgres:s3cret",
        "redis:u:s3cret@h:6379",
        "Redis+Cluster:u:s3cret@h",
        "mysql:u:s3cret@h/db",
        "user:s3cret@h/db",
    ],
)
def test_a_server_needs_slashes(url: str) -> None:
    """The error has the rule and not the password, which could be anywhere after the scheme."""
    with pytest.raises(ConfigurationError, match="store must be a path") as raised:
        find_engine(url)
    assert "s3cret" not in str(raised.value)
    assert url.partition(":")[0] in str(raised.value)
    assert "s3cret" not in redact_store_url(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:a@b.db", "sqlite:a@b.db"),
        ("redis://host:1/0", "redis://host:1/0"),
        ("postgresql://u:s3cret@h1:1,h2:2/db", "postgresql://[redacted]@h1:1,h2:2/db"),
        ("postgresql://u:s3/c?r@e#t@host/db", "postgresql://[redacted]@host/db"),
        (
            "postgresql:///db?host=/tmp&password=s3cret&user=u",
            "postgresql:///db?host=/tmp&password=[redacted]&user=u",
        ),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    """User name, password and secret parameters are replaced."""
    assert shown == redact_store_url(url)
