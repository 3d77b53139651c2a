"""Read scenario files as studies, and policy files as defences (see docs/scenario-files.md).

A study compares variants of a scenario, which differ in some values. A defence is a policy or
hedging, with breaker, budget and limiter. `tarry simulate` can set values, or sweep them (run with
several values), by their path in the file, such as `clients.defence.max_attempts`. Each run builds
its scenario from the data of the file again, so that swept values are checked as well.

A file with a value that has no effect is rejected, because that value is probably a mistake. A
value that is set or swept on the command line may have no effect, because a sweep may, for example,
disable the breaker on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tarry.core.checks import check_count
from tarry.core.policy import Policy
from tarry.core.text import suggest
from tarry.errors import ConfigurationError, short_repr
from tarry.policyfile.defence import TABLE_NAMES, Defence, parameters_of, table_arguments
from tarry.simulator.distributions import DISTRIBUTIONS, Empirical, Fixed
from tarry.simulator.documents import Document, DocumentValue, read_document
from tarry.simulator.scenario import Scenario
from tarry.simulator.schema import (
    build_defence,
    build_scenario,
    read_durations,
    with_location,
)
from tarry.simulator.simulate import run_trials
from tarry.simulator.study import Column, Plot, Study
from tarry.wire.policies import to_file_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tarry.simulator.documents import KeyPath
    from tarry.simulator.metrics import Summary


STUDY_KEYS = ("question", "lesson", "trials", "variants")
"""The keys of a file that describe the study. `lesson` is the text below the results."""
DIFFERS = "(differs)"
"""Shown instead of the value of a parameter that has different values in the variants."""
ARRIVAL_KINDS_BY_SETTING = {
    "rate": ("poisson",),
    "count": ("at-once", "closed", "backlog"),
    "think": ("closed",),
}
"""For some keys of `clients`: the values of `arrivals` with which the key has an effect."""
COLUMNS = (
    Column("success_rate", "succeeded", "%"),
    Column("attempts_per_call", "attempts per call"),
    Column("amplification", "load at last server", "x"),  # requests at this server per call
    Column("recovered_after", "recovered after", "s"),
    Column("crashes", "crashes"),
    Column("p99", "p99", "ms"),
)
PLOTS = (
    Plot("series", "requests", "Requests at the last server", y_title="requests"),
    Plot("series", "succeeded", "Successful calls", y_title="calls"),
    Plot("bars", "amplification", "Load at the last server"),
)
_DISTRIBUTION_KINDS: dict[type, str] = {cls: kind for kind, cls in DISTRIBUTIONS.items()}


def read_defence(path: Path) -> Defence:
    """Read a policy file: the data of `Defence.from_dict` in TOML, YAML or JSON."""
    return build_defence(read_policy_document(path).root)


def read_policy_document(path: Path) -> Document:
    """Read the document of a policy file; raise if the file is a scenario.

    Fields that have the names of the service's API get the names of `Policy`.
    """
    document = read_document(path)
    if "servers" in document.data:
        msg = f"{path} is a scenario, not a policy: its policy is the value of clients.defence"
        raise ConfigurationError(msg)
    data = with_location(document.root, lambda: to_file_fields(document.data))
    return replace(document, data=data)


def read_study(path: Path) -> Study:
    """Read a scenario file as a study of its variants."""
    document, variant_documents = _read_scenario_file(path)
    question, lesson = (document.data.get(key, "") for key in ("question", "lesson"))
    trial_count = document.data.get("trials", 1)
    return _make_study(path.stem, variant_documents, question, lesson, trial_count)


def read_comparison(paths: Sequence[Path]) -> Study:
    """Read several scenario files as one study with all variants of all files."""
    all_documents: dict[str, Document] = {}
    for path, name in zip(paths, short_names(paths), strict=True):
        _, documents = _read_scenario_file(path)
        for variant, document in documents.items():
            all_documents[name if len(documents) == 1 else f"{name}/{variant}"] = document
    stems = [path.stem for path in paths]
    return _make_study(" and ".join(stems), all_documents, f"How do {', '.join(stems)} compare?")


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the stem of each path, or the whole path if another path has the same stem."""
    stems = [path.stem for path in paths]
    return [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]


def is_scenario_file(path: Path) -> bool:
    """Return whether a file is a scenario file (it has servers) rather than a policy file."""
    return "servers" in read_document(path).data


def run_variant(
    documents: Mapping[str, Document], *, variant: str, trials: int, seed: int, **parameters: Any
) -> list[Summary]:
    """Run one variant with changed parameters; those that the variant does not have are ignored."""
    document = documents[variant]
    known_names = scenario_parameters(build_scenario(document))
    for name, value in parameters.items():
        if name in known_names:
            document = with_value(document, name, value)
    return run_trials(build_scenario(document), trials, seed)


