"""`/policy-simulations` and `/policy-advice`: analyses of policies, in real processes."""

from __future__ import annotations

import asyncio

import pytest

from tarry.service import analysis_process
from tarry.service.api import policy_analysis
from tarry.service.api.context import ApiLimits
from tarry.service.model import AttemptRecord, Status
from tarry.service.store import TaskResult
from tarry.simulator.scenarios import STUDIES
from tarry.tuning import rules
from tarry.wire.policies import SERVICE_PRESETS
from tests.service.api.harness import ApiHarness
from tests.service.api.test_auth import create_key

STUCK_PROGRAM = ("-c", "import time; time.sleep(600)")
"""A process that never ends by itself."""


async def wait_for_processes(api: ApiHarness, count: int) -> None:
    """Wait until this number of processes has been started."""
    while len(api.api._policy_analysis._runner._processes) < count:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)


async def test_policy_is_simulated(api: ApiHarness) -> None:
    """The response has the figures of `tarry simulate storm`, with the policy and without retries.

    The policy is not stored.
    """
    fields = {"maxAttempts": 10, "initialDelayMs": 100, "jitterType": "NONE"}
    fields |= {"totalBudgetMs": None, "maxDelayMs": 30_000}
    response = await api.request("POST", "/policy-simulations", fields)
    assert 200 == response.status, response.body
    simulation = response.json
    study = STUDIES["storm"]
    assert (study.question, 1000) == (simulation["description"], simulation["clients"])
    assert (1000, 20_000, 40_000) == (
        simulation["stepMs"],
        simulation["outageStartMs"],
        simulation["outageEndMs"],
    )
    run, baseline = simulation["withPolicy"], simulation["withoutRetries"]
    assert 120 == len(run["requestsPerSecond"]) == len(baseline["requestsPerSecond"])
    assert run["requests"] == sum(run["requestsPerSecond"])
    # Clients without jitter return together, and crash the server again.
    assert run["crashes"] > 1
    assert run["peakLoad"] > 5
    assert baseline["peakLoad"] < 1
    assert run["requestsPerCall"] > 1.5
    assert 1 == baseline["requestsPerCall"]
    assert 0 == baseline["crashes"]
    assert baseline["recoveredAfterMs"] < 5_000
    page = await api.request("GET", "/retry-policies")
    assert len(SERVICE_PRESETS) == len(page.json["items"])


async def test_run_that_does_not_recover_has_no_recovery_time(api: ApiHarness) -> None:
    """`recoveredAfterMs` is null if calls still wait at the end of the simulated time."""
    hours = {"initialDelayMs": 3_600_000, "maxDelayMs": 3_600_000, "jitterType": "NONE"}
    run = (await api.request("POST", "/policy-simulations", hours)).json["withPolicy"]
    assert run["recoveredAfterMs"] is None
    assert run["unfinishedCalls"] > 100


async def test_invalid_policy_is_not_simulated(api: ApiHarness) -> None:
    """The error names the invalid field of the policy."""
    response = await api.request("POST", "/policy-simulations", {"initialDelayMs": -1})
    assert (422, "initialDelayMs") == (response.status, response.problem["field"])


async def test_simulation_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy with very many attempts reaches the limit of processor time and gets a 422."""
    program = "from tarry.service import analysis_process as p; p.MAX_CPU_S = 1; p.main()"
    monkeypatch.setattr(analysis_process, "_COMMAND", ("-c", program))
    api = ApiHarness()

    fields = {"initialDelayMs": 0.001, "maxDelayMs": 0.001, "attemptTimeoutMs": 0.001}
    response = await api.request("POST", "/policy-simulations", fields)
    assert 422 == response.status
    assert "longer delays" in response.problem["detail"]


async def test_simulation_on_an_overloaded_machine_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that does not end in time is killed, and the request gets a 503."""
    monkeypatch.setattr(analysis_process, "_COMMAND", STUCK_PROGRAM)
    monkeypatch.setattr(analysis_process, "_MAX_DURATION_S", 0.01)
    api = ApiHarness()

    response = await api.request("POST", "/policy-simulations", {})
    assert 503 == response.status
    assert "not ended" in response.problem["detail"]
    assert not api.api._policy_analysis._runner._processes


