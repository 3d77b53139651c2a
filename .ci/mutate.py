"""Measure which faults in the source the tests notice (mutation testing).

A mutant is the source with one small fault: another comparison, a constant that is one larger, a
statement that is missing. Tests that fail with it have killed it; a mutant that survives shows
behaviour that no test asserts.

All modules and tests are loaded once. For each mutant a fork replaces the code of one function (or
the value of one constant) and runs the tests that cover its line, without a new start of pytest.
Code that is only executed by other processes or during imports has no mutants.

    $ make mutants ARGS="--count 100 --tests tests/core -- src/tarry/core"

A later version of the source draws the same mutants where their code still exists, so a score
before a change of the tests can be compared with the score after it.
"""

import argparse
import ast
import contextlib
import gc
import hashlib
import json
import os
import resource
import select
import signal
import sys
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import coverage
import pytest

MAX_TEST_S = 15
"""A test that takes longer has noticed the mutant."""

MAX_MUTANT_S = 90
MAX_MODULE_S = 300
"""For recording the coverage of the tests in one file."""

MAX_MEMORY_BYTES = 4 << 30

COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
"""The attributes of a node of the syntax tree that contain statements."""


@dataclass
class Mutant:
    """One fault: `attribute` of `node` (or item `index` of it) becomes `value`."""

    path: str
    function: str
    text: str
    """The kind of the fault and the original text; independent of line numbers."""

    lines: range
    """The tests that run one of these lines may notice the fault."""

    node: Any
    attribute: str
    index: int | None
    value: Any
    statement: ast.stmt
    name: str = ""
    """Unique in the project."""

    is_constant: bool = False
    """Whether it is the value of a constant of the module."""

    def swap(self) -> None:
        """Put the fault into the tree, or the original back."""
        container = getattr(self.node, self.attribute)
        if self.index is None:
            setattr(self.node, self.attribute, self.value)
            self.value = container
        else:
            container[self.index], self.value = self.value, container[self.index]


def _negate(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _is_removable(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):  # not a docstring
        return not isinstance(statement.value, ast.Constant | ast.Yield)
    if isinstance(statement, ast.Assign):  # without a local name that later statements need
        return not any(isinstance(name, ast.Name) for name in statement.targets)
    return isinstance(statement, ast.AugAssign | ast.Raise | ast.Delete | ast.Continue)


class _MutantFinder(ast.NodeVisitor):
    """Lists the mutants of a module."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.function: list[str] = []
        self.statement: ast.stmt | None = None
        self.mutants: list[Mutant] = []

    def add(
        self, kind: str, node: ast.AST, attribute: str, value: object, index: int | None = None
    ) -> None:
        statement = cast("ast.stmt", self.statement)
        place: Any = node if hasattr(node, "lineno") else statement
        if kind in ("remove", "return None"):
            place = statement
        # Lines that run the fault: of a compound statement, those before its body.
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno
        lines = range(place.lineno, max(place.lineno, min(last, place.end_lineno)) + 1)
        text = f"{kind}: {ast.unparse(place)}"
        self.mutants.append(
            Mutant(
                self.path,
                ".".join(self.function),
                text,
                lines,
                node,
                attribute,
                index,
                value,
                statement,
            )
        )

    def visit_body(self, node: ast.AST) -> None:
        """Add the mutants of all statements in a node."""
        for attribute in BODIES:
            statements = getattr(node, attribute, None)
            if not isinstance(statements, list):
                continue
            for index, statement in enumerate(statements):
                if isinstance(statement, ast.ExceptHandler | ast.match_case):
                    self.visit_body(statement)
                    continue
                before, self.statement = self.statement, statement
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.visit_function(statement)
                elif isinstance(statement, ast.ClassDef):
                    self.visit_class(statement)
                elif self.function:
                    self.visit_statement(statement, node, attribute, index)
                else:
                    self.visit_constant(statement)
                self.statement = before

    def visit_function(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Add the mutants of a body; decorators and defaults are evaluated during the import."""
        self.function.append(function.name)
        self.visit_body(function)
        self.function.pop()

    def visit_class(self, definition: ast.ClassDef) -> None:
        """Add the mutants of the methods of a class, unless it is in a function."""
        if self.function:
            return
        self.function.append(definition.name)
        for member in definition.body:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                self.visit_function(member)
        self.function.pop()

    def visit_statement(
        self, statement: ast.stmt, parent: ast.AST, attribute: str, index: int
    ) -> None:
        """Add the mutants of a statement in a function, and of all that it contains."""
        if _is_removable(statement):
            self.add("remove", parent, attribute, ast.copy_location(ast.Pass(), statement), index)
        if isinstance(statement, ast.Return) and not _is_none(statement.value):
            self.add("return None", statement, "value", None)
        if isinstance(statement, ast.AugAssign) and type(statement.op) in ARITHMETIC:
            self.add("operator", statement, "op", ARITHMETIC[type(statement.op)]())
        if isinstance(statement, ast.If | ast.While) and not isinstance(
            statement.test, ast.Constant
        ):
            self.add("negate", statement, "test", _negate(statement.test))
        for name, value in ast.iter_fields(statement):
            if name in BODIES or name == "annotation":
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.expr | ast.withitem):
                    self.visit(item)
        self.visit_body(statement)

    def visit_constant(self, statement: ast.stmt) -> None:
        """Add the value of a constant of the module."""
        if isinstance(statement, ast.If):
            return
        value = getattr(statement, "value", None)
        target = getattr(statement, "target", None) or (getattr(statement, "targets", [None])[0])
        if not isinstance(target, ast.Name) or value is None:
            return
        for part in ast.walk(value):
            if isinstance(part, ast.Constant) and type(part.value) in (int, float):
                self.function.append(target.id)
                self.add("constant", part, "value", part.value + 1)
                self.mutants[-1].is_constant = True
                self.function.pop()
                return

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip messages."""

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                self.add(f"comparison {other.__name__}", node, "ops", other(), index)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC and not (_is_string(node.left) or _is_string(node.right)):
            self.add("operator", node, "op", ARITHMETIC[type(node.op)]())
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.add("and/or", node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add("negate", node, "test", _negate(node.test))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value is True or node.value is False:
            self.add("constant", node, "value", not node.value)
        elif type(node.value) in (int, float):
            self.add("constant", node, "value", node.value + 1)


def find_mutants(path: str) -> tuple[ast.Module, list[Mutant]]:
    """Return the tree and the mutants of a file, each with a unique name."""
    tree = ast.parse(Path(path).read_text())
    finder = _MutantFinder(path)
    finder.visit_body(tree)
    seen: dict[str, int] = defaultdict(int)
    for mutant in finder.mutants:
        name = f"{path}:{mutant.function}: {mutant.text}"
        seen[name] += 1
        mutant.name = f"{name} #{seen[name]}"
    return tree, finder.mutants


def draw(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants; a change of the source draws the same ones where they still exist."""

    def key(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).hexdigest()

    return sorted(mutants, key=key)[:count]


