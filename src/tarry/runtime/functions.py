"""Names, flags and checks of the callables that users pass."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationTypeError, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable

# Bits of `code.co_flags`, copied from `inspect`, because importing `inspect` is slow.
GENERATOR, COROUTINE, ASYNC_GENERATOR = 0x20, 0x80 | 0x100, 0x200


def flags_of(fn: Any) -> int:
    """Return the `co_flags` of a callable's code; 0 if the callable is not written in Python."""
    fn = _unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        code = getattr(type(fn).__call__, "__code__", None)
    return 0 if code is None else int(code.co_flags)


def name_of(fn: Any) -> str:
    """Return the qualified name of a callable, for error messages."""
    fn = _unwrap(fn)
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def operation_of(fn: Any) -> str:
    """Return the name of a callable with its module, for events, logs and metrics."""
    return add_module(getattr(_unwrap(fn), "__module__", None), name_of(fn))


def add_module(module: str | None, qualname: str) -> str:
    """Return "orders.charge" for `charge` in the module `orders`.

    The module of a script is left out, because it is always "__main__".
    """
    return f"{module}.{qualname}" if module and module != "__main__" else qualname


def check_callable(api_name: str, fn: Any) -> None:
    """Raise if `fn` is not callable; the user has probably written `fn()` instead of `fn`."""
    if not callable(fn):
        if hasattr(fn, "cr_code"):
            fn.close()  # otherwise Python warns that the coroutine was never awaited
        raise ConfigurationTypeError(
            f"tarry.{api_name} takes the function and its arguments, not the result of a call: "
            f"got {fn!r}"
        )


def check_awaitable(fn: Callable[..., Any], sync_api: str) -> Callable[..., Any]:
    """Return a function that calls `fn`, and raises if the result cannot be awaited.

    `sync_api` is the public function for plain functions. An error that `fn` raises before it
    returns gets a note with this name, because only the first result shows whether `fn` is plain.
    """

    # Not named `call`: `error_record` finds drivers by their names.
    def call_and_check(*args: Any, **kwargs: Any) -> Any:
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            note = (
                f"tarry: the error was raised before {name_of(fn)} returned an awaitable; if it is "
                f"a plain function, use tarry.{sync_api}(...)"
            )
            if note not in getattr(error, "__notes__", ()):  # it may be raised several times
                error.add_note(note)
            raise
        # A generator-based coroutine has no `__await__`.
        if not hasattr(result, "__await__") and not hasattr(result, "gi_code"):
            raise ConfigurationTypeError(
                f"{name_of(fn)} returned {short_repr(result)}, which cannot be awaited: it is a "
                f"plain function, use tarry.{sync_api}(...)"
            )
        return result

    return call_and_check


def check_not_async(field: str, fn: object) -> None:
    """Raise if `fn` is async: its result would be a coroutine object, which is always true."""
    if flags_of(fn) & (COROUTINE | ASYNC_GENERATOR):
        rule = f"must be a plain function, got the coroutine function {name_of(fn)}"
        raise ConfigurationTypeError(field, rule)


def check_not_async_generator(field: str, fn: object) -> None:
    """Raise if `fn` is an async generator function, whose result cannot be awaited."""
    if flags_of(fn) & ASYNC_GENERATOR:
        rule = f"must be a function, got the async generator function {name_of(fn)}"
        raise ConfigurationTypeError(field, rule)


def reject_awaitable(field: str, value: Any, rule: str) -> None:
    """Raise if a function of the user that is not awaited has returned an awaitable."""
    if hasattr(value, "__await__"):
        if hasattr(value, "close"):
            value.close()  # otherwise Python warns that the coroutine was never awaited
        raise ConfigurationTypeError(field, rule)


def _unwrap(fn: Any) -> Any:
    """Return the function inside `functools.partial` objects and bound methods."""
    while True:
        if isinstance(fn, partial):
            # pyright does not know the type of the function inside a bare `partial`.
            fn = fn.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        else:
            return fn
