"""The links of the packages, as a package index shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from email.message import Message

ROOT = Path(__file__).resolve().parents[2]
URL = "https://git.example/owner/tarry"
RELATIVE_LINK = re.compile(r"\]\((?!https://|#)")


def build(
    source: Path, target: str, folder: Path, *, project_url: str = ""
) -> subprocess.CompletedProcess[str]:
    """Build a package into a folder, and return the ended process."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    environ = {**os.environ, "PROJECT_URL": project_url}
    return subprocess.run(
        command, cwd=source, env=environ, check=False, capture_output=True, text=True
    )


def read_metadata(folder: Path) -> Message:
    """Return the metadata of the wheel in a folder; its payload is the long description."""
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        [name] = [each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")]
        return HeaderParser().parsestr(wheel.read(name).decode("utf-8"))


def test_links_lead_to_the_repository_of_the_release(tmp_path: Path) -> None:
    """With `PROJECT_URL`, a wheel built from the sdist has project URLs and absolute links."""
    assert build(ROOT, "sdist", tmp_path, project_url=URL).returncode == 0
    [path] = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        sdist.extractall(tmp_path, filter="data")
    assert build(tmp_path / path.name.removesuffix(".tar.gz"), "wheel", tmp_path).returncode == 0

    metadata = read_metadata(tmp_path)
    files = f"{URL}/blob/v{metadata['Version']}"
    description = metadata.get_payload()
    assert metadata.get_all("Project-URL") == [
        f"Repository, {URL}",
        f"Documentation, {files}/docs/index.md",
        f"Changelog, {files}/CHANGELOG.md",
        f"Issues, {URL}/issues",
    ]
    assert isinstance(description, str)
    assert f"[quickstart]({files}/docs/quickstart.md)" in description
    assert not RELATIVE_LINK.search(description)


def test_a_build_without_address_has_no_links_to_files(tmp_path: Path) -> None:
    """Without `PROJECT_URL`, relative links are replaced by their texts."""
    assert build(ROOT, "wheel", tmp_path).returncode == 0

    metadata = read_metadata(tmp_path)
    description = metadata.get_payload()
    assert metadata.get_all("Project-URL") is None
    assert isinstance(description, str)
    assert "quickstart" in description
    assert not RELATIVE_LINK.search(description)


def test_invalid_address_is_rejected(tmp_path: Path) -> None:
    """`PROJECT_URL` must be an HTTPS address; the error shows the rule and the value."""
    result = build(ROOT, "wheel", tmp_path, project_url="git@host:owner/tarry")

    assert result.returncode != 0
    assert "PROJECT_URL must be an address that begins with https://" in result.stderr
    assert "git@host:owner/tarry" in result.stderr
