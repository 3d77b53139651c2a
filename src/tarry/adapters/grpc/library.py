"""The optional import of grpcio. Typed as Any, because grpcio has no type annotations."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tarry.errors import MissingExtra

try:
    grpc: Any = import_module("grpc")
except ImportError:
    _message = "this needs grpcio: pip install 'tarry[grpc]'"
    raise MissingExtra(_message) from None
