"""Minimal Istio resources for the tests of the importer."""

from __future__ import annotations

from typing import Any


def virtual_service(*routes: dict[str, Any]) -> dict[str, Any]:
    """Return a VirtualService with these HTTP routes."""
    return {"kind": "VirtualService", "metadata": {}, "spec": {"hosts": ["a"], "http": [*routes]}}


def destination_rule(**traffic_policy: Any) -> dict[str, Any]:
    """Return a DestinationRule with this traffic policy."""
    return {"kind": "DestinationRule", "spec": {"host": "a", "trafficPolicy": traffic_policy}}