# --- code ---------------------------------------------------------------------------------------


def _code_objects(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield (constant.co_qualname, constant.co_firstlineno), constant
            yield from _code_objects(constant)


class Program:
    """The loaded source, in which the code of functions is replaced."""

    def __init__(self) -> None:
        self._functions: dict[str, list[types.FunctionType]] = defaultdict(list)
        gc.unfreeze()
        for function in gc.get_objects():
            if type(function) is types.FunctionType:
                self._functions[function.__code__.co_filename].append(function)
        gc.freeze()

    def replace(self, tree: ast.Module, mutant: Mutant) -> bool:
        """Run the mutant from now on, in this process."""
        path = str(Path(mutant.path).resolve())
        original = dict(_code_objects(compile(tree, path, "exec")))
        mutant.swap()
        ast.fix_missing_locations(tree)
        module = compile(tree, path, "exec")
        mutant.swap()
        changed = dict(_code_objects(module))
        replaced = False
        for function in self._functions[path]:
            key = (function.__code__.co_qualname, function.__code__.co_firstlineno)
            code = changed.get(key)
            if code is None or code == original.get(key):
                continue
            if code.co_freevars != function.__code__.co_freevars:
                continue
            function.__code__ = code
            replaced = True
        if mutant.is_constant:
            replaced = self._replace_constant(path, mutant)
        return replaced

    def _replace_constant(self, path: str, mutant: Mutant) -> bool:
        modules = [module for name, module in sys.modules.items() if name.startswith("tarry")]
        home = next(module for module in modules if module.__file__ == path)
        before = vars(home)[mutant.function]
        mutant.swap()
        expression = ast.Expression(cast("ast.Assign", mutant.statement).value)
        mutant.swap()
        try:
            value = eval(compile(expression, path, "eval"), dict(vars(home)))  # noqa: S307
        except ArithmeticError:
            return False
        if type(value) is not type(before):
            return False
        for module in modules:  # also where it is imported
            if vars(module).get(mutant.function) is before:
                setattr(module, mutant.function, value)
        return True


# --- tests --------------------------------------------------------------------------------------


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@contextlib.contextmanager
def _exit_at_end() -> Iterator[None]:
    """End a fork, also after an error, without the clean-up of the parent."""
    try:
        yield
    finally:
        os._exit(0)


def _receive(pipe: int, seconds: float, process: int) -> Iterator[list[Any]]:
    """Yield what a fork reports; kill it when its time is over."""
    deadline = time.monotonic() + seconds
    rest = b""
    while select.select([pipe], [], [], max(0, deadline - time.monotonic()))[0]:
        data = os.read(pipe, 1 << 20)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        yield from map(json.loads, lines)
    else:
        yield ["timeout", None]
    os.close(pipe)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)


