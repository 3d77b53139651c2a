"""`tarry tune`: propose a policy from a log of attempts."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli.options import ApiKeyOption, parse_duration, parse_time
from tarry.cli.output import (
    POLICY_SUFFIXES,
    check_output_path,
    report_table,
    to_builtins,
    to_printable_line,
    write_text,
)
from tarry.cli.policy import policy_text, to_core_policy
from tarry.client.errors import NotFound
from tarry.core.text import format_count, format_duration
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tarry.policyfile.defence import Defence
    from tarry.tuning.attempt_log import AttemptLog
    from tarry.tuning.comparison import Comparison
    from tarry.tuning.evidence import Evidence
    from tarry.tuning.proposal import Proposal

_MAX_TASKS = 1_000
"""Number of the newest tasks of a service whose policies are counted."""
_METRICS = (
    ("success_rate", "calls that succeeded", "%"),
    ("amplification", "requests per call", "x"),
    ("p50", "p50 of calls", "ms"),
    ("p99", "p99 of calls", "ms"),
    ("p999", "p99.9 of calls", "ms"),
    ("recovered_after", "time to recover from outages", "s"),
    ("unfinished", "calls still running at the end", ""),
)
"""Name, row title and unit of each metric in the comparison."""


def tune(
    log: Annotated[
        Path | None,
        typer.Argument(
            metavar="LOG",
            help="Attempts as CSV with a header or as JSON Lines; see `tarry docs tuning`.",
        ),
    ] = None,
    service: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Read the attempts from this service instead of LOG."),
    ] = None,
    downstream: Annotated[
        str | None,
        typer.Option(metavar="LANE", help="Only attempts of this downstream of the service."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only tasks of the service created since: 24h, 7d."),
    ] = None,
    api_key: ApiKeyOption = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="Current policy, in TOML, YAML or JSON.",
            show_default="with --service the policy of most of its tasks, else the default policy",
        ),
    ] = None,
    latency_target: Annotated[
        str | None, typer.Option(metavar="TIME", help="Maximum total time of a call: 2s, 500ms.")
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

    The log is a file, or the attempt log of a service (--service). A setting is kept if the log has
    too little data for it. Unless --no-simulate is given, the current and the proposed policy are
    then simulated with the latencies in the log.
    """
    from tarry.simulator.files import read_defence
    from tarry.tuning.attempt_log import read_attempt_log
    from tarry.tuning.comparison import compare_policies
    from tarry.tuning.evidence import analyze_log
    from tarry.tuning.proposal import propose, to_json

    check_output_path(out, POLICY_SUFFIXES)
    latency_target_s = parse_duration("--latency-target", latency_target)
    # A defence is a policy or hedging, with an optional breaker, budget and limiter.
    current = None if policy is None else read_defence(policy)
    if log is not None and (service, downstream, since) == (None, None, None):
        attempt_log = read_attempt_log(log)
    elif log is None and service is not None:
        attempt_log, used_policy = _fetch_attempt_log(service, api_key, downstream, since)
        current = current or used_policy
    else:
        msg = "name either a LOG, or --service with optional --downstream and --since"
        raise ConfigurationError(msg)
    evidence = analyze_log(attempt_log)
    proposal = propose(evidence, current, latency_target_s)
    comparison: Comparison | None = None
    if not no_simulate and proposal.proposed != proposal.current:
        comparison = compare_policies(evidence, proposal.current, proposal.proposed, seed=seed)
    if out is not None:
        is_json = out.suffix.lower() == ".json"
        write_text(out, policy_text(proposal.proposed.to_dict(), as_json=is_json))
    if as_json:
        typer.echo(to_json(evidence, proposal, comparison))
        return
    from rich.console import Console

    console = Console()
    print_proposal(console, evidence, proposal)
    if not no_simulate:
        print_comparison(console, evidence, proposal, comparison)
    if out is not None:
        _print_line(console, f"written to {out}")


def _fetch_attempt_log(
    service: str, api_key: str | None, downstream: str | None, since: str | None
) -> tuple[AttemptLog, Defence]:
    """Return the attempts of a service, and the policy of most of the tasks that were read.

    Raises `ConfigurationError` if there are no attempts.
    """
    from tarry.cli.remote import check_downstream_exists, connect
    from tarry.policyfile.defence import Defence
    from tarry.tuning.attempt_log import AttemptLog, read_attempts

    created_after = parse_time("--since", since)
    with connect(service, api_key) as client:
        attempts = client.export_attempts(lane=downstream, created_after=created_after)
        log = AttemptLog(read_attempts(map(to_builtins, attempts)))
        if not len(log):
            if downstream is not None:
                check_downstream_exists(client, "--downstream", downstream)
            raise ConfigurationError(f"{service} has no attempts that match the options")
        tasks = islice(client.tasks(lane=downstream, created_after=created_after), _MAX_TASKS)
        ((policy_id, _),) = Counter(task.policy_id for task in tasks).most_common(1)
        try:
            stored_policy = client.policy(policy_id)
        except NotFound:  # tasks of a deleted policy use the default policy
            stored_policy = client.policy("default")
    return log, Defence(policy=to_core_policy(stored_policy))