async def test_simulation_that_crashes_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exit status is logged, and is an internal error."""
    monkeypatch.setattr(analysis_process, "_COMMAND", ("-c", "raise SystemExit(7)"))
    api = ApiHarness()

    assert 500 == (await api.request("POST", "/policy-simulations", {})).status


async def test_simultaneous_simulations_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that uses half of the slots gets a 429, and another tenant still gets a slot.

    If other tenants use all slots, the request gets a 503. When the service stops, the processes
    are killed.
    """
    monkeypatch.setattr(analysis_process, "_COMMAND", STUCK_PROGRAM)

    api = ApiHarness(keys=True, limits=ApiLimits(max_policy_analyses=2))
    keys = [await create_key(api, name) for name in ("acme", "beta", "gamma")]
    acme, beta, gamma = ({"x-api-key": key} for key, _ in keys)
    path = "/policy-simulations"
    running = [asyncio.ensure_future(api.request("POST", path, {}, headers=acme))]
    await wait_for_processes(api, 1)
    rejected = await api.request("POST", path, {}, headers=acme)
    assert (429, "5") == (rejected.status, rejected.header("retry-after"))
    running.append(asyncio.ensure_future(api.request("POST", path, {}, headers=beta)))
    await wait_for_processes(api, 2)
    assert 503 == (await api.request("POST", path, {}, headers=gamma)).status
    api.api.close()
    assert [503, 503] == [response.status for response in await asyncio.gather(*running)]


async def test_simulation_ends_when_its_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed, and its slot is free again."""
    monkeypatch.setattr(analysis_process, "_COMMAND", STUCK_PROGRAM)
    monkeypatch.setattr(policy_analysis, "_DISCONNECT_CHECK_INTERVAL_S", 0.01)

    api = ApiHarness(limits=ApiLimits(max_policy_analyses=2))
    for _ in range(2):
        disconnected = asyncio.Event()
        request = asyncio.ensure_future(
            api.request("POST", "/policy-simulations", {}, is_abandoned=disconnected.is_set)
        )
        await wait_for_processes(api, 1)
        disconnected.set()
        await request
        assert not api.api._policy_analysis._runner._processes


async def test_simulation_that_starts_while_the_service_stops_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that `close` does not find yet is killed, and no process starts after `close`."""
    monkeypatch.setattr(analysis_process, "_COMMAND", STUCK_PROGRAM)
    api = ApiHarness()

    starting = asyncio.ensure_future(api.request("POST", "/policy-simulations", {}))
    await asyncio.sleep(0)
    api.api.close()
    assert 503 == (await starting).status
    assert 503 == (await api.request("POST", "/policy-simulations", {})).status
    assert not api.api._policy_analysis._runner._processes


LANE = "https:example.com:443"


async def record_attempts(
    api: ApiHarness,
    count: int,
    url: str = "https://example.com/hook",
    added_ms: float = 0.0,
    headers: dict[str, str] | None = None,
) -> None:
    """Create tasks that succeed at the first attempt, after 40 to 60 ms; one attempt is lost.

    `added_ms` is added to these durations.
    """
    body = {"tasks": [{"targetUrl": url}] * (count + 1)}
    response = await api.request("POST", "/retry-tasks/batch", body, headers=headers)
    assert 200 == response.status, response.body
    tasks = await api.lease_due_tasks()
    assert count + 1 == len(tasks)
    results: list[TaskResult] = []
    for index, task in enumerate(tasks):
        attempt = AttemptRecord(
            attempt_number=1,
            scheduled_at=task.next_attempt_at,
            started_at=api.time.ms + 100 * index,
            duration_ms=40.0 + index % 21 + added_ms if index < count else None,
            response_status=200,
            outcome="success" if index < count else "lost",
        )
        results.append(TaskResult(task=task, attempt=attempt, status=Status.SUCCEEDED))
    await api.store.finish(results)


