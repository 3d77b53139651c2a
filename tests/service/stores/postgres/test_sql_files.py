"""The `.sql` files: their placeholders, and their syntax, which is checked without a server."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from tarry.service.stores.postgres.sql_files import load_schema, replace_placeholders

pglast = import_module("pglast")

INPUT_MODES = {"FUNC_PARAM_IN", "FUNC_PARAM_DEFAULT"}


def parse(text: str) -> int:
    """Parse statements and the bodies of functions; return the number of functions in PL/pgSQL."""
    pglast.parse_sql(text)
    # The parser knows no type of another schema, and no array of a composite type.
    text = re.sub(r"tarry\.\w+_1\[\]", "text[]", text).replace("tarry.", "public.")
    functions = [each for each in pglast.split(text) if "LANGUAGE plpgsql" in each]
    for function in functions:
        pglast.parse_plpgsql(function)
    return len(functions)


def test_files_have_no_syntax_error() -> None:
    """PostgreSQL's own parser accepts each statement, and each statement of a function."""
    assert parse(load_schema()) >= 20


def test_functions_have_few_parameters() -> None:
    """A function gets many values of a task as one value of a composite type."""
    statements = [each.stmt for each in pglast.parse_sql(load_schema())]
    by_name = {
        statement.funcname[-1].sval: [
            each.name for each in statement.parameters or () if each.mode.name in INPUT_MODES
        ]
        for statement in statements
        if isinstance(statement, pglast.ast.CreateFunctionStmt)
    }

    assert 8 == len(by_name["claim_1"])
    assert {} == {name: names for name, names in by_name.items() if len(names) > 10}


@pytest.mark.parametrize(
    ("correct", "wrong"),
    [
        ("v_name text", "v_name text[+]"),
        ("RETURN 1", "RETURN 1 +"),
        ("RETURN 1", "v_other := 1"),
        ("END IF", "END"),
        ("SELECT 1", "SELECT 1 FROM FROM"),
    ],
)
def test_syntax_errors_are_found(correct: str, wrong: str) -> None:
    """An error in an expression, a statement or a block of a function is found."""
    function = """CREATE FUNCTION tarry.f_1() RETURNS integer LANGUAGE plpgsql AS $$
    DECLARE v_name text;
    BEGIN
        IF v_name IS NULL THEN
            PERFORM 1 FROM (SELECT 1) AS i;
        END IF;
        RETURN 1;
    END $$;"""

    assert 1 == parse(function)
    with pytest.raises(pglast.parser.ParseError):
        parse(function.replace(correct, wrong))


def test_placeholders_are_replaced() -> None:
    """A placeholder may be in several texts."""
    text = replace_placeholders(["${A} $$", "${A} ${B}"], {"A": 1, "B": "b"})

    assert "1 $$\n1 b" == text


@pytest.mark.parametrize(("text", "values"), [("${A} ${B}", {"A": 1}), ("", {"A": 1})])
def test_placeholders_and_constants_must_agree(text: str, values: dict[str, object]) -> None:
    """A placeholder without a constant, or a constant that no file names, is an error."""
    with pytest.raises(ValueError, match="constant"):
        replace_placeholders([text], values)
