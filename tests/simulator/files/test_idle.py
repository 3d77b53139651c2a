"""What a file says in vain is refused with its line."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError
from tarry.simulator.files import read_study
from tarry.simulator.study import run_study
from tests.simulator.files.written import CHECKOUT, SMALL

NEVER = "is never called: clients.calls or another server's calls must name it"
CLOSED = SMALL.replace("rate = 20", "arrivals = 'closed'\nrate = 20")
COUNT = SMALL.replace("rate = 20", "count = 20")
MISTAKES = [
    (SMALL + "[servers.ledger]\n", f"a.toml:7: server 'ledger' {NEVER}"),
    (
        SMALL + "[variants.x]\nservers.apis.concurrency = 1\n",
        f"a.toml:8: server 'apis' {NEVER}; did you mean 'api'?",
    ),
    (CLOSED, "a.toml:5: rate is for arrivals = 'poisson', but arrivals is 'closed'"),
    (
        COUNT,
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
def test_what_would_do_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    """The message names the line, and what it takes to count."""
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigurationError) as caught:
        read_study(Path("a.toml"))

    assert expected == str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        "[servers.copy]\n[variants.a]\n[variants.b]\nclients.calls = 'copy'\n",
        "[variants.cached]\nclients.calls = 'cache'\nservers.cache.calls = 'api'\n",
        "[variants.a]\n[variants.b]\nclients = { arrivals = 'closed', count = 3, think = 2 }\n",
    ],
    ids=["a server of one variant", "a server more", "other arrivals"],
)
def test_what_counts_in_one_variant_is_right(tmp_path: Path, more: str) -> None:
    """Variants may call other servers and arrive in other ways."""
    path = tmp_path / "a.toml"
    path.write_text(SMALL + more, encoding="utf-8")

    assert read_study(path).variants


def test_what_is_set_may_switch_a_part_off() -> None:
    """A run that ends before the trouble shows what is usual."""
    (row, _) = run_study(read_study(CHECKOUT), parameters={"duration": 5}).rows

    assert isnan(row.metrics["recovered_after"])
