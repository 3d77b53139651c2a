"""`tarry docs`: the pages of the documentation, which are part of the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from tarry.core.text import suggest
from tarry.errors import ConfigurationError

_PACKAGE = Path(__file__).parents[1]
_INDEX = "index"
_INDEX_ROW = re.compile(
    r"^\| \[[^\]]+\]\((?P<page>[\w-]+)\.md\) \| (?P<subject>.+) \|$", re.MULTILINE
)


def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="PAGE", help="The name of a page, such as quickstart.")
    ] = None,
) -> None:
    """List the pages of the documentation, or print one of them.

    The pages are Markdown files of this version of tarry. They need no network.
    """
    folder = docs_folder()
    if page is None:
        rows = _INDEX_ROW.findall((folder / f"{_INDEX}.md").read_text("utf-8"))
        width = max(len(name) for name, _ in rows)
        typer.echo("\n".join(f"{name:{width}}  {subject}" for name, subject in rows))
        typer.echo(f"\ntarry docs PAGE prints a page. The files are in {folder}")
        return
    names = {path.stem for path in folder.glob("*.md")}
    name = page.removesuffix(".md").removeprefix("docs/")
    if name not in names:
        similar = suggest(name, names)
        hint = f"did you mean {similar}?" if similar else "`tarry docs` lists the pages"
        raise ConfigurationError("PAGE", f"is not a page of the documentation; {hint}", page)
    typer.echo((folder / f"{name}.md").read_text("utf-8"), nl=False)


def docs_folder() -> Path:
    """Return the folder of the pages: in the package, or in the checkout it is installed from."""
    installed = _PACKAGE / "docs"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "docs"
