"""The alerts of deploy/prometheus fire in a real Prometheus that scrapes services with failures.

The test shortens the rules of the file: one minute becomes 500 ms.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.deploy.test_alerts import ALERTS
from tests.integration.servers import redis_server
from tests.integration.service import Service, Target, service, target
from tests.integration.test_prometheus import Prometheus, prometheus
from tests.prometheus import RULES

redis = import_module("redis")

pytestmark = pytest.mark.timeout(300)

MINUTE_MS = 500
"""Replaces a minute in the rules. A rate over 5 minutes then covers 2.5 s, which are 12 scrapes."""
SCRAPE_INTERVAL = "200ms"
DUE_AGE_THRESHOLD_S = 1
"""The threshold of `TarryOldestDueTask` (60 s in the file) and `TarryTasksWaiting` (15 min)."""
FLAPPING_PHASE_S = 1.0
"""The flapping target fails for this time, then succeeds for the same time, and so on."""
SLOW_TASKS, SLOW_RESPONSE_S = 300, 0.2
"""A service that runs one attempt at a time starts the last of these tasks after 60 s."""
POLL_INTERVAL_S = 0.1
MAX_WAIT_S = 120.0  # on a busy machine; usually all alerts fire within 30 s


def write_fast_rules(folder: Path) -> Path:
    """Write the rules with shorter durations; return the file."""
    rules = RULES.read_text("utf-8")
    rules, count = re.subn(r"(retry_oldest_due.*) > \d+\n", rf"\1 > {DUE_AGE_THRESHOLD_S}\n", rules)
    assert 2 == count
    path = folder / "rules.yml"
    path.write_text(
        re.sub(r"\b(\d+)m\b", lambda minutes: f"{int(minutes[1]) * MINUTE_MS}ms", rules)
    )
    return path


def respond(path: str, number: int) -> int:
    """Return the status of a response; `number` counts the requests for this path from 1."""
    match path.split("/")[1]:
        case "healthy":
            return 200
        case "retried":
            return 503 if number == 1 else 200
        case "refused":
            return 410
        case "flapping":
            return 503 if time.monotonic() % (2 * FLAPPING_PHASE_S) < FLAPPING_PHASE_S else 200
        case "slow":
            time.sleep(SLOW_RESPONSE_S)
            return 200
        case _:
            return 503


LIMITS: dict[str, dict[str, Any]] = {
    "retried": {"breaker": {"enabled": False}},
    "broken": {"breaker": {"enabled": False}},
    "flapping": {"breaker": {"consecutiveFailures": 1, "openForMs": 200, "maxOpenMs": 200}},
    "small-budget": {"breaker": {"enabled": False}, "budget": {"ratio": 0.01, "minPerSecond": 0}},
}
"""Limits by lane key. Breakers are disabled where they would stop the failing attempts."""
POLICY = {"maxAttempts": 1_000, "initialDelayMs": 200, "maxDelayMs": 200}


class TaskProducer:
    """Creates tasks. Their lane key begins the path of the URL, and selects the responses."""

    def __init__(self, running_service: Service, failing_target: Target) -> None:
        self.service = running_service
        self._target = failing_target
        self._task_count = 0

    def lane(self, key: str) -> str:
        """Return the name of a lane."""
        return f"{self._target.url.replace('//', '')}@{key}"

    def set_limits(self) -> None:
        """Set the limits of all lanes."""
        for key, limits in LIMITS.items():
            path = f"/downstreams/{quote(self.lane(key), safe='')}?create=true"
            assert 200 == self.service.request("PUT", path, limits)[0]

    def post(self, *keys: str) -> None:
        """Create a task in each of these lanes."""
        for key in keys:
            self._task_count += 1
            url = f"{self._target.url}/{key}/{self._task_count}"
            self.service.post(targetUrl=url, laneKey=key, policy=POLICY)


@contextmanager
def repeat(step: Callable[[], object]) -> Iterator[None]:
    """Call a function every `POLL_INTERVAL_S` in a thread until the block ends."""
    stop_event = threading.Event()

    def run() -> None:
        while not stop_event.wait(POLL_INTERVAL_S):
            step()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def wait_until_firing(api: Prometheus, expected: set[tuple[str, str, str]]) -> set[str]:
    """Wait until alerts fire; return the lanes of all alerts that have fired.

    `expected` has tuples of alert name, label name and label value. Both are empty for alerts that
    are aggregated over all processes.
    """
    firing_lanes: set[str] = set()
    missing = expected
    deadline = time.monotonic() + MAX_WAIT_S
    while missing:
        assert time.monotonic() < deadline, f"these alerts do not fire: {missing}"
        time.sleep(POLL_INTERVAL_S)
        alerts = [alert for alert in api.get("alerts")["alerts"] if alert["state"] == "firing"]
        firing_lanes |= {alert["labels"].get("lane", "") for alert in alerts}
        missing = missing - {
            (alert["labels"]["alertname"], label, value)
            for alert in alerts
            for label, value in (alert["labels"] | {"": ""}).items()
        }
    return firing_lanes


def test_every_alert_fires(tmp_path: Path) -> None:
    """Every alert fires, for the failing lane or process if it has such a label, not for others."""
    folders = [tmp_path / name for name in ("failing", "busy", "locked", "flushed", "prometheus")]
    for folder in folders:
        folder.mkdir()
    bodies = folders[1] / "bodies"
    busy_flags = ("--set", "in_flight=1", "--set", f"bodies={bodies}")
    with ExitStack() as stack:
        failing_target = stack.enter_context(target(respond))
        failing, busy, locked = (
            TaskProducer(running_service, failing_target)
            for running_service in (
                stack.enter_context(service(folders[0])),
                stack.enter_context(service(folders[1], *busy_flags)),
                stack.enter_context(service(folders[2])),
            )
        )
        server = stack.enter_context(redis_server())
        redis_flags = ("--store", server.address.replace("unix://", "redis+unix://"))
        flushed = stack.enter_context(service(folders[3], *redis_flags))
        ports = [each.service.port for each in (failing, busy, locked)]
        ports.append(flushed.port)
        rules = write_fast_rules(folders[4])
        api = stack.enter_context(
            prometheus(folders[4], *ports, rules=rules, interval=SCRAPE_INTERVAL)
        )
        assert set() == api.wait_for_results({"sum(up) == 4"})

        failing.set_limits()
        keys = ("healthy", "retried", "broken", "refused", "flapping", "small-budget")
        stack.enter_context(repeat(lambda: failing.post(*keys)))
        busy.post(*["slow"] * SLOW_TASKS)
        shutil.rmtree(bodies, ignore_errors=True)
        bodies.touch()  # a file where the service needs a folder
        assert bodies.is_file()
        # GET /readyz checks the storage of bodies, which otherwise only large bodies use.
        stack.enter_context(repeat(lambda: busy.service.request("GET", "/readyz")))
        database = stack.enter_context(closing(sqlite3.connect(folders[2] / "tarry.db")))
        database.execute("BEGIN IMMEDIATE")

        with redis.Redis.from_url(server.address) as client:
            client.flushall()
        expected = {
            ("TarryStoreLost", "instance", f"127.0.0.1:{flushed.port}"),
            ("TarryStoreFailing", "instance", f"127.0.0.1:{locked.service.port}"),
            ("TarryComponentFailing", "instance", f"127.0.0.1:{busy.service.port}"),
            ("TarryOldestDueTask", "", ""),
            ("TarryTasksWaiting", "waiting_for", "retry-budget"),
            ("TarrySchedulingLag", "", ""),
            ("TarryDeadLetters", "", ""),
            ("TarryRetriesWithoutErrors", "lane", f"default/{failing.lane('retried')}"),
            ("TarryRetriesNeverConverge", "lane", f"default/{failing.lane('broken')}"),
            ("TarryBreakerFlapping", "lane", f"default/{failing.lane('flapping')}"),
            ("TarryBudgetEmpty", "lane", f"default/{failing.lane('small-budget')}"),
        }
        firing_lanes = wait_until_firing(api, expected)
        assert f"default/{failing.lane('healthy')}" not in firing_lanes

        locked.service.kill()
        down = ("TarryProcessDown", "instance", f"127.0.0.1:{locked.service.port}")
        wait_until_firing(api, {down})
        assert ALERTS.keys() == {name for name, *_ in expected | {down}}