async def test_policy_is_proposed_from_recorded_attempts(api: ApiHarness) -> None:
    """The response has the suggestions of `tarry tune` in milliseconds; the policy is unchanged."""
    await record_attempts(api, 300)
    response = await api.request("POST", "/policy-advice", {"lane": LANE})
    assert 200 == response.status, response.body
    advice = response.json
    assert (LANE, "default") == (advice["lane"], advice["policyId"])
    assert (300, 300, 0, []) == tuple(
        advice[name] for name in ("attempts", "calls", "outages", "warnings")
    )
    suggestions = {item["field"]: item for item in advice["suggestions"]}
    current = (await api.request("GET", "/retry-policies/default")).json
    assert {name: current[name] for name in suggestions} == {
        name: item["current"] for name, item in suggestions.items()
    }
    first_delay = suggestions["initialDelayMs"]
    assert 100 == first_delay["proposed"]
    assert first_delay["reason"].startswith("twice the median")
    assert "median 50 ms of 300" == first_delay["basis"]
    kept = suggestions["attemptTimeoutMs"]
    assert (False, kept["current"]) == (kept["hasEnoughData"], kept["proposed"])
    assert "too little data: 300 successful attempts" in kept["reason"]
    assert advice["simulation"].startswith("Simulated with the durations")


async def test_advice_uses_a_limited_number_of_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the attempts of the newest tasks are used."""
    monkeypatch.setattr(policy_analysis, "MAX_ADVICE_ATTEMPTS", 250)
    monkeypatch.setattr(policy_analysis, "_ATTEMPTS_PER_PAGE", 100)
    api = ApiHarness()

    await record_attempts(api, 300, added_ms=1000.0)
    await record_attempts(api, 300)
    advice = (await api.request("POST", "/policy-advice", {"lane": LANE})).json
    assert 250 == advice["attempts"]
    basis = {item["field"]: item["basis"] for item in advice["suggestions"]}
    assert "median 50 ms of 250" == basis["initialDelayMs"]


async def test_advice_needs_enough_attempts(api: ApiHarness) -> None:
    """The error says how many attempts are recorded, and how many are needed."""
    assert rules.MIN_ATTEMPTS == policy_analysis.MIN_ADVICE_ATTEMPTS

    await record_attempts(api, 199)
    response = await api.request("POST", "/policy-advice", {"lane": LANE})
    assert (422, "lane") == (response.status, response.problem["field"])
    assert "lane has 199 recorded attempts, but advice needs 200." == response.problem["detail"]


async def test_advice_says_if_only_newest_tasks_were_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If older tasks may have attempts, the error says so, and names the command without limit."""
    monkeypatch.setattr(policy_analysis, "_MAX_PAGES", 1)
    monkeypatch.setattr(policy_analysis, "_ATTEMPTS_PER_PAGE", 100)
    api = ApiHarness()

    await record_attempts(api, 200)
    response = await api.request("POST", "/policy-advice", {"lane": LANE})
    assert 422 == response.status, response.body
    assert "among the newest tasks, but advice needs 200" in response.problem["detail"]
    assert "tarry tune --service" in response.problem["detail"]


async def test_advice_for_unknown_lanes_and_policies_is_404() -> None:
    """A lane of another tenant is unknown, as is a policy that does not exist."""
    api = ApiHarness(keys=True)
    acme, _ = await create_key(api, "acme")
    beta, _ = await create_key(api, "beta")
    await record_attempts(api, 200, headers={"x-api-key": acme})
    for key, policy_id, status in (
        (acme, "default", 200),
        (acme, "missing", 404),
        (beta, "default", 404),
    ):
        body = {"lane": LANE, "policyId": policy_id}
        headers = {"x-api-key": key}
        response = await api.request("POST", "/policy-advice", body, headers=headers)
        assert status == response.status, response.body


async def test_advice_does_not_depend_on_its_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the simulation reaches the limit of processor time, the response has only the proposal."""
    program = (
        "from tarry.service import analysis_process as p\n"
        "from tarry.tuning import comparison\n"
        "def never_end(*arguments):\n"
        "    while True: pass\n"
        "comparison.compare_policies = never_end\n"
        "p.MAX_CPU_S = 2\n"
        "p.main()"
    )
    monkeypatch.setattr(analysis_process, "_COMMAND", ("-c", program))
    api = ApiHarness()

    await record_attempts(api, 300)
    advice = (await api.request("POST", "/policy-advice", {"lane": LANE})).json
    text = "Not simulated: the simulation needs too much time or memory."
    assert text == advice["simulation"]
    assert 100 in [item["proposed"] for item in advice["suggestions"]]
