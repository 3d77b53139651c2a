"""The Redis store without a server; `tests/integration` has the tests with one."""

from __future__ import annotations

import sys

import pytest

from tarry.errors import MissingExtra
from tarry.idempotency import RedisStore


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without redis the error has the install line."""
    monkeypatch.setitem(sys.modules, "redis", None)

    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[redis\]'"):
        RedisStore("redis://")
