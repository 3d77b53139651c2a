"""`tarry backup`: copy the store of a service that may be running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tarry.cli.keys import StoreOption  # noqa: TC001 - typer reads annotations
from tarry.cli.options import JsonOption  # noqa: TC001
from tarry.cli.output import print_result, progress_bar
from tarry.cli.serve import ConfigOption, SetOption, load_service_settings
from tarry.errors import ConfigurationError

_NATIVE_TOOLS = {
    "postgres": "back up the database with PostgreSQL's own tool: pg_dump --format=custom URL",
    "redis": "back up the server with its own tool: redis-cli --rdb FILE, or a copy of its AOF",
}
"""Advice for a store on a server, by the beginning of its URL."""
_NATIVE_TOOLS["valkey"] = _NATIVE_TOOLS["redis"].replace("redis-cli", "valkey-cli")
_MB = 1_000_000


def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Path of the backup.", show_default=False)
    ],
    store_url: StoreOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a backup of a SQLite store to FILE. The service may be running.

    The backup has all tasks that were acknowledged before the command started. FILE appears when
    the backup is complete and checked. Large bodies are copied to the folder FILE.bodies, unless
    they are in object storage. FILE contains requests and secrets as they are stored: protect it.

    To restore, stop the service, move its folder away, and put FILE and FILE.bodies in their
    places; `tarry docs backup` has the commands.
    """
    _check_engine(store_url or "")  # before an error about an engine whose extra is missing
    settings = load_service_settings(config_file, assignments, {"store": store_url}).settings
    _check_engine(settings.store)
    from tarry.service.app import check_store_file, name_store
    from tarry.service.backup import back_up, bodies_folder_of
    from tarry.service.redaction import redact_user_info
    from tarry.service.store_url import MEMORY_URL, sqlite_path

    if settings.store == MEMORY_URL:
        rule = "must be a file, because a memory: store exists only inside its service"
        raise ConfigurationError("--store", rule)
    store = sqlite_path(settings.store)
    check_store_file(store)
    has_folder = "://" not in settings.bodies
    bodies = Path(settings.bodies) if settings.bodies else store.parent / "bodies"
    with progress_bar("copying") as on_progress:
        result = back_up(
            store,
            bodies if has_folder else None,
            file,
            overwrite=force,
            on_progress=on_progress,
        )
    if not has_folder:
        location = redact_user_info(settings.bodies)
        typer.echo(f"bodies in {location} are not part of the backup", err=True)
    if result.missing_body_count:
        typer.echo(
            f"{result.missing_body_count} bodies were missing in {bodies}: their tasks were "
            "deleted during the backup, or the bodies were lost before",
            err=True,
        )
    bodies_folder = str(bodies_folder_of(file)) if result.body_count else None
    value = {
        "store": name_store(settings.store),
        "file": str(file),
        "bytes": result.size,
        "tasks": result.task_count,
        "bodiesFolder": bodies_folder,
        "bodies": result.body_count,
        "missingBodies": result.missing_body_count,
    }
    text = f"{result.task_count} tasks of {value['store']} in {file} ({result.size / _MB:.1f} MB)"
    if bodies_folder is not None:
        text += f", {result.body_count} bodies in {bodies_folder}"
    print_result(value, text, as_json=as_json)


def _check_engine(url: str) -> None:
    """Raise if the store is not a SQLite file, and name the tool that can copy it."""
    for scheme, advice in _NATIVE_TOOLS.items():
        if url.startswith(scheme) and "://" in url:
            raise ConfigurationError(f"tarry backup copies SQLite stores only; {advice}")
