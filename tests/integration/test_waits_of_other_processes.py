"""What a process with the role `api` reports about tasks that wait in a `worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.servers import store_url
from tests.integration.service import Service, service, target


def oldest_due_age(process: Service, reason: str) -> float:
    """Return the age of the oldest due task that waits for a reason, as Prometheus reads it."""
    text = process.request("GET", "/metrics")[1]
    prefix = f'retry_oldest_due_task_age_seconds{{waiting_for="{reason}"}} '
    [value] = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
    return float(value)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
def test_an_api_process_shows_what_tasks_wait_for(tmp_path: Path, kind: str) -> None:
    """It shows waits for the retry budget and for a rate, and none when the tasks are cancelled."""
    folders = {role: tmp_path / role for role in ("api", "worker")}
    for folder in folders.values():
        folder.mkdir()
    with (
        store_url(kind) as url,
        target(lambda *_: 503) as failing,
        target() as limited,
        service(
            folders["api"], "--role", "api", store=url or f"sqlite:{tmp_path / 'shared.db'}"
        ) as api,
        service(
            folders["worker"], "--role", "worker", store=url or f"sqlite:{tmp_path / 'shared.db'}"
        ),
    ):
        failing_lane, limited_lane = (each.url.replace("//", "") for each in (failing, limited))
        no_retries = {"breaker": {"enabled": False}, "budget": {"ratio": 0.001, "minPerSecond": 0}}
        for lane, limits in ((failing_lane, no_retries), (limited_lane, {"ratePerSecond": 0.1})):
            assert 200 == api.request("PUT", f"/downstreams/{lane}?create=true", limits)[0]
        # After the delay, the worker knows the limits: it reads them every second.
        fields = {"policy": {"maxAttempts": 100, "maxDelayMs": 100}, "delayMs": 3000}
        ids = [
            api.post(targetUrl=f"{each.url}/{number}", **fields)["taskId"]
            for number in range(20)
            for each in (failing, limited)
        ]

        def downstream(lane: str) -> Any:
            return api.request("GET", f"/downstreams/{lane}")[1]

        api.wait_for(lambda: downstream(failing_lane)["waitingFor"] == "retry-budget")
        api.wait_for(lambda: downstream(limited_lane)["waitingFor"] == "rate-limit")
        assert downstream(failing_lane)["local"] is None
        listed = api.request("GET", "/downstreams")[1]["items"]
        assert {"retry-budget", "rate-limit"} == {each["waitingFor"] for each in listed}
        api.wait_for(lambda: oldest_due_age(api, "retry-budget") > 0)
        assert oldest_due_age(api, "rate-limit") > 0
        assert 0 == oldest_due_age(api, "free-slot")
        text = "It waits for: retry budget, and is tried again in"
        explain = f"/retry-tasks/{ids[0]}/explain"
        api.wait_for(lambda: text in api.request("GET", explain)[1]["text"])
        current = api.request("GET", "/overview?range=1h")[1]["current"]
        assert current["oldestDueWaitingFor"] in {"retry-budget", "rate-limit"}

        for task_id in ids:
            api.request("DELETE", f"/retry-tasks/{task_id}")
        api.wait_for(
            lambda: (
                {downstream(lane)["waitingFor"] for lane in (failing_lane, limited_lane)} == {None}
            )
        )
        api.wait_for(lambda: oldest_due_age(api, "retry-budget") == 0)
