"""Events of calls and breakers, for listeners: logs, metrics, traces and tests.

Type checkers treat the classes as frozen dataclasses, and the functions of `dataclasses` (`fields`,
`replace`, `asdict`) work with them. This module has its own decorator, because the first failed
call of a program loads the module: `dataclasses` would add 16 ms of processor time to that call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast, dataclass_transform

from tarry.core.values import ImmutableValue

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import Field

    from tarry.core.breaker import BreakerState
    from tarry.core.hints import Hint
    from tarry.core.outcome import Kind
    from tarry.core.verdict import Reason


T = TypeVar("T")
_REQUIRED: Any = object()


class _FieldOptions(NamedTuple):
    """The options of a field, as in `dataclasses.field`."""

    default: Any = _REQUIRED
    kw_only: bool = False
    compare: bool = True


def field(*, default: Any, kw_only: bool, compare: bool = True) -> Any:
    """Return the options of a field that is not required."""
    return _FieldOptions(default, kw_only, compare)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def event(cls: type[T]) -> type[T]:
    """Return the class with slots for its annotated fields, which its constructor sets."""
    own_fields = tuple(cls.__annotations__)
    options: dict[str, _FieldOptions] = {
        **getattr(cls, "_options", {}),
        **{name: vars(cls).get(name, _FieldOptions()) for name in own_fields},
    }
    # Slots cannot be added to an existing class.
    dropped = (*own_fields, "__dict__", "__weakref__")
    namespace = {name: value for name, value in vars(cls).items() if name not in dropped}
    namespace |= {"__slots__": own_fields, "_fields": tuple(options), "_options": options}
    namespace["__match_args__"] = tuple(name for name in options if not options[name].kw_only)
    new_class: Any = type(cls.__name__, cls.__bases__, namespace)
    setters = {name: getattr(new_class, name).__set__ for name in options}
    new_class._setters = tuple(setters[name] for name in new_class.__match_args__)  # noqa: SLF001 - declared below
    new_class._optional_setters = {  # noqa: SLF001 - declared below
        name: (setters[name], option.default) for name, option in options.items() if option.kw_only
    }
    return cast("type[T]", new_class)


class _DataclassFields:
    """The attribute by which `dataclasses` recognises its classes. It is built when it is read."""

    def __get__(self, _: object, event_class: type[_EventBase]) -> dict[str, Field[Any]]:
        return event_class._build_dataclass_fields()  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 - same module


class _EventBase(ImmutableValue):
    __slots__ = ()

    _options: ClassVar[dict[str, _FieldOptions]]
    # The setters of the slots are stored, because `object.__setattr__` takes twice as long.
    _setters: ClassVar[tuple[Callable[[object, object], None], ...]]
    _optional_setters: ClassVar[dict[str, tuple[Callable[[object, object], None], object]]]
    """The setters and default values of keyword-only fields."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassFields()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if (
                len(args) != len(self._setters)
                or not kwargs.keys() <= self._optional_setters.keys()
            ):
                args = self._positional_values(args, kwargs)
            for set_slot, value in zip(self._setters, args, strict=True):
                set_slot(self, value)
            for name, (set_slot, default) in self._optional_setters.items():
                set_slot(self, kwargs.get(name, default))

        def _positional_values(self, args: Any, kwargs: dict[str, Any]) -> list[Any]:
            """Return the values of the required fields, some of which are keyword arguments."""
            names = self.__match_args__
            values = dict(zip(names, args, strict=False))
            is_valid = len(args) <= len(names) and not values.keys() & kwargs.keys()
            values |= kwargs
            if not is_valid or not set(names) <= values.keys() <= set(self._fields):
                rule = f"{', '.join(names)}, which are required, and optional keyword arguments"
                raise TypeError(f"{type(self).__name__} takes {rule}, got {args} and {kwargs}")
            return [values[name] for name in names]

    @classmethod
    def _build_dataclass_fields(cls) -> dict[str, Field[Any]]:
        from dataclasses import field as dataclass_field
        from dataclasses import make_dataclass

        fields: list[tuple[str, type, Any]] = [
            (name, object, dataclass_field(kw_only=True, compare=option.compare))
            for name, option in cls._options.items()
        ]
        dataclass: Any = make_dataclass("_", fields)
        found: dict[str, Field[Any]] = dataclass.__dataclass_fields__
        return found

    def __replace__(self, **changes: Any) -> Any:
        return type(self)(**(self._asdict() | changes))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._compared_values() == other._compared_values()

    def __hash__(self) -> int:
        return hash((type(self), *self._compared_values()))

    def _compared_values(self) -> list[object]:
        options = self._options
        return [getattr(self, name) for name in options if options[name].compare]


