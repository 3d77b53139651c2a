"""`/policy-simulations`: simulations of policies, in real processes."""

from __future__ import annotations

import asyncio

import pytest

from tarry.service import analysis_process
from tarry.service.api.context import ApiLimits
from tarry.simulator.scenarios import STUDIES
from tarry.wire.policies import SERVICE_PRESETS
from tests.service.api.harness import ApiHarness, run_with_api
from tests.service.api.test_auth import create_key

STUCK_PROGRAM = ("-c", "import time; time.sleep(600)")
"""A process that never ends by itself."""


async def wait_for_processes(api: ApiHarness, count: int) -> None:
    """Wait until this number of processes has been started."""
    while len(api.api._policy_analysis._runner._processes) < count:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)


def test_policy_is_simulated() -> None:
    """The response has the figures of `tarry simulate storm`, with the policy and without retries.

    The policy is not stored.
    """

    async def test(api: ApiHarness) -> None:
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
        run, without = simulation["withPolicy"], simulation["withoutRetries"]
        assert 120 == len(run["requestsPerSecond"]) == len(without["requestsPerSecond"])
        assert run["requests"] == sum(run["requestsPerSecond"])
        # Clients without jitter return together, and crash the server again.
        assert run["crashes"] > 1
        assert run["peakLoad"] > 5
        assert without["peakLoad"] < 1
        assert run["requestsPerCall"] > 1.5
        assert 1 == without["requestsPerCall"]
        assert 0 == without["crashes"]
        assert without["recoveredAfterMs"] < 5_000
        page = await api.request("GET", "/retry-policies")
        assert len(SERVICE_PRESETS) == len(page.json["items"])

    run_with_api(test)


def test_run_that_does_not_recover_has_no_recovery_time() -> None:
    """`recoveredAfterMs` is null if calls still wait at the end of the simulated time."""

    async def test(api: ApiHarness) -> None:
        hours = {"initialDelayMs": 3_600_000, "maxDelayMs": 3_600_000, "jitterType": "NONE"}
        run = (await api.request("POST", "/policy-simulations", hours)).json["withPolicy"]
        assert run["recoveredAfterMs"] is None
        assert run["unfinishedCalls"] > 100

    run_with_api(test)


def test_invalid_policy_is_not_simulated() -> None:
    """The error names the invalid field of the policy."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("POST", "/policy-simulations", {"initialDelayMs": -1})
        assert (422, "initialDelayMs") == (response.status, response.problem["field"])

    run_with_api(test)


def test_simulation_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy with very many attempts reaches the limit of processor time and gets a 422."""
    program = "from tarry.service import analysis_process as p; p.MAX_CPU_S = 1; p.main()"
    monkeypatch.setattr(analysis_process, "_COMMAND", ("-c", program))

    async def test(api: ApiHarness) -> None:
        fields = {"initialDelayMs": 0.001, "maxDelayMs": 0.001, "attemptTimeoutMs": 0.001}
        response = await api.request("POST", "/policy-simulations", fields)
        assert 422 == response.status
        assert "longer delays" in response.problem["detail"]

    run_with_api(test)


def test_simulation_on_an_overloaded_machine_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end in time is killed, and the request gets a 503."""
    monkeypatch.setattr(analysis_process, "_COMMAND", STUCK_PROGRAM)
    monkeypatch.setattr(analysis_process, "_MAX_DURATION_S", 0.01)

    async def test(api: ApiHarness) -> None:
        response = await api.request("POST", "/policy-simulations", {})
        assert 503 == response.status
        assert "not ended" in response.problem["detail"]
        assert not api.api._policy_analysis._runner._processes

    run_with_api(test)


def test_simulation_that_crashes_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exit status is logged, and is an internal error."""
    monkeypatch.setattr(analysis_process, "_COMMAND", ("-c", "raise SystemExit(7)"))

    async def test(api: ApiHarness) -> None:
        assert 500 == (await api.request("POST", "/policy-simulations", {})).status

    run_with_api(test)


def test_simultaneous_simulations_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may run as many simulations as are free; then it gets a 429, but others a slot.

    If other tenants use all slots, the request gets a 503. When the service stops, the processes
    end.
    """
    monkeypatch.setattr(analysis_process, "_COMMAND", STUCK_PROGRAM)

    async def test(api: ApiHarness) -> None:
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

    run_with_api(test, keys=True, limits=ApiLimits(max_policy_analyses=2))
