"""`tarry.retrying`: a decorated function with other options."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import tarry
from tarry.testing import VirtualClock
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver

DECORATOR_DRIVERS = [driver for driver in DRIVERS if driver.form == "decorator"]


def attempts_of(call: Callable[[], object]) -> int:
    """Return the number of attempts of a call that fails."""
    with pytest.raises(ConnectionError) as caught:
        call()
    record = tarry.record_of(caught.value)
    assert record is not None
    return record.attempts


@pytest.mark.parametrize("driver", DECORATOR_DRIVERS, ids=str)
def test_option_applies_to_the_returned_function_only(driver: Driver, clock: VirtualClock) -> None:
    """The returned function has the new option; the decorated function keeps its own."""
    dependency = Dependency(clock, FAIL)
    decorated = driver.wrap(dependency.call if driver.is_sync else dependency.acall, attempts=2)

    changed = tarry.retrying(decorated, attempts=3)

    assert 3 == attempts_of(lambda: driver.run_function(clock, changed))
    assert 2 == attempts_of(lambda: driver.run_function(clock, decorated))


@pytest.mark.parametrize("driver", DECORATOR_DRIVERS, ids=str)
def test_other_options_are_kept(driver: Driver, clock: VirtualClock) -> None:
    """Options that are not given are those of the decorator, such as the downstream."""
    downstream = tarry.Downstream("d", budget=tarry.TokenBudget())
    dependency = Dependency(clock, FAIL)
    decorated = driver.wrap(
        dependency.call if driver.is_sync else dependency.acall, downstream=downstream, attempts=2
    )

    with pytest.raises(ConnectionError) as caught:
        driver.run_function(clock, tarry.retrying(decorated, timeout=5.0))

    record = tarry.record_of(caught.value)
    assert record is not None
    assert ("op", "d", 2) == (record.operation, record.downstream, record.attempts)
    assert downstream.budget is not None
    assert 495 == downstream.budget.balance(0.0)


def test_attribute_of_the_decorated_function(clock: VirtualClock) -> None:
    """A decorated function has `retrying` as an attribute, and so has the returned function."""
    dependency = Dependency(clock, FAIL)
    decorated: Any = tarry.retry(on=ConnectionError, attempts=2)(dependency.call)

    assert 3 == attempts_of(decorated.retrying(attempts=3))
    assert 4 == attempts_of(decorated.retrying(attempts=3).retrying(attempts=4))
    assert 2 == attempts_of(decorated)


def test_decorated_function_is_freed_without_the_garbage_collector() -> None:
    """A decorated local function is in no reference cycle, so its closure is freed at once."""

    class Resource:
        pass

    def use_resource() -> weakref.ref[Resource]:
        resource = Resource()

        @tarry.retry(on=ConnectionError)
        def load() -> Resource:
            return resource

        return weakref.ref(load())

    gc.disable()
    try:
        assert use_resource()() is None
    finally:
        gc.enable()


def test_returned_function_can_be_changed_again(clock: VirtualClock) -> None:
    """`retrying` accepts its own result, and adds the new options to the earlier ones."""
    decorated = tarry.retry(on=ConnectionError)(Dependency(clock, FAIL).call)

    changed = tarry.retrying(tarry.retrying(decorated, attempts=5), fallback="cached")

    assert "cached" == changed()
    assert 5 == attempts_of(tarry.retrying(tarry.retrying(decorated, attempts=5), name="op"))


def pass_on(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function, as another decorator does."""

    @functools.wraps(fn)
    def call_function(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return call_function


class Client:
    """A class with decorated methods."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    @tarry.retry(on=ConnectionError, attempts=2)
    def method(self, number: int, *, suffix: str = "") -> str:
        """Fail."""
        self.calls.append(number)
        raise ConnectionError(suffix)

    @classmethod
    @tarry.retry(on=ConnectionError, attempts=2)
    def class_method(cls, number: int) -> str:
        """Fail."""
        raise ConnectionError(cls.__name__)

    @tarry.retry(on=ConnectionError, attempts=2)
    @classmethod
    def outer_class_method(cls, number: int) -> str:
        """Fail."""
        raise ConnectionError(cls.__name__)

    @staticmethod
    @tarry.retry(on=ConnectionError, attempts=2)
    def static_method(number: int) -> str:
        """Fail."""
        raise ConnectionError

    @tarry.retry(on=ConnectionError, attempts=2)
    async def coroutine_method(self, number: int) -> str:
        """Fail."""
        self.calls.append(number)
        raise ConnectionError

    @tarry.retry(on=ConnectionError, attempts=2)
    @pass_on
    def traced_method(self) -> None:
        """Do nothing."""


def test_methods_are_bound(clock: VirtualClock) -> None:
    """A method that is given as `client.method` keeps its instance or class."""
    client = Client()

    assert 3 == attempts_of(lambda: tarry.retrying(client.method, attempts=3)(7, suffix="x"))
    assert [7, 7, 7] == client.calls
    assert 3 == attempts_of(lambda: tarry.retrying(Client.class_method, attempts=3)(7))
    assert 3 == attempts_of(lambda: tarry.retrying(client.outer_class_method, attempts=3)(7))
    assert 3 == attempts_of(lambda: tarry.retrying(Client.static_method, attempts=3)(7))
    assert 3 == attempts_of(lambda: tarry.retrying(Client.method, attempts=3)(client, 7))


@pytest.mark.parametrize(
    "method",
    [
        Client().method,
        Client.method,
        Client.class_method,
        Client().outer_class_method,
        Client().coroutine_method,
        Client().traced_method,
    ],
    ids=["bound", "function", "class method", "outer class method", "coroutine", "traced"],
)
def test_attribute_of_a_method(method: Any) -> None:
    """The attribute of a method, which would not pass `self`, names `tarry.retrying` instead."""
    message = rf"tarry.retrying\(object.{method.__name__}, ...\)"

    with pytest.raises(tarry.ConfigurationTypeError, match=message):
        method.retrying(attempts=3)


def test_attribute_of_functions_without_self(clock: VirtualClock) -> None:
    """The attribute of a static method and of a callable object works as that of a function."""
    static_method: Any = Client.static_method
    load = functools.partial(Dependency(clock, FAIL).call)
    callable_object: Any = tarry.retry(on=ConnectionError)(load)

    assert 3 == attempts_of(lambda: static_method.retrying(attempts=3)(7))
    assert 3 == attempts_of(callable_object.retrying(attempts=3))


def test_coroutine_methods_are_bound(clock: VirtualClock) -> None:
    """A coroutine method keeps its instance."""
    client = Client()

    changed = tarry.retrying(client.coroutine_method, attempts=3)

    assert inspect.iscoroutinefunction(changed)
    assert 3 == attempts_of(lambda: clock.run(lambda: changed(7)))
    assert [7, 7, 7] == client.calls


def test_generators(clock: VirtualClock) -> None:
    """A generator and an async generator can get other options."""
    failures = iter([ConnectionError] * 5)

    @tarry.retry(on=ConnectionError, attempts=2)
    def generate() -> Iterator[int]:
        raise next(failures)
        yield 1

    @tarry.retry(on=ConnectionError, attempts=2)
    async def generate_async() -> AsyncIterator[int]:
        raise ConnectionError
        yield 1

    async def first_item() -> int:
        return await anext(aiter(tarry.retrying(generate_async, attempts=3)()))

    assert 5 == attempts_of(lambda: list(tarry.retrying(generate, attempts=5)()))
    assert 3 == attempts_of(lambda: clock.run(first_item))


def test_signature_is_kept() -> None:
    """The returned function has the name, docstring, signature and defaults of the original."""

    @tarry.retry(on=ConnectionError)
    def load(number: int, *, key: str = "k") -> str:
        """Load a value."""
        return f"{number}{key}"

    changed = tarry.retrying(load, attempts=2)

    assert "7k" == changed(7)
    assert inspect.signature(load) == inspect.signature(changed)
    assert ("load", "Load a value.") == (changed.__name__, changed.__doc__)


def undecorated() -> None:
    """Do nothing."""


@functools.wraps(tarry.retry(on=OSError)(undecorated))
def decorated_again() -> None:
    """Do nothing."""


@pytest.mark.parametrize("fn", [undecorated, decorated_again, len, 5], ids=repr)
def test_function_that_is_not_decorated(fn: Any) -> None:
    """Functions without retries, or with another decorator on top, are rejected."""
    with pytest.raises(tarry.ConfigurationTypeError, match=r"that @tarry.retry has decorated, got"):
        tarry.retrying(fn, attempts=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tries": 3}, r"tarry.retrying has no argument tries=; use attempts="),
        ({"repeatable": False}, r"tarry.retrying has no argument repeatable="),
        ({"attempts": 0}, "attempts must be at least 1"),
    ],
)
def test_invalid_options(options: Any, message: str, clock: VirtualClock) -> None:
    """Unknown and invalid options are rejected, with the right spelling."""
    decorated = tarry.retry(on=ConnectionError)(Dependency(clock, OK).call)

    with pytest.raises(tarry.ConfigurationError, match=message):
        tarry.retrying(decorated, **options)
