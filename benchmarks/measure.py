"""Measures all candidates in each case (such as async calls that succeed), and imports.

All candidates wrap the same function, under the same conditions:

* Batches are short and interleaved in a new random order each round, so other load on the
  machine affects all candidates. A ratio is computed for each round; the result is their median.
* Time is this thread's processor time if its resolution is at least 1 us, else wall-clock time.
* Each candidate has its own copy of the timing code, so that the interpreter's inline caches work
  as in a real program. The loop is unrolled five times, so its own cost is negligible.
* Waits are removed by patching ``time.sleep`` and ``asyncio.sleep``, so the code of each library
  around the sleep is still measured. tarry's waits are removed by its own ``testing.no_wait``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import repeat
from statistics import median
from types import FunctionType
from typing import Any
from unittest import mock

from benchmarks.candidates import ASYNC_ONLY, CANDIDATES, Work

CASES = ("sync-success", "sync-failure", "async-success", "async-failure")
"""Sync and async calls that succeed, and calls whose first attempt fails."""
IMPORT_STATEMENTS = (
    *("import tarry", "import tarry; tarry.retry", "import tenacity", "import stamina"),
    *("import backoff", "import opnieuw", "import hyx.retry", "import nopanic", "import asyncio"),
)
FIRST_CALL = """\
import {library} as library
@library.retry({arguments})
def work():
    return 1
