"""Scenario files and policy files: formats, variants, parameters, and keys without effect."""

from __future__ import annotations

import pickle
from math import isnan
from pathlib import Path

import pytest

from tarry import Breaker, Policy, Schedule
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.simulator import files
from tarry.simulator.distributions import Empirical, Fixed, Lognormal
from tarry.simulator.files import is_scenario_file, read_comparison, read_defence, read_study
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.schema import build_scenario
from tarry.simulator.study import run_study
from tests.simulator.file_builders import CHECKOUT, SMALL, YAML, write_file

JSON = """\
{"duration": 5, "clients": {"calls": "api", "rate": 20},
 "servers": {"api": {"latency": 0.01}}}
"""


def read_scenarios(path: Path) -> dict[str, Scenario]:
    """Return the scenario of each variant of a file."""
    _, documents = files._read_scenario_file(path)
    return {name: build_scenario(document) for name, document in documents.items()}


@pytest.mark.parametrize(("name", "text"), [("a.toml", SMALL), ("a.yaml", YAML), ("a.json", JSON)])
def test_all_formats_give_the_same_scenario(tmp_path: Path, name: str, text: str) -> None:
    """TOML, YAML and JSON give the same scenario."""
    expected = Scenario(
        duration=5.0,
        clients=Clients(calls="api", rate=20.0),
        servers={"api": Server(latency=Fixed(0.01))},
    )

    path = write_file(tmp_path, name, text)

    assert ("a", ("a",)) == (read_study(path).name, read_study(path).variants)
    assert {"a": expected} == read_scenarios(path)


def test_example_has_two_variants_that_differ_in_their_defence() -> None:
    """The variants of the example have the same servers and different defences."""
    eager, careful = read_scenarios(CHECKOUT).values()

    assert ("eager", "careful") == read_study(CHECKOUT).variants
    assert eager.servers == careful.servers
    assert Lognormal(0.07, 0.5) == eager.servers["payments"].latency
    assert (Failure(kind="refuse", start=10.0, end=15.0),) == eager.servers["payments"].failures
    assert (
        Defence(
            Policy(max_attempts=5, attempt_timeout=1.0, jitter="none"),
        )
        == eager.clients.defence
    )
    assert {"failure_rate": 0.5, "open_for": 2.0} == careful.clients.defence.breaker


def test_variant_replaces_kinds_and_removes_tables(tmp_path: Path) -> None:
    """A table with a kind replaces a table, `false` removes one, and null removes a value."""
    path = write_file(
        tmp_path,
        "v.yaml",
        """\
        clients: {calls: api, defence: {max_attempts: 2, breaker: {open_for: 3}}}
        servers: {api: {latency: {kind: lognormal, median: 0.1, sigma: 1}, retry_after: 3}}
        variants:
          base: {}
          other:
            clients: {defence: {breaker: false}}
            servers: {api: {latency: {kind: uniform, low: 0, high: 1}, retry_after: null}}
        """,
    )

    base, other = read_scenarios(path).values()

    assert {"open_for": 3} == base.clients.defence.breaker
    assert (None, 2) == (other.clients.defence.breaker, other.clients.defence.policy.max_attempts)
    assert 0.5 == other.servers["api"].latency.mean
    assert (3.0, None) == (base.servers["api"].retry_after, other.servers["api"].retry_after)


def test_defence_and_latencies_can_come_from_other_files(tmp_path: Path) -> None:
    """File names are relative to the scenario file, and a column is scaled to seconds."""
    write_file(tmp_path, "policy.yaml", "preset: interactive\nbreaker: {open_for: 4}\n")
    write_file(tmp_path, "times.csv", "id,durationMs\n1,100\n\n2,300\n")
    write_file(tmp_path, "plain.txt", "0.5\n1.5\n")
    path = write_file(
        tmp_path,
        "s.toml",
        """\
        network = { kind = "empirical", file = "plain.txt" }
        [clients]
        calls = "api"
        defence = "policy.yaml"
        [servers.api.latency]
        kind = "empirical"
        file = "times.csv"
        column = "durationMs"
        scale = 0.001
        """,
    )

    (scenario,) = read_scenarios(path).values()

    assert 1.0 == read_study(path).parameters["network"]
    assert Empirical((0.5, 1.5)) == scenario.network
    assert pytest.approx(0.2) == scenario.servers["api"].latency.mean
    assert Defence(Policy.preset("interactive"), breaker={"open_for": 4}) == (
        scenario.clients.defence
    )


