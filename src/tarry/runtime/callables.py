"""What kind of function a callable is, and what it is called."""

from __future__ import annotations

import sys
from functools import partial
from types import MethodType
from typing import Any

from tarry.errors import ConfigurationTypeError

# Bits of `code.co_flags`, as the `inspect` module documents them; it is not imported for that.
GENERATOR, COROUTINE, ASYNC_GENERATOR = 0x20, 0x80 | 0x100, 0x200


def flags_of(fn: Any) -> int:
    """Return the flags of the code that a callable runs: 0 where there is none in Python."""
    fn = _unwrapped(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        code = getattr(type(fn).__call__, "__code__", None)
    return 0 if code is None else int(code.co_flags)


def name_of(fn: Any) -> str:
    """Return the name for logs and metrics."""
    fn = _unwrapped(fn)
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def check_callable(door: str, fn: Any) -> None:
    """Refuse what cannot be called: most likely the result of a call."""
    if not callable(fn):
        if hasattr(fn, "cr_code"):
            fn.close()  # or Python warns that it was never awaited
        msg = f"tarry.{door} takes the function and its arguments, not its call: got {fn!r}"
        raise ConfigurationTypeError(msg)


def check_not_async(field: str, fn: object) -> None:
    """Refuse a coroutine function where an answer is needed at once: its coroutine is a yes."""
    if flags_of(fn) & (COROUTINE | ASYNC_GENERATOR):
        rule = f"must be a plain function, got the coroutine function {name_of(fn)}"
        raise ConfigurationTypeError(field, rule)


def name_of_caller() -> str:
    """Return the name of the function that called the one that asks."""
    frame = sys._getframe(2)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return frame.f_code.co_qualname


def _unwrapped(fn: Any) -> Any:
    """Look through `functools.partial` and bound methods."""
    while True:
        if isinstance(fn, partial):
            fn = fn.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        else:
            return fn
