"""Make studies of scenario files, and defences of policy files.

What `tarry simulate` can set or sweep is named by its way through the file, such as
`clients.defence.max_attempts`. Each run makes its scenario anew from the plain data, so that a
swept value passes the same checks as a written one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tarry.core.checks import check_count
from tarry.errors import ConfigurationError, short_repr
from tarry.simulator.files.documents import Document, read_document
from tarry.simulator.files.idle import check_arrivals, check_calls, check_windows
from tarry.simulator.files.measured import measured
from tarry.simulator.files.schema import check_keys, defence_of, scenario_of
from tarry.simulator.files.settings import changed, merged, settings_of
from tarry.simulator.scenario import Scenario
from tarry.simulator.simulate import run_trials
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tarry.policyfile.defence import Defence
    from tarry.simulator.files.documents import Place
    from tarry.simulator.metrics import Summary

ABOUT = ("question", "lesson", "trials", "variants")
"""The keys of a file that are not part of its scenario."""
DIFFERS = "(differs)"
"""Stands for the value of a parameter that is not the same in all variants."""
COLUMNS = (
    Column("success_rate", "succeeded", "%"),
    Column("attempts_per_call", "attempts per call"),
    Column("amplification", "load at last server", "x"),
    Column("recovered_after", "recovered after", "s"),
    Column("crashes", "crashes"),
    Column("p99", "p99", "ms"),
)
PLOTS = (
    Plot("series", "requests", "Requests at the last server", y_title="requests"),
    Plot("series", "succeeded", "Calls that ended well", y_title="calls"),
    Plot("bars", "amplification", "Requests for each call"),
)


def read_defence(path: Path) -> Defence:
    """Read a policy file: the form of `Defence.from_dict` in TOML, YAML or JSON."""
    document = read_document(path)
    return defence_of(document, (), document.data)


def read_study(path: Path) -> Study:
    """Read a scenario file and make a study of it, with the variants that it names."""
    written = _read(path)
    return _study(path.stem, written.worlds, written.question, written.lesson, written.trials)


def compare_files(paths: Sequence[Path]) -> Study:
    """Read several scenario files and make one study of them; each file is a variant of it."""
    worlds: dict[str, Document] = {}
    for path, name in zip(paths, names_of(paths), strict=True):
        own = _read(path).worlds
        for variant, document in own.items():
            worlds[name if len(own) == 1 else f"{name}/{variant}"] = document
    stems = [path.stem for path in paths]
    return _study(" and ".join(stems), worlds, f"How do {', '.join(stems)} compare?")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the short name of each file, or its path where another file has the same name."""
    stems = [path.stem for path in paths]
    return [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]


def is_scenario(path: Path) -> bool:
    """Tell a scenario file, which has servers, from a policy file."""
    return "servers" in read_document(path).data


def run_worlds(
    worlds: Mapping[str, Document], *, variant: str, trials: int, seed: int, **parameters: Any
) -> list[Summary]:
    """Run one variant; a parameter that it does not have leaves it as it is."""
    document = worlds[variant]
    known = settings_of(scenario_of(document))
    for name, value in parameters.items():
        if name in known:
            document = changed(document, name, value)
    return run_trials(scenario_of(document), trials, seed)


class _Written(NamedTuple):
    """What a scenario file says: the scenario of each variant, and about them all."""

    worlds: dict[str, Document]
    question: str
    lesson: str
    trials: int


def _read(path: Path) -> _Written:
    document = _resolved(read_document(path))
    check_keys(document, (), document.data, (*ABOUT, *(field.name for field in fields(Scenario))))
    question, lesson = (_text(document, key) for key in ("question", "lesson"))
    trials = document.data.get("trials", 1)
    try:
        check_count("trials", trials)
    except ConfigurationError as error:
        raise document.refusal(("trials",), str(error)) from None
    return _Written(_variants(document), question, lesson, trials)


