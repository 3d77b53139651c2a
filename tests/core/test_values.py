"""Tests for immutable values."""

from __future__ import annotations

import copy
import pickle

import pytest

from tarry.core.values import ImmutableValue


class Point(ImmutableValue):
    """A value with two fields; y has a default."""

    __slots__ = _fields = ("x", "y")

    x: int
    y: int

    def __init__(self, x: int, y: int = 0) -> None:
        self._set(x=x, y=y)


class OtherPoint(Point):
    """Another type with the same fields."""

    __slots__ = ()


def test_values_are_equal_by_their_fields() -> None:
    """Values of one type with the same fields are equal and have the same hash."""
    assert Point(1, 2) == Point(1, 2)
    assert {Point(1, 2)} == {Point(1, 2), Point(1, 2)}
    assert Point(1, 2) != Point(2, 1)


def test_another_type_is_never_equal() -> None:
    """A value is not equal to a value of another type with the same fields."""
    other: object = OtherPoint(1, 2)
    assert Point(1, 2) != other
    assert Point(1, 2) != (1, 2)


@pytest.mark.parametrize("name", ["x", "z"])
def test_values_cannot_be_changed(name: str) -> None:
    """Setting or deleting a field raises an error that says what to do instead."""
    point = Point(1)
    with pytest.raises(AttributeError, match="Point cannot be changed; create a new one"):
        setattr(point, name, 5)
    with pytest.raises(AttributeError, match="Point cannot be changed; create a new one"):
        delattr(point, name)
    assert 1 == point.x


def test_repr_of_values() -> None:
    """The repr of a value is the constructor call that creates it."""
    assert "Point(x=1, y=2)" == repr(Point(1, 2))


def test_values_can_be_copied_and_pickled() -> None:
    """A copied or pickled value is equal to the original."""
    point = Point(1, 2)
    pickled = pickle.loads(pickle.dumps(point))  # noqa: S301 - pickled by this test
    assert [point] * 3 == [pickled, copy.copy(point), copy.deepcopy(point)]
