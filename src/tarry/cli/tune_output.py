"""A proposal, and the old policy against the new one, as tables in the terminal."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tarry.cli.output import printable
from tarry.core.explain import format_duration
from tarry.simulator.metrics import quantile
from tarry.simulator.report.formatting import shown
from tarry.tuning.comparison import ENOUGH, verdict
from tarry.tuning.estimates import needed
from tarry.tuning.evidence import TAIL
from tarry.tuning.formatting import counted, percent, setting

if TYPE_CHECKING:
    from rich.console import Console

    from tarry.tuning.comparison import Replay
    from tarry.tuning.evidence import Evidence
    from tarry.tuning.proposal import Proposal
    from tarry.tuning.rules import Line

_METRICS = (
    ("success_rate", "calls that succeeded", "%"),
    ("amplification", "requests for each call", "x"),
    ("p50", "p50 of calls", "ms"),
    ("p99", "p99 of calls", "ms"),
    ("p999", "p99.9 of calls", "ms"),
    ("recovered_after", "well again after the outages", "s"),
    ("unfinished", "calls still running at the end", ""),
)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line; what it names may come from outside."""
    console.print(Text(printable(text), style=style), soft_wrap=True)


def show_proposal(console: Console, evidence: Evidence, proposal: Proposal) -> None:
    """Print each number with its reason and the evidence, and what hedges would do."""
    say(
        console,
        f"{counted(evidence.attempts, 'attempt')} of {counted(evidence.calls, 'call')} "
        f"in {format_duration(evidence.span)}, {counted(len(evidence.outages), 'outage')}",
        "bold",
    )
    for remark in proposal.remarks:
        say(console, f"warning: {remark}", "yellow")
    table = _table("field", "now", "proposed", "why")
    for line in proposal.lines:
        why = Text(printable(line.reason))
        if line.evidence:
            why.append(f"\n{printable(line.evidence)}", style="dim")
        table.add_row(
            Text(line.field),
            Text(printable(setting(line.field, line.current))),
            Text(printable(setting(line.field, line.proposed)), style=_style(line)),
            why,
        )
    console.print(table)
    console.print()
    if len(evidence.healthy) >= needed(TAIL):
        table = _table("a second copy at", "after", "p99.9", "saves", "adds")
        for hedge in evidence.hedges:
            times = (format_duration(hedge.delay), format_duration(hedge.tail))
            table.add_row(hedge.percentile, *times, percent(hedge.saving), percent(hedge.load))
        console.print(table)
        console.print()


def show_replay(
    console: Console, evidence: Evidence, proposal: Proposal, runs: Replay | None
) -> None:
    """Print what both policies did to the same calls."""
    if proposal.defence == proposal.current:
        say(console, "nothing changes, so nothing is simulated")
        return
    if runs is None:
        there = f"{counted(len(evidence.healthy), 'healthy attempt')}, {ENOUGH} needed"
        if not evidence.calls:
            there = "no call with a first attempt"
        say(console, f"not simulated: too little data: {there}")
        return
    say(
        console,
        f"simulated: {format_duration(runs.duration)} at {runs.rate:.3g} calls a second "
        f"with {counted(runs.outages, 'outage')}",
        "bold",
    )
    say(
        console,
        f"on a server for {counted(runs.concurrency, 'request')} at a time, "
        "about twice what the log has seen",
        "dim",
    )
    table = _table("", "in the log", "now", "proposed")
    seen = _seen(evidence)
    old, new = runs.old.metrics(), runs.new.metrics()
    for name, title, unit in _METRICS:
        if old[name] or new[name]:
            values = (seen.get(name, nan), old[name], new[name])
            table.add_row(title, *(shown(value, unit) for value in values))
    console.print(table)
    if runs.duration < evidence.span:
        outages = counted(len(evidence.outages), "outage")
        whole = f"all of its {format_duration(evidence.span)} with {outages}"
        say(console, f"in the log: {whole}; simulated: a part of that", "dim")
    console.print(Text(verdict(runs.old, runs.new)))


def _seen(evidence: Evidence) -> dict[str, float]:
    """Return what the log itself has for the numbers of a simulation."""
    times = evidence.call_times
    quantiles = {"p50": 0.5, "p99": 0.99, "p999": TAIL}
    return {
        "success_rate": evidence.success_rate,
        "amplification": evidence.attempts_per_call,
        **{name: quantile(times, q) for name, q in quantiles.items() if len(times) >= needed(q)},
    }


def _table(*titles: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title == "field")
    return table


def _style(line: Line) -> str:
    if not line.enough:
        return "yellow"
    return "green" if line.proposed != line.current and not line.advice else ""
