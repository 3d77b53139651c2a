"""`tarry secrets`: create, list and delete the signing secrets of a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from tarry.cli import output
from tarry.cli.options import (
    DEFAULT_SERVER,
    ApiKeyOption,
    JsonOption,
    ServerOption,
    example_epilog,
    parse_duration,
)
from tarry.cli.remote import connect
from tarry.core.checks import check_one_of
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from tarry.wire.tasks import SecretType, SigningSecret

_TYPES = ("hmac", "ed25519")

app: typer.Typer = typer.Typer(
    name="secrets",
    help="Create, list and delete signing secrets. The API key decides whose attempts they sign.",
    no_args_is_help=True,
)


@app.command(epilog=example_epilog("tarry secrets create --lane https:example.com:443"))
def create(
    lane: Annotated[
        str | None,
        typer.Option(
            metavar="LANE",
            help="Sign only the attempts of this lane; see `tarry downstreams`.",
            show_default="all lanes without secrets of their own",
        ),
    ] = None,
    type_: Annotated[
        str, typer.Option("--type", help=f"Type of the secret: {', '.join(_TYPES)}.")
    ] = "hmac",
    expire_previous: Annotated[
        str,
        typer.Option(metavar="TIME", help="How long the previous secret signs, too; 0: no longer."),
    ] = "24h",
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a secret, and print what receivers need: the secret, or the public key (ed25519).

    The secret cannot be printed again. Create another one to replace it: until the previous secret
    expires, each attempt has a signature of both.
    """
    check_one_of("--type", type_, _TYPES)
    expire_s = 0 if expire_previous == "0" else parse_duration("--expire-previous", expire_previous)
    with connect(server, api_key) as client:
        created = client.create_signing_secret(
            lane=lane, type=cast("SecretType", type_.upper()), expire_previous=expire_s
        )
    if as_json:
        output.print_json(created)
        return
    typer.echo(created.secret or created.public_key)
    note = "public key of secret" if created.secret is None else "it is not shown again: secret"
    typer.echo(f"{note} {created.secret_id}", err=True)


@app.command("list", epilog=example_epilog("tarry secrets list"))
def list_(
    server: ServerOption = DEFAULT_SERVER, api_key: ApiKeyOption = None, as_json: JsonOption = False
) -> None:
    """List the secrets that have not expired, newest first. The secrets cannot be shown."""
    with connect(server, api_key) as client:
        listed = client.signing_secrets()
    now = effects.unix_time()

    def to_row(secret: SigningSecret) -> tuple[object, ...]:
        created, expires = (
            output.time_since(secret.created_at, now),
            output.time_until(secret.expires_at, now),
        )
        return secret.secret_id, secret.lane or "all", secret.type, created, expires

    headings = ("id", "lane", "type", "created", "expires")
    output.print_list(listed, headings, to_row, as_json=as_json)


@app.command(epilog=example_epilog("tarry secrets delete 0199c0de-0000-7000-8000-000000000000"))
def delete(
    secret_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the secret; see `tarry secrets list`.")
    ],
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a secret. It signs no more attempts."""
    with connect(server, api_key) as client:
        client.delete_signing_secret(secret_id)
    result = {"secretId": secret_id, "deleted": True}
    output.print_result(result, f"{secret_id} deleted", as_json=as_json)
