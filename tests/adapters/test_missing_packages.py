"""Without the client's package, its adapter raises an error with the install command."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("hidden", "code", "extra"),
    [
        (["httpx", "httpx2"], "from tarry.adapters.httpx import *; RetryTransport()", "httpx"),
        (["httpx", "httpx2"], "from tarry.adapters.httpx import *; AsyncRetryTransport()", "httpx"),
        (["requests"], "import tarry.adapters.requests", "requests"),
        (["urllib3"], "import tarry.adapters.requests", "requests"),
        (["aiohttp"], "import tarry.adapters.aiohttp", "aiohttp"),
    ],
)
def test_missing_package(hidden: list[str], code: str, extra: str) -> None:
    """The error is an ImportError with the command that installs the package."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}\n{code}"], capture_output=True, text=True, check=False
    )

    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"tarry.errors.MissingExtra: tarry.adapters.{extra} needs ")
    assert last.endswith(f"pip install 'tarry[{extra}]'")


def test_httpx2_alone_is_enough() -> None:
    """If only httpx2 is installed, the default transport is from httpx2."""
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from tarry.adapters.httpx import RetryTransport\n"
        "print(type(RetryTransport()._transport).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "httpx2" == done.stdout.partition(".")[0].strip()
