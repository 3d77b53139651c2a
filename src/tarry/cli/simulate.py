"""`tarry simulate`: simulate the effect of a retry policy on a failing dependency.

A study runs one scenario in several variants, usually policies. The name of the scenario selects
the study. A defence is a policy or hedging, with an optional breaker, budget and limiter.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tarry.cli.exit_codes import EXIT_FAILED
from tarry.cli.output import check_output_path, progress_bar, to_printable_line
from tarry.cli.policy import read_defence_or_preset
from tarry.core.text import did_you_mean, suggest
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tarry.simulator.study import Study

MAX_SWEEPS = 2
MAX_SWEEP_VALUES = 1_000
_MIN_SIMILARITY = 0.7
"""Minimum similarity of a suggested name, so high that `budget` does not suggest `total_budget`."""
_RANGE = re.compile(r"(?P<first>[^.]+(?:\.\d+)?)\.\.(?P<last>[^:]+?)(?::(?P<step>.+))?")
"""A range such as `10..200:10` (first, last, step); the step is optional."""


def simulate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO|FILE|POLICY",
            help="Built-in scenario, or scenario file; with --compare, also policies. "
            "Default: list the built-in scenarios.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Compare several scenario files, or several policies in one scenario."
        ),
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Only show the variants and parameters.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a parameter. Can be repeated."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Run with a list of values (1,10) or a range first..last:step. Can be used twice.",
        ),
    ] = None,
    variants: Annotated[
        str | None, typer.Option(metavar="A,B", help="Run only these variants.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(help="Number of runs for each row of the table, which shows their means."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Random seed: the same seed gives the same numbers.")
    ] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Number of processes.", show_default="all cores")
    ] = None,
    assertions: Annotated[
        list[str] | None,
        typer.Option(
            "--assert",
            metavar="CONDITION",
            help='Exit with 1 if a condition such as "amplification < 1.2" is false. Add a name to '
            'check only one variant: "full: p99 <= 250ms".',
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the charts as PNG.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the charts as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only failed assertions.")
    ] = False,
) -> None:
    """Simulate clients, a network and failing servers. The library's own code decides on retries.

    Time is virtual: a simulated hour takes seconds.
    """
    from tarry.cli import simulate_output
    from tarry.simulator import report
    from tarry.simulator.assertions import check_assertions, metric_units, parse_assertion
    from tarry.simulator.study import run_study, with_parameters

    if not arguments:
        simulate_output.print_studies(as_json=as_json)
        return
    study = select_study(arguments, compare=compare)
    parameters = parse_parameters(set_ or [], study.parameters)
    study = with_parameters(study, parameters)
    if show:
        simulate_output.print_study(study, as_json=as_json)
        return
    variant_names = (
        [name.strip() for name in variants.split(",")] if variants else list(study.variants)
    )
    for assertion in assertions or []:  # reject an invalid assertion before the long run
        parse_assertion(assertion, variant_names, metric_units(study.columns))
    for option, path, suffixes in (
        ("--html", html, (".html", ".htm")),
        ("--png", png, (".png",)),
        ("--svg", svg, (".svg",)),
    ):
        # A path without a suffix may be a pipe or a device.
        check_output_path(path, suffixes if path and path.suffix else (), option)
        if path is not None:
            report.import_vl_convert()  # raises MissingExtra before the long run
    with progress_bar("simulating", hidden=quiet) as update_progress:
        results = run_study(
            study,
            seed=seed,
            trials=trials,
            variants=variant_names,
            parameters=parameters,
            sweep=parse_sweeps(sweep, study.parameters) if sweep else None,
            jobs=_count_cores() if jobs is None else jobs,
            progress=update_progress,
        )
    assertion_results = check_assertions(results, assertions or [])
    if html is not None:
        options = {"--set": set_, "--sweep": sweep, "--variants": variants, "--trials": trials}
        report.write_html(results, html, command=_command_line(arguments, compare, options, seed))
    if png is not None:
        report.write_png(results, png)
    if svg is not None:
        report.write_svg(results, svg)
    if not quiet or as_json:
        simulate_output.print_results(results, assertion_results, as_json=as_json)
    for path in (html, png, svg):
        if path is not None and not quiet:
            # On standard error, because a program may parse standard output.
            typer.echo(f"written to {to_printable_line(str(path))}", err=True)
    if not simulate_output.report_assertions(assertion_results, quiet=quiet or as_json):
        raise typer.Exit(EXIT_FAILED)


def _command_line(
    arguments: list[str], compare: bool, options: dict[str, list[str] | str | int | None], seed: int
) -> str:
    """Return a command line that repeats the simulation, without the output options."""
    first, *others = arguments
    words = ["tarry", "simulate", first, *(["--compare"] if compare else []), *others]
    for option, values in options.items():
        for value in values if isinstance(values, list) else [values]:
            if value is not None:
                words += [option, str(value)]
    return join([*words, "--seed", str(seed)])


def _count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def select_study(arguments: Sequence[str], *, compare: bool) -> Study:
    """Return the study that the arguments name.

    With `compare`, the arguments are several scenario files, or one scenario and the policies to
    compare in it.
    """
    from tarry.simulator.files import read_comparison, short_names
    from tarry.simulator.scenarios import STUDIES

    first, others = arguments[0], arguments[1:]
    if not compare:
        if others:
            msg = f"got {len(arguments)} scenarios; use --compare to compare several files"
            raise ConfigurationError(msg)
        return _find_study(first)
    if not others:
        needed = "policies to compare in" if first in STUDIES else "at least two files, got only"
        raise ConfigurationError(f"--compare needs {needed} {first}")
    if first not in STUDIES and all(map(_is_scenario_file, others)):
        return read_comparison([Path(name) for name in arguments])
    study = _find_study(first)
    if study.with_defences is None:
        msg = f"--compare cannot be used with {first}: its variants are not policies"
        raise ConfigurationError(msg)
    paths = [Path(name) for name in others]
    defences = dict(zip(short_names(paths), map(read_defence_or_preset, others), strict=True))
    return study.with_defences(study, defences)


def _is_scenario_file(name: str) -> bool:
    from tarry.simulator.files import is_scenario_file

    path = Path(name)
    return bool(path.suffix or path.exists()) and is_scenario_file(path)


def _find_study(name: str) -> Study:
    from tarry.simulator.files import read_study
    from tarry.simulator.scenarios import STUDIES

    if name in STUDIES:
        return STUDIES[name]
    path = Path(name)
    if path.suffix or path.exists():
        return read_study(path)
    hint = did_you_mean(name, STUDIES, otherwise="the scenarios are")
    raise ConfigurationError(f"{name!r} is neither a scenario nor a file; {hint}")


def parse_parameters(options: Iterable[str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each parameter that a `--set` option names."""
    return {name: parse_value(text) for name, text in _parse_pairs("--set", options, parameters)}


