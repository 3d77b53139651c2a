"""Watch a service: `tarry downstreams`, `tarry tail` (events) and `tarry top` (rates).

A downstream is the state that the service keeps for one target host: statistics, and a lane
(queue of tasks). The lane and the downstream have the same name.
"""

from __future__ import annotations

import json
import os
import re
import select
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tarry.cli import output
from tarry.cli.options import (
    DEFAULT_LIMIT,
    DEFAULT_SERVER,
    ApiKeyOption,
    JsonOption,
    LimitOption,
    ServerOption,
)
from tarry.cli.remote import connect
from tarry.client.errors import ServiceUnavailable, ServiceUnreachable
from tarry.core.checks import check_one_of
from tarry.errors import ConfigurationError
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from rich.console import RenderableType

    from tarry.client import Client
    from tarry.wire.tasks import DownstreamInfo, LatencyStats, ServiceEvent


ACTIONS = ("show", "pause", "resume", "reset", "set")
_OPTION_BY_FIELD = {
    "lane": "LANE",
    "ratePerSecond": "--rate",
    "concurrency": "--concurrency",
    "breaker": "--breaker",
    "budget": "--budget",
}
"""The arguments of `tarry downstreams` by the API's names of the fields."""
_DEFAULT_TENANT = "default"
"""The tenant of services that do not require API keys: it is not worth a mention."""
_HEADINGS = (
    *("downstream", "state", "pending", "leased", "dead", "p50", "p90", "p99"),
    *("running", "limit", "rate", "waiting for"),  # of the service process that responded
)


