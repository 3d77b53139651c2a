"""Tests for immutable values."""

from __future__ import annotations

import copy
import pickle

import pytest

from tarry.core.checks import ImmutableValue


class Point(ImmutableValue):
    """A value with two fields, one of which has a default."""

    __slots__ = _fields = ("x", "y")

    x: int
    y: int

    def __init__(self, x: int, y: int = 0) -> None:
        self._set(x=x, y=y)


class Other(Point):
    """The same fields under another type."""

    __slots__ = ()


def test_values_are_equal_by_their_fields() -> None:
    """Values of one type with the same fields are equal and hash alike."""
    assert Point(1, 2) == Point(1, 2)
    assert {Point(1, 2)} == {Point(1, 2), Point(1, 2)}
    assert Point(1, 2) != Point(2, 1)


def test_another_type_is_never_equal() -> None:
    """Equal fields under another type make no equal value."""
    other: object = Other(1, 2)
    assert Point(1, 2) != other
    assert Point(1, 2) != (1, 2)


@pytest.mark.parametrize("name", ["x", "z"])
def test_values_cannot_be_changed(name: str) -> None:
    """To set or delete a field is rejected, and the message says what to do instead."""
    point = Point(1)
    with pytest.raises(AttributeError, match="Point cannot be changed; create a new one"):
        setattr(point, name, 5)
    with pytest.raises(AttributeError, match="Point cannot be changed; create a new one"):
        delattr(point, name)
    assert 1 == point.x


def test_values_show_their_fields() -> None:
    """The repr of a value is the call of its constructor."""
    assert "Point(x=1, y=2)" == repr(Point(1, 2))


def test_values_survive_copies() -> None:
    """A pickled or copied value is equal to the first."""
    point = Point(1, 2)
    pickled = pickle.loads(pickle.dumps(point))  # noqa: S301 - our own bytes
    assert [point] * 3 == [pickled, copy.copy(point), copy.deepcopy(point)]
