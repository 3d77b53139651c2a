"""Tests of the requirements files, which pin versions."""

import re
import tomllib
from importlib.metadata import requires
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TOOLS_WITHOUT_TESTS = {
    "basedpyright",
    "coverage",
    "import-linter",
    "mypy",
    "ruff",
    "types-PyYAML",
    "uv",
}
"""Packages of requirements-dev.txt that `make test-lowest` does not need."""


def lower_bounds() -> dict[str, str]:
    """Return the lowest version of each dependency that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = list(chain.from_iterable(project["optional-dependencies"].values()))
    found = [
        re.match(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)", requirement) for requirement in requirements
    ]
    return {match[1]: match[2] for match in found if match is not None}


def pins(name: str) -> dict[str, str]:
    """Return the pinned version of each package in a requirements file."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_lowest_versions_are_the_lower_bounds() -> None:
    """requirements-lowest.txt pins the lowest version that pyproject.toml allows."""
    lowest = pins("requirements-lowest.txt")
    lowest["opentelemetry-api"] = lowest["opentelemetry-sdk"]  # of the same version

    expected = {name: version.split(".") for name, version in lower_bounds().items()}
    actual = {
        name: lowest.get(name, "missing").split(".")[: len(parts)]
        for name, parts in expected.items()
    }

    assert expected == actual


def test_lowest_versions_include_the_packages_of_the_tests() -> None:
    """requirements-lowest.txt has each package that requirements-dev.txt has for the tests."""
    missing = pins("requirements-dev.txt").keys() - pins("requirements-lowest.txt").keys()

    assert TOOLS_WITHOUT_TESTS == missing


def closure(package: str, extras: set[str]) -> set[str]:
    """Return the packages that a package with extras needs here, without those of Swagger UI."""
    found: set[str] = set()
    pending = [(package, frozenset(extras))]
    seen = set(pending)
    while pending:
        name, wanted = pending.pop()
        found.add(name)
        for text in requires(name) or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if name == "flask-swagger-ui" or (
                marker and not any(marker.evaluate({"extra": extra}) for extra in wanted | {""})
            ):
                continue
            needed = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if needed not in seen:
                seen.add(needed)
                pending.append(needed)
    return found


def test_make_serve_installs_what_the_service_needs() -> None:
    """requirements-serve.txt, which pip installs without dependencies, has all of them."""
    needed = closure("tarry", {"service"}) - {"tarry"} | closure("hatchling", set()) | {"editables"}

    assert set() == needed - set(pins("requirements-serve.txt"))


def test_make_serve_installs_the_tested_versions() -> None:
    """requirements-serve.txt and requirements-dev.txt have the same versions."""
    tested, served = pins("requirements-dev.txt"), pins("requirements-serve.txt")

    assert {name: tested[name] for name in tested.keys() & served.keys()} == {
        name: served[name] for name in tested.keys() & served.keys()
    }
