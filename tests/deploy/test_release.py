"""The workflow that publishes a release."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.test_docs import ROOT

WORKFLOW: dict[str, Any] = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
PACKAGE = json.loads((ROOT / "clients" / "typescript" / "package.json").read_text("utf-8"))


def commands_of(job: str) -> list[str]:
    """Return the shell commands of a job, without comments."""
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_versions_agree() -> None:
    """The Python package and the TypeScript client have one version, which the tag names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    assert project["version"] == PACKAGE["version"]
    compared = [command for command in commands_of("build") if "$GITHUB_REF_NAME" in command]
    assert ["pyproject.toml", "clients/typescript/package.json"] == [
        command.split()[-1].rstrip(')"') for command in compared
    ]


def test_build_tests_before_it_packages() -> None:
    """All tests pass first. `make package` empties dist/, so the TypeScript client follows it."""
    targets = [command for command in commands_of("build") if command.startswith("make ")]

    assert ["make test", "make test-all", "make package", "make typescript"] == targets


@pytest.mark.parametrize(("job", "environment"), [("publish", "pypi"), ("publish-npm", "npm")])
def test_publishers_are_trusted(job: str, environment: str) -> None:
    """A job that publishes has its own environment, and no permission but an identity token."""
    assert {} == WORKFLOW["permissions"]
    assert ("build", environment) == (JOBS[job]["needs"], JOBS[job]["environment"])
    assert {"id-token": "write"} == JOBS[job]["permissions"]
    assert "secrets." not in json.dumps(JOBS[job])


def test_actions_and_programs_are_pinned() -> None:
    """No tag or branch that can be moved decides what a job with an identity token runs."""
    actions = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), action
    [install] = [each for each in commands_of("publish") if " install " in each]
    assert "--require-hashes" in install
    assert ".github/publish-requirements.txt" in " ".join(commands_of("build"))
    requirements = (ROOT / ".github" / "publish-requirements.txt").read_text("utf-8")
    for line in requirements.splitlines():
        assert line.startswith("# ") or re.fullmatch(
            r"[a-z0-9._-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line
        ), line


def test_client_is_published_with_provenance() -> None:
    """The file of `make typescript` is published, and names the repository that it is from."""
    (publish,) = commands_of("publish-npm")
    (set_repository,) = [each for each in commands_of("build") if each.startswith("npm pkg set")]

    assert f"npm publish --provenance --access public ./dist/{PACKAGE['name']}-*.tgz" == publish
    assert "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY.git" in set_repository
    assert "repository" not in PACKAGE
