"""`tarry send`: enqueue a task."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tarry.cli.options import DEFAULT_SERVER, ApiKeyOption, JsonOption, ServerOption, parse_duration
from tarry.cli.output import print_json, print_text
from tarry.cli.remote import connect
from tarry.client.errors import NotFinished
from tarry.core.text import format_count
from tarry.errors import ConfigurationError
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from tarry.wire.tasks import RetryTask, SecretReference

_MAX_BODY_BYTES = 64 << 20
"""Larger than any body that the service accepts; limits the memory of this process."""

_OPTION_BY_FIELD = {
    "targetUrl": "URL",
    "method": "--method",
    "policyId": "--policy",
    "idempotencyKey": "--idempotency-key",
    "laneKey": "--lane-key",
    "callbackUrl": "--callback",
    "callbackPolicyId": "--callback-policy",
    "delayMs": "--delay",
}
"""The options by the API's names of the fields."""


def send(
    url: Annotated[str, typer.Argument(metavar="URL", help="Target of the call.")],
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="Body: text, @FILE, or @- for standard input."),
    ] = None,
    method: Annotated[str, typer.Option("--method", "-X", help="HTTP method.")] = "POST",
    header_options: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", help="Header. Can be repeated.", metavar="NAME:VALUE"),
    ] = None,
    secret_headers: Annotated[
        list[str] | None,
        typer.Option(
            "--secret-header",
            help="Header whose value is a secret of the service. Can be repeated.",
            metavar="NAME:SECRET",
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Retry policy; see `tarry policy list`.")] = "default",
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            help="Commands with the same key enqueue only one task.", show_default="generated"
        ),
    ] = None,
    lane_key: Annotated[
        str | None,
        typer.Option(help="Own lane (queue) for tasks with this key, such as a customer's id."),
    ] = None,
    callback: Annotated[
        str | None, typer.Option(metavar="URL", help="URL that receives the result of the task.")
    ] = None,
    callback_policy: Annotated[
        str | None, typer.Option(help="Retry policy of the callback.", show_default="default")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Delay of the first attempt: 90s, 10m, 2h.")
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Wait at most this long for the task to finish; exit with 1 unless it succeeds.",
        ),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Enqueue a task: an HTTP call that the service makes, and retries as its policy allows.

    The task is stored durably when the command returns. A body that is a JSON object or array is
    sent as application/json, unless --header sets another content type.
    """
    wait_s, delay_s = parse_duration("--wait", wait), parse_duration("--delay", delay)
    headers = _parse_headers(header_options or [], secret_headers or [])
    body = None if data is None else _read_body(data)
    has_content_type = "content-type" in map(str.lower, headers)
    if isinstance(body, str) and _is_json_object_or_array(body) and not has_content_type:
        headers["content-type"] = "application/json"
    with connect(server, api_key, option_by_field=_OPTION_BY_FIELD) as client:
        from tarry.client.api import FINISHED_STATUSES

        started_at = effects.now()  # in monotonic seconds
        task = client.enqueue(
            url,
            body,
            wait=wait_s,
            method=method,
            headers=headers or None,
            policy=policy,
            key=idempotency_key,
            lane_key=lane_key,
            delay=delay_s,
            callback=callback,
            callback_policy=callback_policy,
        )
        # The service may respond before `wait_s` has passed; the client then polls until it has.
        remaining_s = 0.0 if wait_s is None else started_at + wait_s - effects.now()
        if task.status not in FINISHED_STATUSES and remaining_s > 0:
            try:
                task = client.wait(task, remaining_s)
            except NotFinished:
                task = client.get(task)
    if as_json:
        print_json(task)
    else:
        _print_task(task)
        if wait_s is not None and task.status not in FINISHED_STATUSES:
            print_text(f"not finished yet; to follow it: tarry tasks show {task.task_id}")
    if wait_s is not None and task.status != "SUCCEEDED":
        raise typer.Exit(1)


def _print_task(task: RetryTask) -> None:
    reason = "" if task.reason is None else f": {task.reason}"
    attempts = format_count(task.attempt_number, "attempt")  # attempts are numbered from 1
    print_text(f"{task.task_id} {task.status} after {attempts}{reason}")
    if task.response is not None:
        print_text(f"the target answered {task.response.status}")
        for line in (task.response.body or "").splitlines():
            print_text(line)
        if task.response.truncated:
            print_text("... (the service keeps only the beginning of a response)")
    elif task.status != "SUCCEEDED" and task.last_error is not None:
        print_text(f"the last attempt failed: {task.last_error}")
    elif task.last_status is not None:  # another process of the service has made the attempt
        print_text(f"the target answered {task.last_status}")
    if task.status == "EXHAUSTED":
        print_text(f"to see why: tarry tasks explain {task.task_id}")


def _parse_headers(
    header_options: list[str], secret_options: list[str]
) -> dict[str, str | SecretReference]:
    headers: dict[str, str | SecretReference] = {}
    options = [("--header", each) for each in header_options]
    options += [("--secret-header", each) for each in secret_options]
    for flag, option in options:
        name, colon, value = (part.strip() for part in option.partition(":"))
        if not colon or not name:
            raise ConfigurationError(flag, "must have the format 'Name: value'")
        if name.lower() in map(str.lower, headers):
            raise ConfigurationError(flag, f"sets {name} twice")
        headers[name] = value if flag == "--header" else {"secret": value}
    return headers


def _read_body(data: str) -> str | bytes:
    """Return the body: str if it is UTF-8, because the client sends bytes as base64."""
    raw = _read_file(data[1:]) if data.startswith("@") else data.encode(errors="surrogateescape")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _read_file(name: str) -> bytes:
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(_MAX_BODY_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                raw = file.read(_MAX_BODY_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"--data: cannot read {name}: {error.strerror}") from error
    if len(raw) > _MAX_BODY_BYTES:
        raise ConfigurationError(f"--data: {name} has more than {_MAX_BODY_BYTES} bytes")
    return raw


def _is_json_object_or_array(text: str) -> bool:
    """Return whether a text is a JSON object or array. A number may be meant as plain text."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
