"""What users write on the command line as `name=value`, `name=1,10,100` and `name=10..200:10`."""

from __future__ import annotations

import re
import tomllib
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarry.cli.files import defence_of
from tarry.core.suggest import did_you_mean, suggest
from tarry.errors import ConfigurationError
from tarry.simulator.files import compare_files, is_scenario, read_study
from tarry.simulator.files.studies import short_names
from tarry.simulator.scenarios import STUDIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tarry.simulator.study import Study

MOST_SWEPT = 2
MOST_VALUES = 1_000
_CLOSE = 0.7
"""How alike two keys are of which one may be a slip: a budget is no total_budget."""
_RANGE = re.compile(r"(?P<first>[^.]+(?:\.\d+)?)\.\.(?P<last>[^:]+?)(?::(?P<step>.+))?")


def settings(texts: Iterable[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Read each `--set`."""
    return {name: value_of(text) for name, text in _pairs("--set", texts, known)}


def sweeps(texts: Sequence[str], known: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Read each `--sweep`."""
    if len(texts) > MOST_SWEPT:
        msg = f"--sweep can be given {MOST_SWEPT} times at most, got {len(texts)}"
        raise ConfigurationError(msg)
    return {name: values_of(text) for name, text in _pairs("--sweep", texts, known)}


def value_of(text: str) -> Any:
    """Read a value as TOML would, and anything else as text."""
    try:
        parsed: dict[str, Any] = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def values_of(text: str) -> list[Any]:
    """Read a list of values, or a range with both ends and a step."""
    found = _RANGE.fullmatch(text.strip())
    values = _range(text, found) if found else [value_of(part.strip()) for part in text.split(",")]
    if len(values) > MOST_VALUES:
        msg = f"a sweep has at most {MOST_VALUES} values; {text!r} has more"
        raise ConfigurationError(msg)
    return values


def _range(text: str, found: re.Match[str]) -> list[Any]:
    try:
        first, last = Decimal(found["first"]), Decimal(found["last"])
        step = Decimal(found["step"] or 1)
        size = int((last - first) / step) + 1
    except (InvalidOperation, ZeroDivisionError, ValueError, OverflowError):
        size, first, step = 0, Decimal(0), Decimal(0)
    if size < 1 or step <= 0:
        msg = f"a range is written first..last:step, such as 10..200:10, got {text!r}"
        raise ConfigurationError(msg)
    exact = (first + step * index for index in range(min(size, MOST_VALUES + 1)))
    whole = first == first.to_integral_value() and step == step.to_integral_value()
    return [int(value) if whole else float(value) for value in exact]


def _pairs(
    option: str, texts: Iterable[str], known: Mapping[str, Any]
) -> Iterable[tuple[str, str]]:
    seen: set[str] = set()
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not value:
            msg = f"{option} is written name=value, got {text!r}"
            raise ConfigurationError(msg)
        if name not in known:
            msg = f"{option}: no parameter {name!r}; {_meant(name, known)}"
            raise ConfigurationError(msg)
        if name in seen:
            msg = f"{option}: {name} is given twice"
            raise ConfigurationError(msg)
        seen.add(name)
        yield name, value


def _meant(name: str, known: Iterable[str]) -> str:
    """Suggest a key of the table that the name is in, or of the nearest around it that exists."""
    names = list(known)
    table, _, key = name.rpartition(".")
    while table:
        inside = [one.removeprefix(f"{table}.") for one in names if one.startswith(f"{table}.")]
        keys = dict.fromkeys(one.partition(".")[0] for one in inside)
        if keys:
            close = suggest(key, keys, similarity=_CLOSE)
            return f"did you mean {table}.{close}?" if close else f"{table} has {', '.join(keys)}"
        table, _, key = table.rpartition(".")
    return did_you_mean(name, names)


def study_of(what: Sequence[str], *, compare: bool) -> Study:
    """Return the study; with `compare`, the one that puts the files side by side."""
    first, others = what[0], what[1:]
    if not compare:
        if others:
            msg = f"got {len(what)} scenarios; put files side by side with --compare"
            raise ConfigurationError(msg)
        return _study(first)
    if not others:
        needed = "policies to run in" if first in STUDIES else "two files or more, got"
        msg = f"--compare needs {needed} {first}"
        raise ConfigurationError(msg)
    if first not in STUDIES and all(map(_is_scenario, others)):
        return compare_files([Path(name) for name in what])
    study = _study(first)
    if study.with_defences is None:
        msg = f"{first} compares something else than policies; it takes no --compare"
        raise ConfigurationError(msg)
    paths = [Path(name) for name in others]
    return study.with_defences(dict(zip(short_names(paths), map(defence_of, others), strict=True)))


def _is_scenario(name: str) -> bool:
    path = Path(name)
    return bool(path.suffix or path.exists()) and is_scenario(path)


def _study(name: str) -> Study:
    if name in STUDIES:
        return STUDIES[name]
    path = Path(name)
    if path.suffix or path.exists():
        return read_study(path)
    msg = f"no scenario and no file {name!r}; {did_you_mean(name, STUDIES)}"
    raise ConfigurationError(msg)