def _read_scenario_file(path: Path) -> tuple[Document, dict[str, Document]]:
    """Return the document of a file, and for each variant a document with its scenario."""
    document = _inline_files(read_document(path))
    root = document.root
    root.check_keys((*STUDY_KEYS, *(field.name for field in fields(Scenario))))
    for key in ("question", "lesson"):
        if not isinstance(document.data.get(key, ""), str):
            raise root.item(key).type_error("a string")
    if "trials" in document.data:
        root.item("trials").check(check_count)
    return document, _build_variants(document)


def _make_study(
    name: str,
    documents: Mapping[str, Document],
    question: str = "",
    lesson: str = "",
    trial_count: int = 1,
) -> Study:
    parameters: dict[str, Any] = {}
    scenarios = [build_scenario(document) for document in documents.values()]
    for scenario in scenarios:
        for parameter, value in scenario_parameters(scenario).items():
            is_equal = parameters.setdefault(parameter, value) == value
            parameters[parameter] = value if is_equal else DIFFERS
    servers = [server for scenario in scenarios for server in scenario.servers.values()]
    can_crash = any(server.crash_above is not None for server in servers)
    return Study(
        name=name,
        question=question,
        lesson=lesson,
        run=partial(run_variant, documents),
        variant_parameter="variant",
        variants=tuple(documents),
        columns=tuple(column for column in COLUMNS if column.metric != "crashes" or can_crash),
        plots=PLOTS,
        parameters=parameters,
        with_defences=partial(_with_defences, documents),
        trial_count=trial_count,
    )


def _with_defences(
    documents: Mapping[str, Document], study: Study, defences: Mapping[str, Defence]
) -> Study:
    """Return a study with a copy of the first variant for each of these defences."""
    document = next(iter(documents.values()))
    new_documents: dict[str, Document] = {}
    for name, defence in defences.items():
        clients = {**document.data.get("clients", {}), "defence": defence.to_dict()}
        new_documents[name] = replace(document, data={**document.data, "clients": clients})
    return _make_study(study.name, new_documents, study.question, trial_count=study.trial_count)


def _build_variants(document: Document) -> dict[str, Document]:
    """Return a document for each variant: the data of the file with the changes of the variant."""
    base_data = {key: value for key, value in document.data.items() if key not in STUDY_KEYS}
    variants_table: object = document.data.get("variants", {document.path.stem: {}})
    if not isinstance(variants_table, dict) or not variants_table:
        msg = "variants must be a table with a table for each variant"
        raise document.error_at(("variants",), msg)
    changes_by_name = cast("dict[str, Any]", variants_table)
    documents: dict[str, Document] = {}
    scenarios: dict[str, Scenario] = {}
    for name, changes in changes_by_name.items():
        variant_path: KeyPath = ("variants", name)
        # An error about a value that the variant changes must name the line in the variant.
        locations = document.locations | {
            key_path[2:]: location
            for key_path, location in document.locations.items()
            if key_path[:2] == variant_path and key_path != variant_path
        }
        data = merge_tables(base_data, DocumentValue(document, variant_path, changes).table())
        documents[name] = replace(document, data=data, locations=locations)
        scenarios[name] = build_scenario(documents[name])
        _check_periods(documents[name], scenarios[name])
    _check_client_keys(document, changes_by_name, scenarios)
    _check_all_called(documents, scenarios)
    return documents


def _inline_files(document: Document) -> Document:
    """Replace the names of policy files and duration files by the content of these files."""
    locations = dict(document.locations)

    def inline(value: DocumentValue) -> Any:
        if isinstance(value.data, dict):
            table = value.table()
            if table.get("kind") == "empirical" and "file" in table:
                return {"kind": "empirical", "values": read_durations(value)}
            return {key: inline(value.item(key)) for key in table}
        if isinstance(value.data, list):
            count = len(cast("list[object]", value.data))
            return [inline(value.item(index)) for index in range(count)]
        if isinstance(value.data, str) and value.key_path[-1] == "defence":
            return read_policy_file(value)
        return value.data

    def read_policy_file(value: DocumentValue) -> dict[str, Any]:
        try:
            policy_document = read_policy_document(document.path.parent / value.data)
        except ConfigurationError as error:
            raise value.error(f"defence: {error}") from None
        build_defence(policy_document.root)
        for inner_path, location in policy_document.locations.items():
            if inner_path:
                locations[*value.key_path, *inner_path] = location
        return policy_document.data

    return replace(document, data=inline(document.root), locations=locations)


def _check_periods(document: Document, scenario: Scenario) -> None:
    """Raise if a failure or surge starts after the end of the run."""
    starts: dict[KeyPath, float] = {
        ("clients", "surges", index): surge.start
        for index, surge in enumerate(scenario.clients.surges)
    }
    for name, server in scenario.servers.items():
        for index, failure in enumerate(server.failures):
            starts["servers", name, "failures", index] = failure.start
    for key_path, start in starts.items():
        if start >= scenario.duration:
            msg = f"start must be before the end of the run (duration {scenario.duration:g})"
            raise document.error_at((*key_path, "start"), f"{msg}, got {start:g}")


