"""Arguments of `tarry simulate`: which study to run, `--set name=value` and `--sweep name=values`.

The values of a sweep are a list (`1,10,100`) or a range with a step (`10..200:10`).
"""

from __future__ import annotations

import re
import tomllib
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarry.cli.files import read_policy
from tarry.core.suggest import did_you_mean, suggest
from tarry.errors import ConfigurationError
from tarry.simulator.files import compare_files, is_scenario, read_study
from tarry.simulator.files.studies import short_names
from tarry.simulator.scenarios import STUDIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tarry.simulator.study import Study

MAX_SWEEPS = 2
MAX_SWEEP_VALUES = 1_000
_MIN_SIMILARITY = 0.7
"""For suggestions: high enough that `budget` does not suggest `total_budget`."""
_RANGE = re.compile(r"(?P<first>[^.]+(?:\.\d+)?)\.\.(?P<last>[^:]+?)(?::(?P<step>.+))?")


def parse_settings(texts: Iterable[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each `--set` option."""
    return {name: parse_value(text) for name, text in _parse_pairs("--set", texts, known)}


def parse_sweeps(texts: Sequence[str], known: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each `--sweep` option."""
    if len(texts) > MAX_SWEEPS:
        raise ConfigurationError("--sweep", f"can be used at most {MAX_SWEEPS} times", len(texts))
    return {name: parse_values(text) for name, text in _parse_pairs("--sweep", texts, known)}


def parse_value(text: str) -> Any:
    """Parse a value as TOML; a value that is not TOML is text."""
    try:
        parsed: dict[str, Any] = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def parse_values(text: str) -> list[Any]:
    """Parse a list of values, or an inclusive range with a step."""
    match = _RANGE.fullmatch(text.strip())
    values = (
        _expand_range(text, match)
        if match
        else [parse_value(part.strip()) for part in text.split(",")]
    )
    if len(values) > MAX_SWEEP_VALUES:
        msg = f"a sweep has at most {MAX_SWEEP_VALUES} values; {text!r} has more"
        raise ConfigurationError(msg)
    return values


def _expand_range(text: str, match: re.Match[str]) -> list[Any]:
    try:
        first, last = Decimal(match["first"]), Decimal(match["last"])
        step = Decimal(match["step"] or 1)
        size = int((last - first) / step) + 1
    except (InvalidOperation, ZeroDivisionError, ValueError, OverflowError):
        size, first, step = 0, Decimal(0), Decimal(0)
    if size < 1 or step <= 0:
        msg = f"a range has the format first..last:step, such as 10..200:10, got {text!r}"
        raise ConfigurationError(msg)
    exact = (first + step * index for index in range(min(size, MAX_SWEEP_VALUES + 1)))
    is_whole = first == first.to_integral_value() and step == step.to_integral_value()
    return [int(value) if is_whole else float(value) for value in exact]


def _parse_pairs(
    option: str, texts: Iterable[str], known: Mapping[str, Any]
) -> Iterable[tuple[str, str]]:
    seen: set[str] = set()
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign or not value:
            raise ConfigurationError(option, "must have the format name=value", text)
        if name not in known:
            msg = f"{option}: there is no parameter {name!r}; {_suggest_parameter(name, known)}"
            raise ConfigurationError(msg)
        if name in seen:
            raise ConfigurationError(option, f"sets {name} twice")
        seen.add(name)
        yield name, value


def _suggest_parameter(name: str, known: Iterable[str]) -> str:
    """Suggest a name from the same table, or from the nearest enclosing table that exists."""
    names = list(known)
    table, _, key = name.rpartition(".")
    while table:
        prefix = f"{table}."
        inside = [known.removeprefix(prefix) for known in names if known.startswith(prefix)]
        keys = dict.fromkeys(path.partition(".")[0] for path in inside)
        if keys:
            close = suggest(key, keys, similarity=_MIN_SIMILARITY)
            return f"did you mean {table}.{close}?" if close else f"{table} has {', '.join(keys)}"
        table, _, key = table.rpartition(".")
    return did_you_mean(name, names)


def select_study(arguments: Sequence[str], *, compare: bool) -> Study:
    """Return the study that the arguments name; with `compare`, a comparison of several files."""
    first, others = arguments[0], arguments[1:]
    if not compare:
        if others:
            msg = f"got {len(arguments)} scenarios; use --compare to compare several files"
            raise ConfigurationError(msg)
        return _find_study(first)
    if not others:
        needed = "policies to compare in" if first in STUDIES else "at least two files, got only"
        msg = f"--compare needs {needed} {first}"
        raise ConfigurationError(msg)
    if first not in STUDIES and all(map(_is_scenario_file, others)):
        return compare_files([Path(name) for name in arguments])
    study = _find_study(first)
    if study.with_defences is None:
        msg = f"--compare cannot be used with {first}: its variants are not policies"
        raise ConfigurationError(msg)
    paths = [Path(name) for name in others]
    return study.with_defences(dict(zip(short_names(paths), map(read_policy, others), strict=True)))


def _is_scenario_file(name: str) -> bool:
    path = Path(name)
    return bool(path.suffix or path.exists()) and is_scenario(path)


def _find_study(name: str) -> Study:
    if name in STUDIES:
        return STUDIES[name]
    path = Path(name)
    if path.suffix or path.exists():
        return read_study(path)
    msg = f"{name!r} is neither a scenario nor a file; {did_you_mean(name, STUDIES)}"
    raise ConfigurationError(msg)