def downstreams(
    action: Annotated[
        str | None,
        typer.Argument(
            metavar="|".join(ACTIONS),
            help=(
                "show: print the state, the latency and the breaker history of the downstream. "
                "pause: start no more attempts; the time of the pause counts towards the total "
                "budgets of waiting tasks. "
                "resume: start attempts again, slowly at first. "
                "reset: discard the statistics of the downstream, and resume. "
                "set: replace its limits by those of the options; without options, remove them."
            ),
        ),
    ] = None,
    lane: Annotated[
        str | None, typer.Argument(metavar="LANE", help="Name, such as https:example.com:443.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="set: attempts per second, of all processes together.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="set: attempts at a time, of all processes together.")
    ] = None,
    breaker: Annotated[
        str | None,
        typer.Option(help="set: `off`, or fields of the API: failureRate=0.5,openForMs=5000."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="set: `off`, or fields of the API: ratio=0.1,minPerSecond=1.")
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="pause, set: also if no task has used the downstream.")
    ] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(
            help="Only downstreams in this state: ACTIVE, PAUSED, PARKED or PROBING. Repeatable."
        ),
    ] = None,
    limit: LimitOption = DEFAULT_LIMIT,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the downstreams (target hosts), or show, pause, resume, reset or limit one of them."""
    limits = {"rate": rate, "concurrency": concurrency, "breaker": breaker, "budget": budget}
    for name, value in limits.items():
        if value is not None and action != "set":
            raise ConfigurationError(f"--{name}", "can only be given with `tarry downstreams set`")
    if create and action not in {"pause", "set"}:
        rule = "can only be given with `tarry downstreams pause` and `tarry downstreams set`"
        raise ConfigurationError("--create", rule)
    if action is not None:
        if state:
            raise ConfigurationError("--state", "can only be given for the list of downstreams")
        check_one_of("the first argument", action, ACTIONS)
        if lane is None:
            rule = f"is required: the downstream to {action}; `tarry downstreams` lists all of them"
            raise ConfigurationError("LANE", rule)
        with connect(server, api_key, option_by_field=_OPTION_BY_FIELD) as client:
            methods: dict[str, Callable[[str], DownstreamInfo]] = {
                "show": client.downstream,
                "pause": partial(client.pause, create=create),
                "resume": client.resume,
                "reset": client.reset,
                "set": partial(
                    client.set_limits,
                    rate_per_second=rate,
                    concurrency=concurrency,
                    breaker=_parse_fields("--breaker", breaker),
                    budget=_parse_fields("--budget", budget),
                    create=create,
                ),
            }
            downstream = methods[action](lane)
        if action == "show" and not as_json:
            _print_downstream(downstream)
            return
        text = f"{downstream.lane} {downstream.state}"
        if downstream.tenant != _DEFAULT_TENANT:
            text += f", tenant {downstream.tenant}"
        if action == "pause" and downstream.pending:
            text += "; its waiting tasks still end when their total budgets are used up"
        if action == "set":
            text += f", limits: {json.dumps(output.to_builtins(downstream.limits))}"
        output.print_result(downstream, text, as_json=as_json)
        return
    states = _parse_states(state or [])
    with connect(server, api_key) as client:
        listed, next_cursor = _list_downstreams(client, states, limit)
    if next_cursor is not None:
        output.print_limit_note(limit)
    if_empty = "none yet: a downstream is created with the first task for its host"
    if states:
        if_empty = f"no downstream is {' or '.join(states)}"
    output.print_list(
        listed,
        _HEADINGS,
        _downstream_row,
        as_json=as_json,
        if_empty=if_empty,
        cut_column="downstream",
        next_cursor=next_cursor,
    )


def _parse_states(names: list[str]) -> list[str]:
    from tarry.wire.tasks import LANE_STATE_NAMES

    states = [name.upper() for name in names]
    for state in states:
        check_one_of("--state", state, LANE_STATE_NAMES)
    return states


class _Position(NamedTuple):
    """A downstream of a list: the cursor of its page, and its number on the page, from 1."""

    page_cursor: str | None
    number: int


def _list_downstreams(
    client: Client, states: list[str], limit: int
) -> tuple[list[DownstreamInfo], str | None]:
    """Return up to `limit` downstreams, in one of the states if given, and the next cursor."""
    from tarry.wire.tasks import MAX_PAGE_SIZE

    listed: list[DownstreamInfo] = []
    cursor: str | None = None
    last_listed = _Position(None, 0)
    while True:
        # One more than the limit, which shows whether the list is complete.
        wanted_count = MAX_PAGE_SIZE if states else min(limit + 1 - len(listed), MAX_PAGE_SIZE)
        page = client.downstream_page(cursor, limit=wanted_count)
        for number, info in enumerate(page.items, 1):
            if states and info.state not in states:
                continue
            if len(listed) == limit:
                return listed, _cursor_after(client, last_listed)
            listed.append(info)
            last_listed = _Position(cursor, number)
        if page.next_cursor is None:
            return listed, None
        cursor = page.next_cursor


def _cursor_after(client: Client, position: _Position) -> str | None:
    """Return the cursor that continues a list after a downstream, which may be inside of a page."""
    return client.downstream_page(position.page_cursor, limit=position.number).next_cursor


def _parse_fields(option: str, text: str | None) -> dict[str, Any] | None:
    """Parse `off`, or fields such as `ratio=0.1,minPerSecond=1`."""
    if text is None or text == "off":
        return None if text is None else {"enabled": False}
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            fields[name.strip()] = json.loads(value)
        except ValueError:
            rule = "must be `off`, or fields with numbers such as ratio=0.1,minPerSecond=1"
            raise ConfigurationError(option, rule, part) from None
    return fields


def _downstream_row(downstream: DownstreamInfo) -> tuple[object, ...]:
    from tarry.wire.tasks import LocalStats

    local = downstream.local or LocalStats()
    return (
        downstream.lane,
        downstream.state,
        downstream.pending,
        downstream.in_flight,
        downstream.dead,
        *_format_quantiles(downstream.latency),
        local.running,
        "" if local.concurrency_limit is None else local.concurrency_limit,
        "" if local.rate_per_second is None else f"{local.rate_per_second:g}/s",
        (downstream.waiting_for or "").replace("-", " "),
    )


def _format_quantiles(latency: LatencyStats | None) -> tuple[str, str, str]:
    if latency is None:
        return "", "", ""
    p50, p90, p99 = map(output.format_ms, (latency.p50_ms, latency.p90_ms, latency.p99_ms))
    return p50, p90, p99


def _print_downstream(downstream: DownstreamInfo) -> None:
    now_s = effects.unix_time()
    text = f"{downstream.lane} {downstream.state}, breaker {downstream.shared_breaker}"
    if downstream.state == "PARKED" and downstream.parked_until is not None:
        text += f", parked until {output.time_until(downstream.parked_until, now_s)}"
    if downstream.waiting_for is not None:
        text += f", waiting for: {downstream.waiting_for.replace('-', ' ')}"
    output.print_text(text)
    latency = downstream.latency
    if latency is not None:
        p50, p90, p99 = _format_quantiles(latency)
        count, since = latency.attempts, output.time_since(latency.since, now_s)
        output.print_text(f"p50 {p50}, p90 {p90}, p99 {p99} ({count} attempts since {since})")
    history = downstream.breaker_history or []
    if not history:
        output.print_text("no change of the breaker is recorded")
        return
    rows = [
        (output.time_since(change.at, now_s), change.from_, change.to, change.reason or "")
        for change in history
    ]
    output.console().print(output.table(("breaker", "from", "to", "reason"), rows))


_EVENT_STYLES = {"succeeded": "green", "exhausted": "red", "parked": "red", "missed": "yellow"}


def tail(
    server: ServerOption = DEFAULT_SERVER, api_key: ApiKeyOption = None, as_json: JsonOption = False
) -> None:
    """Print live events: attempts, finished tasks, downstreams that fail or recover.

    Prints new events until Ctrl-C. With --json, each line is one event.
    """
    with connect(server, api_key) as client:
        for event in client.events():
            if as_json:
                fields = output.to_builtins(event)
                fields = {name: value for name, value in fields.items() if value is not None}
                output.print_json(fields, indent=None)
            else:
                _print_event(event)


def _print_event(event: ServiceEvent) -> None:
    from rich.text import Text

    time = "" if event.at is None else output.time_of_day(event.at)
    line = Text(f"{time:12}  ", style="dim")
    style = _EVENT_STYLES.get(event.kind, "not dim")
    line.append(f"{output.to_printable_line(event.kind):10}  ", style=style)
    texts = [event.task_id or "", event.lane or "", event_details(event)]
    details = "  ".join(output.to_printable_line(text) for text in texts if text)
    line.append(details, style="not dim")
    output.console().print(line, soft_wrap=True)


def event_details(event: ServiceEvent) -> str:
    """Return what an event reports besides its kind, task and lane."""
    if event.missed is not None:
        return f"{event.missed} events were dropped: this reader is too slow"
    if event.attempt is None:
        return event.reason or ""
    attempt = event.attempt
    duration = "" if attempt.duration_ms is None else f" in {output.format_ms(attempt.duration_ms)}"
    decision = output.decision_text(attempt)
    text = f"attempt {attempt.attempt_number} got {output.attempt_result(attempt)}{duration}"
    return f"{text}; {decision}" if decision else text


REFRESH_INTERVAL_S = 1.0
_MAX_REFRESH_LOAD = 0.2
"""Maximum share of the time for requests: the service needs up to 60 us for each downstream, and
10,000 of them would keep one of its processes busy if they were read once a second."""
_MAX_DOWNSTREAMS = 10_000
"""Maximum number of downstreams to fetch, which is how many a service usually has at most."""
_MAX_ROWS = 1_000
"""Maximum number of downstreams to print, the busiest first."""
_LINES_OUTSIDE_ROWS = 5
"""Terminal lines kept free for the totals and the headings."""
_SAMPLE = re.compile(r"(retry_\w+)\{(.*)\} (\S+)")
"""Line of the Prometheus text format, with its metric, labels and value."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LABEL_OF_METRIC = {
    "retry_tasks": "status",
    "retry_attempts_total": "outcome",
    "retry_task_outcomes_total": "outcome",
}
"""Metrics to show, each with the label by which its values are added up."""


