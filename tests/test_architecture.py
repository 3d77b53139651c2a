"""Tests of docs/architecture.md and of the layout that it and CONTRIBUTING.md describe."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
REPEATED_CLASSES = {
    "AttemptLog": "the entry of an attempt log in the API and a log file are both public",
    "Downstream": "`tarry.Downstream` adds a lock; public signatures have the class of the core",
}
"""Names that two classes have, with the reason."""


def test_files_on_the_page_exist() -> None:
    """Every file that docs/architecture.md names exists, so that a rename updates the page."""
    named = set(re.findall(r"[\w/]*/[\w/]+\.py", PAGE.read_text("utf-8")))
    missing = [
        path
        for path in sorted(named)
        if not (ROOT / "src" / "tarry" / path).is_file() and not (ROOT / path).is_file()
    ]

    assert len(named) > 30
    assert [] == missing


def test_shapes_on_the_page_are_defined_where_it_says() -> None:
    """Each shape of a task is a class of the file that the page names."""
    rows = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    undefined = [
        name
        for name, path in rows
        if f"class {name}(" not in (ROOT / "src" / "tarry" / path).read_text("utf-8")
    ]

    assert 2 + 9 == len(rows)  # the request, the log entry, and nine shapes between them
    assert [] == undefined


def test_layers_on_the_page_are_those_of_the_code() -> None:
    """The table of layers lists exactly the packages and modules of `src/tarry`."""
    text = PAGE.read_text("utf-8")
    table = text.partition("## Layers")[2].partition("## The order")[0]
    documented = set(re.findall(r"^\| `([\w.]+)/?` \|", table, re.MULTILINE))
    package = ROOT / "src" / "tarry"
    actual = {
        path.name
        for path in package.iterdir()
        if not path.name.startswith("_") and (path.is_dir() or path.suffix == ".py")
    }

    assert actual - {"py.typed"} == documented


def test_no_two_classes_have_the_same_name() -> None:
    """A class name means one thing in the whole project."""
    counts = Counter(
        node.name
        for path in (ROOT / "src" / "tarry").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    )

    assert set(REPEATED_CLASSES) == {name for name, count in counts.items() if count > 1}
