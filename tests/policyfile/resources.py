"""Resources of Istio for the tests: the parts that matter."""

from __future__ import annotations

from typing import Any


def virtual_service(*routes: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that matter."""
    return {"kind": "VirtualService", "metadata": {}, "spec": {"hosts": ["a"], "http": [*routes]}}


def destination_rule(**traffic: Any) -> dict[str, Any]:
    """Return the parts that matter."""
    return {"kind": "DestinationRule", "spec": {"host": "a", "trafficPolicy": traffic}}