class Snapshot(NamedTuple):
    """Metrics and downstreams at one moment."""

    at: float
    """Time of the snapshot in monotonic seconds."""
    metrics: dict[str, dict[str, float]]
    """Counts by metric, and by value of the metric's label in `_LABEL_OF_METRIC`."""
    downstreams: list[DownstreamInfo]
    has_counters: bool = True
    """Whether `metrics` has the counters of attempts, which only an operator's key can read."""


def top(
    server: ServerOption = DEFAULT_SERVER, api_key: ApiKeyOption = None, as_json: JsonOption = False
) -> None:
    """Show the number of tasks, rates and the busiest downstreams, once a second.

    Runs until q or Ctrl-C. Without a terminal, prints one table. With --json, each line is a
    snapshot.
    """
    from rich.live import Live

    terminal = output.console()
    reads_keys = terminal.is_terminal and not as_json
    with (
        connect(server, api_key) as client,
        _quit_key() if reads_keys else nullcontext(_sleep) as wait,
    ):
        snapshot_pairs = pairwise(_snapshots(client, server, api_key, wait))
        if as_json:
            for previous, current in snapshot_pairs:
                output.print_json(summarize(previous, current), indent=None)
        elif not terminal.is_terminal:
            terminal.print(_render(*next(snapshot_pairs), max_rows=_MAX_ROWS))
        else:
            with Live(console=terminal, auto_refresh=False, screen=True) as live:
                for previous, current in snapshot_pairs:
                    max_rows = terminal.height - _LINES_OUTSIDE_ROWS
                    live.update(_render(previous, current, max_rows), refresh=True)


