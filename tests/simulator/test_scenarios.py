"""The built-in studies: their results support their lessons, for several seeds."""

from __future__ import annotations

from typing import Any

import pytest

from tarry import ConfigurationError, Policy
from tarry.simulator import (
    Defence,
    Summary,
    amplification,
    hedging,
    metastable,
    recovery,
    retry_after,
    shared_capacity,
    storm,
)
from tarry.simulator.scenarios import STUDIES
from tarry.simulator.study import Study, run_study

SEEDS = (0, 1, 2)


def _run_variants(study: Study, seed: int, **fixed: Any) -> dict[str, Summary]:
    runs: dict[str, Summary] = {}
    for variant in study.variants:
        arguments = {study.variant_parameter: variant, "trials": 1, "seed": seed, **fixed}
        (runs[variant],) = study.run(**arguments)  # type: ignore[assignment]
    return runs


@pytest.mark.long_run
@pytest.mark.parametrize("seed", SEEDS)
def test_each_defence_shortens_the_recovery_from_a_storm(seed: int) -> None:
    """With each further defence the service recovers sooner or crashes less often."""
    runs = _run_variants(STUDIES["storm"], seed)
    fixed, exponential, full, budget, breaker = runs.values()

    assert not fixed.recovered
    assert 40 < exponential.recovered_after
    assert full.recovered_after < exponential.recovered_after * 0.7
    assert budget.recovered_after < full.recovered_after
    assert breaker.recovered_after < 10
    assert fixed.crashes > exponential.crashes > full.crashes > 0
    assert 0 == budget.crashes == breaker.crashes
    assert budget.peak_load < full.peak_load / 5
    assert breaker.peak_load < 1


def test_budget_and_breaker_lower_the_success_rate() -> None:
    """A budget and a breaker each lower the success rate, because they fail calls early."""
    full, budget, breaker = (
        storm(defence=name)[0] for name in ("full", "full+budget", "full+budget+breaker")
    )

    assert full.success_rate > budget.success_rate > breaker.success_rate > 0.75


@pytest.mark.parametrize("seed", SEEDS)
def test_layers_multiply_attempts(seed: int) -> None:
    """Three layers of four attempts make 64 requests, and 4 if only one layer retries."""
    every_layer, budget, one_layer = _run_variants(STUDIES["amplification"], seed).values()

    assert 64 == every_layer.amplification
    assert 1.1**3 == pytest.approx(budget.amplification, rel=0.02)
    assert 4 == one_layer.amplification


def test_attempts_are_a_parameter_of_amplification() -> None:
    """Three attempts at each of three layers make 27 requests."""
    assert 3**3 == amplification(attempts=3)[0].amplification


@pytest.mark.long_run
def test_later_hedge_has_longer_tail_and_less_load() -> None:
    """The later the second copy is sent, the longer the tail and the smaller the extra load."""
    runs = [hedging(after=after)[0] for after in ("none", "p50", "p95", "p99")]
    unhedged, p50, p95, p99 = runs

    assert 1 == pytest.approx(unhedged.amplification, abs=0.001)
    assert 1.5 == pytest.approx(p50.amplification, rel=0.03)
    assert 1.05 == pytest.approx(p95.amplification, rel=0.02)
    loads = [run.amplification for run in runs[1:]]
    assert sorted(loads, reverse=True) == loads
    assert p95.p999 < unhedged.p999 / 4
    assert p50.p999 < p99.p999


@pytest.mark.parametrize("seed", SEEDS)
def test_hint_without_jitter_synchronises_clients(seed: int) -> None:
    """Clients that obey the same hint overload the service again, unless each adds jitter."""
    none, full = _run_variants(STUDIES["retry-after"], seed).values()

    assert none.peak_load > 5
    assert full.peak_load < 1.5
    assert none.success_rate < 0.6
    assert 1 == full.success_rate
    assert full.p99 < 120 * 1.1 + 2  # the spread of a hint is a tenth of it


def test_no_request_arrives_before_the_hint() -> None:
    """Jitter is added to the hint: no request arrives before second 120."""
    for jitter in ("none", "full"):
        (run,) = retry_after(jitter=jitter)

        assert 0 == sum(run.series["requests"][1:120])


