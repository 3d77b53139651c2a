"""The error for an optional dependency, an extra of tarry, that is not installed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tarry.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def require_extra(need: str, extra: str) -> Generator[None]:
    """Raise MissingExtra if an import in the `with` block fails.

    The message consists of `need`, such as "RedisStore needs redis", and the pip command for the
    `extra` of tarry.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(f"{need}: pip install 'tarry[{extra}]'") from error
