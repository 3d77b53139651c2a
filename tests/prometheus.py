"""The programs of Prometheus, which `make programs` provides."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy" / "prometheus" / "tarry-rules.yml"
UNPACKED_PROGRAMS = ROOT / ".venv" / "prometheus" / "usr" / "bin"


def find_program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`."""
    found = shutil.which(name) or shutil.which(name, path=UNPACKED_PROGRAMS)
    assert found is not None, f"{name} is missing: run make programs"
    return found