class Session:
    """Runs in the place of pytest's loop over the tests."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._last = set(Path(options.last).read_text().split()) if options.last else set()
        self._pipe = -1
        self._failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        """Register a profile of hypothesis that does not simplify failing examples."""
        import hypothesis  # pytest warns about plugins that are loaded before it

        # A fault is found as soon as one example fails.
        hypothesis.settings.register_profile(
            "mutants",
            hypothesis.settings.get_profile("ci"),
            phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record the coverage of the tests unless it is known, and run the mutants."""
        self._plugins = session.config.pluginmanager
        self._items: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            self._items[_function_of(item)].append(item)
        print(f"\n{len(session.items)} tests, {len(self._items)} functions", flush=True)
        path = self._options.coverage
        if path is not None and path.exists():
            recorded = json.loads(path.read_text())
        else:
            recorded = self._record()
        if path is not None:
            path.write_text(json.dumps(recorded))
        self._run_mutants(recorded)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember that a test has failed."""
        self._failed |= report.failed

    def _send(self, *message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:  # a signal may interrupt a write
            data = data[os.write(self._pipe, data) :]

    def _fork(self) -> tuple[int, int]:
        """Return (process, pipe); in the fork, process is 0."""
        read, write = os.pipe()
        sys.stdout.flush()
        process = os.fork()
        if process:
            os.close(write)
            return process, read
        os.setsid()
        os.close(read)
        self._pipe = write
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        self._plugins.unregister(name="terminalreporter")
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        return 0, write

    def _run_tests(self, functions: list[str], recording: coverage.Coverage | None = None) -> None:
        """Run tests in a fork, and stop after the number of failures that the options ask for."""
        killers = set()
        items = [(function, item) for function in functions for item in self._items[function]]
        for (function, item), (_, following) in pairwise([*items, ("", None)]):
            if recording:
                recording.switch_context(function)
            self._send("start", function)
            self._failed = False
            start = time.perf_counter()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._send("end", function, time.perf_counter() - start, self._failed)
            if self._failed and not recording:
                killers.add(function)
                if len(killers) == self._options.killers:
                    break

    # --- coverage ---

    def _record(self) -> dict[str, Any]:
        """Return the tests of each line, the time of each test, and the tests that fail."""
        modules: dict[str, list[str]] = defaultdict(list)
        for function in self._items:
            modules[function.split("::")[0]].append(function)
        seconds: dict[str, float] = defaultdict(float)
        failed: set[str] = set()
        lines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for module, functions in modules.items():
            process, pipe = self._fork()
            if not process:
                with _exit_at_end():
                    self._record_module(functions)
            started = ""
            for kind, *values in _receive(pipe, MAX_MODULE_S, process):
                if kind == "start":
                    started = values[0]
                elif kind == "end":
                    seconds[values[0]] += values[1]
                    if values[2]:
                        failed.add(values[0])
                elif kind == "lines":
                    path, covered = values
                    for line, tests in covered.items():
                        lines[path][line] += tests
                elif kind == "done":
                    started = ""
                else:
                    failed.update(functions)
            if started:
                print(f"{module} ended in {started}", flush=True)
                failed.update(functions)
        total = sum(seconds.values())
        print(f"recorded in {total:.0f} s; without a mutant fail: {sorted(failed)}", flush=True)
        return {"lines": lines, "seconds": seconds, "failed": sorted(failed)}

    def _record_module(self, functions: list[str]) -> None:
        recording = coverage.Coverage(
            data_file=None,
            config_file=False,
            include=[
                f"{Path(path).resolve()}{'/*' * Path(path).is_dir()}" for path in self._sources
            ],
        )
        recording.start()
        self._run_tests(functions, recording)
        recording.stop()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tests that cover none of the sources
            data = recording.get_data()
        for path in data.measured_files():
            contexts = data.contexts_by_lineno(path)
            covered = {line: [name for name in tests if name] for line, tests in contexts.items()}
            self._send("lines", os.path.relpath(path), covered)
        self._send("done", None)

    @property
    def _sources(self) -> list[str]:
        return self._options.sources

    # --- mutants ---

    def _run_mutants(self, recorded: dict[str, Any]) -> None:
        program = Program()
        trees = {}
        mutants: list[Mutant] = []
        for source in self._sources:
            files = [source] if source.endswith(".py") else map(str, Path(source).rglob("*.py"))
            for path in sorted(files):
                trees[path], found = find_mutants(path)
                mutants += found
        chosen = draw(mutants, self._options.count, self._options.seed)
        output = self._options.output
        known = {}
        if output is not None and output.exists():
            lines = output.read_text().splitlines()
            known = {line["name"]: line for line in map(json.loads, lines)}
        print(f"{len(mutants)} mutants, {len(chosen)} drawn, {len(known)} known", flush=True)
        results: dict[str, int] = defaultdict(int)
        for mutant in chosen:
            result = known.get(mutant.name)
            if result is None:
                result = self._run_mutant(program, trees[mutant.path], mutant, recorded)
                if output is not None:
                    with output.open("a") as file:
                        file.write(json.dumps(result) + "\n")
            results[result["result"]] += 1
            if result["result"] != "killed":
                print(f"{result['result']}: {mutant.lines.start} {mutant.name}", flush=True)
        print(dict(results), flush=True)

    def _covering_tests(self, mutant: Mutant, recorded: dict[str, Any]) -> list[str]:
        """Return the tests that run the mutant: those of the same module first, fast ones first."""
        lines = recorded["lines"].get(mutant.path, {})
        used = {str(line) for line in mutant.lines}
        if mutant.is_constant:
            used = {
                str(node.lineno)
                for node in ast.walk(ast.parse(Path(mutant.path).read_text()))
                if isinstance(node, ast.Name) and node.id == mutant.function
            }
        tests = {test for line in used for test in lines.get(line, ())}
        tests = {test for test in tests if test in self._items} - set(recorded["failed"])
        stem = Path(mutant.path).stem

        def key(test: str) -> tuple[bool, bool, float]:
            is_other = stem not in Path(test.split("::", maxsplit=1)[0]).stem
            return test in self._last, is_other, recorded["seconds"][test]

        return sorted(tests, key=key)

    def _run_mutant(
        self, program: Program, tree: ast.Module, mutant: Mutant, recorded: dict[str, Any]
    ) -> dict[str, Any]:
        tests = self._covering_tests(mutant, recorded)
        result: dict[str, Any] = {"name": mutant.name, "covered_by": len(tests), "killers": []}
        if not tests:
            return result | {"result": "not covered"}
        deadline = time.monotonic() + self._options.seconds
        while tests and time.monotonic() < deadline:
            process, pipe = self._fork()
            if not process:
                with _exit_at_end():
                    if program.replace(tree, mutant):
                        self._send("replaced", None)
                        self._run_tests(tests)
                    self._send("done", None)
            started = ""
            is_replaced = False
            for kind, *values in _receive(pipe, deadline - time.monotonic(), process):
                if kind == "replaced":
                    is_replaced = True
                elif kind == "start":
                    started = values[0]
                elif kind == "end" and values[2] and values[0] not in result["killers"]:
                    result["killers"].append(values[0])
                elif kind == "done":
                    started = ""
                    tests = []
                elif kind == "timeout":
                    started = ""
            if not is_replaced:
                return result | {"result": "not possible"}
            if started:  # the test has ended the process
                result["killers"].append(started)
                tests = tests[tests.index(started) + 1 :]
            if len(result["killers"]) >= self._options.killers:
                break
        result["seconds"] = round(time.monotonic() - deadline + self._options.seconds, 1)
        return result | {"result": "killed" if result["killers"] else "survived"}


def main() -> None:
    """Run the mutants and print those that no test kills."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=MAX_MUTANT_S, help="for each mutant")
    parser.add_argument("--killers", type=int, default=1, help="tests to find for each mutant")
    parser.add_argument("--timeout", type=float, default=MAX_TEST_S, help="of a test")
    parser.add_argument(
        "--last", help="file with tests that run after all others; no other test replaces a killer"
    )
    parser.add_argument("--coverage", type=Path, help="file that is read, or written if missing")
    parser.add_argument("--output", type=Path, help="file of results, which are not measured again")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("sources", nargs="+")
    options = parser.parse_args()
    arguments = ["-qq", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "--tb=no"]
    arguments += [f"--timeout={options.timeout}", "-o", "tmp_path_retention_policy=none"]
    sys.exit(pytest.main([*arguments, *options.tests], plugins=[Session(options)]))


if __name__ == "__main__":
    main()
