"""Tests of the pages about moving from another library: both blocks of a pair behave the same.

A pair is a ```python before block, with the code for the other library, and the ```python after
block that follows it, with the code for tarry. Both define `fetch`, which calls `get` or sends an
HTTP request. The tests replace `get`, and the part of urllib3 that sends a request, by a function
that raises or returns the replies of a script, and compare the times of the calls, the result or
error, and the printed text. Time is virtual. The first Python block of a page is run before each
of the two. A text block below a pair shows how the two differ.
"""

import datetime
import inspect
import io
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from itertools import chain, pairwise, product, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import backoff
import pytest
import stamina
import tenacity
import urllib3
from urllib3.exceptions import ConnectTimeoutError, ReadTimeoutError

from tarry.runtime.events import bus
from tarry.testing import VirtualClock, scripted_random
from tests.test_docs import DOCS, Block, blocks_of

LIBRARIES = ("backoff", "stamina", "tenacity", "urllib3")
"""The retry libraries; pages about moving from a service or a task queue have no pairs."""
PAGES = [DOCS / f"moving-from-{library}.md" for library in LIBRARIES]

REPLIES = {
    "ok": "'ok'",
    "None": "None",
    "pending": "'pending'",
    "ConnectionError": "ConnectionError('reset')",
    "TimeoutError": "TimeoutError('late')",
    "ValueError": "ValueError('bug')",
    "Throttled": "Throttled(7)",
    "HTTPError-404": "HTTPError(404)",
    "HTTPError-503": "HTTPError(503)",
}
"""Expressions with the names of the page, by the names that scripts use. Errors are raised."""

SCRIPTS = [
    "ok",
    "None ok",
    "pending pending ok",
    "ConnectionError ok",
    "ConnectionError TimeoutError ConnectionError ok",
    "TimeoutError TimeoutError ok",
    "ConnectionError ValueError",
    "Throttled ok",
    "ConnectionError Throttled Throttled ConnectionError ok",
    "HTTPError-503 HTTPError-404",
    "None " * 40,
    "pending " * 40,
    "ConnectionError " * 40,
    "Throttled " * 40,
    "HTTPError-503 " * 40,
]
"""The replies to the calls of `get`, in order, then `ok`. Each pair is run with each script."""

HTTP_SCRIPTS = [
    "200",
    "404",
    "500 200",
    "503 503 200",
    "503 404",
    "403 200",
    "403-after-3 403-after-3 200",
    "503-after-3 200",
    "503 503-after-3 503 200",
    "Refused 503 200",
    "Dropped 200",
    "ConnectTimeout ReadTimeout Dropped",
    "Refused 503 Dropped 503 Refused 503 Dropped 503 Refused 503 Dropped",
    "503 " * 20,
    "Refused " * 20,
    "Dropped " * 20,
    "ConnectTimeout " * 20,
]
"""The replies to the requests on the page about urllib3, then 200."""


class Observation(NamedTuple):
    """How a call of `fetch` behaved."""

    call_times: list[float]
    result: str
    printed: str


@contextmanager
def virtual_time(random_number: float) -> Iterator[VirtualClock]:
    """Replace the clock, the waits and the random numbers of tarry and of the other libraries."""
    start = datetime.datetime(2026, 1, 1)  # noqa: DTZ001 - backoff uses local times
    with (
        pytest.MonkeyPatch.context() as patch,
        VirtualClock(start=0.0) as clock,
        scripted_random([random_number]),
    ):
        patch.setattr(time, "sleep", clock.advance)
        patch.setattr(time, "monotonic", clock.now)
        patch.setattr(random, "random", lambda: random_number)
        patch.setattr(random, "uniform", lambda low, high: low + random_number * (high - low))
        patch.setattr(bus, "listeners", ())
        patch.setattr(logging.getLogger("billing"), "handlers", [])
        stamina.instrumentation.set_on_retry_hooks([])  # the default writes to stdout
        virtual_datetime = SimpleNamespace(
            now=lambda: start + datetime.timedelta(seconds=clock.now())
        )
        for module in ("backoff._sync.datetime", "backoff._async.datetime"):
            patch.setattr(module, SimpleNamespace(datetime=virtual_datetime))
        yield clock


