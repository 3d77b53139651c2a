"""Simulate and tune policies in separate processes, so that requests and attempts do not wait.

The service starts one process for each analysis, writes the job to its standard input, and reads
the result from its standard output. The process limits its own processor time and memory, and has a
low priority. It imports `tarry.simulator` and `tarry.tuning`, which the service itself never does.
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
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from tarry.core.policy import POLICY_FIELDS, Policy
from tarry.errors import Overloaded
from tarry.wire.policies import policy_from_json, policy_to_json
from tarry.wire.tasks import PolicyAdvice, PolicySimulation, PolicySuggestion, SimulatedRun

if TYPE_CHECKING:
    from tarry.policyfile.defence import Defence
    from tarry.simulator.metrics import Summary
    from tarry.tuning.evidence import Evidence

MAX_CPU_S = 10
"""Limit of processor time. Simulating the scenario `storm` takes 0.2 s for a common policy, but up
to a minute for a policy with delays of 1 ms."""
_MAX_MEMORY_BYTES = 1 << 30
_MAX_DURATION_S = 60.0
"""Limit of elapsed time. It only takes effect if the machine is overloaded: otherwise the process
reaches its limit of processor time first."""
_MAX_COMPARISON_S = 30
"""Limit of elapsed time for the simulation of a proposal, which must not delay the proposal."""
_NICENESS = 10
_TOO_LARGE_EXIT_STATUS = 3
"""Exit status of a process that has reached the limit of processor time or memory."""
# Without -P, Python would import modules from the working directory of the service.
_COMMAND = ("-P", "-c", f"from {__name__} import main; main()")


class StormJob(msgspec.Struct, tag="storm"):
    """A request to simulate the scenario `storm` twice: with a policy, and without retries."""

    policy: dict[str, Any]
    """All fields of the policy, as JSON."""


class RecordedAttempt(NamedTuple):
    """The fields of an attempt that the tuning needs."""

    task_id: str
    number: int
    started_at: int
    """In milliseconds since 1970."""
    duration_ms: float
    outcome: str


class AdviceJob(msgspec.Struct, tag="advice"):
    """A request to propose values for a policy from the attempts of a downstream."""

    lane: str
    policy_id: str
    policy: dict[str, Any]
    """All fields of the policy, as JSON."""
    attempts: list[RecordedAttempt]


class AnalysisTooLarge(Exception):
    """The analysis has reached its limit of processor time or memory."""


_encode = msgspec.msgpack.Encoder().encode


class AnalysisRunner:
    """Runs each analysis in a new process, and kills the processes when the service stops."""

    def __init__(self) -> None:
        self._processes: set[asyncio.subprocess.Process] = set()
        self._is_closed = False

    async def simulate_storm(self, policy: dict[str, Any]) -> PolicySimulation:
        """Simulate the scenario `storm`; raise `AnalysisTooLarge` or `Overloaded`."""
        output = await self._run(StormJob(policy))
        return msgspec.msgpack.decode(output, type=PolicySimulation)

    async def advise(self, job: AdviceJob) -> PolicyAdvice:
        """Propose values for a policy; raise `AnalysisTooLarge` or `Overloaded`."""
        return msgspec.msgpack.decode(await self._run(job), type=PolicyAdvice)

    def close(self) -> None:
        """Kill all processes. Their requests fail with `Overloaded`."""
        self._is_closed = True
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()

    async def _run(self, job: StormJob | AdviceJob) -> bytes:
        self._check_open()
        process = await asyncio.create_subprocess_exec(
            sys.executable, *_COMMAND,
            stdin=PIPE, stdout=PIPE, start_new_session=True,  # Ctrl-C is meant for the service
        )  # fmt: skip
        self._processes.add(process)
        try:
            self._check_open()  # `close` did not find a process that was still starting
            async with asyncio.timeout(_MAX_DURATION_S):
                output, _ = await process.communicate(_encode(job))
        except TimeoutError:
            msg = f"The analysis has not ended within {_MAX_DURATION_S:g} s"
            raise Overloaded(msg, retry_after=_MAX_DURATION_S) from None
        finally:
            self._processes.discard(process)
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        self._check_open()
        if process.returncode == _TOO_LARGE_EXIT_STATUS:
            raise AnalysisTooLarge
        if process.returncode != 0:
            raise RuntimeError(f"the analysis process exited with status {process.returncode}")
        return output

    def _check_open(self) -> None:
        if self._is_closed:
            raise Overloaded("The service is shutting down")


def main() -> None:
    """Run the job from standard input, and write its result to standard output."""
    os.nice(_NICENESS)
    _set_limit(resource.RLIMIT_AS, _MAX_MEMORY_BYTES)
    signal.signal(signal.SIGXCPU, _raise_too_large)
    _set_limit(resource.RLIMIT_CPU, MAX_CPU_S)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=StormJob | AdviceJob)
    try:
        result = _simulate_storm(job) if isinstance(job, StormJob) else _advise(job)
    except (AnalysisTooLarge, MemoryError):
        sys.exit(_TOO_LARGE_EXIT_STATUS)
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
        with_policy=_simulated_run(runs[0]),
        without_retries=_simulated_run(runs[1]),
    )


def _simulated_run(summary: Summary) -> SimulatedRun:
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


def _advise(job: AdviceJob) -> PolicyAdvice:
    from tarry.core.outcome import Kind
    from tarry.policyfile.defence import Defence
    from tarry.tuning.attempt_log import AttemptLog, LoggedAttempt
    from tarry.tuning.evidence import analyze_log
    from tarry.tuning.proposal import propose

    attempts = (
        LoggedAttempt(task_id, number, started_at / 1000, duration_ms / 1000, Kind(outcome))
        for task_id, number, started_at, duration_ms, outcome in job.attempts
    )
    evidence = analyze_log(AttemptLog(attempts))
    current = Defence(policy_from_json(job.policy, Policy()))
    proposal = propose(evidence, current, has_known_units=True)
    # A policy of the service has no retry budget and no hedging.
    proposed = Defence(proposal.proposed.policy)
    proposed_fields = policy_to_json(proposed.policy)
    json_names = {field.name: field.json_name for field in POLICY_FIELDS}
    return PolicyAdvice(
        lane=job.lane,
        policy_id=job.policy_id,
        attempts=evidence.attempts,
        calls=evidence.calls,
        outages=len(evidence.outages),
        span_ms=round(evidence.span * 1000),
        suggestions=[
            PolicySuggestion(
                field=name,
                current=job.policy[name],
                proposed=proposed_fields[name],
                reason=suggestion.reason,
                basis=suggestion.basis,
                has_enough_data=suggestion.has_enough_data,
            )
            for suggestion in proposal.suggestions
            if (name := json_names.get(suggestion.field))
        ],
        warnings=list(proposal.warnings),
        simulation=_describe_simulation(evidence, current, proposed),
    )


def _describe_simulation(evidence: Evidence, current: Defence, proposed: Defence) -> str:
    """Simulate both policies; return the changes, or why nothing was simulated."""
    from tarry.tuning.comparison import (
        compare_policies,
        describe_changes,
        explain_missing_comparison,
    )

    if reason := explain_missing_comparison(evidence, current, proposed):
        return f"Not simulated: {reason}."
    signal.signal(signal.SIGALRM, _raise_too_large)
    signal.alarm(_MAX_COMPARISON_S)
    try:
        comparison = compare_policies(evidence, current, proposed)
    except (AnalysisTooLarge, MemoryError):
        # The proposal is useful without the simulation, so the request must not fail.
        return "Not simulated: the simulation needs too much time or memory."
    finally:
        signal.alarm(0)
    assert comparison is not None  # noqa: S101 - `explain_missing_comparison` has checked the log
    changes = describe_changes(comparison.current, comparison.proposed)
    return f"Simulated with the durations of these attempts. {changes}"
