"""Adapters whose client library is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("missing", "code", "extra"),
    [
        (["httpx", "httpx2"], "from tarry.adapters.httpx import *; RetryTransport()", "httpx"),
        (["httpx", "httpx2"], "from tarry.adapters.httpx import *; AsyncRetryTransport()", "httpx"),
        (["requests"], "import tarry.adapters.requests", "requests"),
        (["urllib3"], "import tarry.adapters.requests", "requests"),
        (["aiohttp"], "import tarry.adapters.aiohttp", "aiohttp"),
    ],
)
def test_missing_package_raises(missing: list[str], code: str, extra: str) -> None:
    """Without its client library, an adapter raises `MissingExtra` with the install command."""
    hide_missing = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
    completed = subprocess.run(
        [sys.executable, "-c", f"{hide_missing}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )

    last_line = completed.stderr.splitlines()[-1]
    assert last_line.startswith(f"tarry.errors.MissingExtra: tarry.adapters.{extra} needs ")
    assert last_line.endswith(f"pip install 'tarry[{extra}]'")


def test_httpx2_alone_is_enough() -> None:
    """If only httpx2 is installed, the default transport is from httpx2."""
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from tarry.adapters.httpx import RetryTransport\n"
        "print(type(RetryTransport()._transport).__module__)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert "httpx2" == completed.stdout.partition(".")[0].strip()
