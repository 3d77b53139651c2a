"""Tests for the error of an extra that is not installed."""

from __future__ import annotations

import pytest

from tarry.core.extras import require_extra
from tarry.errors import MissingExtra


def test_require_extra() -> None:
    """require_extra() turns a failed import into an error with the pip command."""
    with (
        pytest.raises(MissingExtra, match=r"^x needs y: pip install 'tarry\[z\]'$") as caught,
        require_extra("x needs y", "z"),
    ):
        raise ImportError("y")
    assert isinstance(caught.value.__cause__, ImportError)
