"""Tests of the documentation: its code runs, its output and its tables match the code.

Rules for a page: its Python blocks run in order, in one namespace, in virtual time. A `text` block
right after a Python block is the output of that block. A block that opens with ```python notest
needs a third-party package and is not run. ```python before and ```python after are a pair on a
page about moving from another retry library: see test_migration.py; those about Celery are not
run. ```ts is TypeScript, which test_typescript_client.py runs. A fence without a language is a
diagram.
"""

import asyncio
import io
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType

import pytest

import tarry
import tarry.client
import tarry.testing
from tarry.runtime.events import bus
from tarry.testing import VirtualClock

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PLUGINS_NOT_LOADED = ("cacheprovider", "faker", "schemathesis")
PACKAGES = {"adapters", "client", "idempotency", "simulator", "telemetry", "testing", "tuning"}


@dataclass(frozen=True)
class Block:
    """A fenced block; `info` is the text after the opening fence."""

    info: str
    text: str
    line: int
    """The line number of the first line of the text."""

    def compile(self, page: Path) -> CodeType:
        """Return the code of a Python block; tracebacks have the line numbers of the page."""
        return _compile(self, page)


@cache  # compiling takes half of the time of test_migration.py, which runs each block 60 times
def _compile(block: Block, page: Path) -> CodeType:
    source = "\n" * (block.line - 1) + block.text
    return compile(source, str(page), "exec", dont_inherit=True)


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1].strip(), found[2], text.count("\n", 0, found.start(2)) + 1)
        for found in FENCE.finditer(text)
    ]


def relative_path(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def table_of(page: Path, heading: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this heading."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            break
    next(lines)  # the separator below the headings
    rows: list[list[str]] = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def code_on_page(page: Path) -> str:
    """Return all code on a page, inline and in blocks."""
    text = page.read_text(encoding="utf-8")
    blocks = [found[2] for found in FENCE.finditer(text)]
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", FENCE.sub("", text))])


@contextmanager
def sandbox() -> Iterator[None]:
    """Run a page in virtual time, also for `asyncio.run` and `time.sleep`; restore the state after.

    This is not a fixture, because pytest adds its log handlers after it sets up the fixtures.
    """
    logger = logging.getLogger("tarry")
    level = logger.level
    with pytest.MonkeyPatch.context() as patch, VirtualClock() as clock:
        patch.setattr(asyncio, "run", lambda main: clock.run(lambda: main))
        patch.setattr(time, "sleep", clock.advance)
        patch.setattr(bus, "listeners", ())
        patch.setattr(logging.root, "handlers", [])
        patch.setattr(logger, "handlers", [])
        root_level = logging.root.level
        try:
            yield
        finally:
            # Not patched: only `setLevel` clears the caches of the loggers.
            logging.root.setLevel(root_level)
            logger.setLevel(level)


@pytest.mark.parametrize("page", PAGES, ids=relative_path)
def test_examples_of_page_run_and_print_what_it_shows(page: Path) -> None:
    """Each Python block of a page runs, and prints the text block that follows it, or nothing."""
    namespace: dict[str, object] = {"__name__": "__main__"}  # as if the page were a script
    printed = io.StringIO()  # one per page: a log handler of one block also writes in later blocks

    with sandbox(), redirect_stdout(printed), redirect_stderr(io.StringIO()):
        for block, following in pairwise([*blocks_of(page), Block("", "", 0)]):
            if block.info != "python":
                continue
            start = printed.tell()
            exec(block.compile(page), namespace)  # noqa: S102
            expected = following.text if following.info == "text" else ""
            assert expected == printed.getvalue()[start:], (
                f"{relative_path(page)}, line {block.line}"
            )


@pytest.mark.parametrize("page", PAGES, ids=relative_path)
def test_blocks_have_a_known_language(page: Path) -> None:
    """Each block has a known language, so that none is skipped; `text` only follows `python`."""
    known = {
        "",
        "console",
        "python",
        "python notest",
        "python before",
        "python after",
        "text",
        "ts",
    }
    infos = [block.info for block in blocks_of(page)]

    assert set() == set(infos) - known
    before_text = {previous for previous, info in pairwise(["", *infos]) if info == "text"}
    assert before_text <= {"python", "python after"}


def test_tests_shown_to_users_pass(tmp_path: Path) -> None:
    """The tests on docs/testing.md pass under pytest, with the plugin that comes with tarry."""
    page = [block.text for block in blocks_of(DOCS / "testing.md") if block.info == "python"]
    (tmp_path / "test_page.py").write_text("\n".join(page), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n", encoding="utf-8")
    # The import of the plugins of faker and schemathesis takes 2 s.
    options = [option for name in PLUGINS_NOT_LOADED for option in ("-p", f"no:{name}")]

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    test_count = "\n".join(page).count("\ndef test_")
    assert f"{test_count} passed" in done.stdout, done.stdout


@pytest.mark.timeout(300)  # an example may start several processes, which is slow on a busy machine
@pytest.mark.parametrize("example", EXAMPLES, ids=relative_path)
def test_example_prints_what_a_page_shows(example: Path, tmp_path: Path) -> None:
    """Exactly one page shows the output of an example, word for word."""
    command = f"$ python {relative_path(example)}\n"
    documented_outputs = [
        block.text.removeprefix(command)
        for page in PAGES
        for block in blocks_of(page)
        if block.text.startswith(command)
    ]

    done = subprocess.run(
        [sys.executable, "-u", str(example)],  # unbuffered: both streams in order, as on a terminal
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        cwd=tmp_path,
    )

    assert [done.stdout] == documented_outputs


def test_every_public_name_is_documented() -> None:
    """Each public name is on a page, as `tarry.name` or alone in backticks."""
    code = "\n".join(code_on_page(page) for page in PAGES)

    missing = {
        name
        for name in [*tarry.__all__, *tarry.testing.__all__]
        if not re.search(rf"\btarry\.{name}\b|^{name}\b(?:\(.*\))?$", code, re.MULTILINE)
    }

    assert set() == missing


def test_every_name_that_the_pages_use_is_public() -> None:
    """Each `tarry.name` on the pages and in the changelog is a public name or a package."""
    code = "\n".join(code_on_page(page) for page in [*PAGES, ROOT / "CHANGELOG.md"])
    used = set(re.findall(r"\btarry\.([A-Za-z_]+)", code))

    file_names = {"db", "json", "service", "toml", "yaml"}  # such as `tarry.db`, the store
    assert set() == used - set(tarry.__all__) - PACKAGES - file_names


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("C*.md"))], ids=relative_path)
def test_relative_links_resolve(page: Path) -> None:
    """Each relative link leads to an existing file."""
    targets = [target.partition("#")[0] for target in LINK.findall(page.read_text("utf-8"))]
    files = [target for target in targets if target and "://" not in target]

    assert [] == [target for target in files if not (page.parent / target).is_file()]


