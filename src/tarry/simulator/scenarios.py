"""For each built-in scenario, a function that runs one variant and a `Study` that compares all.

The variants differ in one parameter, often in the defence: a policy or hedging, with an optional
breaker, retry budget and limiter. The scenarios `blip`, `contention` and
`shared-capacity` have modules of their own.
"""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_count, check_one_of, check_positive
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.blip import BLIP_STUDY
from tarry.simulator.contention import CONTENTION_STUDY, no_delay
from tarry.simulator.distributions import Exponential, Fixed, HeavyTail, Lognormal
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tarry.simulator.shared_capacity import SHARED_CAPACITY_STUDY
from tarry.simulator.simulate import run_trials
from tarry.simulator.study import Column, Plot, Study, run_with_defence, with_defences_as_variants

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

# The storm: a server freezes for 20 s, then restarts and drops every connection, so that all calls
# in progress fail at the same moment. If it then has more requests than it can process in two
# seconds, it crashes and is down for 3 s.
_THINK_TIME = Exponential(30.0)
_FREEZE_START_S, _FREEZE_END_S = 20.0, 40.0
_FREEZE = ((_FREEZE_START_S, _FREEZE_END_S, "frozen"),)
_STORM_LATENCY = Lognormal(0.08, 0.5)
_CAPACITY_PER_LOAD = 2.0
"""The capacity of the server, divided by its load before the freeze."""
_EXPONENTIAL_POLICY = Policy(max_attempts=10, jitter="none")
_FULL_JITTER_POLICY = _EXPONENTIAL_POLICY.replace(jitter="full")
_RATIO_BUDGET = {"kind": "ratio"}
_STORM_BREAKER = {"min_span": 0.0, "open_for": 5.0}
"""With the default `min_span` it would stay closed, because all calls fail at the same moment."""
_STORM_DEFENCES: dict[str, Defence] = {
    "fixed": Defence(Policy(max_attempts=30, initial_delay=5.0, backoff="fixed", jitter="none")),
    "exponential": Defence(_EXPONENTIAL_POLICY),
    "full": Defence(_FULL_JITTER_POLICY),
    "full+budget": Defence(_FULL_JITTER_POLICY, budget=_RATIO_BUDGET),
    "full+budget+breaker": Defence(
        _FULL_JITTER_POLICY, budget=_RATIO_BUDGET, breaker=_STORM_BREAKER
    ),
}