def summarize(previous: Snapshot, current: Snapshot) -> dict[str, Any]:
    """Return task counts, downstreams, and rates per second, which are None without counters."""
    return {
        "tasks": _count_tasks(current),
        "attemptsPerSecond": _rates("retry_attempts_total", previous, current),
        "finishedPerSecond": _rates("retry_task_outcomes_total", previous, current),
        "downstreams": output.to_builtins(current.downstreams[:_MAX_ROWS]),
    }


def _count_tasks(snapshot: Snapshot) -> dict[str, int]:
    """Return the number of tasks by status."""
    counts = snapshot.metrics["retry_tasks"]
    if counts:
        return {status: int(count) for status, count in counts.items()}
    # Another process of the service reports this metric. The downstreams are the same in all
    # processes, but they do not count the tasks that have succeeded or were cancelled.
    return {
        "PENDING": sum(downstream.pending for downstream in snapshot.downstreams),
        "IN_FLIGHT": sum(downstream.in_flight for downstream in snapshot.downstreams),
        "EXHAUSTED": sum(downstream.dead for downstream in snapshot.downstreams),
    }


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Return the metrics in `_LABEL_OF_METRIC` from the Prometheus text format."""
    metrics: dict[str, dict[str, float]] = {name: {} for name in _LABEL_OF_METRIC}
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is not None and sample[1] in metrics:
            label_value = dict(_LABEL.findall(sample[2])).get(_LABEL_OF_METRIC[sample[1]], "")
            counts = metrics[sample[1]]
            counts[label_value] = counts.get(label_value, 0.0) + float(sample[3])
    return metrics


@contextmanager
def _quit_key() -> Generator[Callable[[float], bool]]:
    """Read single keys from the terminal; yield a function that waits until q is pressed.

    Without a terminal as standard input, and on Windows, there is only Ctrl-C.
    """
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    attributes = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)  # keys are not echoed, and can be read without Enter
    try:
        yield partial(wait_for_quit, descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)


def _sleep(seconds: float) -> bool:
    effects.blocking_sleep(seconds, None)
    return False


def wait_for_quit(descriptor: int, seconds: float) -> bool:
    """Wait, and return whether q was pressed or the terminal was closed; True ends the wait."""
    end = effects.now() + seconds
    while (remaining := end - effects.now()) > 0:
        readable, _, _ = select.select([descriptor], [], [], remaining)
        if readable:
            keys = os.read(descriptor, 1024)
            if not keys or b"q" in keys.lower():
                return True
    return False


def _snapshots(
    client: Client, server: str, api_key: str | None, wait: Callable[[float], bool]
) -> Iterator[Snapshot]:
    """Yield snapshots until `wait` returns True.

    There are `REFRESH_INTERVAL_S` seconds between them, or more if their requests take long.
    """
    is_quit = False
    while not is_quit:
        started_at = effects.now()
        downstreams = sorted(islice(client.downstreams(), _MAX_DOWNSTREAMS), key=busiest_first)
        text = _fetch_metrics(server, api_key)
        has_counters = "retry_attempts_total" in text
        now = effects.now()
        yield Snapshot(now, parse_metrics(text), downstreams, has_counters)
        busy_s = now - started_at
        is_quit = wait(max(REFRESH_INTERVAL_S, busy_s / _MAX_REFRESH_LOAD - busy_s))


def busiest_first(downstream: DownstreamInfo) -> tuple[object, ...]:
    """Return the sort key of a downstream in `tarry top`.

    First come downstreams with unfinished tasks, those that are paused or failing before all
    others; then idle downstreams, in the same order.
    """
    unfinished_count = downstream.pending + downstream.in_flight
    is_active = downstream.state == "ACTIVE"
    return not unfinished_count, is_active, -unfinished_count, -downstream.dead, downstream.lane


def _fetch_metrics(server: str, api_key: str | None) -> str:
    import httpx

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        response = httpx.get(f"{server.rstrip('/')}/metrics", headers=headers, trust_env=False)
    except httpx.RequestError as error:
        raise ServiceUnreachable(f"GET /metrics got no response: {error}") from error
    if not response.is_success:
        msg = f"GET /metrics was answered with {response.status_code}"
        raise ServiceUnavailable(msg, status=response.status_code)
    return response.text


def _rates(metric: str, previous: Snapshot, current: Snapshot) -> dict[str, float] | None:
    """Return the increase of a counter per second by label value; None without counters."""
    if not current.has_counters:
        return None
    elapsed_s = max(current.at - previous.at, 1e-9)
    # A restart of the service resets its counters, so a negative difference counts as 0.
    return {
        label_value: max(0.0, count - previous.metrics[metric].get(label_value, 0.0)) / elapsed_s
        for label_value, count in current.metrics[metric].items()
    }


def _render(previous: Snapshot, current: Snapshot, max_rows: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    summary = summarize(previous, current)
    tasks = "  ".join(
        f"{output.to_printable_line(status)} {count:,}"
        for status, count in summary["tasks"].items()
    )
    rates = "visible only with an operator's key"
    if current.has_counters:
        attempts = _format_rates("attempts", summary["attemptsPerSecond"])
        finished = _format_rates("tasks", summary["finishedPerSecond"])
        rates = f"{attempts or 'no attempts yet'}  {finished}".rstrip()
    return Group(
        Text(f"tasks: {tasks}"),
        Text(f"per second: {rates}"),
        Text(),
        output.table(
            _HEADINGS,
            map(_downstream_row, current.downstreams[: max(1, max_rows)]),
            cut_column="downstream",
        ),
    )


def _format_rates(noun: str, rates: dict[str, float]) -> str:
    return "  ".join(
        f"{rate:,.1f} {noun} {output.to_printable_line(label_value)}"
        for label_value, rate in sorted(rates.items())
    )
