"""The package that this adapter is for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tarry.errors import MissingExtra

try:
    grpc: Any = import_module("grpc")
except ImportError:
    msg = "this needs grpcio: pip install 'tarry[grpc]'"
    raise MissingExtra(msg) from None
