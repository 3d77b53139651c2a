"""libcurl for Python, which speaks HTTP for us."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tarry.errors import MissingExtra

try:
    pycurl: Any = import_module("pycurl")
except ImportError:
    msg = "this needs pycurl 7.49 or newer: pip install 'tarry[service]'"
    raise MissingExtra(msg) from None
