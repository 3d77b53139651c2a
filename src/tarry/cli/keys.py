"""`tarry keys`: create, list and revoke API keys.

The commands open the store directly instead of calling the service, because a request to the
service may already need an API key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tarry.cli.options import JsonOption, example_epilog
from tarry.cli.output import print_json, print_list, print_result, time_since
from tarry.cli.serve import ConfigOption, require_service_packages
from tarry.client.errors import NotFound
from tarry.errors import ConfigurationError
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tarry.service.model import ApiKeyRecord
    from tarry.service.store import Store

T = TypeVar("T")

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="PATH|URL",
        help="Store of the service.",
        show_default="as for `tarry serve`: TARRY_STORE, --config, or sqlite:tarry-data/tarry.db",
    ),
]

app: typer.Typer = typer.Typer(
    name="keys",
    help="Create, list and revoke API keys. Run these commands where the store's file is.",
    no_args_is_help=True,
)


@app.command(epilog=example_epilog("export TARRY_KEY=$(tarry keys create --tenant shop)"))
def create(
    tenant: Annotated[
        str, typer.Option(help="Tenant of the key. Tenants see only their own tasks.")
    ],
    name: Annotated[str, typer.Option(help="Name of the key, shown by `tarry keys list`.")] = "",
    role: Annotated[
        str,
        typer.Option(
            metavar="read|write|admin",
            help="What the key may do. read: GET requests. write: also create, cancel, retry and "
            "replay tasks, and control downstreams. admin: also policies, signing secrets and "
            "the deletion of dead letters.",
        ),
    ] = "admin",
    store_url: StoreOption = None,
    config_file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key and print it. It cannot be printed again: the store keeps only its hash."""
    require_service_packages()
    from uuid_utils import uuid7

    from tarry.service.api.auth import make_api_key
    from tarry.service.records.api_keys import put_api_key

    key, record = make_api_key(tenant, str(uuid7()), name, role)
    _use_store(store_url, config_file, lambda store: put_api_key(store, record))
    _print_action("createApiKey", tenant, record.id, None, {"name": name, "role": role})
    if as_json:
        print_json({"id": record.id, "tenant": tenant, "name": name, "role": role, "key": key})
        return
    typer.echo(key)
    typer.echo(f"key {record.id} of tenant {tenant}, role {role}; it is not shown again", err=True)


@app.command("list", epilog=example_epilog("tarry keys list --tenant shop"))
def list_(
    tenant: Annotated[str | None, typer.Option(help="Only keys of this tenant.")] = None,
    store_url: StoreOption = None,
    config_file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List keys with their ids, including revoked keys. The keys themselves cannot be shown."""
    require_service_packages()
    from tarry.service.records.api_keys import list_api_keys

    now = effects.unix_time()

    def to_row(fields: dict[str, Any]) -> tuple[object, ...]:
        *texts, created_at, revoked_at = fields.values()
        return (*texts, time_since(created_at, now), time_since(revoked_at, now))

    listed_keys = [
        {
            "id": record.id,
            "tenant": record.tenant,
            "name": record.name,
            "role": record.role,
            "createdAt": record.created_at,
            "revokedAt": record.revoked_at,
        }
        for record in _use_store(store_url, config_file, lambda store: list_api_keys(store, tenant))
    ]
    print_list(
        listed_keys, ("id", "tenant", "name", "role", "created", "revoked"), to_row, as_json=as_json
    )


@app.command(epilog=example_epilog("tarry keys revoke 0199c0de-0000-7000-8000-000000000000"))
def revoke(
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the key; see `tarry keys list`.")
    ],
    store_url: StoreOption = None,
    config_file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key. A running service may accept it for a few more seconds."""
    require_service_packages()
    from tarry.service.records.api_keys import list_api_keys, revoke_api_key

    async def revoke_key(store: Store) -> tuple[bool, ApiKeyRecord | None]:
        keys = await list_api_keys(store)
        record = next((each for each in keys if each.id == key_id), None)
        return await revoke_api_key(store, key_id), record

    exists, record = _use_store(store_url, config_file, revoke_key)
    if not exists:
        raise NotFound(f"there is no key {key_id!r}; `tarry keys list` lists all ids")
    if record is not None:
        fields: dict[str, object] = {"name": record.name, "role": record.role}
        was_revoked = record.revoked_at is not None
        before, after = {**fields, "revoked": was_revoked}, {**fields, "revoked": True}
        _print_action("revokeApiKey", record.tenant, key_id, before, after)
    print_result({"id": key_id, "revoked": True}, f"{key_id} revoked", as_json=as_json)


def _print_action(
    action: str,
    tenant: str,
    key_id: str,
    before: dict[str, object] | None,
    after: dict[str, object],
) -> None:
    """Print the line that the service would log for an action of an operator."""
    from tarry.service.api.action_log import format_action
    from tarry.service.api.messages import Change

    line = format_action(action, tenant, "tarry keys", Change(key_id, before, after))
    typer.echo(line, err=True)


def _use_store(
    url: str | None,
    config_file: Path | None,
    action: Callable[[Store], Awaitable[T]],
) -> T:
    """Return the result of `action(store)`; print the name of the store on standard error.

    The store must exist. A new one would be unknown to the service.
    """
    import asyncio

    from tarry.service.app import make_store, name_store
    from tarry.service.settings import load_settings
    from tarry.service.store_url import StoreEngine, find_engine
    from tarry.service.transfer import check_not_moved

    url = load_settings({"store": url}, file=config_file).settings.store
    if find_engine(url) is StoreEngine.MEMORY:
        rule = "must be a file, because a memory: store exists only inside its service"
        raise ConfigurationError("--store", rule)
    store = make_store(url, must_exist=True)
    typer.echo(f"store: {name_store(url)}", err=True)

    async def run() -> T:
        await store.open()
        try:
            await check_not_moved(store, name_store(url))
            return await action(store)
        finally:
            await store.close()

    return asyncio.run(run())
