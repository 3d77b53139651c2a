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


_POSTGRES_FORM = "write postgresql://USER:PASSWORD@HOST/DATABASE"
_REDIS_FORM = "write redis://USER:PASSWORD@HOST/0"
_CLUSTER_FORM = r"write redis\+cluster://USER:PASSWORD@HOST"
_FILE_FORM = "or sqlite:PATH if it is a file"


@pytest.mark.parametrize(
    ("url", "form", "shown"),
    [
        ("postgres//u:s3cret@h/db", _POSTGRES_FORM, "postgres[redacted]"),
        ("postgresql/u:s3cret@h/db", _POSTGRES_FORM, "postgresql[redacted]"),
        ("postgresql:/u:s3cret@h/db", _POSTGRES_FORM, "postgresql[redacted]"),
        ("postgres:u:s3cret@h", _POSTGRES_FORM, "postgres[redacted]"),
        ("postgres:s3cret", _POSTGRES_FORM, "postgres[redacted]"),
        ("postgresql:u:s3cret@h/db?x=://", _POSTGRES_FORM, "postgresql[redacted]"),
        ("postgres/db?password=s3cret", _POSTGRES_FORM, "postgres[redacted]"),
        ("POSTGRESQL//u:s3cret@h/db", _POSTGRES_FORM, "postgresql[redacted]"),
        (" postgresql://u:s3cret@h/db", _POSTGRES_FORM, "postgresql[redacted]"),
        ("'postgresql://u:s3cret@h/db'", _POSTGRES_FORM, "postgresql[redacted]"),
        ("redis//:s3cret@h", _REDIS_FORM, "redis[redacted]"),
        ("redis:u:s3cret@h:6379", _REDIS_FORM, "redis[redacted]"),
        ("rediss:u:s3cret@h", "write rediss://USER:PASSWORD@HOST/0", "rediss[redacted]"),
        ("valkey/:s3cret@h", "write valkey://USER:PASSWORD@HOST/0", "valkey[redacted]"),
        ("Redis+Cluster:u:s3cret@h", _CLUSTER_FORM, "redis+cluster[redacted]"),
        ("redis+unix:/:s3cret@/s", r"write redis\+unix:///PATH", "redis+unix[redacted]"),
        ("mysql:u:s3cret@h/db", _POSTGRES_FORM, "[redacted]"),
        ("postgre//u:s3cret@h/db", _POSTGRES_FORM, "[redacted]"),
        ("user:s3cret@h/db", _POSTGRES_FORM, "[redacted]"),
        (":s3cret@h", _POSTGRES_FORM, "[redacted]"),
        ("//u:s3cret@h/db", _POSTGRES_FORM, "[redacted]"),
        ("//s3cret@h/db", _POSTGRES_FORM, "[redacted]"),
        ("/u:s3cret@h/db", _POSTGRES_FORM, "[redacted]"),
        ("sqlite://u:s3cret@h/db", _POSTGRES_FORM, "[redacted]"),
        ("postgresq?password=s3cret", _POSTGRES_FORM, "[redacted]"),
        ("host=h user=u password=s3cret", _POSTGRES_FORM, "[redacted]"),
        ("postgreq,l://u:s3cret/db", _POSTGRES_FORM, "[redacted]"),
        ("redis+//:s3cret", _POSTGRES_FORM, "[redacted]"),
        ("--store=postgresql://u:s3cret@h/db", _POSTGRES_FORM, "[redacted]"),
    ],
)
def test_a_mistyped_url_of_a_server_is_not_a_path(url: str, form: str, shown: str) -> None:
    """The error has the right form and not the password, which could be anywhere in the text."""
    with pytest.raises(ConfigurationError, match=f"^store .*{form}") as raised:
        find_engine(url)
    assert "s3cret" not in str(raised.value)
    assert _FILE_FORM in str(raised.value)
    assert shown == redact_store_url(url)
    assert raised.value.value == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:s3cret/db", "postgresql://[redacted]"),
        ("redis://:s3cret", "redis://[redacted]"),
        ("redis+cluster://h1:7000,h2:s3cret", "redis+cluster://[redacted]"),
        ("rediss://[::1]:s3cret/0", "rediss://[redacted]"),
    ],
)
def test_a_password_without_a_host_is_not_a_port(url: str, shown: str) -> None:
    """Otherwise an error of the driver would show the password."""
    with pytest.raises(ConfigurationError, match="number as the port") as raised:
        find_engine(url)
    assert shown == raised.value.value
    assert shown == redact_store_url(url)


@pytest.mark.parametrize("url", ["redis://h", "redis://h:1", "redis://[::1]:1,h2", "redis://[::1]"])
def test_a_host_with_a_port_has_no_password(url: str) -> None:
    assert StoreEngine.REDIS is find_engine(url)
    assert url == redact_store_url(url)


@pytest.mark.parametrize(
    "path",
    [
        "redis.db",
        "postgres-tasks.db",
        "./postgres/tarry.db",
        "/srv/redis/tarry.db",
        "user@host.db",
        "sqlite:redis/tarry.db",
        "sqlite:a:b@c.db",
        "sqlite:/srv/a:b@c/tarry.db",
        "sqlite:///srv/a:b@c/tarry.db",
    ],
)
def test_a_path_that_resembles_a_url_is_a_path(path: str) -> None:
    """With `sqlite:`, each path can be named. Such paths are shown as they are."""
    assert StoreEngine.SQLITE is find_engine(path)
    assert path == redact_store_url(path)


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
        (
            "postgresql:///db?pasword=s3cret&passwords3cret&schema=a&",
            "postgresql:///db?[redacted]&[redacted]&schema=a&",
        ),
        ("postgresql:///db&password=s3cret", "postgresql:///db&password=[redacted]"),
        ("postgresql:///db?a@b&pasword=s3cret", "postgresql://[redacted]@b&[redacted]"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    """User name, password and secret parameters are replaced."""
    assert shown == redact_store_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s3cret@h:1/db?schema=s",
        "postgres://u:s3cret@h1,h2/db",
        "postgresql:///db?host=/tmp&user=u&password=s3cret",
        "redis://:s3cret@h:1/0",
        "rediss://u:s3cret@h",
        "redis+cluster://u:s3cret@h1:7000,h2:7000",
        "valkey://:s3cret@h/0?prefix=p",
    ],
)
def test_no_typing_error_shows_the_password(url: str) -> None:
    """One character is missing, added, replaced, or swapped with the next one."""
    start = url.index("s3cret")
    password = range(start, start + len("s3cret"))
    texts = {url}
    for index in range(len(url) + 1):
        before, after = url[:index], url[index:]
        if index not in password or index == start:
            texts |= {before + character + after for character in ":/@?#&=,%+-' \nx1["}
        if index < len(url) and index not in password:
            texts |= {before + character + after[1:] for character in ":/@?#&=,%+-' \nx1["}
            texts.add(before + after[1:])
            if index + 1 < len(url) and index + 1 not in password:
                texts.add(before + after[1] + after[0] + after[2:])
    for text in texts:
        shown = redact_store_url(text)
        try:
            find_engine(text)
        except ConfigurationError as error:
            shown += str(error)
        assert "s3cret" not in shown, text