@event
class Event(_EventBase):
    """The base class of all events."""

    operation: str
    """The name that the user set, or else that of the function with its module ("orders.charge");
    "" for `BreakerStateChanged`."""
    downstream: str | None
    """The name of the downstream, or None for a call without a downstream."""
    call_id: str = field(default="", kw_only=True, compare=False)
    """Unique for each call, in all processes; "" for `BreakerStateChanged`."""
    time: float = field(default=0.0, kw_only=True, compare=False)
    """The time of the event in seconds since 1970."""


@event
class AttemptStarted(Event):
    """An attempt is about to run."""

    attempt: int
    max_attempts: int | None
    """None if the number of attempts is not limited."""


@event
class AttemptFailed(Event):
    """An attempt failed, or returned a result that `until` does not accept."""

    attempt: int
    max_attempts: int | None
    """None if the number of attempts is not limited."""
    kind: Kind
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """The HTTP status, the gRPC code or the name of the error's type."""
    duration: float | None = field(default=None, kw_only=True, compare=False)
    """The seconds that the attempt took; None if it was not measured, see `Succeeded`."""
    delay: float | None = field(default=None, kw_only=True, compare=False)
    """The seconds until the next attempt; None if none follows."""


@event
class WaitEvent(Event):
    """The base class of the events before and after a wait."""

    retry: int
    max_retries: int | None
    """None if the number of attempts is not limited."""
    ceiling: float
    """The delay before jitter. A server's hint or decorrelated jitter can make `delay` longer."""
    delay: float
    """The delay in seconds, with jitter and the server's hint applied."""
    hint: Hint | None
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """The HTTP status, the gRPC code or the name of the error's type."""


@event
class WillWait(WaitEvent):
    """The call waits before retry number `retry`."""


@event
class Waited(WaitEvent):
    """The wait is over."""

    slept: float
    """The actual duration of the wait in seconds."""


@event
class Succeeded(Event):
    """The call ended with a result."""

    attempts: int
    duration: float | None = field(default=None, kw_only=True, compare=False)
    """The seconds that the successful attempt took; None if it was not measured.

    Hedged calls are not measured. The first attempt of a call without a downstream is measured only
    if there is a listener, because reading the clock would slow down each call.
    """


@event
class GaveUp(Event):
    """The call ended without success; `attempts` is 0 if its first attempt was rejected."""

    attempts: int
    reason: Reason
    waited: float
    """The sum of all waits between attempts, in seconds."""
    retry_after: float | None
    """Seconds after which a new call can succeed; None when that is not known."""
    hint: Hint | None
    error: BaseException | None
    detail: str = field(default="", kw_only=True)
    """The HTTP status, the gRPC code or the name of the error's type."""


@event
class BudgetEmpty(Event):
    """A retry was not made because the retry budget is empty."""


@event
class BreakerStateChanged(Event):
    """The state of a downstream's circuit breaker changed."""

    before: BreakerState
    after: BreakerState


@event
class HedgeFired(Event):
    """A hedge started: another attempt of the call, in parallel to the running ones."""

    attempt: int


@event
class HedgeWon(Event):
    """The result of a hedged call came from an attempt other than the first."""

    attempt: int


def fields_of(event: Event) -> dict[str, Any]:
    """Return the fields of an event by name, without an import of `dataclasses`."""
    return event._asdict()  # pyright: ignore[reportPrivateUsage] - same module
