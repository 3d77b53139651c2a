"""`tarry keys`: API keys, in the store itself: the first key cannot be made with a key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tarry.cli.options import JsonOption, example_epilog
from tarry.cli.serve import need_service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.model import ApiKey
    from tarry.service.store import Store

T = TypeVar("T")

StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Where the service keeps its tasks.",
        show_default="as for `tarry serve`: TARRY_STORE, the file, sqlite:tarry-data/tarry.db",
    ),
]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="The TOML file of the service.")]

app: typer.Typer = typer.Typer(
    name="keys",
    help="Make, list and revoke API keys, on the machine where the store is.",
    no_args_is_help=True,
)


@app.command(epilog=example_epilog("export TARRY_KEY=$(tarry keys create --tenant shop)"))
def create(
    tenant: Annotated[str, typer.Option(help="Whose key it is: each tenant sees its own tasks.")],
    name: Annotated[str, typer.Option(help="What it is for, to tell keys apart.")] = "",
    store: StoreUrl = None,
    config: Config = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it, once: the store keeps only a digest."""
    need_service()
    from uuid_utils import uuid7

    from tarry.cli.output import print_json
    from tarry.service.api.auth import make_key

    secret, made = make_key(tenant, str(uuid7()), name)
    _with_store(store, config, lambda opened: opened.put_key(made), is_new=True)
    if as_json:
        print_json({"id": made.id, "tenant": tenant, "name": name, "key": secret})
        return
    typer.echo(secret)
    typer.echo(f"key {made.id} of {tenant}; it is not shown again", err=True)


@app.command("list", epilog=example_epilog("tarry keys list --tenant shop"))
def list_(
    tenant: Annotated[str | None, typer.Option(help="Only those of this tenant.")] = None,
    store: StoreUrl = None,
    config: Config = None,
    as_json: JsonOption = False,
) -> None:
    """List keys, revoked ones too; the keys themselves are nowhere."""
    from tarry.cli.output import console, print_json, print_text, table, time_since
    from tarry.runtime.clocks import system

    found = _with_store(store, config, lambda opened: opened.list_keys(tenant))
    if as_json:
        print_json([_told(key) for key in found])
    elif not found:
        print_text("none")
    else:
        now = system.unix_time()
        rows = [
            (
                key.id,
                key.tenant,
                key.name,
                time_since(key.created_at, now),
                None if key.revoked_at is None else time_since(key.revoked_at, now),
            )
            for key in found
        ]
        console().print(table(("key", "tenant", "name", "made", "revoked"), rows))


@app.command(epilog=example_epilog("tarry keys revoke 0199c0de-0000-7000-8000-000000000000"))
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", help="The id of a key: `tarry keys list`.")],
    store: StoreUrl = None,
    config: Config = None,
    as_json: JsonOption = False,
) -> None:
    """End a key; a running service believes it for a few seconds more."""
    from tarry.cli.output import print_json, print_text
    from tarry.client.errors import NotFound

    if not _with_store(store, config, lambda opened: opened.revoke_key(key)):
        msg = f"there is no key {key!r}; `tarry keys list` has their ids"
        raise NotFound(msg)
    if as_json:
        print_json({"id": key, "revoked": True})
    else:
        print_text(f"{key} is revoked")


def _with_store(
    url: str | None,
    config: Path | None,
    work: Callable[[Store], Awaitable[T]],
    *,
    is_new: bool = False,
) -> T:
    """Open the store, do the work, close it; only a first key may make a store."""
    import asyncio

    from tarry.errors import ConfigurationError
    from tarry.service.app import make_store
    from tarry.service.settings import load_settings
    from tarry.service.settings_checks import sqlite_path

    url = load_settings({"store": url}, file=config).settings.store
    if url == "memory:":
        rule = "must be one that lasts, sqlite:PATH: what is in memory: is the service's own"
        raise ConfigurationError("--store", rule)
    if url.startswith("sqlite:") and not is_new and not sqlite_path(url).exists():
        msg = f"--store: there is no {sqlite_path(url)}; is it the store of your service?"
        raise ConfigurationError(msg)
    store = make_store(url)

    async def run() -> T:
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _told(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "createdAt": key.created_at,
        "revokedAt": key.revoked_at,
    }