def _check_client_keys(
    document: Document, changes: Mapping[str, Any], scenarios: Mapping[str, Scenario]
) -> None:
    """Raise if a key of `clients` has no effect with the `arrivals` of any variant that has it."""
    arrivals = {name: scenario.clients.arrivals for name, scenario in scenarios.items()}
    tables: list[tuple[KeyPath, Mapping[str, Any], list[str]]] = [
        ((), document.data, list(arrivals.values())),
        *((("variants", name), changes[name], [arrivals[name]]) for name in changes),
    ]
    for key_path, table, arrival_kinds in tables:
        clients = table.get("clients")
        for key in cast("Mapping[str, Any]", clients) if isinstance(clients, Mapping) else ():
            kinds_with_effect = ARRIVAL_KINDS_BY_SETTING.get(key, arrival_kinds)
            if not set(kinds_with_effect) & set(arrival_kinds):
                *others, last = map(repr, kinds_with_effect)
                choices = f"{', '.join(others)} or {last}" if others else last
                msg = f"{key} is for arrivals = {choices}, but arrivals is {arrival_kinds[0]!r}"
                raise document.error_at((*key_path, "clients", key), msg)


def _check_all_called(documents: Mapping[str, Document], scenarios: Mapping[str, Scenario]) -> None:
    """Raise if a server is called in no variant, because a name is probably misspelt."""
    called_names = {name for scenario in scenarios.values() for name in scenario.path()}
    for variant, scenario in scenarios.items():
        for name in scenario.servers:
            if name not in called_names:
                similar = suggest(name, called_names)
                hint = f"; did you mean {similar!r}?" if similar else ""
                msg = (
                    f"server {name!r} is never called: clients.calls or another server's calls "
                    f"must name it{hint}"
                )
                raise documents[variant].error_at(("servers", name), msg)


def scenario_parameters(scenario: Scenario) -> dict[str, Any]:
    """Return the values that can be set or swept, by their path in the file."""
    return dict(_iterate_values("", scenario))


def with_value(document: Document, name: str, value: object) -> Document:
    """Return a document in which the value with this name (its path in the file) is changed.

    An error about the value shows the change, such as `clients.rate = 5`, instead of a line.
    """
    key_path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
    location = f"{name} = {short_repr(value)}"
    data = cast("dict[str, Any]", _replace_at(document.data, key_path, value))
    return replace(document, data=data, locations=document.locations | {key_path: location})


def merge_tables(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base table with the changes of a variant, including those in nested tables.

    There are two exceptions: `false` removes a nested table, and a nested table with a `kind`
    replaces that of the base table as a whole.
    """
    result = dict(base)
    for key, value in changes.items():
        base_value = result.get(key)
        if isinstance(base_value, Mapping) and value is False:
            del result[key]
        elif isinstance(base_value, Mapping) and isinstance(value, Mapping) and "kind" not in value:
            base_table = cast("Mapping[str, Any]", base_value)
            result[key] = merge_tables(base_table, cast("Mapping[str, Any]", value))
        else:
            result[key] = value
    return result


def _iterate_values(name: str, value: object) -> Iterator[tuple[str, Any]]:
    inner_values: Mapping[str, object] | None = None
    if isinstance(value, Defence):
        inner_values = _defence_values(value)
    elif isinstance(value, Fixed):
        value = value.value  # in a file, a fixed duration is a plain number
    elif isinstance(value, Empirical):
        value = value.mean
    elif is_dataclass(value):
        if type(value) in _DISTRIBUTION_KINDS:
            # List the table itself too, so that a number can replace the whole table.
            yield name.removeprefix("."), _DISTRIBUTION_KINDS[type(value)]
        inner_values = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        inner_values = {str(index): item for index, item in enumerate(items)}
    elif isinstance(value, dict):
        inner_values = cast("dict[str, object]", value)
    if inner_values is None:
        yield name.removeprefix("."), value
        return
    for key, inner_value in inner_values.items():
        yield from _iterate_values(f"{name}.{key}", inner_value)


def _defence_values(defence: Defence) -> dict[str, Any]:
    """Return all fields of a defence; those of its breaker, budget, ... are in nested dicts."""
    data = defence.to_dict()
    values = dict.fromkeys(parameters_of(Policy)) if defence.hedging is None else {}
    values |= data
    for name in TABLE_NAMES:
        if name in data:
            values[name] = table_arguments(name, data[name]) | data[name]
    return values


def _replace_at(data: object, key_path: KeyPath, value: object) -> object:
    """Return a copy of nested data in which the value at the key path is replaced."""
    if not key_path:
        return value
    key, rest = key_path[0], key_path[1:]
    if isinstance(data, list) and isinstance(key, int):
        items = list(cast("list[object]", data))
        items[key] = _replace_at(items[key], rest, value)
        return items
    table = dict(cast("Mapping[str, Any]", data)) if isinstance(data, Mapping) else {}
    return {**table, str(key): _replace_at(table.get(str(key)), rest, value)}
