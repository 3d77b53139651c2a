"""Studies. A study answers a question by running a scenario in several variants.

The variants differ in one parameter, such as the defence: a policy or hedging, with breaker, budget
and limiter. Other parameters can be swept, that is, run with several values. Each variant is run
once per trial; trials differ in their random numbers.
"""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from math import isfinite, isnan, nan
from multiprocessing import active_children, get_context
from statistics import fmean, median_high
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from tarry.core.checks import check_count, check_one_of
from tarry.errors import ConfigurationError, TarryError
from tarry.simulator.metrics import METRICS
from tarry.simulator.simulate import run_trials

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tarry.policyfile.defence import Defence
    from tarry.simulator.metrics import Summary
    from tarry.simulator.scenario import Scenario


class TrialResult(Protocol):
    """The result of one trial: `Summary`, or `Contention`."""

    def metrics(self) -> dict[str, float]:
        """Return the value of each metric by its name."""
        ...


class Column(NamedTuple):
    """A column of the table of results: a metric, a title, and the unit in which it is shown."""

    metric: str
    title: str
    unit: str = ""
    """One of "", "s", "ms", "%" and "x"."""


class Plot(NamedTuple):
    """The definition of a chart.

    kind:
        series: the time series `y` of the first trial of each variant.
        bars: the metric `y`, one bar for each variant.
        lines: the metric `y` over the metric `x`, or over the swept parameter if `x` is no metric;
            one line for each variant. Without a sweep, bars; with several parameters, a heat map.
    """

    kind: str
    y: str
    title: str
    x: str = ""
    y_title: str = ""
    is_log: bool = False
    """Whether the axis of `y` is logarithmic."""
    spans: tuple[tuple[float, float, str], ...] = ()
    """Periods to shade behind a time series: start, end and label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The definition of a study. `tarry simulate NAME` runs it and shows the results."""

    name: str
    question: str
    lesson: str
    """The conclusion from the results, shown below them."""
    run: Callable[..., Sequence[TrialResult]]
    """Runs one variant: takes the variant parameter, `trials`, `seed` and the parameters as keyword
    arguments, and returns one result for each trial."""
    variant_parameter: str
    """The name of the argument of `run` that selects the variant."""
    variants: tuple[str, ...]
    columns: tuple[Column, ...]
    plots: tuple[Plot, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The parameters that can be changed or swept, with their current values."""
    with_defences: Callable[[Study, Mapping[str, Defence]], Study] | None = None
    """Takes the study and returns it with these defences as its variants; None if not supported."""
    build_scenario: Callable[..., Scenario] | None = None
    """Takes a defence and the parameters, and returns the scenario, so that `--show` can list its
    settings; None if the variants are not defences, or `parameters` has all settings."""
    trial_count: int = 1
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, "Sequence[Any]"])
    """The parameters that are swept by default, and their values."""

    def unit(self, metric: str) -> str:
        """Return the unit in which a metric is shown: that of its column, if it has one."""
        stored_unit = METRICS[metric].unit if metric in METRICS else ""
        return next((each.unit for each in self.columns if each.metric == metric), stored_unit)

    def title(self, name: str) -> str:
        """Return the title of a metric's column, or the name of a metric or parameter as text."""
        default = name.rpartition(".")[2].replace("_", " ")
        return next((column.title for column in self.columns if column.metric == name), default)


class StudyRow(NamedTuple):
    """The results of one variant with one combination of swept values."""

    variant: str
    parameters: dict[str, Any]
    """The swept parameters and their values in this row."""
    trials: list[TrialResult]

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric over the trials, or the median if a value is infinite."""
        all_metrics = [trial.metrics() for trial in self.trials]
        return {name: _average([values[name] for values in all_metrics]) for name in all_metrics[0]}


class StudyResults(NamedTuple):
    """A study and its results."""

    study: Study
    seed: int
    trial_count: int
    rows: list[StudyRow]

    @property
    def variants(self) -> list[str]:
        """The variants that were run, in the order of the rows."""
        return list(dict.fromkeys(row.variant for row in self.rows))

    @property
    def swept_parameters(self) -> list[str]:
        """The names of the swept parameters."""
        return list(self.rows[0].parameters) if self.rows else []

    @property
    def fixed_parameters(self) -> dict[str, Any]:
        """The parameters that are not swept, with their values."""
        parameters = self.study.parameters.items()
        return {name: value for name, value in parameters if name not in self.swept_parameters}

    def to_dict(self) -> dict[str, Any]:
        """Return the results as data for JSON; infinite and missing values are None."""
        study = self.study
        return {
            "study": study.name,
            "question": study.question,
            "lesson": study.lesson,
            "tarry": version("tarry"),
            "seed": self.seed,
            "trials": self.trial_count,
            "variant_parameter": study.variant_parameter,
            "parameters": _to_plain(self.fixed_parameters),
            "columns": [column._asdict() for column in study.columns],
            "rows": [
                {
                    "variant": row.variant,
                    "parameters": _to_plain(row.parameters),
                    "metrics": _to_plain(row.metrics),
                    "trials": [_trial_to_dict(trial) for trial in row.trials],
                }
                for row in self.rows
            ],
        }


def run_study(
    study: Study,
    *,
    seed: int = 0,
    trials: int | None = None,
    variants: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> StudyResults:
    """Run each variant with each combination of swept values. Equal seeds give equal results.

    `trials`, `variants`, `parameters` and `sweep` replace those of the study. `jobs` is the number
    of processes. A case is one variant with one combination of swept values; `progress` is called
    with the number of cases that have been run and the number of all cases.
    """
    trial_count = study.trial_count if trials is None else check_count("trials", trials)
    check_count("jobs", jobs)
    chosen_variants = study.variants if variants is None else tuple(variants)
    for variant in chosen_variants:
        check_one_of(study.variant_parameter, variant, study.variants)
    changes = dict(parameters or {})
    swept_values = dict(study.sweep if sweep is None else sweep)
    for name in (*changes, *swept_values):
        check_one_of("parameter", name, study.parameters)
    for name in changes:
        if swept_values.pop(name, None) is not None and sweep:
            raise ConfigurationError(f"{name} is both set and swept; leave one out")
    for name, values in swept_values.items():
        if not values:
            raise ConfigurationError(f"sweep over {name} needs at least one value")
    products = product(*swept_values.values())
    combinations = [dict(zip(swept_values, values, strict=True)) for values in products]
    cases = [(variant, combination) for combination in combinations for variant in chosen_variants]
    shared_arguments = {**changes, "trials": trial_count, "seed": seed}
    arguments = [
        {study.variant_parameter: variant, **combination, **shared_arguments}
        for variant, combination in cases
    ]
    results = _run_all(study.run, arguments, jobs, progress or (lambda _done, _all: None))
    rows = [StudyRow(*case, list(result)) for case, result in zip(cases, results, strict=True)]
    return StudyResults(with_parameters(study, changes), seed, trial_count, rows)


def with_parameters(study: Study, changes: Mapping[str, Any]) -> Study:
    """Return the study with changed parameters. A change of `a` replaces `a.b` and `a.c`."""
    replaced_prefixes = tuple(f"{name}." for name in changes)
    parameters = study.parameters.items()
    others = {name: value for name, value in parameters if not name.startswith(replaced_prefixes)}
    return replace(study, parameters={**others, **changes})


def run_with_defence(
    build_scenario: Callable[..., Scenario],
    defences: Mapping[str, Defence],
    *,
    defence: str,
    trials: int = 1,
    seed: int = 0,
    **parameters: Any,
) -> list[Summary]:
    """Run a scenario with the defence of this name."""
    check_one_of("defence", defence, defences)
    return run_trials(build_scenario(defences[defence], **parameters), trials, seed)


def with_defences_as_variants(
    build_scenario: Callable[..., Scenario], study: Study, defences: Mapping[str, Defence]
) -> Study:
    """Return the study with these defences as variants, without the lesson of the old variants."""
    run = partial(run_with_defence, build_scenario, defences)
    return replace(study, run=run, variants=tuple(defences), lesson="")


def _trial_to_dict(trial: TrialResult) -> dict[str, Any]:
    attributes = {name: getattr(trial, name, None) for name in ("reasons", "bucket", "series")}
    details = {name: _to_plain(value) for name, value in attributes.items() if value is not None}
    return {"metrics": _to_plain(trial.metrics()), **details}


def _to_plain(value: Any) -> Any:
    """Convert a value to types of JSON."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        mapping = cast("Mapping[Any, Any]", value)
        return {str(name): _to_plain(item) for name, item in mapping.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in cast("list[Any]", value)]
    return str(value)


def _average(values: list[float]) -> float:
    known_values = [value for value in values if not isnan(value)]
    if not known_values:
        return nan
    return fmean(known_values) if all(map(isfinite, known_values)) else median_high(known_values)


def _run_all(
    run: Callable[..., Sequence[TrialResult]],
    arguments: Sequence[dict[str, Any]],
    jobs: int,
    progress: Callable[[int, int], None],
) -> list[Sequence[TrialResult]]:
    """Call `run` with each dict of keyword arguments, in `jobs` processes."""
    total = len(arguments)
    progress(0, total)
    results: list[Sequence[TrialResult]] = [()] * total
    if jobs == 1 or total == 1:
        for index, keywords in enumerate(arguments):
            results[index] = run(**keywords)
            progress(index + 1, total)
        return results
    unrelated_children = set(active_children())
    pool = ProcessPoolExecutor(
        min(jobs, total), mp_context=get_context("spawn"), initializer=_restore_sigint
    )
    try:
        futures = {pool.submit(run, **keywords): index for index, keywords in enumerate(arguments)}
        for done_count, future in enumerate(as_completed(futures), 1):
            results[futures[future]] = future.result()
            progress(done_count, total)
    except BrokenProcessPool as error:
        msg = "a simulation process died, possibly out of memory; try jobs = 1"
        raise TarryError(msg) from error
    except BaseException:
        # Without this, `shutdown` would wait until the workers have run their current cases.
        for worker in set(active_children()) - unrelated_children:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _restore_sigint() -> None:
    """Make Ctrl-C end a worker process without a traceback; the parent process reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
