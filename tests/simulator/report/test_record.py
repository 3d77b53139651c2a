from __future__ import annotations

import json
from pathlib import Path

from tarry.simulator.report import to_json
from tests.simulator.report.made_up import findings


def test_to_json() -> None:
    """Plain data has everything, and null where a number would not be JSON."""
    of = to_json(findings())
    assert json.loads(json.dumps(of, allow_nan=False)) == of
    first = of["rows"][0]
    assert ("storm", 7, 1, "none") == (of["study"], of["seed"], of["trials"], first["variant"])
    assert (None, 0.4) == (first["metrics"]["recovered_after"], first["metrics"]["success_rate"])
    assert 120 == len(first["trials"][0]["series"]["requests"])


def test_to_json_of_odd_parameters() -> None:
    """A parameter that JSON has no word for is said as text."""
    of = findings(parameters={"path": Path("a"), "waits": (1.0, float("inf")), "more": {1: None}})
    parameters = to_json(of)["parameters"]
    assert {"path": "a", "waits": [1.0, None], "more": {"1": None}} == parameters
