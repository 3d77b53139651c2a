"""The Redis store without a server; the tests with a server are in `tests/integration`."""

from __future__ import annotations

import sys

import pytest

from tarry.errors import MissingExtra
from tarry.idempotency import RedisStore


def test_missing_redis_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without redis, creating the store raises `MissingExtra` with the install command."""
    monkeypatch.setitem(sys.modules, "redis", None)

    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[redis\]'"):
        RedisStore("redis://")
