"""`tarry simulate`: see what a policy does to a dependency, before production does."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import join
from typing import Annotated

import typer

FAILED = 1
"""The exit code when a claim does not hold."""


def simulate(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCENARIO|FILE",
            help="A built-in scenario or a scenario file; none lists the built-in ones.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Put side by side: scenario files, or policies (files, presets) after a scenario.",
        ),
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Show variants and parameters; run nothing.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change a parameter."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Run at several values, as 1,10,100 or 10..200:10; can be given twice.",
        ),
    ] = None,
    variants: Annotated[
        str | None, typer.Option(metavar="A,B", help="Run only these variants.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Runs for each row, with different dice; rows show means.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Processes to run in.", show_default="all cores")
    ] = None,
    claims: Annotated[
        list[str] | None,
        typer.Option(
            "--assert",
            metavar="CLAIM",
            help='Exit with 1 unless it holds: "amplification < 1.2", "full: p99 <= 250ms".',
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report that needs no network.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the charts as PNG.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the charts as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only claims that fail.")
    ] = False,
) -> None:
    """Simulate clients, a network and servers that fail, with the library's own decisions.

    The time is virtual: an hour takes seconds, and the same seed gives the same numbers.
    """
    from tarry.cli import simulate_output
    from tarry.cli.files import check_out
    from tarry.cli.simulate_options import settings, study_of, sweeps
    from tarry.simulator import report
    from tarry.simulator.assertions import check_assertions, metric_units, parse_assertion
    from tarry.simulator.study import run_study, with_parameters

    if not what:
        simulate_output.list_studies(as_json=as_json)
        return
    study = study_of(what, compare=compare)
    changes = settings(set_ or [], study.parameters)
    study = with_parameters(study, changes)
    if show:
        simulate_output.describe(study, as_json=as_json)
        return
    chosen = [name.strip() for name in variants.split(",")] if variants else list(study.variants)
    for claim in claims or []:  # what would be refused after the run is refused before it
        parse_assertion(claim, chosen, metric_units(study.columns))
    for option, path, endings in (
        ("--html", html, (".html", ".htm")),
        ("--png", png, (".png",)),
        ("--svg", svg, (".svg",)),
    ):
        if path is not None:  # a pipe or a device has no ending
            check_out(path, endings if path.suffix else (), option)
    with simulate_output.Bar(hidden=quiet) as bar:
        findings = run_study(
            study,
            seed=seed,
            trials=trials,
            variants=chosen,
            parameters=changes,
            sweep=sweeps(sweep, study.parameters) if sweep else None,
            jobs=_cores() if jobs is None else jobs,
            progress=bar.update,
        )
    verdicts = check_assertions(findings, claims or [])
    if html is not None:
        options = {"--set": set_, "--sweep": sweep, "--variants": variants, "--trials": trials}
        report.write_html(findings, html, command=_command(what, compare, options, seed))
    if png is not None:
        report.write_png(findings, png)
    if svg is not None:
        report.write_svg(findings, svg)
    if not quiet or as_json:
        simulate_output.print_findings(findings, verdicts, as_json=as_json)
    if not quiet:
        simulate_output.tell_written(path for path in (html, png, svg) if path is not None)
    if not simulate_output.judge(verdicts, quiet=quiet or as_json):
        raise typer.Exit(FAILED)


def _command(
    what: list[str], compare: bool, options: dict[str, list[str] | str | int | None], seed: int
) -> str:
    """Return the line that makes the same report again."""
    words = ["tarry", "simulate", *what]
    if compare:
        words.insert(2 if len(what) == 1 else 3, "--compare")
    for option, given in options.items():
        for value in given if isinstance(given, list) else [given]:
            if value is not None:
                words += [option, str(value)]
    return join([*words, "--seed", str(seed)])


def _cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
