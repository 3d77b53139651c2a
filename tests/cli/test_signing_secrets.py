"""`tarry secrets`: create, list and delete signing secrets."""

from __future__ import annotations

from collections.abc import Callable

from tarry.client import Client
from tests.cli.harness import CommandResult

RunCli = Callable[..., CommandResult]
LANE = "https:example.com:443"


def test_secret_is_created_listed_and_deleted(run_cli: RunCli, client: Client) -> None:
    """`create` prints the secret alone, `list` prints no secret, and `delete` takes the id."""
    created = run_cli("secrets", "create")
    [secret] = client.signing_secrets()
    listed, as_json = run_cli("secrets", "list"), run_cli("secrets", "list", "--json")
    deleted = run_cli("secrets", "delete", secret.secret_id)
    missing = run_cli("secrets", "delete", secret.secret_id)

    assert (0, f"it is not shown again: secret {secret.secret_id}\n") == (created.code, created.err)
    assert created.out.startswith("whsec_")
    assert [secret.secret_id, "all", "HMAC"] == listed.out.splitlines()[1].split()[:3]
    assert created.out.strip() not in listed.out + as_json.out
    assert [secret.secret_id] == [item["secretId"] for item in as_json.json["items"]]
    assert (0, f"{secret.secret_id} deleted\n") == (deleted.code, deleted.out)
    assert 3 == missing.code
    assert [] == client.signing_secrets()


def test_secret_of_a_lane_is_replaced(run_cli: RunCli, client: Client) -> None:
    """The public key of an ed25519 secret is printed; the previous secret expires."""
    old = run_cli("secrets", "create", "--lane", LANE, "--json").json
    created = run_cli(
        "secrets", "create", "--lane", LANE, "--type", "ed25519", "--expire-previous", "2h"
    )
    new, previous = client.signing_secrets()

    assert f"{new.public_key}\n" == created.out
    assert (LANE, "ED25519", None) == (new.lane, new.type, new.expires_at)
    assert (old["secretId"], new.created_at + 7_200_000) == (
        previous.secret_id,
        previous.expires_at,
    )
    run_cli("secrets", "create", "--lane", LANE, "--expire-previous", "0")
    [newest] = client.signing_secrets()
    client.delete_signing_secret(newest.secret_id)


def test_invalid_options_are_rejected(run_cli: RunCli) -> None:
    """The message names the option."""
    invalid_type = run_cli("secrets", "create", "--type", "rsa")
    invalid_time = run_cli("secrets", "create", "--expire-previous", "soon")

    assert (2, True) == (invalid_type.code, "--type must be" in invalid_type.err)
    assert (2, True) == (invalid_time.code, "--expire-previous must be" in invalid_time.err)
