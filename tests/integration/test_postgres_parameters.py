"""The types of the parameters of all statements for PostgreSQL.

`run_case` compares the arguments of the statements that the conformance suite sends with the types
that PostgreSQL infers. An integer may be a wrong type for an integer argument, too, if it is
divided. The tests here read the sources for that.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import tarry
from tests.integration.postgres_parameters import find_untyped_division, find_wrong_parameters

SOURCES = Path(str(files(tarry)))


def statements_in(path: Path) -> Iterator[str]:
    """Yield the texts with parameters in a source; an inserted value is replaced by a column."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ""
        if isinstance(node, ast.JoinedStr):
            parts = node.values
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "x" for p in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if "$1" in text:
            yield text


def test_parameters_of_divisions_have_casts() -> None:
    """No statement leaves it to PostgreSQL whether a parameter is divided as an integer."""
    found = [
        (path, text)
        for path in [*SOURCES.rglob("*postgres*.py"), *SOURCES.rglob("postgres/**/*.py")]
        for text in statements_in(path)
    ]

    assert {"lanes.py", "queries.py", "transfer.py", "postgres_store.py"} <= {
        path.name for path, _ in found
    }
    assert [] == [(path, text) for path, text in found if find_untyped_division(text)]


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        ("SELECT (now - at) / $1", ["$1"]),
        ("SELECT greatest(now - $2, 0)\n    / greatest(1, $11)", ["$2", "$11"]),
        ("SELECT now % $1", ["$1"]),
        ("SELECT $1 / 2", ["$1"]),
        ("SELECT now / $1::double precision", []),
        ("SELECT queue / 2 FROM live WHERE lane = $1", []),
        ("SELECT split_part($1, '/', 1)", []),
    ],
)
def test_divisions_are_found(statement: str, parameters: list[str]) -> None:
    """A statement that divides by anything but a literal needs a cast of all parameters."""
    assert parameters == find_untyped_division(statement)


@pytest.mark.parametrize(
    ("statement", "argument", "is_exact"),
    [
        ("SELECT 5::bigint / $1", 10_000.0, False),
        ("SELECT 5::bigint / $1::double precision", 10_000.0, True),
        ("SELECT unnest($1::integer[])", [1, 2.5], False),
        ("SELECT unnest($1::integer[])", [1, None], True),
        ("SELECT 5::bigint + $1", True, False),
    ],
)
def test_arguments_of_another_type_are_found(
    postgres_dsn: str, statement: str, argument: object, *, is_exact: bool
) -> None:
    """An argument that asyncpg would truncate is reported."""
    wrong = asyncio.run(find_wrong_parameters(postgres_dsn, [(statement, (argument,))]))
    assert is_exact == (not wrong)