@contextmanager
def http_server(reply: Callable[[], str]) -> Iterator[None]:
    """Replace the function with which urllib3 sends a request; `reply` returns a reply's name."""

    def send(pool: Any, connection: Any, method: str, url: str, **options: Any) -> Any:
        name = reply()
        match name:
            case "Refused":
                raise urllib3.exceptions.NewConnectionError(connection, "refused")
            case "ConnectTimeout":
                raise ConnectTimeoutError(connection, "connect timeout")
            case "ReadTimeout":
                raise ReadTimeoutError(pool, url, "read timeout")
            case "Dropped":
                raise ConnectionResetError("dropped")
        status, _, retry_after = name.partition("-after-")
        return urllib3.HTTPResponse(
            body=io.BytesIO(b""),
            headers={"Retry-After": retry_after} if retry_after else {},
            status=int(status),
            preload_content=options["preload_content"],
            request_method=method,
            retries=options["retries"],
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(urllib3.HTTPConnectionPool, "_make_request", send)
        yield


@cache
def first_block(page: Path) -> Block:
    """Return the block with the imports of a page."""
    return blocks_of(page)[0]


def call_fetch(fetch: Callable[[], Any], clock: VirtualClock) -> Any:
    """Call a function, coroutine function, generator or async generator; return its result."""
    result = fetch()
    if inspect.isawaitable(result):
        return clock.run(lambda: result)
    if inspect.isgenerator(result):
        return list(result)
    if inspect.isasyncgen(result):

        async def collect() -> list[Any]:
            return [item async for item in result]

        return clock.run(collect)
    return result


def observe(
    page: Path, block: Block, script: str, *, duration: float, random_number: float
) -> Observation:
    """Run a block and call its `fetch`; each call of `get` takes `duration` seconds."""
    namespace: dict[str, Any] = {"__name__": "page"}
    call_times: list[float] = []
    printed = io.StringIO()
    success = "200" if page.stem == "moving-from-urllib3" else "ok"
    names = chain(script.split(), repeat(success))
    with virtual_time(random_number) as clock:

        def next_reply() -> str:
            call_times.append(clock.now())
            clock.advance(duration)
            return next(names)

        def get() -> object:
            reply = eval(REPLIES[next_reply()], namespace)  # noqa: S307
            if isinstance(reply, Exception):
                raise reply
            return reply

        with redirect_stdout(printed), http_server(next_reply):
            exec(first_block(page).compile(page), namespace)  # noqa: S102
            namespace["get"] = get
            exec(block.compile(page), namespace)  # noqa: S102
            try:
                result = describe_result(call_fetch(namespace["fetch"], clock))
            except Exception as error:
                result = type(error).__name__
    return Observation(call_times, result, printed.getvalue())


def describe_result(result: object) -> str:
    """Return the status of a response, or the `repr` of another result."""
    status = getattr(result, "status_code", None) or getattr(result, "status", None)
    return repr(result) if status is None else str(status)


def heading_of(page: Path, block: Block) -> str:
    """Return the last heading above a block."""
    lines = page.read_text(encoding="utf-8").splitlines()[: block.line]
    return next(line.lstrip("# ") for line in reversed(lines) if line.startswith("#"))


def script_of(difference: str) -> str:
    """Return the script for a text block that shows how a pair differs."""
    first_line = difference.partition("\n")[0]
    if found := re.fullmatch(r"if the replies are (.+):", first_line):
        return found[1].replace(",", "")
    found = re.fullmatch(r"if every reply is (\S+):", first_line)
    assert found is not None, first_line
    return f"{found[1]} " * 40


def pairs() -> list[Any]:
    """Return the page, both blocks and the text block below them, or None, for each pair."""
    found = []
    for page in PAGES:
        blocks = [*blocks_of(page), Block("", "", 0)]
        for before, after, following in zip(blocks, blocks[1:], blocks[2:], strict=False):
            if before.info == "python before":
                difference = following.text if following.info == "text" else None
                name = f"{page.stem}, line {before.line}, {heading_of(page, before)}"
                found.append(pytest.param(page, before, after, difference, id=name))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_in_pairs(page: Path) -> None:
    """Each block for the other library is followed by a block for tarry."""
    infos = [block.info for block in blocks_of(page)]

    assert "python" == infos[0]
    for info, following in pairwise([*infos, ""]):
        assert (info == "python before") == (following == "python after")


@pytest.mark.parametrize(("page", "before", "after", "difference"), pairs())
def test_pair_behaves_the_same(
    page: Path, before: Block, after: Block, difference: str | None
) -> None:
    """Both blocks of a pair make the same calls at the same times, with the same result."""
    scripts = HTTP_SCRIPTS if page.stem == "moving-from-urllib3" else SCRIPTS
    if difference is not None:  # leave out the failures with which the two differ
        failures = set(script_of(difference).split()) - {"ok", "200"}
        scripts = [script for script in scripts if not failures & set(script.split())]

    for script, (duration, random_number) in product(scripts, [(0.0, 0.3), (0.4, 0.6)]):
        expected, actual = (
            observe(page, block, script, duration=duration, random_number=random_number)
            for block in (before, after)
        )
        situation = f"script {script!r}, duration {duration}, random number {random_number}"
        assert expected.result == actual.result, situation
        assert pytest.approx(expected.call_times, abs=1e-5) == actual.call_times, situation
        assert expected.printed == actual.printed, situation


@pytest.mark.parametrize(
    ("page", "before", "after", "difference"),
    [pair for pair in pairs() if pair.values[3] is not None],
)
def test_difference_is_as_shown(page: Path, before: Block, after: Block, difference: str) -> None:
    """The text below a pair has the times of the calls and the result of both blocks."""
    lines = [difference.partition("\n")[0]]
    for block in (before, after):
        observed = observe(page, block, script_of(difference), duration=0.0, random_number=0.5)
        times = ", ".join(f"{call_time:.6g} s" for call_time in observed.call_times)
        lines.append(f"{block.info.removeprefix('python ')}: {times}, then {observed.result}")

    assert difference == "\n".join(lines) + "\n"


def parameters_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters of a function or class."""
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs"}


OPTIONS = {
    "backoff": {
        *backoff.__all__,
        *parameters_of(backoff.on_exception),
        *parameters_of(backoff.on_predicate),
        *parameters_of(backoff.expo),
        *parameters_of(backoff.fibo),
        *parameters_of(backoff.constant),
        *parameters_of(backoff.runtime),
    }
    - {"wait_gen_kwargs"},  # the parameters of the wait generators
    "stamina": {
        *stamina.__all__,
        *stamina.instrumentation.__all__,
        *parameters_of(stamina.retry),
        "next_wait",
        "num",
    },
    "tenacity": {
        *parameters_of(tenacity.Retrying),
        *(
            name
            for name in vars(tenacity)
            if re.match(r"(retry|stop|wait|before|after|sleep)_", name)
            and not name.endswith(("_base", "_nothing"))
        ),
        *("AsyncRetrying", "RetryCallState", "RetryError", "Retrying", "TornadoRetrying"),
        *("TryAgain", "retry_with", "statistics"),
    },
    "urllib3": parameters_of(urllib3.Retry),
}
"""The public names and parameters of each library."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_is_on_the_page(page: Path) -> None:
    """A page names each function and option of the other library."""
    text = page.read_text(encoding="utf-8")
    options = OPTIONS[page.stem.removeprefix("moving-from-")]

    assert set() == {name for name in options if not re.search(rf"\b{name}\b", text)}
