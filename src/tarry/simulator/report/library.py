"""The one way to the library that draws: it is an extra, and its absence has an answer."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from tarry.errors import MissingExtra

if TYPE_CHECKING:
    from types import ModuleType


def drawing_library() -> ModuleType:
    """Return vl_convert, which carries Vega, Vega-Lite and Vega-Embed."""
    try:
        import vl_convert
    except ImportError as exc:
        msg = "reports need vl-convert-python: pip install 'tarry[sim]'"
        raise MissingExtra(msg) from exc
    return vl_convert


@cache
def bundle() -> str:
    """Return the script that draws, whole; it takes seconds to make."""
    code: str = drawing_library().javascript_bundle()
    # Inside a page the script ends at the first such tag, even in a string.
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r\n", "\n")
