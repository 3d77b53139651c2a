"""Conducting a study: what is run, in which order, and what is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.study import Study, conduct


class Trial:
    """A run that tells its arguments."""

    def __init__(self, **numbers: float) -> None:
        self._numbers = numbers

    def metrics(self) -> dict[str, float]:
        """Return them."""
        return self._numbers


def run(*, size: str, trials: int, seed: int, width: int = 1, depth: int = 1) -> list[Trial]:
    """Stand in for a simulation."""
    return [
        Trial(size=len(size), seed=seed, trial=trial, area=width * depth) for trial in range(trials)
    ]


STUDY = Study(
    name="study",
    question="?",
    lesson="!",
    run=run,
    knob="size",
    variants=("s", "xxl"),
    columns=(),
    plots=(),
    parameters={"width": 1, "depth": 1},
    trials=2,
    sweep={"width": (1, 2)},
)


def points(**arguments: Any) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a study, without their numbers."""
    return [(row.variant, row.parameters) for row in conduct(STUDY, **arguments).rows]


def test_default_is_what_the_study_says() -> None:
    """Every variant at every point of its own sweep, with its own trials."""
    findings = conduct(STUDY)

    assert 2 == findings.trials
    assert [
        ("s", {"width": 1}),
        ("xxl", {"width": 1}),
        ("s", {"width": 2}),
        ("xxl", {"width": 2}),
    ] == [(row.variant, row.parameters) for row in findings.rows]
    assert {"size": 3.0, "seed": 0.0, "trial": 0.5, "area": 2.0} == findings.rows[3].metrics


def test_two_parameters_are_swept_over_all_pairs() -> None:
    """The last one changes fastest."""
    sweep = {"width": [1, 2], "depth": [3, 4]}

    assert [(1, 3), (1, 4), (2, 3), (2, 4)] == [
        (at["width"], at["depth"]) for _, at in points(sweep=sweep, variants=["s"])
    ]


def test_parameter_that_is_set_is_not_swept() -> None:
    """A user who says one value wants that one."""
    assert [("s", {}), ("xxl", {})] == points(parameters={"width": 5})


def test_processes_change_nothing() -> None:
    """The rows come in the same order with the same numbers."""
    told: list[tuple[int, int]] = []

    alone = conduct(STUDY, seed=7)
    together = conduct(STUDY, seed=7, jobs=2, progress=lambda done, of: told.append((done, of)))

    assert [row.metrics for row in alone.rows] == [row.metrics for row in together.rows]
    assert [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)] == told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"variants": ["m"]}, "^size must be one of s, xxl, got 'm'"),
        ({"parameters": {"hight": 1}}, "^parameter must be one of depth, width, got 'hight'"),
        ({"sweep": {"hight": [1]}}, "^parameter must be one of depth, width, got 'hight'"),
        ({"sweep": {"width": []}}, "^sweep over width needs at least one value"),
        ({"trials": 0}, "^trials must be at least 1, got 0"),
        ({"jobs": 0}, "^jobs must be at least 1, got 0"),
    ],
)
def test_mistakes_are_refused(arguments: dict[str, Any], words: str) -> None:
    """Each names the argument."""
    with pytest.raises(ConfigurationError, match=words):
        conduct(STUDY, **arguments)
