"""Checks that every public name loads in an environment where only tarry is installed."""

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import distributions

import tarry
from tarry import idempotency

installed = {distribution.name for distribution in distributions()}
if installed != {"tarry"}:
    raise SystemExit(f"expected tarry alone, found {sorted(installed)}")

for name in tarry.__all__:
    getattr(tarry, name)
for name in idempotency.__all__:
    getattr(idempotency, name)

# Every module of these packages uses only the standard library, except the JSON types of the
# service, which only the service and its client load.
importlib.import_module("tarry.errors")
for layer in ("core", "wire", "policyfile", "simulator", "tuning"):
    package = importlib.import_module(f"tarry.{layer}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name != "tarry.wire.tasks":
            importlib.import_module(module.name)

# The command names the extra to install.
command = [sys.executable, "-I", "-m", "tarry", "simulate"]
result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
if result.returncode != 1 or "pip install 'tarry[" not in result.stderr or result.stdout:
    raise SystemExit(f"expected exit code 1 and the extra to install, got {result}")
