"""A base class for immutable values, which are compared, hashed and printed by their fields.

It replaces frozen dataclasses: importing `dataclasses` would add 10 ms to `import tarry`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class Value:
    """Base class of values. A subclass lists its `_fields` and calls `_set` in `__init__`."""

    __slots__ = ()

    _fields: ClassVar[tuple[str, ...]]
    """The arguments of `__init__`; each is stored in the attribute of the same name."""

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _set_fields(self, arguments: dict[str, Any]) -> None:
        """Store the fields; `arguments` are the `locals()` of `__init__`."""
        for name in self._fields:
            object.__setattr__(self, name, arguments[name])

    def _asdict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def __setattr__(self, name: str, value: object) -> None:
        msg = f"{type(self).__name__} cannot be changed; make a new one"
        raise AttributeError(msg)

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
        return _rebuild, (type(self), self._asdict())


def _rebuild(cls: type[Any], fields: dict[str, Any]) -> object:
    return cls(**fields)
