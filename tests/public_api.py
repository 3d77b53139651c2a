"""Render the public API of tarry as text, so that each change is visible in a review.

The text comes from the source (`ast`), not from live objects: it has overloads, defaults as
written, and annotations that do not depend on the Python version. `make api` writes it
to docs/public-api.txt, and tests/test_package.py checks that it is current.
"""

import ast
import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TypeVar

PUBLIC_MODULES = (
    "tarry",
    "tarry.client",
    "tarry.idempotency",
    "tarry.simulator",
    "tarry.telemetry",
    "tarry.testing",
    "tarry.tuning",
)

# Special methods that users call by syntax. Others, such as `__repr__`, are not part of the API.
SYNTAX_METHODS = frozenset({
    "__init__", "__new__", "__call__", "__enter__", "__exit__", "__aenter__", "__aexit__",
    "__iter__", "__next__", "__aiter__", "__anext__", "__await__", "__len__", "__contains__",
    "__getitem__", "__bool__",
})  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | ast.Assign | ast.AnnAssign
D = TypeVar("D", bound=Definition)


@dataclass(frozen=True)
class DefinitionSite:
    """The module that defines a name, and its definitions there (several for overloads)."""

    module: str
    definitions: list[Definition]


def render() -> str:
    """Return the public API as text."""
    return "\n".join(_render_lines()) + "\n"


def _render_lines() -> Iterator[str]:
    yield "# The public API of tarry. Generated: `make api` rewrites this file."
    for module in PUBLIC_MODULES:
        names: list[str] = importlib.import_module(module).__all__
        yield ""
        yield f"module {module}"
        for name in sorted(names):
            site = _find_definition(module, name)
            yield ""
            for definition in _public_definitions(site.definitions):
                yield from _render(definition, name, site.module)


def _render(definition: Definition, name: str, module: str) -> Iterator[str]:
    match definition:
        case ast.ClassDef():
            yield from _render_class(definition, name, module)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield _render_function(definition, name)
        case _:
            yield _render_assignment(definition, name)


# --- classes --------------------------------------------------------------------------------------


def _render_class(node: ast.ClassDef, name: str, module: str) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
    yield f"{_render_decorators(node)}class {name}" + (f"({bases}):" if bases else ":")
    bodies = [list(_flatten(body.body)) for body in _bases_and_class(node, module)]
    for text in _fields(bodies).values():
        yield f"    {text}"
    for method, functions in sorted(_methods(bodies).items()):
        for function in _public_definitions(functions):
            yield f"    {_render_function(function, method)}"


def _fields(bodies: list[list[ast.stmt]]) -> dict[str, str]:
    """Return class variables, dataclass fields and attributes set in `__init__`, in order."""
    fields: dict[str, str] = {}
    for statement in chain.from_iterable(bodies):
        match statement:
            case ast.Assign() | ast.AnnAssign():
                for name in filter(_is_public, _target_names(statement)):
                    fields[name] = _render_field(statement, name)
            case ast.FunctionDef(name="__init__"):
                for name, text in _instance_attributes(statement):
                    fields.setdefault(name, text)
            case _:
                pass
    return fields


def _methods(bodies: list[list[ast.stmt]]) -> dict[str, list[Function]]:
    """Return public methods; one name may have overloads, or a property and its setter."""
    methods: dict[str, list[Function]] = {}
    for body in bodies:
        found: dict[str, list[Function]] = {}
        for statement in body:
            if isinstance(statement, Function) and _is_public(statement.name):
                found.setdefault(statement.name, []).append(statement)
        methods |= found  # a class overrides its bases
    return methods


def _bases_and_class(node: ast.ClassDef, module: str) -> Iterator[ast.ClassDef]:
    """Yield the private bases of a class, whose members are rendered as its own, then the class."""
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name) and name.id.startswith("_"):
            site = _find_definition(module, name.id)
            for definition in site.definitions:
                if isinstance(definition, ast.ClassDef):
                    yield from _bases_and_class(definition, site.module)
    yield node


def _instance_attributes(init: Function) -> Iterator[tuple[str, str]]:
    parameters = [*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs]
    annotations = {arg.arg: arg.annotation for arg in parameters}
    for statement in ast.walk(init):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        for target in _target_nodes(statement):
            match target:
                case ast.Attribute(value=ast.Name(id="self"), attr=name) if _is_public(name):
                    annotation = None
                    if isinstance(statement, ast.AnnAssign):
                        annotation = statement.annotation
                    elif isinstance(statement.value, ast.Name):
                        annotation = annotations.get(statement.value.id)
                    yield name, name + (f": {ast.unparse(annotation)}" if annotation else "")
                case _:
                    pass


def _render_field(node: ast.Assign | ast.AnnAssign, name: str) -> str:
    text = f"{name}: {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else name
    return text + (f" = {ast.unparse(node.value)}" if node.value else "")


# --- functions and constants ----------------------------------------------------------------------


def _render_function(node: Function, name: str) -> str:
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{_render_decorators(node)}{kind} {name}({ast.unparse(node.args)}){returns}"


def _render_assignment(node: ast.Assign | ast.AnnAssign, name: str) -> str:
    """Render a constant with its type, because its value may change; render an alias in full."""
    match node:
        case ast.AnnAssign(annotation=annotation, value=value):
            text = ast.unparse(annotation)
            if value is not None and text.rpartition(".")[2] in {"Final", "TypeAlias"}:
                return f"{name}: {text} = {ast.unparse(value)}"
            return f"{name}: {text}"
        case ast.Assign(value=ast.Constant(value=constant)):
            return f"{name}: {type(constant).__name__}"
        case _:
            return f"{name} = {ast.unparse(node.value)}"


def _render_decorators(node: Function | ast.ClassDef) -> str:
    return "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)


def _public_definitions(definitions: list[D]) -> list[D]:
    """Return the overloads if there are any: their implementation is not public."""
    return [node for node in definitions if _is_overload(node)] or definitions


def _is_overload(node: Definition) -> bool:
    return isinstance(node, Function) and any(
        ast.unparse(decorator).rpartition(".")[2] == "overload" for decorator in node.decorator_list
    )


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in SYNTAX_METHODS


# --- finding definitions --------------------------------------------------------------------------


def _find_definition(module: str, name: str) -> DefinitionSite:
    """Follow imports from a module to the definition of a name."""
    found: list[Definition] = []
    for statement in _flatten(_parse_module(module).body):
        match statement:
            case ast.ImportFrom(module=str(origin), names=aliases):
                for alias in aliases:
                    if (alias.asname or alias.name) == name:
                        return _find_definition(origin, alias.name)
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if statement.name == name:
                    found.append(statement)
            case ast.Assign() | ast.AnnAssign():
                if name in _target_names(statement):
                    found.append(statement)
            case _:
                pass
    if not found:
        raise LookupError(
            f"{module} neither defines nor imports {name!r}; a lazily loaded name needs an import "
            "under TYPE_CHECKING too"
        )
    return DefinitionSite(module, found)


@cache
def _parse_module(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"no source for {module}")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _flatten(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body; `if` and `try` are replaced by the statements inside."""
    for statement in body:
        match statement:
            case ast.If() | ast.Try():
                yield from _flatten(statement.body)
                yield from _flatten(statement.orelse)
            case _:
                yield statement


def _target_nodes(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _target_names(node: ast.Assign | ast.AnnAssign) -> list[str]:
    return [target.id for target in _target_nodes(node) if isinstance(target, ast.Name)]


if __name__ == "__main__":
    print(render(), end="")