def storm(
    *, defence: str = "full", clients: int = 1000, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run the storm with a built-in defence; the server has more workers for more clients."""
    return run_with_defence(
        _build_storm, _STORM_DEFENCES, defence=defence, trials=trials, seed=seed, clients=clients
    )


def _build_storm(defence: Defence, *, clients: int = 1000) -> Scenario:
    call_rate = check_count("clients", clients) / _THINK_TIME.mean
    workers = max(1, ceil(_CAPACITY_PER_LOAD * call_rate * _STORM_LATENCY.mean))
    server = Server(
        latency=_STORM_LATENCY,
        concurrency=workers,
        crash_above=ceil(2 * workers / _STORM_LATENCY.mean),  # two seconds of work
        restart_after=3.0,
        failures=(Failure(start=_FREEZE_START_S, end=_FREEZE_END_S, kind="freeze"),),
    )
    closed_loop = Clients(  # each client calls, waits for the result, pauses and calls again
        arrivals="closed",
        count=clients,
        think=_THINK_TIME,
        instances=min(10, clients),
        defence=defence,
    )
    return Scenario(servers={"server": server}, clients=closed_loop, duration=120.0)


_STORM = Study(
    name="storm",
    question=(
        "A dependency freezes for 20 s, restarts and drops every connection. Do its clients let "
        "it recover?"
    ),
    lesson=(
        "Clients that failed together return together. Fixed and exponential delays without "
        "jitter keep them synchronised, and each wave crashes the service again until attempts "
        "run out. Full jitter spreads the clients once its ceilings are wide enough: the first "
        "wave, with a ceiling of 100 ms, is the highest. A retry budget prevents the waves, at "
        "the price of calls that fail early. A breaker with min_span=0 first keeps all load away, "
        "and fails more calls. The default breaker stays closed, because all calls fail at the "
        "same moment."
    ),
    run=storm,
    variant_parameter="defence",
    variants=tuple(_STORM_DEFENCES),
    columns=(
        Column("recovered_after", "recovery time", "s"),
        Column("crashes", "crashes"),
        Column("peak_load", "peak load", "x"),
        Column("amplification", "load per call", "x"),
        Column("success_rate", "success rate", "%"),
        Column("unfinished", "still waiting"),
    ),
    plots=(
        Plot("series", "requests", "Requests at the service", y_title="per second", spans=_FREEZE),
        Plot("series", "succeeded", "Successful calls", y_title="per second", spans=_FREEZE),
        Plot("bars", "recovered_after", "Time from the restart to recovery", y_title="s"),
        Plot("bars", "crashes", "Crashes after the restart", y_title="crashes"),
    ),
    parameters={"clients": 1000},
    with_defences=partial(with_defences_as_variants, _build_storm),
    build_scenario=_build_storm,
)


# Retry amplification: three layers make four attempts each while the last server is down.
_AMPLIFICATION_DURATION_S = 60.0
_LAST_CALL_START_S = 50.0
_RETRY_RULES = ("every-layer", "budget", "one-layer")


def amplification(
    *, rule: str = "every-layer", attempts: int = 4, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run a chain of three layers (clients, gateway, orders) that call a failing server.

    `rule` is "every-layer" (each layer retries), "budget" (each retries within a budget of 10 %)
    or "one-layer" (a layer does not retry an error that a layer below has already retried).
    """
    check_one_of("rule", rule, _RETRY_RULES)
    every_layer = rule != "one-layer"
    policy = Policy(max_attempts=attempts, initial_delay=0.01, ignore_retried_below=every_layer)
    budget = {"kind": "ratio", "min_per_second": 0.0} if rule == "budget" else None
    defence = Defence(policy, budget=budget)
    # A surge of rate 0: no calls start in the last seconds, so that all calls end within the run.
    pause = Surge(start=_LAST_CALL_START_S, end=_AMPLIFICATION_DURATION_S, rate=0.0)
    scenario = Scenario(
        servers={
            "gateway": Server(calls="orders", defence=defence),
            "orders": Server(calls="stock", defence=defence),
            "stock": Server(failures=(Failure(end=_AMPLIFICATION_DURATION_S, kind="error"),)),
        },
        clients=Clients(calls="gateway", rate=20.0, surges=(pause,), defence=defence),
        duration=_AMPLIFICATION_DURATION_S,
    )
    return run_trials(scenario, trials, seed)


_AMPLIFICATION = Study(
    name="amplification",
    question="Three layers make four attempts each. How many requests reach a dead server?",
    lesson=(
        "Attempts multiply from layer to layer: 4 x 4 x 4 = 64 requests for one call, exactly "
        "when the last server is least able to handle them. A budget of 10 % limits each layer to "
        "a factor of 1.1. tarry's rule is to retry at one layer: only the layer next to the "
        "failing server retries, the layers above pass on its marked error, and 4 requests remain."
    ),
    run=amplification,
    variant_parameter="rule",
    variants=_RETRY_RULES,
    columns=(
        Column("amplification", "requests per call", "x"),
        Column("requests", "requests"),
        Column("calls", "calls"),
    ),
    plots=(
        Plot("bars", "amplification", "Requests at the last server per call", is_log=True),
        Plot(
            "series", "requests", "Requests at the last server", y_title="per second", is_log=True
        ),
    ),
    parameters={"attempts": 4},
)


# A metastable failure: retries keep an outage alive after its trigger is gone.
# This is the model of Marc Brooker's 2023 study. Calls arrive at 40 per second, and at 80 per
# second for five seconds. A request takes 1 s, plus 10 ms for each request in progress, itself
# included, and the server also finishes requests whose client has timed out. Attempts time out
# after 3 s, and a call makes three: 3 x 40 requests per second exceed the server's capacity of 100.
# Its backoff waits up to 20 s and 40 s, longer than the surge and the outage that it causes.
_SURGE_START_S, _SURGE_END_S = 20.0, 25.0
_SURGE = ((_SURGE_START_S, _SURGE_END_S, "surge"),)
_NO_BACKOFF_POLICY = Policy(max_attempts=3, attempt_timeout=3.0, backoff=no_delay, jitter="none")
_SURGE_DEFENCES: dict[str, Defence] = {
    "retries": Defence(_NO_BACKOFF_POLICY),
    "backoff": Defence(
        _NO_BACKOFF_POLICY.replace(
            backoff="exponential", initial_delay=20.0, max_delay=40.0, jitter="full"
        )
    ),
    "short-backoff": Defence(
        _NO_BACKOFF_POLICY.replace(backoff="exponential", initial_delay=1.0, jitter="full")
    ),
    "budget": Defence(_NO_BACKOFF_POLICY, budget=_RATIO_BUDGET),
    "breaker": Defence(_NO_BACKOFF_POLICY, breaker={"open_for": 5.0}),
    "no-retries": Defence(_NO_BACKOFF_POLICY.replace(max_attempts=1)),
}


def metastable(
    *, defence: str = "retries", surge: float = 80.0, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run the model with one of the built-in defences; `surge` is the call rate in the surge."""
    return run_with_defence(
        _build_metastable, _SURGE_DEFENCES, defence=defence, trials=trials, seed=seed, surge=surge
    )


def _build_metastable(defence: Defence, *, surge: float = 80.0) -> Scenario:
    surges = (Surge(start=_SURGE_START_S, end=_SURGE_END_S, rate=surge),)
    return Scenario(
        servers={"server": Server(latency=Fixed(1.01), slowdown=0.01)},
        clients=Clients(rate=40.0, surges=surges, defence=defence),
        network=Exponential(0.1),
        duration=120.0,
    )


_METASTABLE = Study(
    name="metastable",
    question=(
        "Load doubles for five seconds. Why is the service still down a minute later, and what "
        "ends the outage?"
    ),
    lesson=(
        "The trigger is gone, but the retries of timed-out calls keep the load above the capacity "
        "of the service, and so calls keep timing out. Backoff ends the outage if it waits longer "
        "than the outage lasts: with waits of up to 20 s and 40 s every run recovers, and nearly "
        "every call succeeds, late; with 1 s and 2 s more than half of the runs stay down. A "
        "budget limits the load whatever the waits are. So does a breaker, which fails more calls "
        "meanwhile, and so does a policy without retries."
    ),
    run=metastable,
    variant_parameter="defence",
    variants=tuple(_SURGE_DEFENCES),
    columns=(
        Column("recovered", "runs that recover", "%"),
        Column("recovered_after", "recovery time", "s"),
        Column("success_rate", "calls succeeded", "%"),
        Column("amplification", "load per call", "x"),
        Column("p99", "p99", "s"),
    ),
    plots=(
        Plot(
            "series",
            "in_progress",
            "Requests in progress",
            y_title="requests",
            is_log=True,
            spans=_SURGE,
        ),
        Plot("series", "succeeded", "Successful calls", y_title="per second", spans=_SURGE),
        Plot("bars", "recovered", "Runs that recovered", y_title="share"),
    ),
    parameters={"surge": 80.0},
    with_defences=partial(with_defences_as_variants, _build_metastable),
    build_scenario=_build_metastable,
    trial_count=20,
)


# Hedging: a copy of each slow request shortens the tail of latencies and adds load.
_HEDGE_DELAYS = ("none", "p50", "p75", "p90", "p95", "p99")


def hedging(
    *, after: str = "p95", shape: float = 1.5, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run calls with heavy-tailed latency.

    `after` is the percentile of the latencies after which a call is hedged; "none" means never.
    `shape` is the shape of the Pareto distribution of latencies.
    """
    check_one_of("after", after, _HEDGE_DELAYS)
    check_positive("shape", shape)
    one_attempt = Defence(Policy(max_attempts=1))
    defence = one_attempt if after == "none" else Defence(hedging=Hedging(after=after))
    servers = {"server": Server(latency=HeavyTail(0.01, shape))}
    clients = Clients(rate=2000.0, defence=defence)
    return run_trials(Scenario(servers=servers, clients=clients, duration=30.0), trials, seed)


_HEDGING = Study(
    name="hedging",
    question=(
        "One call in a thousand takes a second. How much of that does a second copy save, and "
        "how much load does it add?"
    ),
    lesson=(
        "An earlier copy shortens the tail more and costs more. At p95 one call in twenty is sent "
        "twice, and the tail is a fraction of what it was. At p50 half of the calls are sent twice "
        "and little more is gained. This server handles any load; where copies slow the server "
        "down, hedge later."
    ),
    run=hedging,
    variant_parameter="after",
    variants=_HEDGE_DELAYS,
    columns=(
        Column("p50", "p50", "ms"),
        Column("p99", "p99", "ms"),
        Column("p999", "p99.9", "ms"),
        Column("amplification", "load per call", "x"),
    ),
    plots=(
        Plot("bars", "p999", "The slowest call in a thousand", y_title="p99.9", is_log=True),
        Plot("lines", "p999", "Tail against load", x="amplification", y_title="p99.9", is_log=True),
    ),
    parameters={"shape": 1.5},
)


# Retry-After: a thousand clients call at once and receive the hint to retry after 120 seconds.
_HINT_JITTERS = ("none", "full")


def retry_after(
    *,
    jitter: str = "full",
    clients: int = 1000,
    seconds: float = 120.0,
    trials: int = 1,
    seed: int = 0,
) -> list[Summary]:
    """Run clients that receive `Retry-After: seconds`; `jitter` applies to that delay."""
    check_one_of("jitter", jitter, _HINT_JITTERS)
    # mypy does not see that check_one_of makes `jitter` a literal.
    policy = Policy(max_attempts=5, max_hint=max(120.0, seconds), jitter=jitter)  # type: ignore[arg-type]
    server = Server(
        latency=Lognormal(0.09, 0.4),
        concurrency=10,
        queue=100,
        retry_after=seconds,
        failures=(Failure(end=5.0, kind="error", retry_after=seconds),),
    )
    at_once = Clients(arrivals="at-once", count=clients, defence=Defence(policy))
    duration = 5 * seconds + 60.0
    scenario = Scenario(servers={"server": server}, clients=at_once, duration=duration)
    return run_trials(scenario, trials, seed)


_RETRY_AFTER = Study(
    name="retry-after",
    question="A thousand clients receive `Retry-After: 120`. What happens at second 120?",
    lesson=(
        "Without jitter, the hint itself synchronises the clients: all return at the same moment, "
        "most are rejected with the same hint, and they collide again two minutes later. With "
        "jitter on top of the hint, and never below it, the same clients return over a dozen "
        "seconds, and hardly any is rejected again."
    ),
    run=retry_after,
    variant_parameter="jitter",
    variants=_HINT_JITTERS,
    columns=(
        Column("peak_load", "peak load", "x"),
        Column("amplification", "requests per call", "x"),
        Column("success_rate", "calls succeeded", "%"),
        Column("p50", "p50", "s"),
        Column("p99", "p99", "s"),
    ),
    plots=(
        Plot("series", "requests", "Requests at the server", y_title="per second"),
        Plot("series", "succeeded", "Successful calls", y_title="per second"),
    ),
    parameters={"clients": 1000, "seconds": 120.0},
)


# Recovery: a backlog of calls meets a service that restarts with cold caches.
_MAX_IN_FLIGHT = 200
_LIMITERS: dict[str, dict[str, Any]] = {
    "wall": {"kind": "in-flight", "limit": _MAX_IN_FLIGHT, "ramp": 0.001},
    "ramp": {"kind": "in-flight", "limit": _MAX_IN_FLIGHT, "ramp": 20.0},
    "aimd": {"kind": "aimd", "max_limit": _MAX_IN_FLIGHT},
    "adaptive": {"kind": "adaptive-limit", "max_in_flight": _MAX_IN_FLIGHT},
}
_RECOVERY_POLICY = Policy(max_attempts=100, attempt_timeout=2.0, initial_delay=0.5)
_RECOVERY_BREAKER = {  # counts each attempt, as the breaker of the service does
    "count_retries": True,
    "min_span": 0.0,
    "open_for": 5.0,
    "growth": 1.0,
    "spread": 0.0,
}


def recovery(
    *, limit: str = "ramp", backlog: int = 5000, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run a backlog of calls; `limit` selects how the number of requests in flight is limited.

    "wall" allows 200 requests at once, "ramp" raises the limit to 200 over 20 s, and "aimd" adapts
    the limit to successes and failures. "adaptive" adapts the rate, too, as the service does.
    """
    check_one_of("limit", limit, _LIMITERS)
    server = Server(
        latency=Lognormal(0.1, 0.4),
        concurrency=40,
        queue=1000,
        warmup=20.0,
        cold_factor=8.0,
        failures=(Failure(end=20.0, kind="refuse"),),
    )
    defence = Defence(_RECOVERY_POLICY, breaker=_RECOVERY_BREAKER, limiter=_LIMITERS[limit])
    clients = Clients(arrivals="backlog", count=backlog, defence=defence)
    scenario = Scenario(servers={"server": server}, clients=clients, duration=90.0)
    return run_trials(scenario, trials, seed)


_RECOVERY = Study(
    name="recovery",
    question=(
        "A service restarts with cold caches, and 5,000 calls are waiting. Send them at once, or "
        "along a ramp?"
    ),
    lesson=(
        "With the full limit at once, requests meet cold caches: attempts time out, the breaker "
        "opens again, and the service does not warm up meanwhile. Along the ramp nearly all "
        "failures happen before the service is back, and the backlog is finished sooner although "
        "it starts more slowly. Limits that adapt waste the fewest attempts. The one that also "
        "limits the rate finishes the backlog sooner than AIMD."
    ),
    run=recovery,
    variant_parameter="limit",
    variants=tuple(_LIMITERS),
    columns=(
        Column("failures", "failed attempts"),
        Column("p50", "half finished after", "s"),
        Column("p999", "99.9 % finished after", "s"),
    ),
    plots=(
        Plot("series", "succeeded", "Successful calls", y_title="per second"),
        Plot("series", "requests", "Requests at the service", y_title="per second"),
        Plot("bars", "failures", "Failed attempts", y_title="attempts"),
    ),
    parameters={"backlog": 5000},
)

_STUDIES = (_STORM, _AMPLIFICATION, _METASTABLE, _HEDGING, _RETRY_AFTER, _RECOVERY)
STUDIES: dict[str, Study] = {
    study.name: study for study in (CONTENTION_STUDY, *_STUDIES, SHARED_CAPACITY_STUDY, BLIP_STUDY)
}
