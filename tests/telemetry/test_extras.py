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

IMPORT_WITHOUT_PACKAGE = """
import sys
sys.modules["{package}"] = None

import tarry
try:
    import tarry.telemetry.{module}
except tarry.MissingExtra as error:
    print(error)
"""

PRINT_LOADED_PACKAGES = """
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
def test_error_for_a_missing_package_has_the_pip_command(module: str) -> None:
    output = output_of(IMPORT_WITHOUT_PACKAGE.format(module=module, package=PACKAGES[module]))

    assert output.endswith(f"pip install 'tarry[{EXTRAS[module]}]'")


@every_module
def test_listeners_do_not_need_each_other(module: str) -> None:
    """A listener imports its own package and not the packages of other listeners."""
    loaded = output_of(PRINT_LOADED_PACKAGES.format(module=module, packages=set(PACKAGES.values())))

    assert PACKAGES[module] == loaded
