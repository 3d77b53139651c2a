"""`tarry tune`: a policy from the attempts that were made, each number with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tarry.tuning.comparison import Comparison
    from tarry.tuning.proposal import Proposal

FORMATS = (".json", ".toml")


def tune(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG", help="Attempts as CSV with a header, or JSONL: docs/tuning.md."
        ),
    ],
    policy: Annotated[
        Path | None,
        typer.Option(
            help="The policy in force, in TOML, YAML or JSON.", show_default="the defaults"
        ),
    ] = None,
    latency_target: Annotated[
        str | None, typer.Option(metavar="TIME", help="What a call may take in all: 2s, 500ms.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the proposed policy: NAME.toml or NAME.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    no_simulate: Annotated[
        bool, typer.Option("--no-simulate", help="Do not run the old policy against the new one.")
    ] = False,
) -> None:
    """Propose a policy from a log of attempts, and say why.

    What the log is too small for is not guessed: it stays as it is. Then the policy in force
    and the proposed one are simulated on the recorded latencies.
    """
    from tarry.cli.files import check_out
    from tarry.simulator.files import read_defence
    from tarry.tuning.attempt_log import read_attempt_log
    from tarry.tuning.comparison import compare_policies
    from tarry.tuning.evidence import analyze_log
    from tarry.tuning.formatting import parse_duration
    from tarry.tuning.proposal import propose

    if out is not None:
        check_out(out, FORMATS)
    target = None if latency_target is None else parse_duration("--latency-target", latency_target)
    current = None if policy is None else read_defence(policy)
    evidence = analyze_log(read_attempt_log(log))
    proposal = propose(evidence, current, target)
    runs: Comparison | None = None
    if not no_simulate and proposal.defence != proposal.current:
        runs = compare_policies(evidence, proposal.current, proposal.defence, seed=seed)
    if out is not None:
        _write(out, proposal)
    if as_json:
        from tarry.tuning.proposal import to_json

        typer.echo(to_json(evidence, proposal, runs))
        return
    from rich.console import Console

    from tarry.cli.tune_output import say, show_proposal, show_replay

    console = Console()
    show_proposal(console, evidence, proposal)
    if not no_simulate:
        show_replay(console, evidence, proposal, runs)
    if out is not None:
        say(console, f"written to {out}")


def _write(path: Path, proposal: Proposal) -> None:
    import json

    from tarry.cli.files import write_text
    from tarry.policyfile.toml import dumps

    plain = proposal.defence.to_dict()
    as_json = path.suffix.lower() == ".json"
    text = json.dumps(plain, indent=2) + "\n" if as_json else dumps(plain)
    write_text(path, text)
