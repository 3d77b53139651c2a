"""Tests of docs/architecture.md and of the layout that it and CONTRIBUTING.md describe."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"


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

    assert 9 == len(rows)
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