def test_policy_file_is_read_as_a_defence(tmp_path: Path) -> None:
    """A policy file gives a defence with the policy, breaker and budget of the file."""
    defence = Defence(Policy(max_attempts=7), breaker={"open_for": 3.0}, budget={"kind": "token"})
    text = "max_attempts = 7\nbreaker.open_for = 3.0\nbudget = { kind = 'token' }\n"

    assert defence == read_defence(write_file(tmp_path, "p.toml", text))
    assert isinstance(defence.downstream("x").breaker, Breaker)


def test_policy_file_with_names_of_the_api(tmp_path: Path) -> None:
    """A policy file can have the names and units of the service's API."""
    text = """{"policyId": "orders", "version": 3, "createdAt": 1, "maxAttempts": 7,
        "initialDelayMs": 50, "multiplier": 3, "jitterType": "EQUAL", "totalBudgetMs": null,
        "retryableStatusCodes": [503], "breaker": {"open_for": 3.0}}"""
    policy = Policy(
        max_attempts=7, initial_delay=0.05, multiplier=3.0, jitter="equal", retryable_statuses=[503]
    )

    path = write_file(tmp_path, "p.json", text)
    assert Defence(policy, breaker={"open_for": 3.0}) == read_defence(path)
    schedule = write_file(tmp_path, "s.toml", "scheduleMs = [50, 1500]\npreset = 'interactive'")
    expected = Policy.preset("interactive").replace(backoff=Schedule([0.05, 1.5]))
    assert expected == read_defence(schedule).policy


def test_scenario_file_is_recognised_by_its_servers(tmp_path: Path) -> None:
    assert is_scenario_file(CHECKOUT)
    assert not is_scenario_file(write_file(tmp_path, "p.toml", "max_attempts = 7"))


def test_parameters_are_named_by_their_path() -> None:
    """Each parameter is named by its path; "(differs)" means that variants have other values."""
    parameters = read_study(CHECKOUT).parameters

    expected = {
        "clients.rate": 110.0,
        "clients.defence.max_attempts": 5,
        "clients.defence.total_budget": None,
        "clients.defence.jitter": "(differs)",
        "clients.defence.breaker.open_for": 2.0,
        "clients.defence.breaker.probes": 3,
        "servers.payments.latency.sigma": 0.5,
        "servers.payments.failures.0.end": 15.0,
        "network.median": 0.002,
        "bucket": 1.0,
    }
    assert expected == {name: parameters[name] for name in expected}


@pytest.mark.parametrize(("addition", "crashes"), [("", False), ("crash_above = 9\n", True)])
def test_crashes_are_a_column_if_a_server_can_crash(
    tmp_path: Path, addition: str, crashes: bool
) -> None:
    study = read_study(write_file(tmp_path, "a.toml", SMALL + addition))

    assert crashes == ("crashes" in {column.metric for column in study.columns})


def test_distribution_can_be_set_to_a_number() -> None:
    """Setting a distribution to a number makes it fixed, as in a file."""
    study = read_study(CHECKOUT)
    name = "servers.payments.latency"

    results = run_study(study, parameters={name: 0.05, "network": 0, "duration": 5})

    assert "lognormal" == study.parameters[name]
    assert pytest.approx(0.05) == results.rows[0].metrics["p50"]
    parameters = results.study.parameters.items()
    assert {name: 0.05} == {key: value for key, value in parameters if name in key}


def test_study_can_be_pickled() -> None:
    """The run function can be pickled, and returns the same results afterwards."""
    study = read_study(CHECKOUT)
    changes = {"duration": 5, "clients.rate": 10, "servers.payments.failures.0.rate": 0.5}
    arguments = {"variant": "eager", "trials": 2, "seed": 3, **changes}

    restored = pickle.loads(pickle.dumps(study.run))  # noqa: S301 - pickled by this test

    assert study.run(**arguments) == restored(**arguments)
    assert 2 == len(study.run(**arguments))


def test_parameter_changes_only_variants_that_have_it() -> None:
    """A sweep over a breaker does not affect variants without a breaker."""
    study = read_study(CHECKOUT)
    results = run_study(
        study, parameters={"duration": 20}, sweep={"clients.defence.breaker.open_for": [1.0, 4.0]}
    )

    eager, careful, eager_again, careful_again = (row.metrics for row in results.rows)
    assert eager == eager_again
    assert careful != careful_again


