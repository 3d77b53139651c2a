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
from tarry.core.text import did_you_mean, suggest
from tarry.errors import ConfigurationError
from tarry.simulator.files import compare_files, is_scenario, read_study, short_names
from tarry.simulator.scenarios import STUDIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tarry.simulator.study import Study

MAX_SWEEPS = 2
MAX_SWEEP_VALUES = 1_000
_MIN_SIMILARITY = 0.7
"""Minimum similarity of a suggested name, so high that `budget` does not suggest `total_budget`."""
_RANGE = re.compile(r"(?P<first>[^.]+(?:\.\d+)?)\.\.(?P<last>[^:]+?)(?::(?P<step>.+))?")


def parse_settings(options: Iterable[str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each parameter that a `--set` option names."""
    return {name: parse_value(text) for name, text in _parse_pairs("--set", options, parameters)}


def parse_sweeps(options: Sequence[str], parameters: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each parameter that a `--sweep` option names."""
    if len(options) > MAX_SWEEPS:
        raise ConfigurationError("--sweep", f"can be used at most {MAX_SWEEPS} times", len(options))
    return {name: parse_values(text) for name, text in _parse_pairs("--sweep", options, parameters)}


def parse_value(text: str) -> Any:
    """Return a value parsed as TOML, or the text itself if it is not valid TOML."""
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
        count = int((last - first) / step) + 1
    except (InvalidOperation, ZeroDivisionError, ValueError, OverflowError):
        count, first, step = 0, Decimal(0), Decimal(0)  # rejected below
    if count < 1 or step <= 0:
        msg = f"a range has the format first..last:step, such as 10..200:10, got {text!r}"
        raise ConfigurationError(msg)
    # One value too many is enough for the caller to reject the range.
    values = (first + step * index for index in range(min(count, MAX_SWEEP_VALUES + 1)))
    is_integer = first == first.to_integral_value() and step == step.to_integral_value()
    return [int(value) if is_integer else float(value) for value in values]


def _parse_pairs(
    option: str, texts: Iterable[str], parameters: Mapping[str, Any]
) -> Iterable[tuple[str, str]]:
    """Yield the name and the value of each text `name=value` given with the option."""
    seen: set[str] = set()
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise ConfigurationError(option, "must have the format name=value", text)
        if name not in parameters:
            hint = _suggest_parameter(name, parameters)
            msg = f"{option}: there is no parameter {name!r}; {hint}"
            raise ConfigurationError(msg)
        if name in seen:
            raise ConfigurationError(option, f"sets {name} twice")
        seen.add(name)
        yield name, value


def _suggest_parameter(name: str, parameters: Iterable[str]) -> str:
    """Suggest a name from the same table, or from the nearest enclosing table that exists.

    The table of `clients.retry.delay` is `clients.retry`, and its key is `delay`.
    """
    names = list(parameters)
    table, _, key = name.rpartition(".")
    while table:
        prefix = f"{table}."
        paths = [known.removeprefix(prefix) for known in names if known.startswith(prefix)]
        keys = dict.fromkeys(path.partition(".")[0] for path in paths)
        if keys:
            similar = suggest(key, keys, similarity=_MIN_SIMILARITY)
            if similar:
                return f"did you mean {table}.{similar}?"
            return f"{table} has {', '.join(keys)}"
        table, _, key = table.rpartition(".")
    return did_you_mean(name, names)


def select_study(arguments: Sequence[str], *, compare: bool) -> Study:
    """Return the study that the arguments name.

    With `compare`, the arguments are several scenario files, or one scenario and the policies to
    compare in it.
    """
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
    defences = dict(zip(short_names(paths), map(read_policy, others), strict=True))
    return study.with_defences(study, defences)


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
