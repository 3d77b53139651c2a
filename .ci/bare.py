"""Run in an environment that holds tarry and nothing else: every public name must load there."""

import importlib.util
import pkgutil
from importlib.metadata import distributions

import tarry

installed = {distribution.name for distribution in distributions()}
if installed != {"tarry"}:
    raise SystemExit(f"expected tarry alone, found {sorted(installed)}")

for name in tarry.__all__:
    getattr(tarry, name)

# The pure layers keep to the standard library in every module, exported or not.
importlib.import_module("tarry.errors")
for layer in ("core", "wire"):
    if importlib.util.find_spec(f"tarry.{layer}") is None:
        continue
    package = importlib.import_module(f"tarry.{layer}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