def anchors_of(page: Path) -> set[str]:
    """Return the fragments with which links can lead to the headings of a page, as on GitHub."""
    text_without_code = FENCE.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ (.+)$", text_without_code, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("C*.md"))], ids=relative_path)
def test_links_to_headings_resolve(page: Path) -> None:
    """Each relative link with a fragment leads to a heading of its page."""
    links = [target.partition("#") for target in LINK.findall(page.read_text("utf-8"))]
    fragments = [
        (page.parent / file if file else page, fragment)
        for file, _, fragment in links
        if fragment and "://" not in file
    ]

    assert [] == [link for link in fragments if link[1] not in anchors_of(link[0])]


def test_index_lists_every_page() -> None:
    """docs/index.md links to every page of the documentation, and README.md links to the index."""
    index = DOCS / "index.md"
    linked = {(DOCS / target).resolve() for target in LINK.findall(index.read_text("utf-8"))}

    assert set() == set(DOCS.glob("*.md")) - {index} - linked
    assert "docs/index.md" in LINK.findall((ROOT / "README.md").read_text("utf-8"))


def test_reasons_on_the_page_are_those_of_the_code() -> None:
    """The table of stop reasons on docs/errors.md has each reason with its description."""
    documented = [row[:2] for row in table_of(DOCS / "errors.md", "reason")]

    assert [[f"`{reason}`", reason.description] for reason in tarry.Reason] == documented


def test_breaker_states_on_the_page_are_those_of_the_code() -> None:
    """The table of states on docs/breaker.md has every state, in order."""
    documented = [row[0] for row in table_of(DOCS / "breaker.md", "`tarry.BreakerState`")]

    assert [f"`{state}`" for state in tarry.BreakerState] == documented


def test_kinds_on_the_page_are_those_of_the_code() -> None:
    """The table of kinds on docs/hints.md has every kind."""
    documented = {row[0] for row in table_of(DOCS / "hints.md", "`tarry.Kind`")}

    assert {f"`{kind}`" for kind in tarry.Kind} == documented


def test_tree_of_errors_on_the_page_is_that_of_the_code() -> None:
    """The tree on docs/errors.md has the public errors of the package, each under its base."""
    text = next(block.text for block in blocks_of(DOCS / "errors.md") if block.info == "")
    bases: dict[str, str] = {}
    path: list[str] = []
    for line in text.splitlines():
        found = re.fullmatch(r"([│├└─ ]*)tarry\.(?:client\.)?(\w+)(?: \((\w+)\))?", line)
        assert found is not None, line
        depth = len(found[1]) // 4
        path[depth:] = [found[2]]
        parents = [path[depth - 1]] if depth else ["Exception"]
        bases[found[2]] = ", ".join([*parents, *([found[3]] if found[3] else [])])

    actual = {
        name: ", ".join(base.__name__ for base in value.__bases__)
        for module in (tarry, tarry.client)
        for name in module.__all__
        if isinstance(value := getattr(module, name), type) and issubclass(value, Exception)
    }

    assert bases == actual
