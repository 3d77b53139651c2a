"""The base class of immutable values, such as `Policy` and `Outcome`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class ImmutableValue:
    """Base class of immutable values, which are compared, hashed and printed by their fields.

    A subclass lists its fields in `_fields` and stores them in `__init__`. This class is used
    instead of `dataclasses`, whose import would add 10 ms to `import tarry`.
    """

    __slots__ = ()

    _fields: ClassVar[tuple[str, ...]]
    """The names of the arguments of `__init__`; each is stored in the attribute of that name."""

    def _set(self, **values: object) -> None:
        """Store attributes by name, such as values that are computed from the fields."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _set_fields(self, *values: object) -> None:
        """Store the values of all fields, in the order of `_fields`."""
        set_attribute = object.__setattr__  # a local name is faster, and this runs for each failure
        for name, value in zip(self._fields, values, strict=True):
            set_attribute(self, name, value)

    def _asdict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed; create a new one")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._asdict() == other._asdict()

    def __hash__(self) -> int:
        return hash((type(self), *self._asdict().values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._asdict()), ()