def parse_sweeps(options: Sequence[str], parameters: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each parameter that a `--sweep` option names."""
    if len(options) > MAX_SWEEPS:
        raise ConfigurationError("--sweep", f"can be used at most {MAX_SWEEPS} times", len(options))
    return {name: parse_values(text) for name, text in _parse_pairs("--sweep", options, parameters)}


def parse_value(text: str) -> Any:
    """Return a value parsed as TOML, or the text itself if it is not valid TOML."""
    import tomllib

    try:
        parsed: dict[str, Any] = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    # A text with line breaks may be TOML with further keys.
    return parsed["value"] if set(parsed) == {"value"} else text


def parse_values(text: str) -> list[Any]:
    """Return the values of a list such as `1,10,100`, or of a range, last value included."""
    match = _RANGE.fullmatch(text.strip())
    if match:
        values = _expand_range(text, match)
    else:
        values = [parse_value(part.strip()) for part in text.split(",")]
    if len(values) > MAX_SWEEP_VALUES:
        msg = f"a sweep has at most {MAX_SWEEP_VALUES} values; {text!r} has more"
        raise ConfigurationError(msg)
    return values


def _expand_range(text: str, match: re.Match[str]) -> list[Any]:
    from decimal import Decimal, InvalidOperation

    try:
        first, last = Decimal(match["first"]), Decimal(match["last"])
        step = Decimal(match["step"] or 1)
        count = int((last - first) / step) + 1
    except (InvalidOperation, ZeroDivisionError, ValueError, OverflowError):
        count, first, step = 0, Decimal(0), Decimal(0)  # rejected below
    if count < 1 or step <= 0:
        msg = f"a range has the format first..last:step, such as 10..200:10, got {text!r}"
        raise ConfigurationError(msg)
    # Stop after one value too many, which is enough for the caller to reject the range.
    values = (first + step * index for index in range(min(count, MAX_SWEEP_VALUES + 1)))
    is_integer = first == first.to_integral_value() and step == step.to_integral_value()
    return [int(value) if is_integer else float(value) for value in values]


def _parse_pairs(
    option: str, texts: Iterable[str], parameters: Mapping[str, Any]
) -> Iterable[tuple[str, str]]:
    """Yield the name and the value of each text, which has the format `name=value`."""
    seen: set[str] = set()
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise ConfigurationError(option, "must have the format name=value", text)
        if name not in parameters:
            hint = _suggest_parameter(name, parameters)
            raise ConfigurationError(f"{option}: there is no parameter {name!r}; {hint}")
        if name in seen:
            raise ConfigurationError(option, f"sets {name} twice")
        seen.add(name)
        yield name, value


def _suggest_parameter(name: str, parameters: Iterable[str]) -> str:
    """Suggest a parameter in the same table, or in the nearest enclosing table that exists.

    The table of the parameter `clients.retry.delay` is `clients.retry`, and its key is `delay`.
    """
    names = list(parameters)
    table, _, key = name.rpartition(".")
    while table:
        prefix = f"{table}."
        paths = [known.removeprefix(prefix) for known in names if known.startswith(prefix)]
        keys = dict.fromkeys(path.partition(".")[0] for path in paths)
        if keys:
            similar = suggest(key, keys, similarity=_MIN_SIMILARITY)
            if similar:
                return f"did you mean {table}.{similar}?"
            return f"the parameters of {table} are {', '.join(keys)}"
        table, _, key = table.rpartition(".")
    return did_you_mean(name, names, otherwise="the parameters are")