def _print_line(console: Console, text: str, style: str = "") -> None:
    """Print a text as one line, with control characters escaped."""
    from rich.text import Text

    console.print(Text(to_printable_line(text), style=style), soft_wrap=True)


def print_proposal(console: Console, evidence: Evidence, proposal: Proposal) -> None:
    """Print each setting with its reason and data, and the estimated effect of hedging."""
    from rich.text import Text

    from tarry.tuning.evidence import TAIL_QUANTILE, required_samples
    from tarry.tuning.rules import format_percent, format_setting

    attempts = format_count(evidence.attempts, "attempt")
    calls = format_count(evidence.calls, "call")
    span, outages = format_duration(evidence.span), format_count(len(evidence.outages), "outage")
    _print_line(console, f"{attempts} of {calls} in {span}, {outages}", "bold")
    for warning in proposal.warnings:
        _print_line(console, f"warning: {warning}", "yellow")
    table = _table("field", "current", "proposed", "reason")
    for suggestion in proposal.suggestions:
        reason = Text(to_printable_line(suggestion.reason))
        if suggestion.basis:
            reason.append(f"\n{to_printable_line(suggestion.basis)}", style="dim")
        # Advice is not part of the proposed policy.
        is_changed = suggestion.proposed != suggestion.current and not suggestion.is_advice
        style = "green" if is_changed else ""
        if not suggestion.has_enough_data:
            style = "yellow"
        field = suggestion.field
        current = Text(to_printable_line(format_setting(field, suggestion.current)))
        proposed = Text(to_printable_line(format_setting(field, suggestion.proposed)), style=style)
        table.add_row(Text(field), current, proposed, reason)
    console.print(table)
    console.print()
    if len(evidence.success_durations) >= required_samples(TAIL_QUANTILE):
        table = _table("hedge percentile", "hedge after", "p99.9", "p99.9 saved", "load added")
        for hedge in evidence.hedges:
            times = format_duration(hedge.delay), format_duration(hedge.tail)
            effects = format_percent(hedge.saving), format_percent(hedge.load)
            table.add_row(hedge.percentile, *times, *effects)
        console.print(table)
        console.print()


def print_comparison(
    console: Console, evidence: Evidence, proposal: Proposal, comparison: Comparison | None
) -> None:
    """Print the metrics of the log and of both simulations, or why nothing was simulated."""
    from rich.text import Text

    from tarry.simulator.formatting import format_value
    from tarry.tuning.comparison import describe_changes, explain_missing_comparison

    if comparison is None:
        reason = explain_missing_comparison(evidence, proposal.current, proposal.proposed)
        _print_line(console, f"not simulated: {reason}")
        return
    duration = format_duration(comparison.duration)
    outages = format_count(comparison.outages, "outage")
    load = f"{comparison.rate:.3g} calls per second"
    _print_line(console, f"simulated: {duration} at {load} with {outages}", "bold")
    requests = format_count(comparison.concurrency, "request")
    server = f"the simulated server handles {requests} at a time"
    _print_line(console, f"{server}, about twice the concurrency in the log", "dim")
    table = _table("", "in the log", "current", "proposed")
    log_metrics = _metrics_in_log(evidence)
    current, proposed = comparison.current.metrics(), comparison.proposed.metrics()
    for name, title, unit in _METRICS:
        if current[name] or proposed[name]:
            values = (log_metrics.get(name, nan), current[name], proposed[name])
            table.add_row(title, *(format_value(value, unit) for value in values))
    console.print(table)
    if comparison.duration < evidence.span:
        outages = format_count(len(evidence.outages), "outage")
        log_span = f"{format_duration(evidence.span)} with {outages}"
        note = f"the log covers {log_span}, the simulation only a part of that"
        _print_line(console, note, "dim")
    console.print(Text(describe_changes(comparison.current, comparison.proposed)))


def _metrics_in_log(evidence: Evidence) -> dict[str, float]:
    """Return by name the metrics for which the log has enough data."""
    from tarry.simulator.metrics import quantile
    from tarry.tuning.evidence import TAIL_QUANTILE, required_samples

    durations = evidence.call_durations
    quantiles = {"p50": 0.5, "p99": 0.99, "p999": TAIL_QUANTILE}
    return {
        "success_rate": evidence.success_rate,
        "amplification": evidence.attempts_per_call,
        **{
            name: quantile(durations, q)
            for name, q in quantiles.items()
            if len(durations) >= required_samples(q)
        },
    }


def _table(*titles: str) -> Table:
    table = report_table()
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title == "field")
    return table
