"""Plain values as TOML: the standard library reads it and does not write it.

What stands directly in a table comes before its sub-tables, as the format wants it. A table within
a list is written inline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from tarry.errors import ConfigurationError, ConfigurationTypeError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {
    "\b": r"\b",
    "\t": r"\t",
    "\n": r"\n",
    "\f": r"\f",
    "\r": r"\r",
    '"': r"\"",
    "\\": r"\\",
}
_TO_ESCAPE = re.compile(r'[\x00-\x1f"\\\x7f]')


def dumps(plain: Mapping[str, Any]) -> str:
    """Return a text that `tomllib.loads` turns back into these values."""
    return "\n\n".join(_tables(plain, ())) + "\n" if plain else ""


def _tables(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the blocks of a table: its own values first, then each of its sub-tables."""
    lines = [f"[{'.'.join(map(_key, path))}]"] if path else []
    blocks: list[str] = []
    for name, value in table.items():
        here = (*path, name)
        key = _key(name)
        if isinstance(value, Mapping):
            blocks += _tables(cast("Mapping[str, Any]", value), here)
        else:
            lines.append(f"{key} = {_value(value, here)}")
    return ["\n".join(lines), *blocks] if lines else blocks


def _key(name: object) -> str:
    if not isinstance(name, str):
        msg = f"a key of TOML must be text, got {name!r}"
        raise ConfigurationTypeError(msg)
    return name if _BARE_KEY.fullmatch(name) else _text(name)


def _value(value: object, path: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        inside = ", ".join(f"{_key(name)} = {_value(one, (*path, name))}" for name, one in items)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        listed = cast("list[object]", value)
        return f"[{', '.join(_value(one, path) for one in listed)}]"
    where = ".".join(path)
    if value is None:
        msg = f"{where} is None, and TOML has no word for it: leave it out"
        raise ConfigurationError(msg)
    rule = "must be text, a number, true or false, a list or a table"
    raise ConfigurationTypeError(where, rule, value)


def _text(text: str) -> str:
    return f'"{_TO_ESCAPE.sub(_escaped, text)}"'


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    return _ESCAPES.get(character, f"\\u{ord(character):04x}")
