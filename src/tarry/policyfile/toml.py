"""A TOML writer; the standard library has only a reader.

The values of a table are written before its sub-tables, as TOML requires. A table within a list is
written inline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from tarry.errors import ConfigurationError, ConfigurationTypeError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(document: Mapping[str, Any]) -> str:
    """Return a document as TOML text."""
    return "\n\n".join(_format_tables(document, ())) + "\n" if document else ""


def _format_tables(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the blocks of text of a table and of its sub-tables; its own values come first."""
    lines = [f"[{'.'.join(map(_format_key, path))}]"] if path else []
    blocks: list[str] = []
    for name, value in table.items():
        value_path = (*path, name)
        key = _format_key(name)
        if isinstance(value, Mapping):
            blocks += _format_tables(cast("Mapping[str, Any]", value), value_path)
        else:
            lines.append(f"{key} = {_format_value(value, value_path)}")
    return ["\n".join(lines), *blocks] if lines else blocks


def _format_key(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigurationTypeError("a key of TOML", "must be a string", name)
    return name if _BARE_KEY.fullmatch(name) else _quote(name)


def _format_value(value: object, path: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        pairs = ", ".join(
            f"{_format_key(name)} = {_format_value(item, (*path, name))}" for name, item in items
        )
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, (list, tuple)):
        elements = cast("list[object]", value)
        return f"[{', '.join(_format_value(element, path) for element in elements)}]"
    dotted_path = ".".join(path)
    if value is None:
        raise ConfigurationError(dotted_path, "is None, but TOML has no null: leave it out")
    rule = "must be a string, a number, true or false, a list or a table"
    raise ConfigurationTypeError(dotted_path, rule, value)


def _quote(text: str) -> str:
    # A JSON string is also a TOML string, except that TOML requires an escape for U+007F.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
