"""Each listener needs only its own package, and its error names the missing extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

PACKAGES = {
    "prometheus": "prometheus_client",
    "opentelemetry": "opentelemetry",
    "structlog": "structlog",
}
EXTRAS = {"prometheus": "prometheus", "opentelemetry": "otel", "structlog": "structlog"}

MISSING = """
import sys
sys.modules["{package}"] = None

import tarry
try:
    import tarry.telemetry.{module}
except tarry.MissingExtra as error:
    print(error)
"""

LOADED = """
import sys
import tarry.telemetry.{module}
print(*sorted({packages!r} & sys.modules.keys()))
"""

every_module = pytest.mark.parametrize("module", PACKAGES)


def output_of(program: str) -> str:
    """Return the output of a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@every_module
def test_package_is_missing(module: str) -> None:
    """The error has the pip command for the missing package."""
    said = output_of(MISSING.format(module=module, package=PACKAGES[module]))

    assert said.endswith(f"pip install 'tarry[{EXTRAS[module]}]'")


@every_module
def test_listeners_do_not_need_each_other(module: str) -> None:
    """A listener imports its own package and not those of other listeners."""
    loaded = output_of(LOADED.format(module=module, packages=set(PACKAGES.values())))

    assert PACKAGES[module] == loaded
