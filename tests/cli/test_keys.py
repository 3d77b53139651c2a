"""`tarry keys`: keys are made in the store, shown once, and open the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import run_command
from tests.integration.service import service


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The store that `service(tmp_path)` has, which is not there yet."""
    return f"sqlite:{tmp_path / 'tarry.db'}"


def test_key_opens_a_service_and_a_revoked_one_does_not(tmp_path: Path, store: str) -> None:
    """Keys are made before the service and while it runs; without one there is a hint."""
    with service(tmp_path, "--set", "require_keys=true") as running:
        server = f"http://127.0.0.1:{running.port}"
        good = run_command("keys", "create", "--tenant", "shop", "--name", "ci", "--store", store)
        gone = run_command("keys", "create", "--tenant", "shop", "--store", store, "--json").json
        revoked = run_command("keys", "revoke", gone["id"], "--store", store)

        without = run_command("tasks", "list", "--server", server)
        wrong = run_command("tasks", "list", "--server", server, "--key", gone["key"])
        right = run_command("tasks", "list", "--server", server, "--key", good.out.strip())

    assert (0, f"{gone['id']} revoked\n") == (revoked.code, revoked.out)
    assert (0, "none\n") == (right.code, right.out)
    for refused in (without, wrong):
        assert (2, "") == (refused.code, refused.out)
        assert "--key or TARRY_KEY; create one with `tarry keys create`." in refused.err


def test_key_alone_is_on_standard_output(store: str) -> None:
    """So that a script can keep it in a variable; the list does not have it."""
    made = run_command("keys", "create", "--tenant", "shop", "--store", store)

    listed = run_command("keys", "list", "--store", store)
    (told,) = run_command("keys", "list", "--tenant", "shop", "--store", store, "--json").json
    others = run_command("keys", "list", "--tenant", "other", "--store", store)

    assert made.out.startswith("tarry_")
    assert 1 == len(made.out.split())
    assert "it is not shown again" in made.err
    assert made.out.strip() not in listed.out
    assert f"{told['id']}  shop" in listed.out
    assert {"id", "tenant", "name", "createdAt", "revokedAt"} == set(told)
    assert "none\n" == others.out


def test_store_is_that_of_the_service(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named as `tarry serve` has it: by a variable or in a file."""
    run_command("keys", "create", "--tenant", "shop", "--store", store)
    config = tmp_path / "tarry.toml"
    config.write_text(f'store = "{store}"\n')
    by_file = run_command("keys", "list", "--config", config, "--json").json
    monkeypatch.setenv("TARRY_STORE", store)

    assert 1 == len(by_file)
    assert by_file == run_command("keys", "list", "--json").json


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["list", "--store", "memory:"], 2, "--store must be sqlite:PATH"),
        (["list", "--store", "sqlite:nowhere/none.db"], 2, "nowhere/none.db does not exist"),
        (["list", "--store", "mysql:x"], 2, "store must be sqlite:PATH or memory:"),
        (["create", "--tenant", "a/b", "--store", "memory:"], 2, "tenant must have"),
    ],
    ids=["memory", "no such file", "unknown store", "tenant"],
)
def test_mistake_is_named(arguments: list[str], code: int, said: str) -> None:
    """And no store is made by mistake."""
    done = run_command("keys", *arguments)

    assert (code, "") == (done.code, done.out)
    assert said in done.err
    assert not Path("nowhere").exists()


def test_unknown_key_ends_with_3(store: str) -> None:
    """As all that is not there."""
    run_command("keys", "create", "--tenant", "shop", "--store", store)

    done = run_command("keys", "revoke", "none", "--store", store)

    assert (3, "", "error: there is no key 'none'; `tarry keys list` lists all ids\n") == done
