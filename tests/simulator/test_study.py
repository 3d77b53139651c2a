"""Conducting a study: what is run, in which order, and what is refused before anything runs."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from math import inf, nan
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError, TarryError
from tarry.simulator.study import Study, StudyRow, _restore_sigint, run_study
from tests.simulator.report import sample_results


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


def dies(**_: object) -> list[Trial]:
    """Stand in for a simulation that takes all memory."""
    os._exit(1)


STUDY = Study(
    name="study",
    question="?",
    lesson="!",
    run=run,
    variant_parameter="size",
    variants=("s", "xxl"),
    columns=(),
    plots=(),
    parameters={"width": 1, "depth": 1},
    trials=2,
    sweep={"width": (1, 2)},
)


def points(**arguments: Any) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a study, without their numbers."""
    return [(row.variant, row.parameters) for row in run_study(STUDY, **arguments).rows]


def test_default_is_what_the_study_says() -> None:
    """Every variant at every point of its own sweep, with its own trials."""
    findings = run_study(STUDY)

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

    alone = run_study(STUDY, seed=7)
    together = run_study(STUDY, seed=7, jobs=2, progress=lambda done, of: told.append((done, of)))

    assert [row.metrics for row in alone.rows] == [row.metrics for row in together.rows]
    assert [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)] == told


def test_findings_say_which_parameters_were_in_force() -> None:
    """What the user has set is recorded, beside what the study says; the study is as it was."""
    findings = run_study(STUDY, parameters={"width": 5})

    assert {"width": 5, "depth": 1} == findings.study.parameters
    assert {"width": 1, "depth": 1} == STUDY.parameters
    assert {5.0} == {row.metrics["area"] for row in findings.rows}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([1.0, 2.0, 6.0], 3.0, id="the mean"),
        pytest.param([1.0, nan, 3.0], 2.0, id="of those that are known"),
        pytest.param([nan, nan], nan, id="none is known"),
        pytest.param([1.0, 7.0, inf], 7.0, id="the median where one is infinite"),
        pytest.param([1.0, inf], inf, id="the higher of two"),
        pytest.param([nan, 1.0, 7.0, inf], 7.0, id="the median of those that are known"),
    ],
)
def test_a_row_sums_up_its_trials(values: list[float], expected: float) -> None:
    """A number that a trial does not have is left out, unless none has it."""
    row = StudyRow("s", {}, [Trial(number=value) for value in values])

    assert pytest.approx({"number": expected}, nan_ok=True) == row.metrics


def test_a_process_that_dies_is_told() -> None:
    """Whoever waits for its numbers learns what happened, and what to try."""
    with pytest.raises(TarryError, match=r"^a simulation process died, .* try jobs = 1$"):
        run_study(replace(STUDY, run=dies), jobs=2)


def test_an_error_on_the_way_ends_the_processes() -> None:
    """It comes out as it is, and no process is left that would finish its run first."""
    before = active_children()

    def told(done: int, _of: int) -> None:
        if done:
            raise LookupError

    with pytest.raises(LookupError):
        run_study(STUDY, jobs=2, progress=told)

    assert before == active_children()


def test_an_interrupt_ends_a_process_at_once() -> None:
    """A worker leaves Ctrl-C to its parent, and does not show where it was."""
    before = signal.getsignal(signal.SIGINT)
    try:
        _restore_sigint()
        assert signal.SIG_DFL == signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_results_as_plain_data() -> None:
    """The data is complete, and null where a number would not be valid JSON."""
    data = sample_results.findings().to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    first = data["rows"][0]
    assert ("storm", 7, 1, "none") == (
        data["study"],
        data["seed"],
        data["trials"],
        first["variant"],
    )
    assert (None, 0.4) == (first["metrics"]["recovered_after"], first["metrics"]["success_rate"])
    assert 120 == len(first["trials"][0]["series"]["requests"])


def test_parameters_that_json_cannot_represent_become_text() -> None:
    """A path is written as text, a tuple as a list, and infinity as null."""
    results = sample_results.findings(
        parameters={"path": Path("a"), "waits": (1.0, inf), "more": {1: None}}
    )
    parameters = results.to_dict()["parameters"]
    assert {"path": "a", "waits": [1.0, None], "more": {"1": None}} == parameters


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"variants": ["m"]}, "^size must be one of s, xxl, got 'm'"),
        ({"parameters": {"hight": 1}}, "^parameter must be one of depth, width, got 'hight'"),
        ({"sweep": {"hight": [1]}}, "^parameter must be one of depth, width, got 'hight'"),
        (
            {"sweep": {"width": [1]}, "parameters": {"width": 2}},
            "^width is both set and swept; leave one out",
        ),
        ({"sweep": {"width": []}}, "^sweep over width needs at least one value"),
        ({"trials": 0}, "^trials must be at least 1, got 0"),
        ({"jobs": 0}, "^jobs must be at least 1, got 0"),
    ],
)
def test_mistakes_are_refused(arguments: dict[str, Any], words: str) -> None:
    """Each names the argument."""
    with pytest.raises(ConfigurationError, match=words):
        run_study(STUDY, **arguments)
