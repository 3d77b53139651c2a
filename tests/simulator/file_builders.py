"""Scenario files for tests."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

CHECKOUT = Path(__file__).parents[2] / "examples" / "checkout.toml"
SMALL = """\
duration = 5
[clients]
calls = "api"
rate = 20
[servers.api]
latency = 0.01
"""
YAML = """\
duration: 5
clients:
  calls: api
  rate: 20
servers:
  api: {latency: 0.01}
"""


def write_file(folder: Path, name: str, text: str) -> Path:
    """Write a file and return its path."""
    path = folder / name
    path.write_text(dedent(text), encoding="utf-8")
    return path