def test_other_defences_run_in_the_same_scenario(tmp_path: Path) -> None:
    """The given defences become the variants of the study."""
    study = read_study(CHECKOUT)
    assert study.with_defences is not None

    changed = study.with_defences(study, {"once": Defence(Policy(max_attempts=1))})

    (row,) = run_study(changed, parameters={"duration": 20}).rows
    assert "" == changed.lesson  # the lesson is about the variants of the file
    assert ("once", 1.0) == (row.variant, row.metrics["amplification"])


def test_files_are_compared_in_one_study(tmp_path: Path) -> None:
    """Each file is a variant; a file with several variants contributes all of them."""
    small = write_file(tmp_path, "small.toml", SMALL)

    study = read_comparison([small, CHECKOUT])

    assert ("small", "checkout/eager", "checkout/careful") == study.variants


def test_files_with_equal_names_get_their_paths(tmp_path: Path) -> None:
    """Files with the same stem are named by their whole path."""
    (tmp_path / "other").mkdir()
    paths = [write_file(tmp_path, "a.toml", SMALL), write_file(tmp_path / "other", "a.toml", SMALL)]

    assert tuple(map(str, paths)) == read_comparison(paths).variants


def test_more_trials_do_not_change_earlier_ones() -> None:
    """Additional trials do not change the results of the first ones."""
    run = read_study(CHECKOUT).run

    assert run(variant="eager", trials=2, seed=4, duration=5)[:1] == (
        run(variant="eager", trials=1, seed=4, duration=5)
    )


def test_different_seeds_share_no_trial() -> None:
    """The trials of consecutive seeds are all different runs."""
    run_variant = read_study(CHECKOUT).run
    runs = [
        trial
        for seed in range(3)
        for trial in run_variant(variant="eager", trials=3, seed=seed, duration=5)
    ]

    assert [] == [run for index, run in enumerate(runs) if run in runs[:index]]


NEVER_CALLED = "is never called: clients.calls or another server's calls must name it"
CLOSED_WITH_RATE = SMALL.replace("rate = 20", "arrivals = 'closed'\nrate = 20")
POISSON_WITH_COUNT = SMALL.replace("rate = 20", "count = 20")
MISTAKES = [
    (SMALL + "[servers.ledger]\n", f"a.toml:7: server 'ledger' {NEVER_CALLED}"),
    (
        SMALL + "[variants.x]\nservers.apis.concurrency = 1\n",
        f"a.toml:8: server 'apis' {NEVER_CALLED}; did you mean 'api'?",
    ),
    (CLOSED_WITH_RATE, "a.toml:5: rate is for arrivals = 'poisson', but arrivals is 'closed'"),
    (
        POISSON_WITH_COUNT,
        (
            "a.toml:4: count is for arrivals = 'at-once', 'closed' or 'backlog', "
            "but arrivals is 'poisson'"
        ),
    ),
    (
        SMALL + "[variants.x.clients]\nthink = 3\n",
        "a.toml:8: think is for arrivals = 'closed', but arrivals is 'poisson'",
    ),
    (
        SMALL + "[[servers.api.failures]]\nstart = 5\nend = 9\n",
        "a.toml:8: start must be before the end of the run (duration 5), got 5",
    ),
    (
        SMALL + "[[clients.surges]]\nrate = 3\nstart = 7\nend = 9\n",
        "a.toml:9: start must be before the end of the run (duration 5), got 7",
    ),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[case[1] for case in MISTAKES])
def test_key_without_effect_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    """The error names the line, and explains when the key has an effect."""
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigurationError) as caught:
        read_study(Path("a.toml"))

    assert expected == str(caught.value)


@pytest.mark.parametrize(
    "addition",
    [
        "[servers.copy]\n[variants.a]\n[variants.b]\nclients.calls = 'copy'\n",
        "[variants.cached]\nclients.calls = 'cache'\nservers.cache.calls = 'api'\n",
        "[variants.a]\n[variants.b]\nclients = { arrivals = 'closed', count = 3, think = 2 }\n",
    ],
    ids=["server of one variant", "additional server", "other arrivals"],
)
def test_key_with_effect_in_one_variant_is_accepted(tmp_path: Path, addition: str) -> None:
    """Variants may call different servers and have different arrivals."""
    path = tmp_path / "a.toml"
    path.write_text(SMALL + addition, encoding="utf-8")

    assert read_study(path).variants


def test_parameter_may_end_the_run_before_a_failure() -> None:
    """A parameter may shorten the run, so that a failure of the file never starts."""
    (row, _) = run_study(read_study(CHECKOUT), parameters={"duration": 5}).rows

    assert isnan(row.metrics["recovered_after"])
