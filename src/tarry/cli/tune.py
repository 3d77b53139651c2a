"""`tarry tune`: propose a policy from a log of attempts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli.options import parse_duration

if TYPE_CHECKING:
    from tarry.tuning.comparison import Comparison
    from tarry.tuning.proposal import Proposal

POLICY_SUFFIXES = (".json", ".toml")


def tune(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help="Attempts as CSV with a header or as JSON Lines; see docs/tuning.md.",
        ),
    ],
    policy: Annotated[
        Path | None,
        typer.Option(help="Current policy, in TOML, YAML or JSON.", show_default="the defaults"),
    ] = None,
    latency_target: Annotated[
        str | None, typer.Option(metavar="TIME", help="Maximum time of a call in total: 2s, 500ms.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the proposed policy: NAME.toml or NAME.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    seed: Annotated[
        int, typer.Option(help="Random seed: the same seed gives the same numbers.")
    ] = 0,
    no_simulate: Annotated[
        bool,
        typer.Option("--no-simulate", help="Do not simulate the current and the proposed policy."),
    ] = False,
) -> None:
    """Propose a policy from a log of attempts, with the reason for each setting.

    A setting is not changed if the log has too little data for it. Afterwards, the current and
    the proposed policy are simulated with the recorded latencies.
    """
    from tarry.cli.files import check_output_path
    from tarry.simulator.files import read_defence
    from tarry.tuning.attempt_log import read_attempt_log
    from tarry.tuning.comparison import compare_policies
    from tarry.tuning.evidence import analyze_log
    from tarry.tuning.proposal import propose

    if out is not None:
        check_output_path(out, POLICY_SUFFIXES)
    latency_target_s = (
        None if latency_target is None else parse_duration("--latency-target", latency_target)
    )
    current = None if policy is None else read_defence(policy)
    evidence = analyze_log(read_attempt_log(log))
    proposal = propose(evidence, current, latency_target_s)
    comparison: Comparison | None = None
    if not no_simulate and proposal.defence != proposal.current:
        comparison = compare_policies(evidence, proposal.current, proposal.defence, seed=seed)
    if out is not None:
        _write_policy(out, proposal)
    if as_json:
        from tarry.tuning.proposal import to_json

        typer.echo(to_json(evidence, proposal, comparison))
        return
    from rich.console import Console

    from tarry.cli.tune_output import print_line, show_comparison, show_proposal

    console = Console()
    show_proposal(console, evidence, proposal)
    if not no_simulate:
        show_comparison(console, evidence, proposal, comparison)
    if out is not None:
        print_line(console, f"written to {out}")


def _write_policy(path: Path, proposal: Proposal) -> None:
    """Write the proposed policy as JSON or TOML; the suffix of the path selects the format."""
    import json

    from tarry.cli.files import write_text
    from tarry.policyfile.toml import dumps

    fields = proposal.defence.to_dict()
    is_json = path.suffix.lower() == ".json"
    text = json.dumps(fields, indent=2) + "\n" if is_json else dumps(fields)
    write_text(path, text)
