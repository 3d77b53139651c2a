"""Find out whether a callable is async, and its name; check callables that users pass."""

from __future__ import annotations

import sys
from functools import partial
from types import MethodType
from typing import Any

from tarry.errors import ConfigurationTypeError

# Bits of `code.co_flags`, copied from `inspect` to keep that module out of `import tarry`.
GENERATOR, COROUTINE, ASYNC_GENERATOR = 0x20, 0x80 | 0x100, 0x200


def flags_of(fn: Any) -> int:
    """Return the `co_flags` of a callable's code, or 0 if it is not written in Python."""
    fn = _unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        code = getattr(type(fn).__call__, "__code__", None)
    return 0 if code is None else int(code.co_flags)


def name_of(fn: Any) -> str:
    """Return the name of a callable for logs and metrics."""
    fn = _unwrap(fn)
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def check_callable(api_name: str, fn: Any) -> None:
    """Raise if `fn` is not callable; most likely the user has called the function."""
    if not callable(fn):
        if hasattr(fn, "cr_code"):
            fn.close()  # otherwise Python warns that the coroutine was never awaited
        msg = (
            f"tarry.{api_name} takes the function and its arguments, not the result of a call: "
            f"got {fn!r}"
        )
        raise ConfigurationTypeError(msg)


def check_not_async(field: str, fn: object) -> None:
    """Raise if `fn` is a coroutine function, because the coroutine it returns is always truthy."""
    if flags_of(fn) & (COROUTINE | ASYNC_GENERATOR):
        rule = f"must be a plain function, got the coroutine function {name_of(fn)}"
        raise ConfigurationTypeError(field, rule)


def name_of_caller() -> str:
    """Return the name of the function that called the caller of this function."""
    frame = sys._getframe(2)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return frame.f_code.co_qualname


def _unwrap(fn: Any) -> Any:
    """Return the function inside `functools.partial` objects and bound methods."""
    while True:
        if isinstance(fn, partial):
            fn = fn.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        else:
            return fn
