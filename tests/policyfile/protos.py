"""Checks documents against Envoy's protobufs and their validation rules."""

from __future__ import annotations

from importlib import import_module
from typing import Any

json_format = import_module("google.protobuf.json_format")
validate = import_module("validate.validate_pb2")
routes = import_module("envoy.config.route.v3.route_components_pb2")
clusters = import_module("envoy.config.cluster.v3.cluster_pb2")


def parse_valid(message_type: Any, document: dict[str, Any]) -> Any:
    """Parse a document; fail on unknown fields and on fields that break a validation rule."""
    message = json_format.ParseDict(document, message_type())
    assert [] == find_invalid_fields(message, "")
    return message


def find_invalid_fields(message: Any, path: str) -> list[str]:
    """Return the paths of the fields that break a rule of protoc-gen-validate."""
    invalid: list[str] = []
    for field, value in message.ListFields():
        field_path = f"{path}.{field.name}"
        rules = field.GetOptions().Extensions[validate.rules]
        items = list(value) if field.is_repeated else [value]
        if len(items) < rules.repeated.min_items:
            invalid.append(field_path)
        for item in items:
            if not is_valid(rules, item):
                invalid.append(field_path)
            elif field.message_type is not None:
                invalid += find_invalid_fields(item, field_path)
    return invalid


def is_valid(rules: Any, value: Any) -> bool:
    """Return whether a value meets Envoy's rules for durations, numbers and strings."""
    if rules.duration.HasField("gt"):
        return bool(value.ToTimedelta() > rules.duration.gt.ToTimedelta())
    number = getattr(value, "value", value)
    if rules.uint32.HasField("lte"):
        return bool(number <= rules.uint32.lte)
    if rules.double.HasField("lte"):
        return bool(rules.double.gte <= number <= rules.double.lte)
    return bool(len(value) >= rules.string.min_len) if isinstance(value, str) else True
