"""Tests of the files with pinned versions."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lower_bounds() -> dict[str, str]:
    """Return the lowest version of each dependency that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = [each for extra in project["optional-dependencies"].values() for each in extra]
    found = [re.match(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)", each) for each in requirements]
    return {match[1]: match[2] for match in found if match is not None}


def pins(name: str) -> dict[str, str]:
    """Return the pinned version of each package in a requirements file."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_lowest_versions_are_the_lower_bounds() -> None:
    """`make test-lowest` tests the lowest version of each dependency, and not a newer one."""
    lowest = pins("requirements-lowest.txt")
    lowest["opentelemetry-api"] = lowest.pop("opentelemetry-sdk")  # always of the same version

    expected = {name: version.split(".") for name, version in lower_bounds().items()}
    actual = {
        name: lowest.get(name, "missing").split(".")[: len(parts)]
        for name, parts in expected.items()
    }

    assert expected == actual
