"""Running a study: variants, sweeps, processes, and invalid arguments."""

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
from tests.simulator.sample_results import sample_results


class FixedTrial:
    """A trial with these metrics."""

    def __init__(self, **metrics: float) -> None:
        self._metrics = metrics

    def metrics(self) -> dict[str, float]:
        """Return the metrics."""
        return self._metrics


def run(*, size: str, trials: int, seed: int, width: int = 1, depth: int = 1) -> list[FixedTrial]:
    """Return trials whose metrics are the arguments."""
    return [
        FixedTrial(size=len(size), seed=seed, trial=trial, area=width * depth)
        for trial in range(trials)
    ]


def exit_process(**_: object) -> list[FixedTrial]:
    """Exit like a process that runs out of memory."""
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
    trial_count=2,
    sweep={"width": (1, 2)},
)


def row_keys(**arguments: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the variant and parameters of each row."""
    return [(row.variant, row.parameters) for row in run_study(STUDY, **arguments).rows]


def test_study_runs_with_its_defaults() -> None:
    """Without arguments, each variant runs at each point of the study's own sweep."""
    results = run_study(STUDY)

    assert 2 == results.trial_count
    assert [
        ("s", {"width": 1}),
        ("xxl", {"width": 1}),
        ("s", {"width": 2}),
        ("xxl", {"width": 2}),
    ] == [(row.variant, row.parameters) for row in results.rows]
    assert {"size": 3.0, "seed": 0.0, "trial": 0.5, "area": 2.0} == results.rows[3].metrics


def test_two_parameters_are_swept_over_all_pairs() -> None:
    """A sweep of two parameters runs all pairs; the last parameter changes fastest."""
    sweep = {"width": [1, 2], "depth": [3, 4]}

    assert [(1, 3), (1, 4), (2, 3), (2, 4)] == [
        (point["width"], point["depth"]) for _, point in row_keys(sweep=sweep, variants=["s"])
    ]


def test_parameter_that_is_set_is_not_swept() -> None:
    """A parameter with a given value is not swept."""
    assert [("s", {}), ("xxl", {})] == row_keys(parameters={"width": 5})


def test_result_does_not_depend_on_processes() -> None:
    """Rows have the same order and values with several processes."""
    progress_calls: list[tuple[int, int]] = []

    one_process = run_study(STUDY, seed=7)
    two_processes = run_study(
        STUDY, seed=7, jobs=2, progress=lambda done, total: progress_calls.append((done, total))
    )

    assert [row.metrics for row in one_process.rows] == [row.metrics for row in two_processes.rows]
    assert [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)] == progress_calls


def test_results_have_the_parameters() -> None:
    """The results have the parameters that were set, and the study is unchanged."""
    results = run_study(STUDY, parameters={"width": 5})

    assert {"width": 5, "depth": 1} == results.study.parameters
    assert {"width": 1, "depth": 1} == STUDY.parameters
    assert {5.0} == {row.metrics["area"] for row in results.rows}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([1.0, 2.0, 6.0], 3.0, id="mean"),
        pytest.param([1.0, nan, 3.0], 2.0, id="mean of the known values"),
        pytest.param([nan, nan], nan, id="all values missing"),
        pytest.param([1.0, 7.0, inf], 7.0, id="median if a value is infinite"),
        pytest.param([1.0, inf], inf, id="higher of two if one is infinite"),
        pytest.param([nan, 1.0, 7.0, inf], 7.0, id="median of the known values"),
    ],
)
def test_row_averages_its_trials(values: list[float], expected: float) -> None:
    """A row has the mean of the known values, or the median if one of them is infinite."""
    row = StudyRow("s", {}, [FixedTrial(number=value) for value in values])

    assert pytest.approx({"number": expected}, nan_ok=True) == row.metrics


def test_dead_process_is_reported() -> None:
    """The error says that a process died and what to try."""
    with pytest.raises(TarryError, match=r"^a simulation process died, .* try jobs = 1$"):
        run_study(replace(STUDY, run=exit_process), jobs=2)


def test_error_ends_the_processes() -> None:
    """The error is raised unchanged, and no process is left."""
    before = active_children()

    def on_progress(done: int, _total: int) -> None:
        if done:
            raise LookupError

    with pytest.raises(LookupError):
        run_study(STUDY, jobs=2, progress=on_progress)

    assert before == active_children()


def test_worker_process_restores_the_default_sigint_handler() -> None:
    """A worker process gets the default SIGINT handler, so that Ctrl-C prints no traceback."""
    before = signal.getsignal(signal.SIGINT)
    try:
        _restore_sigint()
        assert signal.SIG_DFL == signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_results_are_converted_to_json_data() -> None:
    """The data has rows, metrics and series, and null for numbers that JSON cannot represent."""
    data = sample_results().to_dict()
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
    results = sample_results(parameters={"path": Path("a"), "waits": (1.0, inf), "more": {1: None}})
    parameters = results.to_dict()["parameters"]
    assert {"path": "a", "waits": [1.0, None], "more": {"1": None}} == parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    """An invalid argument is rejected with its name and the rule."""
    with pytest.raises(ConfigurationError, match=message):
        run_study(STUDY, **arguments)
