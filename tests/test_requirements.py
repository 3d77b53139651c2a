"""Tests of the requirements files, which pin versions."""

import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS_WITHOUT_TESTS = {"basedpyright", "coverage", "import-linter", "mypy", "ruff", "types-PyYAML"}
"""Tools of requirements-dev.txt that `make test-lowest` does not run."""


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
    return dict(line.split("==") for line in lines if not line.startswith("#"))


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
