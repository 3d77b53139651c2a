"""Measure the simulator: attempts per second on one core, and the time of a large storm.

    python -m benchmarks.simulation            # rates, and storm with 100,000 clients
    python -m benchmarks.simulation --quick    # rates only

A rate is attempts per second of processor time. The best of several rounds counts, because other
load on the machine can only make a round slower.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from time import perf_counter, process_time

from tarry import Policy
from tarry.simulator import (
    Clients,
    Defence,
    Lognormal,
    Scenario,
    Server,
    contention,
    simulate,
)

MIN_ATTEMPTS_PER_SECOND = 100_000
MAX_STORM_S, MAX_STORM_MB = 60.0, 1024.0
_SERVER = Server(latency=Lognormal(0.02), concurrency=100, queue=100, failure_rate=0.1)
_POLICY = Policy(attempt_timeout=1.0)
DEFENCES = {  # a defence is a policy, optionally with a budget and a breaker
    "policy": Defence(_POLICY),
    "policy, budget": Defence(_POLICY, budget={"kind": "token"}),
    "policy, budget, breaker": Defence(_POLICY, budget={"kind": "token"}, breaker={}),
}


def measure_rate(defence: Defence, seed: int) -> float:
    """Return attempts per second of processor time, at 2,000 calls per simulated second."""
    clients = Clients(rate=2000.0, defence=defence)
    scenario = Scenario(servers={"server": _SERVER}, clients=clients, duration=30.0)
    started = process_time()
    attempts = simulate(scenario, seed=seed).attempts
    return attempts / (process_time() - started)


def measure_contention_rate(seed: int) -> float:
    """Return attempts per second of processor time of the contention study."""
    started = process_time()
    trials = contention(jitter="full", clients=200, trials=40, seed=seed)
    return sum(trial.calls for trial in trials) / (process_time() - started)


def measure_storm() -> tuple[float, float]:
    """Return the seconds of a storm with 100,000 clients, and the MB of its largest process."""
    started = perf_counter()
    command = [sys.executable, "-m", "tarry", "simulate", "storm", "--set", "clients=100000", "-q"]
    subprocess.run(command, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return perf_counter() - started, peak


def main() -> int:
    """Run the benchmark; return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="measure the rates only, in fewer rounds"
    )
    quick = parser.parse_args().quick
    rounds = range(3 if quick else 10)
    rates = {
        name: max(measure_rate(defence, seed) for seed in rounds)
        for name, defence in DEFENCES.items()
    }
    rates["contention"] = max(measure_contention_rate(seed) for seed in rounds)
    missed = 0
    print("attempts per second on one core")
    for name, best in rates.items():
        is_met = best >= MIN_ATTEMPTS_PER_SECOND
        missed += not is_met
        status = "pass" if is_met else "MISS"
        print(f"  {name:27}{best:>10,.0f}  {status}: >= {MIN_ATTEMPTS_PER_SECOND:,}")
    if not quick:
        seconds, megabytes = measure_storm()
        is_met = seconds <= MAX_STORM_S and megabytes <= MAX_STORM_MB
        missed += not is_met
        print("`tarry simulate storm` with 100,000 clients and each defence of the scenario")
        print(
            f"  {seconds:.0f} s, {megabytes:.0f} MB in the largest process  "
            f"{'pass' if is_met else 'MISS'}: <= {MAX_STORM_S:g} s, {MAX_STORM_MB:g} MB"
        )
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
