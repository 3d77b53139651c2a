"""Read a TOML, YAML or JSON file, and remember on which line each value stands.

Every refusal begins with the file and the line. What is read is bounded, because files come from
anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tarry.core.checks import short
from tarry.errors import ConfigurationError, MissingExtra
from tarry.simulator.files.disk import read_text
from tarry.simulator.files.parsers import PARSERS, Parsed, Syntax

if TYPE_CHECKING:
    from pathlib import Path

    from tarry.simulator.files.lines import Place

LARGEST = 1_000_000
"""Bytes of a file that people write; the YAML parser takes seconds for as many."""


class Spot(NamedTuple):
    """Where a value comes from: a line of a file, or what else is named instead."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data, and where each part of it was written."""

    path: Path
    data: dict[str, Any]
    spots: dict[Place, Spot]

    def refusal(self, place: Place, message: str) -> ConfigurationError:
        """Return an error about the value at a place, or about the nearest table around it."""
        while place and place not in self.spots:
            place = place[:-1]
        spot = self.spots.get(place, Spot(str(self.path)))
        return ConfigurationError(f"{spot}: {message}")


def read_document(path: Path) -> Document:
    """Read a file that holds one table; its name tells its language."""
    if path.suffix.lower() not in PARSERS:
        msg = f"{path}: the name must end in {', '.join(PARSERS)}"
        raise ConfigurationError(msg)
    found = read_parsed(path)
    if len(found) > 1:
        msg = f"{path}:{found[1].line}: must hold one document, but a second one begins"
        raise ConfigurationError(msg)
    data, lines, _ = found[0] if found else Parsed({}, {})
    if not isinstance(data, dict):
        msg = f"{path}:1: must be a table of keys and values, got {short(data)}"
        raise ConfigurationError(msg)
    spots = {place: Spot(str(path), line) for place, line in lines.items()}
    return Document(path, cast("dict[str, Any]", data), {(): Spot(str(path), 1), **spots})


def read_parsed(path: Path) -> list[Parsed]:
    """Read every document of a file; a name that tells no language means YAML."""
    parse = PARSERS.get(path.suffix.lower(), PARSERS[".yaml"])
    text = read_text(path, LARGEST)
    try:
        return parse(text)
    except Syntax as error:
        msg = f"{Spot(str(path), error.line)}: {error}"
        raise ConfigurationError(msg) from None
    except RecursionError:
        msg = f"{path}: nested too deeply"
        raise ConfigurationError(msg) from None
    except MissingExtra as error:
        msg = f"{path}: {error}"
        raise MissingExtra(msg) from None
