"""Checks of the types that PostgreSQL infers for the parameters of statements."""

from __future__ import annotations

import re
from collections.abc import Iterable
from uuid import UUID

from tests.integration.postgres import SEARCH_PATH, connected

_TYPES_OF_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "int2": (int,),
    "int4": (int,),
    "int8": (int,),
    "float8": (float, int),
    "oid": (int,),
    "name": (str,),
    "text": (str,),
    "bytea": (bytes,),
    "bool": (bool,),
    "uuid": (str, UUID),
    "jsonb": (str,),
}
"""Arguments that asyncpg sends without a loss. It truncates a float for an integer parameter."""
_DIVISION = re.compile(r"(?<![/'*])[/%](?![/'*]|\s*[0-9])|\$[0-9]+\s*[/%]")
"""Matches a division, unless a column or a sum is divided by a literal."""
_DAY = re.compile("_day[0-9]+")
_types: dict[str, list[str]] = {}
"""The inferred types of the parameters of each statement."""
_UNTYPED = re.compile(r"\$[0-9]++(?!::)")


def find_untyped_division(statement: str) -> list[str]:
    """Return the parameters without a cast of a statement that divides.

    PostgreSQL infers the type of such a parameter from the other operand: if that is an integer,
    the quotient is an integer, too.
    """
    return _UNTYPED.findall(statement) if _DIVISION.search(statement) else []


async def find_wrong_parameters(
    dsn: str, statements: Iterable[tuple[str, tuple[object, ...]]]
) -> list[str]:
    """Return a description of each argument that does not have the type that was inferred."""
    wrong: set[str] = set()
    sent = [(statement, arguments) for statement, arguments in statements if arguments]
    if new := {statement for statement, _ in sent} - _types.keys():
        async with connected(dsn, search_path=SEARCH_PATH) as connection:
            for statement in new:
                # The partition of a day may have been dropped meanwhile.
                prepared = await connection.prepare(_DAY.sub("_default", statement))
                _types[statement] = [each.name for each in prepared.get_parameters()]
    for statement, arguments in sent:
        pairs = zip(_types[statement], arguments, strict=True)
        wrong.update(
            f"${number} is {name}, but gets {value!r}: {statement}"
            for number, (name, value) in enumerate(pairs, start=1)
            if not _is_exact(name, value)
        )
    return sorted(wrong)


def _is_exact(name: str, value: object) -> bool:
    if value is None:
        return True
    if name.endswith("[]"):
        return isinstance(value, list | tuple) and all(_is_exact(name[:-2], each) for each in value)
    # A bool is an int, but not an argument for an integer parameter. A member of an enum is exact.
    return isinstance(value, _TYPES_OF_ARGUMENTS[name]) and (
        name == "bool" or not isinstance(value, bool)
    )
