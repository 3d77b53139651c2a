"""Count the bytecode instructions that the main process of the service executes for each task.

Run it with ``python -m benchmarks.service.instructions [CANDIDATE]``. The counts hardly depend on
the speed of the machine or on other work, so they show a change of a few percent that times do not
show. They leave out what C code does: system calls, parsing, encoding, hashing.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.service import tarry_server
from benchmarks.service.candidates import CANDIDATES, TARRY_BATCH, TARRY_SINGLE
from benchmarks.service.processes import Enqueuer, ProcessGroup, free_port
from benchmarks.service.target import Target, running_target

if TYPE_CHECKING:
    from types import CodeType, FrameType

TASKS, WARM_UP_TASKS = 2_000, 1_000
IDLE_S = 0.5  # before and after the tasks, so that no other work is counted
ENQUEUE_TIMEOUT_S = 300.0
_OUTPUT = "BENCH_INSTRUCTIONS"  # the variable with the path of the counts
_SERVE = "serve"


class InstructionCounter:
    """Counts instructions and calls by function, from one SIGUSR2 to the next."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._instructions: Counter[CodeType] = Counter()
        self._calls: Counter[CodeType] = Counter()
        self._is_counting = False

    def toggle(self, _signal_number: int, _frame: FrameType | None) -> None:
        """Start to count; or stop, and write the counts to the output file."""
        self._is_counting = not self._is_counting
        if self._is_counting:
            sys.settrace(self._trace_call)
            return
        sys.settrace(None)
        rows = [
            (count, self._calls[code], code.co_qualname, code.co_filename, code.co_firstlineno)
            for code, count in self._instructions.items()
        ]
        unfinished = self._output.with_suffix(".new")
        unfinished.write_text(json.dumps(rows))
        unfinished.replace(self._output)

    def _trace_call(self, frame: FrameType, _event: str, _arg: object):
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._calls[frame.f_code] += 1
        return self._trace_instruction

    def _trace_instruction(self, frame: FrameType, event: str, _arg: object):
        if event == "opcode":
            self._instructions[frame.f_code] += 1
        return self._trace_instruction


def serve() -> None:
    """Run `tarry serve` with a counter in its main process."""
    counter = InstructionCounter(Path(os.environ[_OUTPUT]))
    signal.signal(signal.SIGUSR2, counter.toggle)
    sys.argv = ["tarry", *tarry_server.SERVE_COMMAND[3:]]
    runpy.run_module("tarry", run_name="__main__")


def count(candidate: str, tasks: int) -> list[tuple[int, int, str, str, int]]:
    """Do the job with a candidate; return instructions, calls, name and place of each function."""
    with tempfile.TemporaryDirectory(prefix="tarry-bench-") as home:
        folder, port = Path(home), free_port()
        output = folder / "instructions.json"
        with running_target(folder) as target:
            environ = {
                **tarry_server.environ(folder, port),
                "BENCH_TARGET": target.url,
                _OUTPUT: str(output),
            }
            with ProcessGroup(environ, folder) as group:
                command = (sys.executable, "-m", "benchmarks.service.instructions", _SERVE)
                server = group.start(command)
                tarry_server.wait_until_ready(port, group.check)
                enqueuer = Enqueuer(group, CANDIDATES[candidate].enqueuer, ENQUEUE_TIMEOUT_S)
                _do_job(enqueuer, target, WARM_UP_TASKS, group)
                server.send_signal(signal.SIGUSR2)
                _do_job(enqueuer, target, tasks, group)
                server.send_signal(signal.SIGUSR2)
                while not output.exists():
                    group.check()
                    time.sleep(0.05)
        return json.loads(output.read_text())


def _do_job(enqueuer: Enqueuer, target: Target, tasks: int, group: ProcessGroup) -> None:
    time.sleep(IDLE_S)
    target.reset()
    enqueuer.enqueue(tasks)
    while target.stats()["done"] < tasks:
        group.check()
        time.sleep(0.05)
    time.sleep(IDLE_S)


def main() -> None:
    """Print the totals and the functions with the most instructions."""
    names = [TARRY_SINGLE, TARRY_BATCH]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service.instructions", description=__doc__
    )
    parser.add_argument("candidate", nargs="?", choices=[*names, _SERVE], default=TARRY_SINGLE)
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--top", type=int, default=60, help="number of functions to print (60)")
    args = parser.parse_args()
    if args.candidate == _SERVE:
        serve()
        return
    rows = sorted(count(args.candidate, args.tasks), reverse=True)
    instructions, calls = (sum(column) / args.tasks for column in list(zip(*rows, strict=True))[:2])
    print(f"{args.candidate}: {instructions:,.0f} instructions and {calls:.0f} calls for each task")
    for function_instructions, function_calls, name, file, line in rows[: args.top]:
        place = f"{file.rpartition('/src/')[2].rpartition('site-packages/')[2]}:{line}"
        per_task = function_instructions / args.tasks, function_calls / args.tasks
        print(f"{per_task[0]:8.1f} {per_task[1]:6.2f}  {name:50} {place}")


if __name__ == "__main__":
    main()
