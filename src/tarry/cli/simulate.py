"""`tarry simulate`: simulate the effect of a retry policy on a failing dependency.

A study is a scenario with its variants (usually policies), parameters and reported metrics.
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import join
from typing import Annotated

import typer


def simulate(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO|FILE",
            help="Built-in scenario, or scenario file. Without one, the built-in ones are listed.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Compare several scenario files, or several policies in one scenario.",
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
            help="Run with several values: 1,10,100 or 10..200:10. Can be used twice.",
        ),
    ] = None,
    variants: Annotated[
        str | None, typer.Option(metavar="A,B", help="Run only these variants.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(help="Runs per row, each with other random numbers. Rows show means."),
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
            help='Exit with 1 unless it holds: "amplification < 1.2", "full: p99 <= 250ms".',
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
    """Simulate clients, a network and failing servers, with the library's own retry decisions.

    Time is virtual: a simulated hour takes seconds.
    """
    from tarry.cli import simulate_output
    from tarry.cli.exit_codes import EXIT_FAILED
    from tarry.cli.files import check_output_path
    from tarry.cli.simulate_options import parse_settings, parse_sweeps, select_study
    from tarry.simulator import report
    from tarry.simulator.assertions import check_assertions, metric_units, parse_assertion
    from tarry.simulator.study import run_study, with_parameters

    if not scenarios:
        simulate_output.print_studies(as_json=as_json)
        return
    study = select_study(scenarios, compare=compare)
    changes = parse_settings(set_ or [], study.parameters)
    study = with_parameters(study, changes)
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
        if path is not None:  # a path without a suffix may be a pipe or a device
            check_output_path(path, suffixes if path.suffix else (), option)
    with simulate_output.ProgressBar(hidden=quiet) as bar:
        results = run_study(
            study,
            seed=seed,
            trials=trials,
            variants=variant_names,
            parameters=changes,
            sweep=parse_sweeps(sweep, study.parameters) if sweep else None,
            jobs=_count_cores() if jobs is None else jobs,
            progress=bar.update,
        )
    assertion_results = check_assertions(results, assertions or [])
    if html is not None:
        options = {"--set": set_, "--sweep": sweep, "--variants": variants, "--trials": trials}
        report.write_html(results, html, command=_command_line(scenarios, compare, options, seed))
    if png is not None:
        report.write_png(results, png)
    if svg is not None:
        report.write_svg(results, svg)
    if not quiet or as_json:
        simulate_output.print_results(results, assertion_results, as_json=as_json)
    if not quiet:
        simulate_output.print_written_files(path for path in (html, png, svg) if path is not None)
    if not simulate_output.report_failures(assertion_results, quiet=quiet or as_json):
        raise typer.Exit(EXIT_FAILED)


def _command_line(
    scenarios: list[str], compare: bool, options: dict[str, list[str] | str | int | None], seed: int
) -> str:
    """Return the command line that reproduces a report."""
    words = ["tarry", "simulate", *scenarios]
    if compare:
        words.insert(2 if len(scenarios) == 1 else 3, "--compare")
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
