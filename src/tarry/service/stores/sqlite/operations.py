"""Operations: functions of a write transaction, which this process or the writer process runs."""

from __future__ import annotations

from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints

from msgspec.msgpack import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from inspect import Signature

    from msgspec import Raw

    from tarry.service.stores.sqlite.transaction import WriteTransaction

P = ParamSpec("P")
T = TypeVar("T")


class WriteOperation:
    """A function whose arguments and result can be sent to and from the writer process."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run: Callable[..., Any] = run

    # Computed on first use: a type may be defined below the function.
    @cached_property
    def _types(self) -> dict[str, Any]:
        types = get_type_hints(self.run)
        del types["tx"]
        return types

    @cached_property
    def decode_arguments(self) -> Callable[[Raw], tuple[Any, ...]]:
        """Decodes the arguments after the transaction."""
        types = [value for name, value in self._types.items() if name != "return"]
        return Decoder(tuple[tuple(types)]).decode  # type: ignore[misc]

    @cached_property
    def decode_result(self) -> Callable[[Raw], Any]:
        """Decodes the result."""
        return Decoder(self._types["return"]).decode

    @cached_property
    def signature(self) -> Signature:
        """The parameters of the function."""
        return signature(self.run)


OPERATIONS: dict[str, WriteOperation] = {}
"""All operations, by the name of their function. The package imports the modules that have them."""


def write_operation(
    run: Callable[Concatenate[WriteTransaction, P], T],
) -> Callable[Concatenate[WriteTransaction, P], T]:
    """Make a function an operation. Its annotations are the types of what is sent."""
    if run.__name__ in OPERATIONS:
        msg = f"two operations have the name {run.__name__}"
        raise ValueError(msg)
    OPERATIONS[run.__name__] = WriteOperation(run)
    return run


class OperationCall(Generic[T]):
    """An operation with its arguments."""

    __slots__ = ("arguments", "name", "run")

    def __init__(
        self,
        run: Callable[Concatenate[WriteTransaction, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> None:
        self.run: Callable[..., T] = run
        self.name: str = run.__name__
        parameters = OPERATIONS[self.name].signature
        self.arguments: tuple[Any, ...] = arguments
        # All arguments are sent, by position. To bind them takes 8 us, so a call with all arguments
        # by position is not bound.
        if len(arguments) + 1 < len(parameters.parameters):
            bound = parameters.bind(None, *arguments, **named)
            bound.apply_defaults()
            self.arguments = bound.args[1:]

    def __call__(self, tx: WriteTransaction) -> T:
        """Run the operation."""
        return self.run(tx, *self.arguments)
