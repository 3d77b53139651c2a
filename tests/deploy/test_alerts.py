"""The alert rules in deploy/prometheus, checked with promtool."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.prometheus import ROOT, RULES, find_program
from tests.test_docs import DOCS, anchors_of, table_of

RULE_TESTS = RULES.with_name("tarry-rules-test.yml")
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    for rule in group["rules"]
}


@pytest.mark.programs
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "--lint=all", "--lint-fatal", RULES.name),
        ("check", "config", "--syntax-only", "prometheus.yml", "prometheus-compose.yml"),
        ("test", "rules", RULE_TESTS.name),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_accepts_the_rules(arguments: tuple[str, ...]) -> None:
    """The rules and the configuration are valid, and the unit tests of the rules pass."""
    done = subprocess.run(
        [find_program("promtool"), *arguments],
        cwd=RULES.parent,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stdout + done.stderr


def test_every_alert_has_unit_tests() -> None:
    """The unit tests have a case in which an alert fires, and one in which it does not."""
    cases = [
        (check["alertname"], bool(check.get("exp_alerts")))
        for test in yaml.safe_load(RULE_TESTS.read_text("utf-8"))["tests"]
        for check in test["alert_rule_test"]
    ]

    assert {(name, fires) for name in ALERTS for fires in (True, False)} == set(cases)


def test_every_alert_has_a_section_on_its_page() -> None:
    """The runbook of an alert is a section of docs/alerts.md, whose table has its severity."""
    documented = {row[0].strip("`"): row[1] for row in table_of(DOCS / "alerts.md", "alert")}

    assert documented == {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}
    for name, rule in ALERTS.items():
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (name.lower(), True) == (anchor, anchor in anchors_of(ROOT / file))


def test_durations_on_the_page_are_those_of_the_rules() -> None:
    """The table of alerts has the time for which a condition must hold."""
    documented = {row[0].strip("`"): row[3] for row in table_of(DOCS / "alerts.md", "alert")}

    actual = {
        name: re.sub(r"(\d+)m", r"\1 min", rule.get("for", "at once"))
        for name, rule in ALERTS.items()
    }
    assert actual == documented
