"""`tarry keys`: create, list and revoke API keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import create_store, run_command
from tests.integration.service import service


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return the URL of the store of `service(tmp_path)`, which is empty."""
    create_store(tmp_path / "tarry.db")
    return f"sqlite:{tmp_path / 'tarry.db'}"


def test_created_key_is_accepted_and_revoked_key_rejected(tmp_path: Path, store: str) -> None:
    """A key that is created while the service runs is accepted; a revoked key is rejected."""
    with service(tmp_path, "--set", "require_keys=true") as running_service:
        server = f"http://127.0.0.1:{running_service.port}"
        created = run_command(
            "keys", "create", "--tenant", "shop", "--name", "ci", "--store", store
        )
        other = run_command("keys", "create", "--tenant", "shop", "--store", store, "--json").json
        revoked = run_command("keys", "revoke", other["id"], "--store", store)

        without_key = run_command("tasks", "list", "--server", server)
        with_revoked_key = run_command("tasks", "list", "--server", server, "--key", other["key"])
        with_key = run_command("tasks", "list", "--server", server, "--key", created.out.strip())

    assert (0, f"{other['id']} revoked\n") == (revoked.code, revoked.out)
    fields = '{"name":"","role":"admin","revoked":%s}'
    assert (
        f"store: {store}\n"
        f'operator action, action=revokeApiKey tenant="shop" key="tarry keys" '
        f'object="{other["id"]}" before={fields % "false"} after={fields % "true"}\n'
    ) == revoked.err
    assert 'operator action, action=createApiKey tenant="shop"' in created.err
    assert 'before=null after={"name":"ci","role":"admin"}\n' in created.err
    assert (0, "none\n") == (with_key.code, with_key.out)
    for rejected in (without_key, with_revoked_key):
        assert (2, "") == (rejected.code, rejected.out)
        assert "--key or TARRY_KEY; create one with `tarry keys create`." in rejected.err


def test_only_the_key_is_on_standard_output(store: str) -> None:
    """Only the key is on standard output, and the list does not contain it."""
    created = run_command("keys", "create", "--tenant", "shop", "--store", store)

    listed = run_command("keys", "list", "--store", store)
    listed_keys = run_command("keys", "list", "--tenant", "shop", "--store", store, "--json").json
    (document,) = listed_keys["items"]
    other_tenant = run_command("keys", "list", "--tenant", "other", "--store", store)

    assert created.out.startswith("tarry_")
    assert 1 == len(created.out.split())
    assert "it is not shown again" in created.err
    assert created.out.strip() not in listed.out
    assert f"{document['id']}  shop" in listed.out
    assert {"id", "tenant", "name", "role", "createdAt", "revokedAt"} == set(document)
    assert "none\n" == other_tenant.out


def test_role_of_a_key(store: str) -> None:
    """A key has the role that was given, by default admin; other roles are rejected."""
    for arguments in (["--role", "read"], []):
        run_command("keys", "create", "--tenant", "shop", "--store", store, *arguments)

    listed = run_command("keys", "list", "--store", store, "--json").json["items"]
    rejected = run_command("keys", "create", "--tenant", "a", "--store", store, "--role", "root")

    assert ["read", "admin"] == [key["role"] for key in listed]
    assert 2 == rejected.code
    assert "role" in rejected.err


def test_store_is_configured_as_for_serve(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store can be set in a variable or a file, as for `tarry serve`."""
    run_command("keys", "create", "--tenant", "shop", "--store", store)
    config = tmp_path / "tarry.toml"
    config.write_text(f'store = "{store}"\n')
    keys = run_command("keys", "list", "--config", config, "--json").json
    monkeypatch.setenv("TARRY_STORE", store)

    assert 1 == len(keys["items"])
    assert keys == run_command("keys", "list", "--json").json


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["list", "--store", "memory:"], 2, "--store must be a file"),
        (["list", "--store", "sqlite:nowhere/none.db"], 2, "no store at sqlite:/"),
        (["create", "--tenant", "a", "--store", "nowhere/none.db"], 2, "/nowhere/none.db. Is this"),
        (["revoke", "a", "--store", "none.db"], 2, "/none.db. Is this the store of your service?"),
        (["list", "--store", "mysql:x"], 2, "store must be a path, sqlite:PATH, memory:"),
        (["create", "--tenant", "a/b", "--store", "memory:"], 2, "tenant must be"),
    ],
    ids=["memory", "list", "create", "revoke", "unknown store", "tenant"],
)
def test_invalid_option_is_reported(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An invalid store or tenant is reported, and no store is created."""
    monkeypatch.chdir(tmp_path)

    result = run_command("keys", *arguments)

    assert (code, "") == (result.code, result.out)
    assert message in result.err
    assert [] == list(tmp_path.iterdir())


def test_a_file_without_tables_is_no_store(tmp_path: Path) -> None:
    """An empty file is not the store of a service, and stays empty."""
    empty = tmp_path / "tarry.db"
    empty.touch()

    created = run_command("keys", "create", "--tenant", "shop", "--store", empty)

    assert (2, "") == (created.code, created.out)
    assert f"there is no store at sqlite:{empty}. " in created.err
    assert 0 == empty.stat().st_size


def test_the_store_that_was_used_is_named(store: str, tmp_path: Path) -> None:
    """Each command prints the absolute path of its store on standard error."""
    commands = (["create", "--tenant", "shop"], ["list"], ["list", "--json"], ["revoke", "none"])

    outputs = [run_command("keys", *command, "--store", store).err for command in commands]

    assert [f"store: sqlite:{tmp_path / 'tarry.db'}"] * 4 == [
        output.splitlines()[0] for output in outputs
    ]


def test_unknown_key_exits_with_3(store: str) -> None:
    run_command("keys", "create", "--tenant", "shop", "--store", store)

    result = run_command("keys", "revoke", "none", "--store", store)

    assert (3, "") == (result.code, result.out)
    assert result.err.endswith("error: there is no key 'none'; `tarry keys list` lists all ids\n")
