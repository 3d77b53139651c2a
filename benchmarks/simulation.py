"""How many attempts a second the simulator makes on one core, and what a large storm takes.

    python -m benchmarks.simulation            # the rates, and storm with 100,000 clients
    python -m benchmarks.simulation --quick    # the rates alone

A rate is the best of its rounds, in processor time: what a busy machine does to a time is to add
to it.
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

LEAST = 100_000
MOST_SECONDS, MOST_MEGABYTES = 60.0, 1024.0
_SERVER = Server(latency=Lognormal(0.02), concurrency=100, queue=100, failure_rate=0.1)
_POLICY = Policy(attempt_timeout=1.0)
DEFENCES = {
    "policy": Defence(_POLICY),
    "policy, budget": Defence(_POLICY, budget={"kind": "token"}),
    "policy, budget, breaker": Defence(_POLICY, budget={"kind": "token"}, breaker={}),
}


def rate(defence: Defence, seed: int) -> float:
    """Return the attempts for each second of processor time: calls at 2,000 a second, 10 % fail."""
    clients = Clients(rate=2000.0, defence=defence)
    scenario = Scenario(servers={"server": _SERVER}, clients=clients, duration=30.0)
    begun = process_time()
    attempts = simulate(scenario, seed=seed).attempts
    return attempts / (process_time() - begun)


def rate_of_contention(seed: int) -> float:
    """Return the same for the AWS study."""
    begun = process_time()
    trials = contention(jitter="full", clients=200, trials=40, seed=seed)
    return sum(trial.calls for trial in trials) / (process_time() - begun)


def storm() -> tuple[float, float]:
    """Return the seconds and the megabytes of the largest process of a storm of 100,000."""
    begun = perf_counter()
    command = [sys.executable, "-m", "tarry", "simulate", "storm", "--set", "clients=100000", "-q"]
    subprocess.run(command, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return perf_counter() - begun, peak


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the rates alone, in fewer rounds")
    quick = parser.parse_args().quick
    rounds = range(3 if quick else 10)
    rates = {name: max(rate(one, seed) for seed in rounds) for name, one in DEFENCES.items()}
    rates["contention"] = max(rate_of_contention(seed) for seed in rounds)
    missed = 0
    print("attempts a second on one core")
    for name, best in rates.items():
        missed += best < LEAST
        print(f"  {name:27}{best:>10,.0f}  {'pass' if best >= LEAST else 'MISS'}: >= {LEAST:,}")
    if not quick:
        seconds, megabytes = storm()
        met = seconds <= MOST_SECONDS and megabytes <= MOST_MEGABYTES
        missed += not met
        print("storm with 100,000 clients, every defence")
        print(
            f"  {seconds:.0f} s, {megabytes:.0f} MB in the largest process  "
            f"{'pass' if met else 'MISS'}: <= {MOST_SECONDS:g} s, {MOST_MEGABYTES:g} MB"
        )
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
