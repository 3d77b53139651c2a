"""The findings as plain data, for other programs."""

from __future__ import annotations

from importlib.metadata import version
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from tarry.simulator.report.formatting import in_force

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.simulator.study import Findings, Row, Trial


def to_json(findings: Findings) -> dict[str, Any]:
    """Return all of it, fit for `json.dumps`; null is a time that never came or has no value."""
    study = findings.study
    return {
        "study": study.name,
        "question": study.question,
        "lesson": study.lesson,
        "tarry": version("tarry"),
        "seed": findings.seed,
        "trials": findings.trials,
        "knob": study.knob,
        "parameters": {name: plain(value) for name, value in in_force(findings).items()},
        "columns": [column._asdict() for column in study.columns],
        "rows": [_row(row) for row in findings.rows],
    }


def plain(value: Any) -> Any:
    """Return a value that JSON has a word for."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        named = cast("Mapping[Any, Any]", value)
        return {str(name): plain(one) for name, one in named.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in cast("list[Any]", value)]
    return str(value)


def _row(row: Row) -> dict[str, Any]:
    return {
        "variant": row.variant,
        "parameters": plain(row.parameters),
        "metrics": plain(row.metrics),
        "trials": [_trial(trial) for trial in row.trials],
    }


def _trial(trial: Trial) -> dict[str, Any]:
    known = {name: getattr(trial, name, None) for name in ("reasons", "bucket", "series")}
    more = {name: plain(value) for name, value in known.items() if value is not None}
    return {"metrics": plain(trial.metrics()), **more}
