"""Simulate policies in a process of their own, so that requests and attempts do not wait for it.

The service starts one process for each analysis, writes the job to its input, and reads the result
from its output. The process limits its own processor time and memory, has a low priority, and
imports the simulator, which the service itself never loads.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from contextlib import suppress
from math import isfinite
from subprocess import PIPE
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from tarry.core.policy import Policy
from tarry.errors import Overloaded
from tarry.wire.policies import policy_from_json
from tarry.wire.tasks import PolicySimulation, SimulatedRun

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

MAX_CPU_S = 10
"""The storm of a common policy takes 0.2 s. A policy with delays of 1 ms takes up to a minute."""
_MAX_MEMORY_BYTES = 1 << 30
_MAX_DURATION_S = 60.0
"""The processor time is the actual limit; this is for a machine that is overloaded."""
_NICENESS = 10
_TOO_LARGE_STATUS = 3
"""Exit status of a process that has reached the limit of processor time or memory."""
# Without -P, Python would import modules from the working directory of the service.
_COMMAND = ("-P", "-c", f"from {__name__} import main; main()")


class StormJob(msgspec.Struct, tag="storm"):
    """Simulate the storm with a policy, and without retries."""

    policy: dict[str, Any]
    """All fields of the policy, as JSON."""


class AnalysisTooLarge(Exception):
    """The analysis has reached its limit of processor time or memory."""


_encode = msgspec.msgpack.Encoder().encode


class AnalysisRunner:
    """Starts the processes, and ends them when the service stops."""

    def __init__(self) -> None:
        self._processes: set[asyncio.subprocess.Process] = set()
        self._is_closed = False

    async def simulate_storm(self, policy: dict[str, Any]) -> PolicySimulation:
        """Simulate the storm; raise `AnalysisTooLarge` or `Overloaded`."""
        output = await self._run(StormJob(policy))
        return msgspec.msgpack.decode(output, type=PolicySimulation)

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()

    async def _run(self, job: StormJob) -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *_COMMAND,
            stdin=PIPE, stdout=PIPE, start_new_session=True,  # Ctrl-C is meant for the service
        )  # fmt: skip
        self._processes.add(process)
        try:
            async with asyncio.timeout(_MAX_DURATION_S):
                output, _ = await process.communicate(_encode(job))
        except TimeoutError:
            msg = f"The simulation has not ended within {_MAX_DURATION_S:g} s"
            raise Overloaded(msg, retry_after=_MAX_DURATION_S) from None
        finally:
            self._processes.discard(process)
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._is_closed:
            raise Overloaded("The service stops")
        if process.returncode == _TOO_LARGE_STATUS:
            raise AnalysisTooLarge
        if process.returncode != 0:
            raise RuntimeError(f"the process of the simulation ended with {process.returncode}")
        return output


def main() -> None:
    """Run the job from standard input, and write its result to standard output."""
    os.nice(_NICENESS)
    _set_limit(resource.RLIMIT_AS, _MAX_MEMORY_BYTES)
    signal.signal(signal.SIGXCPU, _raise_too_large)
    _set_limit(resource.RLIMIT_CPU, MAX_CPU_S)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=StormJob)
    try:
        result = _simulate_storm(job)
    except (AnalysisTooLarge, MemoryError):
        sys.exit(_TOO_LARGE_STATUS)
    sys.stdout.buffer.write(_encode(result))


def _set_limit(name: int, value: int) -> None:
    """Set the soft limit of this process, unless its hard limit is lower already."""
    _, hard_limit = resource.getrlimit(name)
    if hard_limit == resource.RLIM_INFINITY or value < hard_limit:
        resource.setrlimit(name, (value, hard_limit))


def _raise_too_large(*_: object) -> NoReturn:
    raise AnalysisTooLarge


def _simulate_storm(job: StormJob) -> PolicySimulation:
    from tarry.policyfile.defence import Defence
    from tarry.simulator.scenarios import STUDIES
    from tarry.simulator.study import run_study

    policy = policy_from_json(job.policy, Policy())
    study = STUDIES["storm"]
    defences = {
        "policy": Defence(policy),
        "no-retries": Defence(policy.replace(max_attempts=1)),
    }
    assert study.with_defences is not None  # noqa: S101 - the variants of the storm are policies
    results = run_study(study.with_defences(study, defences), trials=1)
    runs: list[Any] = [row.trials[0] for row in results.rows]
    [(start, end, _)] = study.plots[0].spans
    return PolicySimulation(
        description=study.question,
        clients=study.parameters["clients"],
        step_ms=runs[0].bucket * 1000,
        outage_start_ms=start * 1000,
        outage_end_ms=end * 1000,
        with_policy=_to_run(runs[0]),
        without_retries=_to_run(runs[1]),
    )


def _to_run(summary: Summary) -> SimulatedRun:
    per_second = 1 / summary.bucket
    recovered_after_ms = summary.recovered_after * 1000
    return SimulatedRun(
        requests_per_second=[count * per_second for count in summary.series["requests"]],
        calls=summary.calls,
        requests=summary.requests,
        requests_per_call=summary.amplification,
        peak_load=summary.peak_load,
        crashes=summary.crashes,
        success_rate=summary.success_rate,
        unfinished_calls=summary.unfinished,
        recovered_after_ms=recovered_after_ms if isfinite(recovered_after_ms) else None,
    )