def _study(
    name: str,
    worlds: Mapping[str, Document],
    question: str = "",
    lesson: str = "",
    trials: int = 1,
) -> Study:
    parameters: dict[str, Any] = {}
    scenarios = [scenario_of(document) for document in worlds.values()]
    for scenario in scenarios:
        for setting, value in settings_of(scenario).items():
            same = parameters.setdefault(setting, value) == value
            parameters[setting] = value if same else DIFFERS
    servers = [server for scenario in scenarios for server in scenario.servers.values()]
    mortal = any(server.crash_above is not None for server in servers)
    return Study(
        name=name,
        question=question,
        lesson=lesson,
        run=partial(run_worlds, worlds),
        variant_parameter="variant",
        variants=tuple(worlds),
        columns=tuple(one for one in COLUMNS if one.metric != "crashes" or mortal),
        plots=PLOTS,
        parameters=parameters,
        with_defences=partial(_with_defence, name, worlds, question, trials),
        trials=trials,
    )


def _with_defence(
    name: str,
    worlds: Mapping[str, Document],
    question: str,
    trials: int,
    defences: Mapping[str, Defence],
) -> Study:
    """Make the study in which the first variant's clients have these defences instead."""
    world = next(iter(worlds.values()))
    others: dict[str, Document] = {}
    for variant, defence in defences.items():
        clients = {**world.data.get("clients", {}), "defence": defence.to_dict()}
        others[variant] = replace(world, data={**world.data, "clients": clients})
    return _study(name, others, question, trials=trials)


def _variants(document: Document) -> dict[str, Document]:
    """Return the scenario of each variant as a document of its own, checked."""
    base = {key: value for key, value in document.data.items() if key not in ABOUT}
    given: object = document.data.get("variants", {document.path.stem: {}})
    if not isinstance(given, dict) or not given:
        raise document.refusal(("variants",), "variants must be a table with a table for each")
    variants = cast("dict[str, Any]", given)
    worlds: dict[str, Document] = {}
    scenarios: dict[str, Scenario] = {}
    for name, changes in variants.items():
        here: Place = ("variants", name)
        if not isinstance(changes, Mapping):
            msg = f"variants.{name} must be a table, got {short_repr(changes)}"
            raise document.refusal(here, msg)
        own = {place[2:]: spot for place, spot in document.spots.items() if place[:2] == here}
        own.pop((), None)
        data = merged(base, cast("Mapping[str, Any]", changes))
        worlds[name] = replace(document, data=data, spots=document.spots | own)
        scenarios[name] = scenario_of(worlds[name])
        check_windows(worlds[name], scenarios[name])
    check_arrivals(document, variants, scenarios)
    check_calls(worlds, scenarios)
    return worlds


def _resolved(document: Document) -> Document:
    """Put in what the file names other files for: policies and measured durations."""
    spots = dict(document.spots)

    def resolved(place: Place, value: object) -> Any:
        if isinstance(value, dict):
            table = cast("dict[str, Any]", value)
            if table.get("kind") == "empirical" and "file" in table:
                return {"kind": "empirical", "values": measured(document, place, table)}
            return {key: resolved((*place, key), one) for key, one in table.items()}
        if isinstance(value, list):
            items = enumerate(cast("list[object]", value))
            return [resolved((*place, index), one) for index, one in items]
        if isinstance(value, str) and place[-1] == "defence":
            return policy(place, value)
        return value

    def policy(place: Place, name: str) -> dict[str, Any]:
        try:
            other = read_document(document.path.parent / name)
        except ConfigurationError as error:
            raise document.refusal(place, f"defence: {error}") from None
        defence_of(other, (), other.data)
        spots.update({(*place, *way): spot for way, spot in other.spots.items() if way})
        return other.data

    return replace(document, data=resolved((), document.data), spots=spots)


def _text(document: Document, key: str) -> str:
    value = document.data.get(key, "")
    if not isinstance(value, str):
        raise document.refusal((key,), f"{key} must be a text, got {short_repr(value)}")
    return value
