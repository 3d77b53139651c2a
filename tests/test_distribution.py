"""Tests of the wheel and of the source distribution."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "site"
)


def build(project: Path, folder: Path) -> dict[str, bytes]:
    """Build the distributions of a project; return their content by file name."""
    environ = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=project,
        env=environ,
        check=True,
        capture_output=True,
    )
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the distributions from a copy of this project; return their folder."""
    folder = tmp_path_factory.mktemp("distributions")
    copied_project = folder / "copy"
    shutil.copytree(ROOT, copied_project, ignore=NOT_COPIED)
    build(copied_project, folder / "dist")
    return folder / "dist"


@pytest.mark.long_run
def test_build_is_reproducible(distributions: Path, tmp_path: Path) -> None:
    """The unpacked source distribution builds the same wheel and the same source distribution."""
    expected = {path.name: path.read_bytes() for path in distributions.iterdir()}
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    project = next(tmp_path.glob("tarry-*"))
    for path in project.rglob("*"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
        path.chmod(path.stat().st_mode & 0o700)

    actual = build(project, tmp_path / "dist")

    assert set(expected) == set(actual)
    assert [] == [name for name, content in expected.items() if content != actual[name]]


def test_source_distribution_has_everything_that_make_test_needs(distributions: Path) -> None:
    """It has the Makefile, tests, tools, documentation and pins, and no cache or environment."""
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    files = {path.name for path in ROOT.glob("requirements-*.txt")} | {
        ".ci/run",
        "LICENSE",
        "Makefile",
        "clients/typescript/src/client.ts",
        "deploy/prometheus/tarry-rules.yml",
        "docs/index.md",
        "pyproject.toml",
        "src/tarry/py.typed",
        "tests/conftest.py",
    }
    assert set() == files - names
    assert not [name for name in names if re.search(r"__pycache__|\.venv|_cache/|\.pyc$", name)]


def test_wheel_has_only_the_package(distributions: Path) -> None:
    """The wheel has the package with its type marker, the license and the metadata."""
    with ZipFile(next(distributions.glob("*.whl"))) as archive:
        names = archive.namelist()

    assert {"tarry", "tarry-0.1.0.dist-info"} == {name.partition("/")[0] for name in names}
    assert {"tarry/py.typed", "tarry-0.1.0.dist-info/licenses/LICENSE"} <= set(names)


def test_wheel_has_the_documentation(distributions: Path) -> None:
    """`tarry docs` prints the pages of the installed version."""
    with ZipFile(next(distributions.glob("*.whl"))) as archive:
        names = archive.namelist()

    assert {f"tarry/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(names)


def test_long_description_has_no_relative_links(distributions: Path) -> None:
    """The long description is the README, with text instead of links that indexes cannot open."""
    with ZipFile(next(distributions.glob("*.whl"))) as archive:
        metadata = email.message_from_bytes(archive.read("tarry-0.1.0.dist-info/METADATA"))
    description = str(metadata.get_payload())

    assert "text/markdown" == metadata["Description-Content-Type"]
    assert description.startswith("# tarry\n")
    assert "Moving from tenacity, stamina,\n" in description
    assert [] == re.findall(r"\]\((?!https?://)[^)]*\)", description)
