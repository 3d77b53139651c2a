"""The Redis store without a server; the tests with a server are in `tests/integration`."""

from __future__ import annotations

import sys
from traceback import format_exception

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.idempotency import RedisStore


@pytest.mark.parametrize("url", ["redis//:s3cret@h", "rediss:u:s3cret@h", "redis://:s3cret"])
def test_mistyped_url_raises(url: str) -> None:
    """The error has the right form and not the password, as the error of redis-py does."""
    with pytest.raises(ConfigurationError, match="like redis://USER:PASSWORD@HOST/0") as raised:
        RedisStore(url)
    assert "s3cret" not in "".join(format_exception(raised.value))


def test_missing_redis_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without redis, creating the store raises `MissingExtra` with the install command."""
    monkeypatch.setitem(sys.modules, "redis", None)

    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[redis\]'"):
        RedisStore("redis://")