@pytest.mark.parametrize("seed", SEEDS)
def test_ramp_fails_fewer_attempts_and_finishes_sooner(seed: int) -> None:
    """With cold caches, "ramp" fails fewer attempts than "wall", and "aimd" fewer than "ramp"."""
    wall, ramp, aimd, adaptive = _run_variants(STUDIES["recovery"], seed).values()

    assert 5000 == wall.succeeded == ramp.succeeded == aimd.succeeded == adaptive.succeeded
    assert ramp.failures < wall.failures / 2
    assert aimd.failures < ramp.failures / 2
    assert adaptive.failures < ramp.failures / 2
    assert ramp.p999 < wall.p999
    assert ramp.recovered_after < wall.recovered_after


@pytest.mark.parametrize("seed", SEEDS)
def test_one_process_exceeds_a_rate_limit_least(seed: int) -> None:
    """Limits in flight do not limit the rate; adaptive limits do, and one process does it best."""
    none, aimd, adaptive, one = _run_variants(STUDIES["shared-capacity"], seed).values()

    assert all(run.succeeded >= 1990 for run in (none, aimd, adaptive, one))
    assert one.peak_load < adaptive.peak_load < none.peak_load / 2
    assert one.peak_load <= 1.5
    assert one.failures < adaptive.failures < aimd.failures < none.failures / 2


def test_three_processes_share_a_capacity_of_which_nothing_fails() -> None:
    """Without failing requests, three limiters do not exceed the rate by 20 %."""
    (run,) = shared_capacity(failing=0.0)

    assert 2000 == run.succeeded
    assert run.peak_load <= 1.2
    assert run.p99 <= 20 + 1.3 * 20


@pytest.mark.long_run
def test_metastable_failures_need_long_waits_or_less_load() -> None:
    """Without a defence at most half of 10 trials recover, with short waits at most 7.

    With the waits of the study (up to 20 s and 40 s), with a budget, with a breaker or without
    retries, all of them recover. The program of the study: 12 of 40 without backoff, 40 of 40 with.
    """
    recovered = {
        name: sum(run.recovered for run in metastable(defence=name, trials=10, seed=1))
        for name in STUDIES["metastable"].variants
    }

    assert recovered["retries"] <= 5
    assert recovered["short-backoff"] <= 7
    assert 10 == recovered["backoff"]
    assert 10 == recovered["budget"] == recovered["breaker"] == recovered["no-retries"]


@pytest.mark.parametrize("name", ["storm", "metastable"])
def test_user_defences_replace_the_built_in_ones(name: str) -> None:
    """The same scenario runs with the user's defences as variants, also in other processes."""
    make = STUDIES[name].with_defences
    assert make is not None
    once = Policy(max_attempts=1, attempt_timeout=3.0)
    defences = {"twice": Defence(once.replace(max_attempts=2)), "once": Defence(once)}
    study = make(STUDIES[name], defences)

    results = run_study(study, trials=1, jobs=2)

    assert ["twice", "once"] == [row.variant for row in results.rows]
    twice_load, once_load = (row.metrics["amplification"] for row in results.rows)
    assert twice_load > once_load


@pytest.mark.parametrize(
    ("run", "arguments", "field"),
    [
        (storm, {"defence": "hope"}, "defence"),
        (storm, {"clients": 0}, "clients"),
        (amplification, {"rule": "x"}, "rule"),
        (amplification, {"attempts": 0}, "max_attempts"),
        (metastable, {"defence": "x"}, "defence"),
        (metastable, {"surge": -1.0}, "rate"),
        (hedging, {"after": "p12"}, "after"),
        (hedging, {"shape": 1.0}, "shape"),
        (retry_after, {"jitter": "equal"}, "jitter"),
        (retry_after, {"seconds": -1.0}, "retry_after"),
        (recovery, {"limit": "x"}, "limit"),
        (recovery, {"backlog": 0}, "count"),
        (recovery, {"trials": 0}, "trials"),
    ],
)
def test_invalid_parameters_are_named(run: Any, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        run(**arguments)


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_study_is_complete(study: Study) -> None:
    """Each study has a question, a lesson, and columns and plots of metrics that exist."""
    (trial,) = study.run(
        **{study.variant_parameter: study.variants[0]}, trials=1, seed=0, **study.parameters
    )
    metrics = trial.metrics()

    assert study.question.endswith("?")
    assert study.lesson.endswith(".")
    for column in study.columns:
        assert column.metric in metrics
    for plot in study.plots:
        assert plot.y in (trial.series if plot.kind == "series" else metrics)  # type: ignore[attr-defined]
