"""`tarry send`: give the service a call to make."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli.options import DEFAULT_SERVER, JsonOption, KeyOption, ServerOption
from tarry.cli.remote import connect
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from tarry.client import Client
    from tarry.client.options import EnqueueOptions
    from tarry.wire.tasks import RetryTask

_MOST = 64 << 20
"""Bytes of a body: more than services take, and no more than a process can hold."""


def send(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where the call goes.")],
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="The body: a text, or @FILE, or @- for standard input."),
    ] = None,
    method: Annotated[str, typer.Option("--method", "-X", help="The method.")] = "POST",
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", help="A header. Repeatable.", metavar="NAME:VALUE"),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="How it is retried: `tarry policy list`.")
    ] = "default",
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="Sent twice with one key is one task.", show_default="a new one"),
    ] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Begin later: 90s, 10m, 2h.")
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Wait for the outcome; exit with 1 if it is no success."),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give the service a call to make; it makes it until it succeeds, or its policy ends it.

    When this returns, the task is kept. A body that is a JSON object or list goes as
    application/json, unless a header says otherwise.
    """
    from tarry.cli.output import print_json
    from tarry.tuning.formatting import parse_duration

    patience = None if wait is None else parse_duration("--wait", wait)
    later = None if delay is None else parse_duration("--delay", delay)
    headers = _headers(header or [])
    body = None if data is None else _body(data)
    if isinstance(body, str) and _is_json(body) and "content-type" not in map(str.lower, headers):
        headers["content-type"] = "application/json"
    options: EnqueueOptions = {
        "method": method,
        "headers": headers or None,
        "policy": policy,
        "key": idempotency_key,
        "delay": later,
    }
    with connect(server, key) as client:
        task = _sent(client, url, body, patience, options)
    if as_json:
        print_json(task)
    else:
        _show(task)
    if patience is not None and task.status != "SUCCEEDED":
        raise typer.Exit(1)


def _sent(
    client: Client,
    url: str,
    body: str | bytes | None,
    patience: float | None,
    options: EnqueueOptions,
) -> RetryTask:
    """Add the task, and wait on when the service waits less than it was asked to."""
    from tarry.client.errors import NotFinished
    from tarry.client.operations import FINAL_STATUSES
    from tarry.runtime.clocks import system

    began = system.now()
    task = client.enqueue(url, body, wait=patience, **options)
    left = 0.0 if patience is None else began + patience - system.now()
    if task.status in FINAL_STATUSES or left <= 0:
        return task
    try:
        return client.wait(task, left)
    except NotFinished:
        return client.get(task)


def _show(task: RetryTask) -> None:
    from tarry.cli.output import pluralize, print_text

    ended = "" if task.reason is None else f": {task.reason}"
    print_text(
        f"{task.task_id} {task.status} after {pluralize(task.attempt_number, 'attempt')}{ended}"
    )
    if task.response is not None:
        print_text(f"the target answered {task.response.status}")
        for line in (task.response.body or "").splitlines():
            print_text(line)
        if task.response.truncated:
            print_text("... (only its beginning is kept)")
    if task.status == "EXHAUSTED":
        print_text(f"tarry tasks explain {task.task_id} says why")


def _headers(texts: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for text in texts:
        name, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or not name:
            msg = f"--header is written 'Name: value', got {text!r}"
            raise ConfigurationError(msg)
        if name.lower() in map(str.lower, headers):
            msg = f"--header: {name} is given twice"
            raise ConfigurationError(msg)
        headers[name] = value
    return headers


def _body(data: str) -> str | bytes:
    """Return what is to be sent: text where it is text, as the service keeps it readable then."""
    raw = _read(data[1:]) if data.startswith("@") else data.encode(errors="surrogateescape")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _read(name: str) -> bytes:
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(_MOST + 1)
        else:
            with Path(name).open("rb") as file:
                raw = file.read(_MOST + 1)
    except OSError as error:
        msg = f"--data: cannot read {name}: {error.strerror}"
        raise ConfigurationError(msg) from error
    if len(raw) > _MOST:
        msg = f"--data: {name} has more than {_MOST} bytes"
        raise ConfigurationError(msg)
    return raw


def _is_json(text: str) -> bool:
    """Say whether a text is a JSON object or list; a bare word or number may be anything."""
    import json

    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
