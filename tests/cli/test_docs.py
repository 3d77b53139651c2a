"""`tarry docs`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.harness import ROOT, run_command

PAGES = {path.stem for path in (ROOT / "docs").glob("*.md")}


def test_every_page_is_listed_with_its_subject() -> None:
    """Each line has a name and a subject; the last line has the folder."""
    *lines, empty, last = run_command("docs").out.splitlines()

    assert PAGES - {"index"} == {re.split(r"\s{2,}", line)[0] for line in lines}
    assert "" == empty
    assert last.endswith(str(ROOT / "docs"))


@pytest.mark.parametrize("name", ["breaker", "breaker.md", "docs/breaker.md"])
def test_a_page_is_printed(name: str) -> None:
    expected = (ROOT / "docs" / "breaker.md").read_text("utf-8")
    assert (0, expected, "") == run_command("docs", name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("quikstart", "did you mean quickstart?"), ("../README", "`tarry docs` lists the pages")],
)
def test_an_unknown_page_is_an_error(name: str, hint: str) -> None:
    """The error has a similar name, or how to list the names."""
    result = run_command("docs", name)
    assert (2, "") == (result.code, result.out)
    assert hint in result.err


def test_help_and_errors_refer_to_existing_pages() -> None:
    """Each `tarry docs PAGE` in the code is a page."""
    sources = [path.read_text("utf-8") for path in Path(ROOT, "src").rglob("*.py")]
    names = {name for text in sources for name in re.findall(r"tarry docs ([a-z][\w-]*)", text)}
    assert {"tuning", "backup", "redis", "migrate"} <= names <= PAGES
