"""A question, the variants that answer it, and the numbers they come to."""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import isfinite, isnan, nan
from multiprocessing import active_children, get_context
from statistics import fmean, median_high
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tarry.core.checks import check_count, check_one_of
from tarry.errors import ConfigurationError, TarryError
from tarry.simulator.simulate import trials_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tarry.policyfile.defence import Defence
    from tarry.simulator.metrics import Summary
    from tarry.simulator.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tarry.policyfile.defence import Defence
    from tarry.simulator.scenario import Scenario


class Trial(Protocol):
    """One run: anything that can tell its numbers."""

    def metrics(self) -> dict[str, float]:
        """Return every number by its name."""
        ...


class Column(NamedTuple):
    """A number of the table: how it is called for people and how it is shown."""

    metric: str
    title: str
    unit: str = ""
    """One of "", "s", "ms", "%" and "x"."""


class Plot(NamedTuple):
    """A chart of the report.

    series: the time series named `y` of the first trial of each variant, over time.
    bars: the metric `y`, one bar for each variant.
    lines: the metric `y` over the swept parameter or the metric `x`, one line for each variant.
    """

    kind: str
    y: str
    title: str
    x: str = ""
    y_title: str = ""
    log: bool = False
    spans: tuple[tuple[float, float, str], ...] = ()
    """Times of trouble to shade behind a series: from, to, and what it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What `tarry simulate NAME` runs and shows."""

    name: str
    question: str
    lesson: str
    run: Callable[..., Sequence[Trial]]
    """Takes `knob`, `trials`, `seed` and the parameters, each by name; gives one per trial."""
    knob: str
    """The argument that tells the variants apart."""
    variants: tuple[str, ...]
    columns: tuple[Column, ...]
    plots: tuple[Plot, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What can be changed or swept, with the values in force."""
    with_defence: Callable[[Mapping[str, Defence]], Study] | None = None
    """Makes the same study with other defences as its variants, where that makes sense."""
    world: Callable[..., Scenario] | None = None
    """Takes a defence and the parameters; gives the scenario, where one holds for all variants."""
    trials: int = 1
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, "Sequence[Any]"])
    """What is swept unless the user asks for something else."""


class Row(NamedTuple):
    """One variant with one set of parameters."""

    variant: str
    parameters: dict[str, Any]
    """The swept ones."""
    trials: list[Trial]

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each number over the trials, or the median where one of them is infinite."""
        every = [trial.metrics() for trial in self.trials]
        return {name: _middle([one[name] for one in every]) for name in every[0]}


class Findings(NamedTuple):
    """A study that was run."""

    study: Study
    seed: int
    trials: int
    rows: list[Row]


def conduct(
    study: Study,
    *,
    seed: int = 0,
    trials: int | None = None,
    variants: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Findings:
    """Run every variant at every swept point; the same seed gives the same findings.

    `jobs` is the number of processes; `progress` is told how many runs are done, of how many.
    """
    trials = study.trials if trials is None else check_count("trials", trials)
    check_count("jobs", jobs)
    chosen = study.variants if variants is None else tuple(variants)
    for variant in chosen:
        check_one_of(study.knob, variant, study.variants)
    fixed = dict(parameters or {})
    swept = dict(study.sweep if sweep is None else sweep)
    for name in (*fixed, *swept):
        check_one_of("parameter", name, study.parameters)
    for name in sweep or {}:
        if name in fixed:
            msg = f"{name} is both set and swept; leave one out"
            raise ConfigurationError(msg)
    swept = {name: values for name, values in swept.items() if name not in fixed}
    for name, values in swept.items():
        if not values:
            msg = f"sweep over {name} needs at least one value"
            raise ConfigurationError(msg)
    points = [dict(zip(swept, point, strict=True)) for point in product(*swept.values())]
    tasks = [(variant, point) for point in points for variant in chosen]
    arguments = [
        {study.knob: variant, **fixed, **point, "trials": trials, "seed": seed}
        for variant, point in tasks
    ]
    results = _run_all(study.run, arguments, jobs, progress or (lambda _done, _all: None))
    rows = [
        Row(variant, point, list(result))
        for (variant, point), result in zip(tasks, results, strict=True)
    ]
    return Findings(with_values(study, fixed), seed, trials, rows)


def with_values(study: Study, changes: Mapping[str, Any]) -> Study:
    """Return the study with these values in force; one that replaces a table hides its keys."""
    gone = tuple(f"{name}." for name in changes)
    kept = {name: old for name, old in study.parameters.items() if not name.startswith(gone)}
    return replace(study, parameters={**kept, **changes})


def _middle(values: list[float]) -> float:
    known = [value for value in values if not isnan(value)]
    if not known:
        return nan
    return fmean(known) if all(map(isfinite, known)) else median_high(known)


def _run_all(
    run: Callable[..., Sequence[Trial]],
    arguments: Sequence[dict[str, Any]],
    jobs: int,
    progress: Callable[[int, int], None],
) -> list[Sequence[Trial]]:
    total = len(arguments)
    progress(0, total)
    results: list[Sequence[Trial]] = [()] * total
    if jobs == 1 or total == 1:
        for index, one in enumerate(arguments):
            results[index] = run(**one)
            progress(index + 1, total)
        return results
    others = set(active_children())
    pool = ProcessPoolExecutor(
        min(jobs, total), mp_context=get_context("spawn"), initializer=_die_quietly
    )
    try:
        running = {pool.submit(run, **one): index for index, one in enumerate(arguments)}
        for done, future in enumerate(as_completed(running), 1):
            results[running[future]] = future.result()
            progress(done, total)
    except BrokenProcessPool as error:
        msg = "a process of the simulation died, perhaps for want of memory; try jobs = 1"
        raise TarryError(msg) from error
    except BaseException:
        for worker in set(active_children()) - others:  # which would finish its run first
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _die_quietly() -> None:
    """Have Ctrl-C end a worker at once: its parent says what is to be said."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(
    world: Callable[..., Scenario],
    defences: Mapping[str, Defence],
    *,
    defence: str,
    trials: int = 1,
    seed: int = 0,
    **parameters: Any,
) -> list[Summary]:
    """Run a scenario behind one of these defences."""
    check_one_of("defence", defence, defences)
    return trials_of(world(defences[defence], **parameters), trials, seed)


def with_defences(
    study: Study, world: Callable[..., Scenario], defences: Mapping[str, Defence]
) -> Study:
    """Return the study with the user's defences as its variants; its lesson is about its own."""
    mine = partial(run, world, defences)
    return replace(study, run=mine, variants=tuple(defences), lesson="")
