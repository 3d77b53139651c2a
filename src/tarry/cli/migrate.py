"""`tarry migrate`: move the tasks of a service to another store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tarry.cli.exit_codes import EXIT_FAILED
from tarry.cli.options import JsonOption  # noqa: TC001 - typer reads annotations
from tarry.cli.output import console, print_json, print_result, progress_bar, table
from tarry.cli.serve import require_service_packages
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.records.transfer_mark import TransferMark
    from tarry.service.transfer import NamedStore, TransferResult

T = TypeVar("T")


def migrate(
    source: Annotated[
        str, typer.Option("--from", metavar="PATH|URL", help="Store to move the tasks from.")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="PATH|URL", help="Store to move the tasks to; it must be empty."
        ),
    ] = None,
    undo: Annotated[
        bool,
        typer.Option(
            "--undo", help="Allow a service to start on the store of --from again. Moves nothing."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Move all tasks, policies, keys, secrets, downstreams and replays to another store.

    Stop all processes of the service first; the command refuses stores that are in use. If it is
    interrupted, even by a power failure, run it again with the same options: it continues, and no
    task is moved twice. At the end the records of both stores are counted and compared. After that
    the service refuses to start on the old store, so that no task is delivered by both.

    Tasks whose attempt was interrupted are attempted again when their lease has expired, and the
    interrupted attempt is logged as lost. Large bodies are not moved: start the service on the new
    store with the same setting `bodies`. Statistics of attempts per minute are not moved.
    """
    require_service_packages()
    if undo:
        if target is not None:
            raise ConfigurationError(
                "--undo cannot be combined with --to: it changes the store of --from only"
            )
        mark = _use_stores([source], lambda stores: _undo(stores[0]))
        from tarry.service.app import name_store

        name = name_store(source)  # without a password
        value = {"from": name, "undone": True, "otherStore": mark.other_store}
        text = (
            f"{name} can be served again. Delete {mark.other_store}, or at least never serve "
            "both: the same tasks would be delivered twice"
        )
        print_result(value, text, as_json=as_json)
        return
    if target is None:
        raise ConfigurationError("--to is missing: name the store to move the tasks to")
    _print_result(source, target, _move(source, target), as_json=as_json)


def _move(source: str, target: str) -> TransferResult:
    from tarry.service.transfer import TransferFailed, move_records

    with progress_bar("opening the stores") as on_progress:
        try:
            return _use_stores(
                [source, target], lambda stores: move_records(stores[0], stores[1], on_progress)
            )
        except TransferFailed as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(EXIT_FAILED) from error


async def _undo(store: NamedStore) -> TransferMark:
    from tarry.service.transfer import undo_transfer

    return await undo_transfer(store)


def _use_stores(urls: list[str], action: Callable[[list[NamedStore]], Awaitable[T]]) -> T:
    """Open the stores, and return the result of the action; the first store must exist."""
    import asyncio
    from contextlib import AsyncExitStack

    from tarry.service.app import make_store, name_store
    from tarry.service.store_url import StoreEngine, find_engine
    from tarry.service.transfer import NamedStore

    for option, url in zip(("--from", "--to"), urls, strict=False):
        try:
            engine = find_engine(url)
        except ConfigurationError as error:
            raise error.with_field(option) from None
        if engine is StoreEngine.MEMORY:
            rule = "must not be memory:, which exists only inside its service"
            raise ConfigurationError(option, rule)
    names = [name_store(url) for url in urls]
    if len({*names}) < len(names):
        raise ConfigurationError("--from and --to name the same store")

    async def run() -> T:
        async with AsyncExitStack() as stack:
            stores: list[NamedStore] = []
            for url, name in zip(urls, names, strict=True):
                store = make_store(url, must_exist=not stores)  # the target may be new
                stack.push_async_callback(store.close)
                await store.open()
                stores.append(NamedStore(store, name))
            return await action(stores)

    return asyncio.run(run())


def _print_result(source: str, target: str, result: TransferResult, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "counts": result.counts,
                "tasksWithBodies": result.tasks_with_bodies,
                "wasComplete": result.was_complete,
            }
        )
        return
    if result.was_complete:
        typer.echo("everything was moved by an earlier run; nothing is left to do")
    else:
        rows = [(name, count) for name, count in sorted(result.counts.items()) if count]
        console().print(table(("moved", "records"), rows))
    if result.tasks_with_bodies:
        from pathlib import Path

        from tarry.service.app import default_bodies

        typer.echo(
            f"{result.tasks_with_bodies} tasks have bodies in the storage `bodies` of the old "
            "service, which was not moved. Serve the new store with the same setting. If you have "
            f"not set it, that is --set bodies={Path(default_bodies(source)).absolute()}"
        )
    from tarry.service.app import name_store

    typer.echo(f"serve the new store: tarry serve --store {name_store(target)}")
