"""The `tarry` command: its commands, their order in the help, and the help text."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getdoc
from typing import Annotated

import typer

from tarry.cli import keys, policy, signing_secrets
from tarry.cli.backup import backup
from tarry.cli.demo import demo
from tarry.cli.docs import docs
from tarry.cli.exit_codes import EXIT_CODES
from tarry.cli.health import health
from tarry.cli.migrate import migrate
from tarry.cli.monitoring import downstreams, tail, top
from tarry.cli.options import Command, Group, example_epilog
from tarry.cli.send import send
from tarry.cli.serve import config, serve
from tarry.cli.simulate import simulate
from tarry.cli.tasks import dead_app, tasks_app
from tarry.cli.tune import tune
from tarry.cli.workers import workers

HELP = (
    "To tarry: to wait before going on. A library, a service and a simulator that share one "
    "retry policy engine.\n\n"
    "The library retries calls in production. The service stores calls durably and retries them "
    "until they succeed or their policy allows no more attempts. The simulator runs the same code "
    "to show, before production, how a policy affects a failing dependency."
)
EXAMPLES_AND_EXIT_CODES = """\
[bold]Examples[/bold]

Watch the service retry calls; this takes ten seconds:

[bold cyan]  tarry demo[/bold cyan]

Compare how retry policies affect a dependency that goes down and recovers:

[bold cyan]  tarry simulate storm[/bold cyan]

Fail a build when retries add more than 20 % to the load:

[bold cyan]  tarry simulate checkout.toml --assert "amplification < 1.2"[/bold cyan]

[bold]Documentation[/bold]

List the pages of the documentation, or print one, such as quickstart or service:

[bold cyan]  tarry docs[/bold cyan]

[bold]Exit codes[/bold]

""" + "; ".join(f"[bold]{code}[/bold] {meaning}" for code, meaning in EXIT_CODES.items())

app: typer.Typer = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXAMPLES_AND_EXIT_CODES,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(f"tarry {version('tarry')}")
        raise typer.Exit


@app.callback()
def tarry(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Accept the options that precede the name of the command: only --version."""


def _add_command(panel: str, example: str, command: Callable[..., None]) -> None:
    app.command(rich_help_panel=panel, epilog=example_epilog(example))(command)


_SERVICE_PANEL, _TASKS_PANEL, _POLICY_PANEL = "The service", "Tasks", "Policies"
_HELP_PANEL = "Documentation"
"""Headings of the groups of commands in the help."""

_add_command(_SERVICE_PANEL, "tarry demo", demo)
_add_command(_SERVICE_PANEL, "tarry serve --dev", serve)
_add_command(_SERVICE_PANEL, "tarry config --port 9000", config)
_add_command(_SERVICE_PANEL, "tarry health", health)
_add_command(_SERVICE_PANEL, "tarry backup /backups/tarry-2026-11-18.db", backup)
_add_command(_SERVICE_PANEL, "tarry migrate --from tarry.db --to postgresql://db/tarry", migrate)
_add_command(_SERVICE_PANEL, "tarry workers", workers)
app.add_typer(keys.app, name="keys", rich_help_panel=_SERVICE_PANEL)
app.add_typer(signing_secrets.app, name="secrets", rich_help_panel=_SERVICE_PANEL)
_add_command(_TASKS_PANEL, "tarry send https://example.com/hook -d @order.json --wait 5", send)
app.add_typer(tasks_app, name="tasks", rich_help_panel=_TASKS_PANEL)
app.add_typer(dead_app, name="dead", rich_help_panel=_TASKS_PANEL)
# For clients, the name of a lane (the queue of one downstream) is scheme:host:port.
_add_command(_TASKS_PANEL, "tarry downstreams pause https:example.com:443", downstreams)
_add_command(_TASKS_PANEL, "tarry tail --json", tail)
_add_command(_TASKS_PANEL, "tarry top", top)
app.add_typer(policy.app, name="policy", rich_help_panel=_POLICY_PANEL)
_add_command(_POLICY_PANEL, "tarry simulate storm --html report.html", simulate)
_add_command(_POLICY_PANEL, "tarry tune attempts.csv --out policy.toml", tune)
_add_command(_HELP_PANEL, "tarry docs quickstart", docs)


def _adjust_help(group: typer.Typer) -> None:
    """Join the lines of each help paragraph, so that typer can wrap it; hide the types of flags."""
    group.info.cls = Group
    for command in group.registered_commands:
        if command.cls is None or not issubclass(command.cls, Command):
            command.cls = Command
        paragraphs = (getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for subgroup in group.registered_groups:
        if subgroup.typer_instance is not None:
            _adjust_help(subgroup.typer_instance)


_adjust_help(app)
