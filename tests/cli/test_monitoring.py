"""`tarry downstreams`, `tarry tail` and `tarry top`."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tarry.cli.monitoring import (
    Snapshot,
    busiest_first,
    event_details,
    parse_metrics,
    summarize,
    wait_for_quit,
)
from tarry.client import Client
from tarry.runtime.effects import effects
from tarry.wire.tasks import DownstreamInfo, LaneStateName, Page, ServiceEvent
from tests.cli.harness import CommandResult, run_command
from tests.integration.flaky import FlakyServer
from tests.integration.tenants import two_tenants

RunCli = Callable[..., CommandResult]


@contextmanager
def start_command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command that runs until it is interrupted."""
    with subprocess.Popen(
        [sys.executable, "-m", "tarry", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Send SIGINT; return the exit code and the output."""
    process.send_signal(signal.SIGINT)
    return process.wait(), _not_none(process.stderr).read()


def _not_none(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.fixture
def traffic(client: Client, target: FlakyServer) -> Iterator[None]:
    """Send calls until the test ends; one in four is retried, too few to open a breaker."""
    stopped = threading.Event()

    def send() -> None:
        number = 0
        while not stopped.is_set():
            number += 1
            plan = "200" if number % 4 else "503,200"
            url = f"{target.url}/?plan={plan}&run={number}"
            client.enqueue(url, wait=30, overrides={"initialDelayMs": 1})

    thread = threading.Thread(target=send)
    thread.start()
    yield
    stopped.set()
    thread.join()


@pytest.mark.usefixtures("traffic")
def test_tail_prints_events_until_ctrl_c(address: str, lane: str) -> None:
    """`tail` prints a line for each event; Ctrl-C exits with 130."""
    with start_command("tail", "--server", address) as process:
        lines: list[str] = []
        for line in _not_none(process.stdout):
            lines.append(line)
            if lane in line and "got 503" in line:
                break

        assert (130, "") == interrupt(process)
    assert "attempt" == lines[-1].split()[1]
    assert "attempt 1 got 503 in " in lines[-1]
    assert "; next after " in lines[-1]


@pytest.mark.usefixtures("traffic")
def test_tail_prints_json_lines(address: str, lane: str) -> None:
    """With --json each line is an event, without null fields."""
    with start_command("tail", "--server", address, "--json") as process:
        events = map(json.loads, _not_none(process.stdout))
        event: Any = next(
            event for event in events if event["kind"] == "attempt" and event["lane"] == lane
        )

    assert event["attempt"]["responseStatus"] in {200, 503}
    assert "missed" not in event


@pytest.mark.usefixtures("traffic")
def test_top_prints_json_lines(address: str, lane: str) -> None:
    """With --json each line has counts, rates and downstreams."""
    with start_command("top", "--server", address, "--json") as process:
        samples = map(json.loads, _not_none(process.stdout))
        sample: Any = next(
            sample for sample in samples if sample["finishedPerSecond"].get("succeeded")
        )

        assert (130, "") == interrupt(process)
    assert sample["tasks"]["SUCCEEDED"] > 0
    assert lane in [downstream["lane"] for downstream in sample["downstreams"]]


def read_until(descriptor: int, text: bytes) -> bytes:
    """Read from a terminal until `text` appears, or until the terminal is closed."""
    received = b""
    while text not in received:
        try:
            received += os.read(descriptor, 65536)
        except OSError:  # Linux: no process has the terminal open any more
            break
    return received


def test_q_quits_top(address: str) -> None:
    """In a terminal, the key q ends `top`; the exit code is 0."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "tarry", "top", "--server", address]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    ) as process:
        os.close(terminal)
        try:
            screen = read_until(controller, b"per second: ")
            os.write(controller, b"q")
            screen += read_until(controller, b"never printed")
            assert 0 == process.wait(), screen
        finally:
            process.kill()
            os.close(controller)


@pytest.mark.parametrize(
    ("keys", "expected"), [(b"q", True), (b"xQ", True), (b"", True), (b"x", False)]
)
def test_wait_for_quit(keys: bytes, expected: bool) -> None:
    """The wait ends when q is pressed, and when the terminal is closed."""
    reader, writer = os.pipe()
    try:
        os.write(writer, keys)
        if not keys:
            os.close(writer)
        assert expected is wait_for_quit(reader, 60.0 if expected else 0.01)
    finally:
        os.close(reader)
        if keys:
            os.close(writer)


def test_top_in_a_pipe_prints_one_table(
    run_cli: RunCli, client: Client, target: FlakyServer, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tarry.cli.monitoring.REFRESH_INTERVAL_S", 0.01)
    client.enqueue(target.url, wait=30)

    result = run_cli("top")

    assert 0 == result.code, result.err
    assert result.out.startswith("tasks: PENDING ")
    assert " tasks succeeded\n" in result.out
    assert any(line.startswith(f"{lane} ") for line in result.out.splitlines())


def test_top_of_a_tenant_has_no_rates(tmp_path: Path) -> None:
    """Without an operator's key, `top` says that rates are not visible."""
    with two_tenants(tmp_path) as callers:
        command = ("top", "--server", f"http://127.0.0.1:{callers.service.port}")
        result = run_command(*command, "--key", callers.secrets["ann"])

    assert (0, "per second: visible only with an operator's key") == (
        result.code,
        result.out.splitlines()[1],
    )


@pytest.mark.parametrize("command", ["tail", "top"])
def test_missing_service_is_reported(run_cli: RunCli, command: str) -> None:
    """Without a service, `tail` and `top` exit with an error."""
    result = run_cli(command, "--server", "http://127.0.0.1:1")

    assert (4, "") == (result.code, result.out)
    assert "start one with `tarry serve`" in result.err


def test_parse_metrics() -> None:
    """Samples are summed by the relevant label; other metrics are ignored."""
    page = (
        "# HELP retry_tasks Tasks\n"
        'retry_tasks{status="PENDING"} 3.0\n'
        'retry_attempts_total{outcome="success",policy="a"} 2.0\n'
        'retry_attempts_total{outcome="success",policy="b"} 5.0\n'
        'other{status="PENDING"} 9.0\n'
        "retry_superseded_total 1.0\n"
    )

    assert {
        "retry_tasks": {"PENDING": 3.0},
        "retry_attempts_total": {"success": 7.0},
        "retry_task_outcomes_total": {},
    } == parse_metrics(page)


def test_rates_are_differences_over_time() -> None:
    """A rate is the increase of a counter over time, and 0 after a restart resets the counter."""

    def snapshot(at: float, attempts: int) -> Snapshot:
        numbers = parse_metrics("")
        numbers["retry_attempts_total"] = {"success": attempts}
        return Snapshot(at, numbers, [])

    rates = [
        summarize(snapshot(10.0, 100), snapshot(12.0, attempts))["attemptsPerSecond"]["success"]
        for attempts in (150, 20)
    ]

    assert [25.0, 0.0] == rates


def make_downstream(
    host: str,
    state: LaneStateName = "ACTIVE",
    *,
    pending: int = 0,
    in_flight: int = 0,
    dead: int = 0,
) -> DownstreamInfo:
    """Return a downstream without limits and statistics."""
    return DownstreamInfo(
        tenant="default",
        lane=f"http:{host}:80",
        state=state,
        parked_until=None,
        consecutive_opens=0,
        pending=pending,
        in_flight=in_flight,
        dead=dead,
        last_claim_at=None,
        local=None,
    )


def test_top_reads_all_downstreams(
    run_cli: RunCli, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The busiest downstream comes first, also if more than 1,000 names precede its name."""
    idle = [make_downstream(f"idle-{number:04}") for number in range(1_110)]
    busy = make_downstream("waiting", "PAUSED", pending=30)
    monkeypatch.setattr("tarry.cli.monitoring.REFRESH_INTERVAL_S", 0.01)
    monkeypatch.setattr(Client, "downstreams", lambda _: iter([*idle, busy]))

    _tasks, _rates, _blank, _headings, first, *others = run_cli("top").out.splitlines()

    assert [busy.lane, "PAUSED", "30"] == first.split()[:3]
    assert 999 == len(others)


def test_order_of_downstreams_in_top() -> None:
    """Downstreams with tasks come before idle ones; in both groups, those with problems first."""
    ordered = [
        make_downstream("paused", "PAUSED", pending=30),
        make_downstream("probing", "PROBING", in_flight=1),
        make_downstream("busy", in_flight=900),
        make_downstream("calm", pending=1, dead=7),
        make_downstream("parked", "PARKED"),
        make_downstream("failed", dead=5),
        make_downstream("idle"),
    ]
    shuffled = ordered[::-1]

    assert ordered == sorted(shuffled, key=busiest_first)


def test_tasks_are_counted_by_downstream_if_another_process_reports_them() -> None:
    """Without `retry_tasks`, the unfinished tasks and dead letters of all downstreams are added."""
    downstreams = [
        make_downstream(host, pending=2, in_flight=1, dead=dead)
        for host, dead in (("a", 0), ("b", 5))
    ]
    snapshot = Snapshot(10.0, parse_metrics(""), downstreams)

    tasks = summarize(snapshot, snapshot)["tasks"]
    assert {"PENDING": 4, "IN_FLIGHT": 2, "EXHAUSTED": 5} == tasks


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (ServiceEvent(kind="missed", missed=3), "3 events were dropped: this reader is too slow"),
        (ServiceEvent(kind="exhausted", reason="permanent"), "permanent"),
        (ServiceEvent(kind="resumed", lane="http:x"), ""),
    ],
    ids=lambda value: value.kind if isinstance(value, ServiceEvent) else "",
)
def test_event_details(event: ServiceEvent, expected: str) -> None:
    """The details of an event depend on its kind."""
    assert expected == event_details(event)


def test_downstreams_have_state_backlog_and_latency(
    run_cli: RunCli, client: Client, target: FlakyServer, lane: str
) -> None:
    client.enqueue(target.url, wait=30)
    client.enqueue(target.url, delay=3600)

    heading, *rows = run_cli("downstreams").out.splitlines()
    (row,) = [row.split() for row in rows if row.split()[0] == lane]
    listed = run_cli("downstreams", "--json").json["items"]
    (document,) = [each for each in listed if each["lane"] == lane]

    columns = "downstream state pending leased dead p50 p90 p99 running limit rate waiting for"
    assert columns == " ".join(heading.split())
    assert [lane, "ACTIVE", "1", "0", "0"] == row[:5]
    assert {"ms", "s"} >= {row[6], row[8], row[10]}
    assert "0" == row[11]
    assert 1 == document["pending"]


class FakeDownstreams:
    """Pages of downstreams, and the sizes of the pages that were requested."""

    def __init__(self, downstreams: list[DownstreamInfo]) -> None:
        self.page_sizes: list[int] = []
        self._downstreams = downstreams

    def read_page(
        self, cursor: str | None = None, *, limit: int | None = None
    ) -> Page[DownstreamInfo]:
        """Return a page, as `Client.downstream_page` does."""
        assert limit is not None
        self.page_sizes.append(limit)
        first = int(cursor or 0)
        end = first + limit
        next_cursor = str(end) if end < len(self._downstreams) else None
        return Page(items=self._downstreams[first:end], next_cursor=next_cursor)


@pytest.fixture
def fake_downstreams(monkeypatch: pytest.MonkeyPatch) -> FakeDownstreams:
    """1,110 downstreams, of which numbers 500 and 1,100 are parked and number 1,105 is paused."""
    states: dict[int, LaneStateName] = {500: "PARKED", 1_100: "PARKED", 1_105: "PAUSED"}
    downstreams = [
        make_downstream(f"host-{number:04}", states.get(number, "ACTIVE"))
        for number in range(1_110)
    ]
    pages = FakeDownstreams(downstreams)
    monkeypatch.setattr(Client, "downstream_page", pages.read_page)
    return pages


@pytest.mark.parametrize(
    ("options", "expected", "is_cut"),
    [
        (("--state", "PARKED"), ["0500", "1100"], False),
        (("--state", "parked", "--state", "PAUSED"), ["0500", "1100", "1105"], False),
        (("--state", "PARKED", "--limit", "2"), ["0500", "1100"], False),
        (("--state", "PARKED", "--limit", "1"), ["0500"], True),
        (("--limit", "2"), ["0000", "0001"], True),
        (("--limit", "1105"), [f"{number:04}" for number in range(1_105)], True),
        (("--limit", "1110"), [f"{number:04}" for number in range(1_110)], False),
    ],
)
def test_list_of_many_downstreams(
    run_cli: RunCli,
    fake_downstreams: FakeDownstreams,
    options: tuple[str, ...],
    expected: list[str],
    is_cut: bool,
) -> None:
    """All pages are searched for a state; a cut list has a note and the cursor of the next page."""
    result = run_cli("downstreams", *options, "--json")

    document: Any = result.json
    numbers = [info["lane"].removeprefix("http:host-")[:4] for info in document["items"]]
    note = f"only the first {len(expected)} are listed; use --limit to list more\n"
    assert (0, note if is_cut else "") == (result.code, result.err)
    assert expected == numbers
    # The cursor continues after the last listed downstream.
    assert (str(int(expected[-1]) + 1) if is_cut else None) == document.get("nextCursor")
    assert max(fake_downstreams.page_sizes) <= 1_000


def test_cut_list_continues_at_its_cursor(run_cli: RunCli, client: Client) -> None:
    """The cursor in the JSON of a cut list is valid for the API, and continues the list."""
    lanes = [f"https:cut-{number}.example:443" for number in range(3)]
    for lane in lanes:
        client.pause(lane, create=True)
    cut = run_cli("downstreams", "--state", "PAUSED", "--limit", "2", "--json").json
    complete = run_cli("downstreams", "--state", "PAUSED")
    following = client.downstream_page(cut["nextCursor"])
    for lane in lanes:
        client.resume(lane)
    none = run_cli("downstreams", "--state", "PAUSED", "--state", "PARKED")

    assert lanes[:2] == [info["lane"] for info in cut["items"]]
    assert lanes[2] == following.items[0].lane
    assert lanes == [line.split()[0] for line in complete.out.splitlines()[1:]]
    assert (0, "no downstream is PAUSED or PARKED\n") == (none.code, none.out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--state", "down"), "--state must be one of ACTIVE, PARKED, PAUSED, PROBING, got 'DOWN'"),
        (("pause", "http:a:80", "--state", "PAUSED"), "--state can only be given for the list"),
    ],
)
def test_invalid_state_is_reported(
    run_cli: RunCli, arguments: tuple[str, ...], message: str
) -> None:
    """An unknown state, and a state for another action than the list, are rejected."""
    result = run_cli("downstreams", *arguments)

    assert (2, "") == (result.code, result.out)
    assert message in result.err


def test_tasks_that_wait_for_a_slot_are_not_counted_as_running(
    run_cli: RunCli, client: Client, target: FlakyServer, lane: str
) -> None:
    """`running` is the number of attempts; `explain` says that the other task waits for a slot."""
    client.set_limits(lane, concurrency=1, create=True)
    client.enqueue(f"{target.url}/?plan=late&run=first")
    waiting_task = client.enqueue(f"{target.url}/?plan=late&run=second")
    while client.get(waiting_task).status != "IN_FLIGHT" or not target.connections:
        effects.blocking_sleep(0.01, None)

    rows = run_cli("downstreams").out.splitlines()[1:]
    explanation = run_cli("tasks", "explain", waiting_task.task_id).out
    target.may_continue.set()
    client.set_limits(lane)

    (row,) = [row.split() for row in rows if row.split()[0] == lane]
    assert [lane, "ACTIVE", "0", "2", "0", "1", "1"] == row[:7]  # no attempt has ended
    assert explanation.endswith(
        "Attempt 1 waits for a free slot (limits of concurrency and rate).\n"
    )


def test_a_downstream_is_shown_with_its_breaker_history(
    run_cli: RunCli, client: Client, target: FlakyServer, lane: str
) -> None:
    """`downstreams show` prints state, latency and the changes of the breaker, newest first."""
    client.set_limits(lane, breaker={"consecutiveFailures": 1, "openForMs": 600_000}, create=True)
    client.enqueue(target.url, wait=30)
    unchanged = run_cli("downstreams", "show", lane)
    # A retry after the reset would have a latency.
    client.enqueue(f"{target.url}/?plan=503&run=history", overrides={"maxAttempts": 1})
    while len(client.downstream(lane).breaker_history or []) < 1:
        effects.blocking_sleep(0.01, None)
    state, latency, heading, *rows = run_cli("downstreams", "show", lane).out.splitlines()
    client.reset(lane)
    client.set_limits(lane)
    document = run_cli("downstreams", "show", lane, "--json").json

    assert f"{lane} ACTIVE, breaker closed" == unchanged.out.splitlines()[0]
    assert "no change of the breaker is recorded" == unchanged.out.splitlines()[-1]
    assert state.startswith(f"{lane} PARKED, breaker open, parked until in ")
    assert latency.startswith("p50 ")
    assert "2 attempts since" in latency
    assert ["breaker", "from", "to", "reason"] == heading.split()
    [row] = rows
    assert row.endswith("closed  open  Too many attempts failed, the last one: status 503.")
    closed, opened = document["breakerHistory"]
    assert ("open", "closed", "An operator reset the downstream.") == (
        closed["from"],
        closed["to"],
        closed["reason"],
    )
    assert "open" == opened["to"]
    assert document["latency"] is None


def test_pause_resume_and_reset(
    run_cli: RunCli, client: Client, target: FlakyServer, lane: str
) -> None:
    """A paused downstream gets no attempts until it is resumed; `reset` prints its state."""
    client.enqueue(target.url, wait=30)

    paused = run_cli("downstreams", "pause", lane)
    unfinished = run_cli("send", target.url, "--wait", "200ms", "--json")
    resumed = run_cli("downstreams", "resume", lane, "--json")
    reset = run_cli("downstreams", "reset", lane)
    client.enqueue(target.url, delay=3600)
    paused_with_tasks = run_cli("downstreams", "pause", lane)
    client.resume(lane)

    assert (0, f"{lane} PAUSED\n") == (paused.code, paused.out)
    warning = "its waiting tasks still end when their total budgets are used up"
    assert f"{lane} PAUSED; {warning}\n" == paused_with_tasks.out
    assert (1, 0) == (unfinished.code, unfinished.json["attemptNumber"])
    assert "ACTIVE" == resumed.json["state"]
    assert f"{lane} ACTIVE\n" == reset.out
    assert "SUCCEEDED" == client.wait(unfinished.json["taskId"], 30).status


def test_limits_are_set_and_removed(run_cli: RunCli, lane: str) -> None:
    """`set` replaces the limits of a downstream; no option removes them."""
    limited = run_cli(
        "downstreams", "set", lane, "--create", "--rate", "50", "--concurrency", "10",
        "--breaker", "failureRate=0.5,openForMs=5000", "--budget", "off",
    )  # fmt: skip
    document = run_cli("downstreams", "set", lane, "--rate", "7", "--json").json
    removed = run_cli("downstreams", "set", lane)

    limits = (
        '{"ratePerSecond": 50.0, "concurrency": 10, '
        '"breaker": {"failureRate": 0.5, "openForMs": 5000}, "budget": {"enabled": false}}'
    )
    assert (0, f"{lane} ACTIVE, limits: {limits}\n") == (limited.code, limited.out)
    assert ({"ratePerSecond": 7.0}, "API") == (document["limits"], document["limitsSource"])
    assert f"{lane} ACTIVE, limits: {{}}\n" == removed.out


@pytest.mark.parametrize("options", [("pause",), ("set", "--rate", "5"), ("pause", "--json")])
def test_unused_downstream_needs_an_option(
    run_cli: RunCli, client: Client, lane: str, options: tuple[str, ...]
) -> None:
    """A downstream that no task has used, perhaps misspelt, is only changed with `--create`."""
    action, *others = options
    refused = run_cli("downstreams", action, lane, *others)
    created = run_cli("downstreams", action, lane, "--create", *others)
    client.resume(lane)
    client.set_limits(lane)

    verb = "pause" if action == "pause" else "limit"
    assert (3, "") == (refused.code, refused.out)
    assert f"error: Tenant default has no downstream {lane}. Check the name" in refused.err
    assert f"To {verb} it before its first task, add ?create=true (tarry: --create)." in refused.err
    assert (0, "") == (created.code, created.err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pause", "http:a:80", "--rate", "5"), "--rate can only be given with"),
        (("set", "http:a:80", "--budget", "ratio"), "--budget must be `off`, or fields"),
        (("set", "http:a:80", "--breaker", "x=1"), "breaker.x is not a known field"),
        (("set", "http:a:80", "--rate", "0"), "error: --rate is invalid: expected number >= 0.001"),
        (("set", "http:a:80", "--concurrency", "0"), "error: --concurrency is invalid: expected"),
        (("resume", "http:a:80", "--create"), "--create can only be given with"),
        (("set", "nowhere"), "error: LANE must be scheme:host:port"),
    ],
)
def test_invalid_limits_are_reported(
    run_cli: RunCli, arguments: tuple[str, ...], message: str
) -> None:
    """Invalid options, fields and names of downstreams are reported."""
    result = run_cli("downstreams", *arguments)
    assert 2 == result.code
    assert message in result.err


def test_invalid_arguments_are_reported(run_cli: RunCli) -> None:
    """An unknown action, a missing and an unknown downstream are reported."""
    unknown_action = run_cli("downstreams", "stop", "http:x")
    no_lane = run_cli("downstreams", "pause")
    unknown_lane = run_cli("downstreams", "resume", "http:nowhere:80")

    assert 2 == unknown_action.code
    assert "must be one of pause, reset, resume, set, show, got 'stop'" in unknown_action.err
    assert 2 == no_lane.code
    assert "LANE is required: the downstream to pause" in no_lane.err
    assert (3, "") == (unknown_lane.code, unknown_lane.out)
    assert "error: Tenant default has no downstream http:nowhere:80. Check" in unknown_lane.err
