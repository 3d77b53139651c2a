"""A real Prometheus scrapes the real service, and evaluates the rules and the dashboard."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.error import URLError
from urllib.parse import quote, urlencode
from urllib.request import urlopen

import pytest
import yaml

from tests.integration.ports import free_port
from tests.integration.servers import Server
from tests.integration.service import Service, service, target
from tests.prometheus import ROOT, RULES, find_program
from tests.test_docs import DOCS, table_of

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "tarry.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SELECTOR = re.compile(r"\b(?:retry_\w+|up)(?:\{[^}]*\})?")
QUERY_TIMEOUT_S = 45.0
"""Prometheus scrapes for the first time about 5 s after its start."""


class Prometheus:
    """The HTTP API of a Prometheus server."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of a successful response."""
        url = f"http://{self._address}/api/v1/{path}?{urlencode(parameters)}"
        with urlopen(url, timeout=30) as response:
            answer = json.load(response)
        assert ("success", None) == (answer["status"], answer.get("warnings")), answer
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        """Return the current result of an expression."""
        return cast("list[Any]", self.get("query", query=expression)["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Wait until all rules have been evaluated; return them."""
        while True:
            groups = self.get("rules")["groups"]
            rules: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
            if rules and all(rule["health"] != "unknown" for rule in rules):
                return rules
            time.sleep(0.2)

    def wait_for_results(self, expressions: set[str]) -> set[str]:
        """Wait until each expression has had a result; return those that had none."""
        deadline = time.monotonic() + QUERY_TIMEOUT_S
        without_result = expressions
        while without_result and time.monotonic() < deadline:
            time.sleep(0.2)
            without_result = {each for each in without_result if not self.query(each)}
        return without_result


@contextmanager
def prometheus(
    folder: Path, *scraped_ports: int, rules: Path = RULES, interval: str = "1s"
) -> Iterator[Prometheus]:
    """Run Prometheus with the configuration in deploy/, but with short intervals."""
    config = yaml.safe_load(RULES.with_name("prometheus.yml").read_text("utf-8"))
    config["global"] = {
        "scrape_interval": interval,
        "scrape_timeout": interval,
        "evaluation_interval": interval,
    }
    config["rule_files"] = [str(rules)]
    addresses = [f"127.0.0.1:{port}" for port in scraped_ports]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = addresses
    (folder / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    api = Prometheus(address)

    def is_up() -> bool:
        try:
            return bool(api.query("vector(1)"))
        except URLError:
            return False

    command = [
        find_program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    server = Server(address, command, folder, is_up)
    server.start()
    try:
        yield api
    finally:
        server.stop()


def produce_metrics(running_service: Service, target_url: str) -> None:
    """Add tasks that succeed, are retried, wait for a breaker or budget, or become dead letters."""
    lane = target_url.replace("//", "")
    limits = {
        "parked": {"breaker": {"consecutiveFailures": 1, "openForMs": 600_000}},
        "poor": {"budget": {"ratio": 0.01, "minPerSecond": 0}},
    }
    for lane_key, each in limits.items():
        url = f"/downstreams/{quote(f'{lane}@{lane_key}', safe='')}?create=true"
        assert 200 == running_service.request("PUT", url, each)[0]
    policy = {"maxAttempts": 2, "initialDelayMs": 10, "maxDelayMs": 10}
    for path, key in (
        ("ok", None),
        ("flaky", None),
        ("broken", None),
        ("broken", "parked"),
        ("broken", "poor"),
        ("broken", "poor"),
    ):
        extra = {} if key is None else {"laneKey": key}
        running_service.post(targetUrl=f"{target_url}/{path}", policy=policy, **extra)


@pytest.fixture(scope="module")
def scraping_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run a service with tasks of all kinds, and a Prometheus that scrapes it."""

    def respond(path: str, number: int) -> int:
        return 503 if path == "/broken" or (path == "/flaky" and number == 1) else 200

    folder = tmp_path_factory.mktemp("prometheus")
    with (
        service(folder) as running_service,
        target(respond) as failing_target,
        prometheus(folder, running_service.port) as api,
    ):
        produce_metrics(running_service, failing_target.url)
        yield api


def test_dashboard_shows_data_of_the_service(scraping_prometheus: Prometheus) -> None:
    """Each expression of the Grafana dashboard is valid, and has a result."""
    expressions = {
        re.sub(r"\$(job|lane)", ".*", each["expr"].replace("$__rate_interval", "1m"))
        for panel in PANELS
        for each in panel["targets"]
    }

    assert set() == scraping_prometheus.wait_for_results(expressions)


def test_rules_match_metrics_of_the_service(scraping_prometheus: Prometheus) -> None:
    """Prometheus evaluates each rule without an error, and each selector in it matches a metric."""
    rules = scraping_prometheus.rules()
    selectors = {found for rule in rules for found in SELECTOR.findall(rule["query"])}

    assert set() == scraping_prometheus.wait_for_results(selectors)
    assert {"ok"} == {rule["health"] for rule in rules}


def test_dashboard_has_every_metric() -> None:
    """The dashboard shows each metric that docs/service-operations.md lists."""
    shown = " ".join(each["expr"] for panel in PANELS for each in panel["targets"])
    documented = {row[0].strip("`") for row in table_of(DOCS / "service-operations.md", "metric")}

    assert set() == {metric for metric in documented if metric not in shown}


def test_variables_of_the_dashboard_are_defined() -> None:
    """Each variable in an expression is defined by the dashboard or by Grafana."""
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}

    assert {"__rate_interval"} == used - defined
    assert len(DASHBOARD["panels"]) == len({panel["id"] for panel in DASHBOARD["panels"]})
