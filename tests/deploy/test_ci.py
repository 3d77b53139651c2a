"""The workflow that runs the tests on each push and pull request."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.test_docs import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"


def load_workflow(name: str) -> dict[Any, Any]:
    """Return a workflow; YAML 1.1 reads its key `on` as True."""
    workflow: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text("utf-8"))
    return workflow


def actions_of(workflow: dict[Any, Any]) -> set[str]:
    """Return the actions of a workflow, with the commits that they are pinned by."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return {step["uses"] for step in steps if "uses" in step}


def test_each_push_and_pull_request_is_tested() -> None:
    """The workflow runs both targets that `.ci/run` runs."""
    workflow = load_workflow("ci.yml")
    runs = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    targets = re.findall(r"make [\w-]+", (ROOT / ".ci" / "run").read_text("utf-8"))

    assert {"push", "pull_request"} == workflow[True].keys()
    assert targets == [command for command in runs if command.startswith("make ")]


def test_jobs_can_only_read_the_source() -> None:
    """No job can write to the repository or read a secret."""
    workflow = load_workflow("ci.yml")

    assert {} == workflow["permissions"]
    assert all({"contents": "read"} == job["permissions"] for job in workflow["jobs"].values())
    assert "secrets." not in (WORKFLOWS / "ci.yml").read_text("utf-8")


def test_actions_are_those_of_a_release() -> None:
    """Actions are pinned by the same commits as those that build a release."""
    actions = actions_of(load_workflow("ci.yml"))

    assert actions
    assert set() == actions - actions_of(load_workflow("release.yml"))
    assert [] == [each for each in actions if not re.fullmatch(r".+@[0-9a-f]{40}", each)]
