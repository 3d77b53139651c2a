"""Envoy's own definitions: what its protobufs and their validation rules say of a document."""

from __future__ import annotations

from importlib import import_module
from typing import Any

json_format = import_module("google.protobuf.json_format")
validate = import_module("validate.validate_pb2")
routes = import_module("envoy.config.route.v3.route_components_pb2")
clusters = import_module("envoy.config.cluster.v3.cluster_pb2")


def parsed(kind: Any, document: dict[str, Any]) -> Any:
    """Read a document into a message, unknown fields refused, and check the rules of each field."""
    message = json_format.ParseDict(document, kind())
    assert [] == broken(message, "")
    return message


def broken(message: Any, path: str) -> list[str]:
    """Return the fields that break a rule of protoc-gen-validate."""
    found: list[str] = []
    for field, value in message.ListFields():
        here = f"{path}.{field.name}"
        rules = field.GetOptions().Extensions[validate.rules]
        items = list(value) if field.is_repeated else [value]
        if len(items) < rules.repeated.min_items:
            found.append(here)
        for item in items:
            if not is_valid(rules, item):
                found.append(here)
            elif field.message_type is not None:
                found += broken(item, here)
    return found


def is_valid(rules: Any, value: Any) -> bool:
    """Return whether a value follows Envoy's rules for durations, numbers and texts."""
    if rules.duration.HasField("gt"):
        return bool(value.ToTimedelta() > rules.duration.gt.ToTimedelta())
    number = getattr(value, "value", value)
    if rules.uint32.HasField("lte"):
        return bool(number <= rules.uint32.lte)
    if rules.double.HasField("lte"):
        return bool(rules.double.gte <= number <= rules.double.lte)
    return bool(len(value) >= rules.string.min_len) if isinstance(value, str) else True
