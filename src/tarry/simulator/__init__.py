"""The simulator: clients, a network and servers in virtual time.

The library's own code decides about retries, as it does in production. A `Defence` is what a caller
uses against failures: a policy or hedging, with a breaker, a retry budget and a limiter.

Each built-in scenario is a function that returns one `Summary` for each trial; `contention` (many
clients write to one row) returns `Contention` objects. `simulate` runs a scenario of your own.
"""

from tarry.policyfile.defence import Defence
from tarry.simulator.blip import blip
from tarry.simulator.contention import Contention, contention
from tarry.simulator.distributions import (
    Distribution,
    Empirical,
    Exponential,
    Fixed,
    HeavyTail,
    Lognormal,
    Normal,
    Uniform,
)
from tarry.simulator.metrics import Summary
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tarry.simulator.scenarios import (
    amplification,
    hedging,
    metastable,
    recovery,
    retry_after,
    storm,
)
from tarry.simulator.shared_capacity import shared_capacity
from tarry.simulator.simulate import simulate

__all__ = [
    "Clients",
    "Contention",
    "Defence",
    "Distribution",
    "Empirical",
    "Exponential",
    "Failure",
    "Fixed",
    "HeavyTail",
    "Lognormal",
    "Normal",
    "Scenario",
    "Server",
    "Summary",
    "Surge",
    "Uniform",
    "amplification",
    "blip",
    "contention",
    "hedging",
    "metastable",
    "recovery",
    "retry_after",
    "shared_capacity",
    "simulate",
    "storm",
]
