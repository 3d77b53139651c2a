"""The commands and what they have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from tarry.cli import policy
from tarry.cli.simulate import simulate
from tarry.cli.tune import tune

HELP = (
    "To tarry: to wait before going on. Retries with one policy engine.\n\n"
    "The library retries in production. These commands run the same code to show, before "
    "production, what a policy does to a dependency that fails; they propose a policy from "
    "what was measured, and carry it to other systems."
)
EXAMPLES = """\
[bold]Two examples[/bold]

A dependency dies and returns: who keeps it down?

[bold cyan]  tarry simulate storm[/bold cyan]

Let a build fail when retries would add more than a fifth to the load:

[bold cyan]  tarry simulate checkout.toml --assert "amplification < 1.2"[/bold cyan]
"""

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


app.command()(simulate)
app.command()(tune)
app.add_typer(policy.app, name="policy")
