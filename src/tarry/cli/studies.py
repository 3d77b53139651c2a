"""Which study the arguments of `tarry simulate` ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tarry.cli.documents import defence_of
from tarry.core.suggest import did_you_mean
from tarry.errors import ConfigurationError
from tarry.simulator.files import compare_files, is_scenario, read_study
from tarry.simulator.files.studies import names_of
from tarry.simulator.scenarios import STUDIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.simulator.study import Study


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
    if study.with_defence is None:
        msg = f"{first} compares something else than policies; it takes no --compare"
        raise ConfigurationError(msg)
    paths = [Path(name) for name in others]
    return study.with_defence(dict(zip(names_of(paths), map(defence_of, others), strict=True)))


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
