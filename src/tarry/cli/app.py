"""The commands and what they have in common."""

from __future__ import annotations

from inspect import getdoc
from typing import Annotated

import typer

from tarry.cli import dead, keys, policy_local, tasks
from tarry.cli.demo import demo
from tarry.cli.downstreams import downstreams
from tarry.cli.exit_codes import MEANINGS
from tarry.cli.remote import example
from tarry.cli.send import send
from tarry.cli.serve import config, serve
from tarry.cli.simulate import simulate
from tarry.cli.tail import tail
from tarry.cli.top import top
from tarry.cli.tune import tune

HELP = (
    "To tarry: to wait before going on. Retries with one policy engine.\n\n"
    "The library retries in production. The service keeps calls and makes them until they "
    "succeed. The simulator runs the same code to show, before production, what a policy does to "
    "a dependency that fails."
)
EXAMPLES = """\
[bold]Three examples[/bold]

See what the service does, in ten seconds:

[bold cyan]  tarry demo[/bold cyan]

A dependency dies and returns: who keeps it down?

[bold cyan]  tarry simulate storm[/bold cyan]

Let a build fail when retries would add more than a fifth to the load:

[bold cyan]  tarry simulate checkout.toml --assert "amplification < 1.2"[/bold cyan]

[bold]Exit codes[/bold]

""" + "; ".join(f"[bold]{code}[/bold] {meaning}" for code, meaning in MEANINGS.items())

app: typer.Typer = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXAMPLES,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tarry {version('tarry')}")
        raise typer.Exit


@app.callback()
def tarry(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """What is common to all commands."""


_SERVICE, _TASKS, _POLICY = "The service", "Tasks", "Policies"

app.command(rich_help_panel=_SERVICE, epilog=example("tarry demo"))(demo)
app.command(rich_help_panel=_SERVICE, epilog=example("tarry serve --dev"))(serve)
app.command(rich_help_panel=_SERVICE, epilog=example("tarry config --port 9000"))(config)
app.add_typer(keys.app, name="keys", rich_help_panel=_SERVICE)
app.command(
    rich_help_panel=_TASKS,
    epilog=example("tarry send https://example.com/hook -d @order.json --wait 5"),
)(send)
app.add_typer(tasks.app, name="tasks", rich_help_panel=_TASKS)
app.add_typer(dead.app, name="dead", rich_help_panel=_TASKS)
app.command(
    rich_help_panel=_TASKS, epilog=example("tarry downstreams pause https:example.com:443")
)(downstreams)
app.command(rich_help_panel=_TASKS, epilog=example("tarry tail --json"))(tail)
app.command(rich_help_panel=_TASKS, epilog=example("tarry top"))(top)
app.add_typer(policy_local.app, name="policy", rich_help_panel=_POLICY)
app.command(rich_help_panel=_POLICY, epilog=example("tarry simulate storm --html report.html"))(
    simulate
)
app.command(rich_help_panel=_POLICY, epilog=example("tarry tune attempts.csv --out policy.toml"))(
    tune
)


def _unwrap(group: typer.Typer) -> None:
    """Let the terminal break the lines of the help, which docstrings break at their own width."""
    for command in group.registered_commands:
        paragraphs = (getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(one.split()) for one in paragraphs)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _unwrap(inner.typer_instance)


_unwrap(app)
