"""Which study the arguments of `tarry simulate` ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError
from tarry.simulator.files import compare_files, is_scenario, read_defence, read_study
from tarry.simulator.scenarios import STUDIES
from tarry.simulator.schema import suggestion

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
    if first not in STUDIES and all(is_scenario(Path(name)) for name in others):
        return compare_files([Path(name) for name in what])
    if not others:
        msg = f"--compare needs policy files to run in {first}"
        raise ConfigurationError(msg)
    study = _study(first)
    if study.with_defence is None:
        msg = f"{first} compares something else than policies; it takes no --compare"
        raise ConfigurationError(msg)
    return study.with_defence({_name(name, others): read_defence(Path(name)) for name in others})


def _study(name: str) -> Study:
    if name in STUDIES:
        return STUDIES[name]
    path = Path(name)
    if path.suffix or path.exists():
        return read_study(path)
    msg = f"no scenario and no file {name!r}; {suggestion(name, STUDIES)}"
    raise ConfigurationError(msg)


def _name(file: str, files: Sequence[str]) -> str:
    """Return the short name of a file, unless another file has it too."""
    stem = Path(file).stem
    return stem if [Path(other).stem for other in files].count(stem) == 1 else file