work()
"""
FIRST_CALL_ARGUMENTS = {
    "tarry": "on=OSError",
    "tenacity": "retry=library.retry_if_exception_type(OSError)",
    "stamina": "on=OSError",
    "nopanic": "on=OSError",
}
IMPORT_PROGRAMS = {statement: statement for statement in IMPORT_STATEMENTS} | {
    f"first call of {library}": FIRST_CALL.format(library=library, arguments=arguments)
    for library, arguments in FIRST_CALL_ARGUMENTS.items()
}
"""The code of each row of the table `imports`. A first call includes the import."""
TIMER = """\
import sys, time
start = time.process_time()
{}
print((time.process_time() - start) * 1e3, "asyncio" in sys.modules)
"""
HAS_FINE_THREAD_TIME = time.get_clock_info("thread_time").resolution <= 1e-6
CLOCK = time.thread_time_ns if HAS_FINE_THREAD_TIME else time.perf_counter_ns
MAX_CHECK_S = 0.1
"""The limit for a call without waits, which takes microseconds; three waits take 0.35 s."""
Progress = Callable[[str], None]


@dataclass(slots=True)
class Row:
    """Nanoseconds per call, or milliseconds per import, of each round; or the error."""

    rounds: list[float] = field(default_factory=list)
    error: str = ""
    loads_asyncio: bool = False

    def ratio(self, other: Row) -> float:
        """Return the median over the rounds of this row's time divided by the other's."""
        return median(a / b for a, b in zip(self.rounds, other.rounds, strict=True))


def build_work(case: str) -> Work:
    """Return the function that all candidates of a case call."""
    failed = False

    def succeed() -> int:
        return 1

    def fail_first() -> int:
        nonlocal failed
        failed = not failed
        if failed:
            raise ConnectionResetError
        return 1

    async def succeed_async() -> int:
        return 1

    async def fail_first_async() -> int:
        nonlocal failed
        failed = not failed
        if failed:
            raise ConnectionResetError
        return 1

    functions: tuple[Work, ...] = (succeed, fail_first, succeed_async, fail_first_async)
    return functions[CASES.index(case)]


def time_batch(f: Work, repetitions: int) -> int:
    """Return the nanoseconds of ``5 * repetitions`` calls."""
    start = CLOCK()
    for _ in repeat(None, repetitions):
        f()
        f()
        f()
        f()
        f()
    return CLOCK() - start


async def time_batch_async(f: Work, repetitions: int) -> int:
    """Return the nanoseconds of ``5 * repetitions`` awaited calls."""
    start = CLOCK()
    for _ in repeat(None, repetitions):
        await f()
        await f()
        await f()
        await f()
        await f()
    return CLOCK() - start


@contextmanager
def no_waits() -> Iterator[None]:
    """Disable all waits and all logging, in the same way for all candidates."""

    def skip_sleep(_seconds: float) -> None: ...

    async def skip_async_sleep(_seconds: float) -> None: ...

    with ExitStack() as stack:
        with suppress(Exception):  # if tarry is missing, its row shows the error
            stack.enter_context(import_module("tarry.testing").no_wait())
        stack.enter_context(mock.patch.object(time, "sleep", skip_sleep))
        stack.enter_context(mock.patch.object(asyncio, "sleep", skip_async_sleep))
        stack.callback(logging.disable, logging.NOTSET)
        logging.disable()
        yield


def check_attempts(
    decorate: Callable[[Work], Work], get_result: Callable[[Any], Any], case: str
) -> None:
    """Raise an error unless the candidate makes four attempts without waiting.

    ``get_result`` returns the result of a call; in an async case it runs the coroutine.
    """
    calls: list[None] = []

    def fail() -> None:
        calls.append(None)
        raise ConnectionResetError

    async def fail_async() -> None:
        fail()

    call = decorate(fail_async if case.startswith("async") else fail)
    start = time.perf_counter()
    with suppress(Exception):  # only the number of calls is checked
        get_result(call())
    seconds = time.perf_counter() - start
    if len(calls) != 4 or seconds > MAX_CHECK_S:
        msg = f"{len(calls)} attempts in {seconds:.3f} s, not 4 at once"
        raise RuntimeError(msg)


def prepare_batch(
    name: str, case: str, target_ns: int, runner: asyncio.Runner
) -> Callable[[], float]:
    """Return a function that measures a batch and returns its nanoseconds per call.

    The batch is calibrated to take about ``target_ns``.
    """
    is_async = case.startswith("async")
    code = (time_batch_async if is_async else time_batch).__code__
    time_calls = FunctionType(code.replace(co_name=code.co_name), globals())

    def get_result(value: Any) -> Any:
        return runner.run(value) if is_async else value

    check_attempts(CANDIDATES[name](), get_result, case)
    call = CANDIDATES[name]()(build_work(case))
    repetitions = 40
    for _ in range(3):
        repetitions = max(
            1, round(repetitions * target_ns / max(1, get_result(time_calls(call, repetitions))))
        )
    return lambda: float(get_result(time_calls(call, repetitions)) / (5 * repetitions))


def measure_case(
    case: str, *, rounds: int, target_ns: int, seed: int, progress: Progress
) -> dict[str, Row]:
    """Measure all candidates in one case; a candidate that raises is dropped with its error."""
    names = [name for name in CANDIDATES if case.startswith("async") or name not in ASYNC_ONLY]
    rows = {name: Row() for name in names}
    batches: dict[str, Callable[[], float]] = {}
    rng = random.Random(seed)
    with no_waits(), asyncio.Runner() as runner:
        for number in range(rounds + 1):
            progress(f"{case}: round {number} of {rounds}")
            for name in rng.sample(names, len(names)):
                if rows[name].error:
                    continue
                gc.collect()
                gc.disable()
                try:
                    if number:  # round 0 prepares
                        rows[name].rounds.append(batches[name]())
                    else:
                        batches[name] = prepare_batch(name, case, target_ns, runner)
                except Exception as exc:
                    rows[name] = Row(error=f"{type(exc).__name__}: {exc}")
                finally:
                    gc.enable()
            gc.freeze()  # so that the next gc.collect() has few objects to visit
    gc.unfreeze()
    return rows


def measure_imports(*, runs: int, seed: int, progress: Progress) -> dict[str, Row]:
    """Measure each import in new interpreters; the first round only writes bytecode.

    The time is processor time, which other load on the machine changes less than wall-clock time.
    """
    rows = {name: Row() for name in IMPORT_PROGRAMS}
    rng = random.Random(seed)
    # With this variable, modules that have changed would be compiled in each run.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for number in range(runs + 1):
        progress(f"imports: round {number} of {runs}")
        for name in rng.sample(list(IMPORT_PROGRAMS), len(IMPORT_PROGRAMS)):
            if rows[name].error:
                continue
            command = [sys.executable, "-c", TIMER.format(IMPORT_PROGRAMS[name])]
            process = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment
            )
            if process.returncode:
                rows[name] = Row(error=process.stderr.strip().rpartition("\n")[2])
            elif number:
                milliseconds, loads_asyncio = process.stdout.split()
                rows[name].rounds.append(float(milliseconds))
                rows[name].loads_asyncio = loads_asyncio == "True"
    return rows
