"""`tarry demo`: a service, flaky targets, and twelve calls that arrive all the same."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tarry.cli.remote import connect
from tarry.client.errors import NotFinished, ServiceUnreachable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from rich.table import Table

    from tarry.cli.demo_target import Flaky
    from tarry.client import Client
    from tarry.wire.tasks import AttemptLog, RetryTask

_FIRST_DELAY = 0.6
_PATIENCE = 60.0
"""Seconds after which something is wrong with this machine, or with tarry."""
_EVERY = 0.1
_SERVES = "tarry serves "


def demo() -> None:
    """Watch calls being retried to success: a service, flaky targets and twelve calls.

    One call ends as a dead letter, is explained and replayed. It takes some ten seconds, needs no
    network and leaves nothing behind.
    """
    from tempfile import TemporaryDirectory

    from tarry.cli.demo_target import DOOMED, PLANS, flaky_targets
    from tarry.cli.output import console, print_text

    print_text("starting a service, and three targets that fail ...")
    with (
        TemporaryDirectory(prefix="tarry-demo-") as folder,
        flaky_targets(PLANS) as target,
        _service(Path(folder)) as address,
        connect(address, None) as client,
    ):
        print_text(f"the service is at {address}; it gets {len(PLANS)} calls to make:")
        _send(client, target)
        board = Board(client, is_plain=not console().is_terminal)
        board.watch(PLANS)
        _explain(client, board.tasks[DOOMED])
        print_text("")
        print_text("The targets are mended, and `tarry dead replay` brings the call back:")
        target.is_mended = True
        client.replay()
        board.watch([DOOMED], replays=1)
        _sum_up(target, board)


class Board:
    """The calls as they stand: a live table for people, lines for a pipe."""

    def __init__(self, client: Client, *, is_plain: bool) -> None:
        self._client = client
        self._is_plain = is_plain
        self._told: dict[str, int] = {}
        self._last: dict[str, AttemptLog] = {}
        self.tasks: dict[str, RetryTask] = {}
        """By the path of their target."""

    def watch(self, paths: Iterable[str], replays: int = 0) -> None:
        """Show calls until all have ended, and have been replayed so often."""
        from rich.live import Live

        from tarry.cli.output import console
        from tarry.client.operations import FINAL_STATUSES
        from tarry.runtime.clocks import system

        end = system.now() + _PATIENCE
        showing = Live(console=console(), auto_refresh=False)
        with nullcontext() if self._is_plain else showing:
            while True:
                self._look()
                watched = {path: self.tasks[path] for path in paths}
                if not self._is_plain:
                    showing.update(self._table(watched), refresh=True)
                if all(
                    one.status in FINAL_STATUSES and one.replays >= replays
                    for one in watched.values()
                ):
                    return
                if system.now() > end:
                    msg = f"the calls have not ended within {_PATIENCE:g} s"
                    raise NotFinished(msg)
                system.sleep(_EVERY, None)

    def _look(self) -> None:
        """Ask for what is new."""
        for task in self._client.tasks():
            path = "/" + task.target_url.split("/", 3)[3]
            self.tasks[path] = task
            if task.attempt_number > self._told.get(path, 0):
                self._tell(path, task)

    def _tell(self, path: str, task: RetryTask) -> None:
        from tarry.cli.output import print_text

        for step in self._client.explain(task).steps:
            if step.attempt_number > self._told.get(path, 0):
                self._told[path] = step.attempt_number
                self._last[path] = step.attempt
                if self._is_plain:
                    print_text(f"{name_of(path)}: {step.text}")

    def _table(self, watched: Mapping[str, RetryTask]) -> Table:
        from tarry.cli.output import attempt_result, table, time_until
        from tarry.runtime.clocks import system

        now = system.unix_time()
        rows = [
            (
                name_of(path),
                task.status,
                task.attempt_number,
                "" if task.next_attempt_at is None else time_until(task.next_attempt_at, now),
                attempt_result(self._last[path]) if path in self._last else "",
            )
            for path, task in watched.items()
        ]
        return table(("call", "status", "attempts", "next attempt", "last answer"), rows)


def name_of(path: str) -> str:
    """Return a call's name: order 7."""
    return path.strip("/").replace("/", " ")


def _send(client: Client, target: Flaky) -> None:
    from tarry.cli.demo_target import ATTEMPTS, PLANS
    from tarry.core.policy import Policy

    policy = Policy(
        max_attempts=ATTEMPTS, initial_delay=_FIRST_DELAY, max_delay=4.0, jitter="equal"
    )
    client.put_policy("demo", policy)
    results = client.enqueue_many(
        [
            {"url": target.url_of(path), "body": {"order": place}, "policy": "demo"}
            for place, path in enumerate(PLANS, 1)
        ]
    )
    refused = [result.problem for result in results if result.task is None]
    if refused:
        msg = f"the service did not take the calls: {refused[0]}"
        raise ServiceUnreachable(msg)


def _explain(client: Client, task: RetryTask) -> None:
    from tarry.cli.demo_target import DOOMED
    from tarry.cli.output import print_text
    from tarry.cli.tasks import explanation_lines

    print_text("")
    print_text(
        f"{name_of(DOOMED).capitalize()} is a dead letter now. `tarry tasks explain` says why:"
    )
    explained = client.explain(task)
    for line in explanation_lines(explained.text, explained.next.text):
        print_text(line)


def _sum_up(target: Flaky, board: Board) -> None:
    """Say what happened, or what should not have."""
    from tarry.cli.demo_target import PLANS
    from tarry.cli.output import print_text

    lost = [name_of(path) for path in PLANS if board.tasks[path].status != "SUCCEEDED"]
    rekeyed = [name_of(path) for path, keys in target.keys.items() if len(set(keys)) != 1]
    if lost or rekeyed:
        msg = f"not delivered: {lost}; sent with more than one key: {rekeyed}"
        raise NotFinished(msg)
    requests = sum(map(len, target.keys.values()))
    retried = sum(len(keys) > 1 for keys in target.keys.values())
    print_text("")
    print_text(
        f"All {len(PLANS)} calls arrived, in {requests} attempts: {retried} were retried, each "
        "with one idempotency key. Nobody had to wait for them."
    )
    print_text("Now your own: `tarry serve --dev` in one terminal, `tarry send URL` in another.")


@contextmanager
def _service(folder: Path) -> Generator[str]:
    """Run a service in a process of its own; what it is told here, no variable changes."""
    import subprocess
    import sys

    flags = [
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--dev",
        "--store",
        f"sqlite:{folder / 'demo.db'}",
    ]
    flags += ["--set", "require_keys=false", "--set", "bodies=", "--set", "log_level=error"]
    command = [sys.executable, "-m", "tarry", "serve", *flags]
    with (
        (folder / "log").open("w+", encoding="utf-8") as log,
        subprocess.Popen(  # noqa: S603 - ourselves
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder
        ) as process,
    ):
        try:
            assert process.stdout is not None  # noqa: S101 - for the type checker
            first = process.stdout.readline()
            if not first.startswith(_SERVES):
                log.seek(0)
                msg = f"the service did not start: {first}{log.read()}"
                raise ServiceUnreachable(msg)
            yield first.removeprefix(_SERVES).split()[0]
        finally:
            process.terminate()
