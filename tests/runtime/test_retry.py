"""`retry`, `call`, `acall` and `attempts`: functions they accept, and rejected arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import tarry
from tarry import Downstream, Policy
from tarry.testing import VirtualClock, captured_events
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver, Step

retry_connection_errors = tarry.retry(on=ConnectionError)


class FlakyFunction:
    """A function that fails at every odd call and otherwise returns its arguments."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Raise or return the arguments."""
        self.calls += 1
        if self.calls % 2:
            raise ConnectionError
        return (*args, kwargs) if kwargs else args


@pytest.fixture
def flaky(clock: VirtualClock) -> FlakyFunction:
    """A function that fails at every odd call, in virtual time."""
    return FlakyFunction()


# --- keyword arguments of single calls ------------------------------------------------------------


def test_call_passes_keyword_arguments(flaky: FlakyFunction) -> None:
    """`tarry.call` passes `kwargs` to the function, also names that are options of `call`."""
    kwargs = {"timeout": 3, "name": "n"}

    assert (1, kwargs) == tarry.call(flaky.call, 1, kwargs=kwargs, on=ConnectionError)


def test_acall_passes_keyword_arguments(flaky: FlakyFunction, clock: VirtualClock) -> None:
    """`tarry.acall` passes `kwargs` to the coroutine function."""

    async def work(*args: Any, **kwargs: Any) -> Any:
        return flaky.call(*args, **kwargs)

    async def main() -> Any:
        return await tarry.acall(work, 1, kwargs={"key": "k"}, on=ConnectionError)

    assert (1, {"key": "k"}) == clock.run(main)


def test_keyword_arguments_must_be_a_mapping() -> None:
    """`kwargs` that is not a mapping is rejected."""
    invalid: Any = [("key", "k")]
    with pytest.raises(tarry.ConfigurationTypeError, match="kwargs must be a dict"):
        tarry.call(FlakyFunction().call, kwargs=invalid, on=ConnectionError)


# --- decorated functions --------------------------------------------------------------------------


def test_plain_function_gets_its_arguments(flaky: FlakyFunction) -> None:
    @retry_connection_errors
    def work(number: int, *rest: int, key: str = "") -> Any:
        return flaky.call(number, *rest, key=key)

    assert (1, 2, {"key": "k"}) == work(1, 2, key="k")
    assert 2 == flaky.calls


def test_coroutine_function_gets_its_arguments(flaky: FlakyFunction, clock: VirtualClock) -> None:
    @retry_connection_errors
    async def work(number: int, *, key: str = "") -> Any:
        return flaky.call(number, key=key)

    assert (1, {"key": "k"}) == clock.run(lambda: work(1, key="k"))


def test_generator_function_gets_its_arguments(flaky: FlakyFunction) -> None:
    @retry_connection_errors
    def work(number: int, *, key: str = "") -> Iterator[Any]:
        yield flaky.call(number, key=key)

    assert [(1, {"key": "k"})] == list(work(1, key="k"))


def test_async_generator_function_gets_its_arguments(
    flaky: FlakyFunction, clock: VirtualClock
) -> None:
    @retry_connection_errors
    async def work(number: int, *, key: str = "") -> AsyncIterator[Any]:
        yield flaky.call(number, key=key)

    async def main() -> list[Any]:
        return [item async for item in work(1, key="k")]

    assert [(1, {"key": "k"})] == clock.run(main)


class Client:
    """A class with decorated methods of every kind."""

    def __init__(self, flaky: FlakyFunction) -> None:
        self.flaky = flaky

    @retry_connection_errors
    def method(self, number: int) -> Any:
        """Call the flaky function."""
        return self.flaky.call(number)

    @retry_connection_errors
    async def async_method(self, number: int) -> Any:
        """Call the flaky function in a coroutine."""
        return self.flaky.call(number)

    @retry_connection_errors
    def stream(self, number: int) -> Iterator[Any]:
        """Yield the result of the flaky function."""
        yield self.flaky.call(number)

    @classmethod
    @retry_connection_errors
    def retry_inside_classmethod(cls, flaky: FlakyFunction) -> Any:
        """Call the flaky function; `retry` is below `classmethod`."""
        return flaky.call(cls.__name__)

    @retry_connection_errors
    @classmethod
    def retry_outside_classmethod(cls, flaky: FlakyFunction) -> Any:
        """Call the flaky function; `retry` is above `classmethod`."""
        return flaky.call(cls.__name__)

    @staticmethod
    @retry_connection_errors
    def retry_inside_staticmethod(flaky: FlakyFunction) -> Any:
        """Call the flaky function; `retry` is below `staticmethod`."""
        return flaky.call("static")

    @retry_connection_errors
    @staticmethod
    def retry_outside_staticmethod(flaky: FlakyFunction) -> Any:
        """Call the flaky function; `retry` is above `staticmethod`."""
        return flaky.call("static")


def test_methods_can_be_decorated(flaky: FlakyFunction, clock: VirtualClock) -> None:
    """Decorated methods get their object and are retried."""
    client = Client(flaky)

    assert (1,) == client.method(1)
    assert (2,) == clock.run(lambda: client.async_method(2))
    assert [(3,)] == list(client.stream(3))
    assert 6 == flaky.calls


def test_bound_method_can_be_decorated(flaky: FlakyFunction) -> None:
    assert (1, 2) == retry_connection_errors(flaky.call)(1, 2)


@pytest.mark.parametrize("owner", ["class", "object"])
def test_class_methods_and_static_methods(owner: str, flaky: FlakyFunction) -> None:
    """Both orders of the decorators work, through the class and through an object."""
    client = Client if owner == "class" else Client(flaky)

    assert ("Client",) == client.retry_inside_classmethod(flaky)
    assert ("Client",) == client.retry_outside_classmethod(flaky)
    assert ("static",) == client.retry_inside_staticmethod(flaky)
    assert ("static",) == client.retry_outside_staticmethod(flaky)
    assert 8 == flaky.calls


def test_partial_can_be_decorated(flaky: FlakyFunction) -> None:
    """A partial of a function can be retried."""
    assert (1, 2) == retry_connection_errors(functools.partial(flaky.call, 1))(2)


def test_partial_of_a_coroutine_function(flaky: FlakyFunction, clock: VirtualClock) -> None:
    async def work(first: int, second: int) -> Any:
        return flaky.call(first, second)

    decorated = retry_connection_errors(functools.partial(work, 1))

    assert (1, 2) == clock.run(lambda: decorated(2))


def test_partial_of_a_partial_of_a_method(flaky: FlakyFunction, clock: VirtualClock) -> None:
    """Nested partials of a method can be retried."""

    class Service:
        async def work(self, first: int, second: int, third: int) -> Any:
            return flaky.call(first, second, third)

    decorated = retry_connection_errors(functools.partial(functools.partial(Service().work, 1), 2))

    assert (1, 2, 3) == clock.run(lambda: decorated(3))


def test_callable_object_can_be_decorated(flaky: FlakyFunction) -> None:
    """An object with `__call__` can be retried; it is named after its class."""

    class Service:
        def __call__(self, number: int) -> Any:
            return flaky.call(number)

    with captured_events() as events:
        assert (1,) == retry_connection_errors(Service())(1)

    assert events[0].operation.endswith("Service")


def test_async_callable_object_can_be_decorated(flaky: FlakyFunction, clock: VirtualClock) -> None:
    """An object with `async def __call__` is retried as a coroutine function."""

    class Service:
        async def __call__(self, number: int) -> Any:
            return flaky.call(number)

    decorated = retry_connection_errors(Service())

    assert (1,) == clock.run(lambda: decorated(1))


def test_call_of_a_builtin_function_and_of_a_class(clock: VirtualClock) -> None:
    assert 3 == tarry.call(len, "abc", on=ConnectionError)
    assert 7 == tarry.call(int, "7", on=ConnectionError)


def test_only_the_inner_of_two_decorators_retries(flaky: FlakyFunction) -> None:
    @retry_connection_errors
    @retry_connection_errors
    def work() -> None:
        flaky.calls += 1
        raise ConnectionError

    with pytest.raises(ConnectionError):
        work()

    assert 4 == flaky.calls


def test_operations_of_one_decorator_have_the_names_of_their_functions(clock: VirtualClock) -> None:
    """If one decorator is used for several functions, each operation has its function's name."""

    def first() -> None: ...

    def second() -> None: ...

    decorated = [retry_connection_errors(first), retry_connection_errors(second)]
    with captured_events() as events:
        for function in decorated:
            function()

    names = [event.operation for event in events if isinstance(event, tarry.Succeeded)]
    assert [f"{__name__}.{function.__qualname__}" for function in (first, second)] == names


# --- preserved attributes -------------------------------------------------------------------------


def sample_function(number: int = 1, *, key: str = "k") -> str:
    """Return the arguments as text."""
    return f"{number}{key}"


async def sample_coroutine_function(number: int, *, key: str = "k") -> str:
    """Return the arguments as text."""
    return f"{number}{key}"


def sample_generator(number: int, *, key: str = "k") -> Iterator[str]:
    """Yield the arguments as text."""
    yield f"{number}{key}"


async def sample_async_generator(number: int, *, key: str = "k") -> AsyncIterator[str]:
    """Yield the arguments as text."""
    yield f"{number}{key}"


@pytest.mark.parametrize(
    "fn",
    [sample_function, sample_coroutine_function, sample_generator, sample_async_generator],
)
@pytest.mark.parametrize("options", [{}, {"deadline": 1}, {"downstream": Downstream("d")}], ids=str)
def test_metadata_is_kept(fn: Callable[..., Any], options: dict[str, Any]) -> None:
    """A decorated function keeps its name, docstring, signature, default values and kind."""
    decorated = tarry.retry(on=ConnectionError, **options)(fn)

    names = "__name__", "__qualname__", "__module__", "__doc__", "__annotations__"
    for name in (*names, "__defaults__", "__kwdefaults__"):
        assert getattr(fn, name) == getattr(decorated, name)
    assert fn is decorated.__wrapped__  # type: ignore[attr-defined]
    assert inspect.signature(fn) == inspect.signature(decorated)
    for kind in (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    ):
        assert kind(fn) == kind(decorated)


# --- defaults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", [d for d in DRIVERS if d.form == "call"], ids=str)
def test_call_with_a_policy_alone(driver: Driver, clock: VirtualClock) -> None:
    """With a policy and no `on`, only connection errors and timeouts are retried."""
    policy = Policy(max_attempts=3)
    steps = (Step(raises=ConnectionError), Step(raises=TimeoutError), OK)

    assert "done" == driver.run(clock, Dependency(clock, *steps), on=None, policy=policy)

    dependency = Dependency(clock, Step(raises=ValueError))
    with pytest.raises(ValueError):  # noqa: PT011 - it has no message
        driver.run(clock, dependency, on=None, policy=policy)
    assert 1 == len(dependency.starts)


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_option_attempts_overrides_max_attempts_of_the_policy(
    driver: Driver, clock: VirtualClock
) -> None:
    """The option `attempts` overrides `max_attempts` of the policy, and no other field."""
    dependency = Dependency(clock, FAIL)
    policy = Policy(max_attempts=9, initial_delay=1, jitter="none")

    with pytest.raises(ConnectionError):
        driver.run(clock, dependency, policy=policy, attempts=2)

    assert [0, 1] == dependency.starts


# --- invalid arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": KeyboardInterrupt}, "on must name subclasses of Exception"),
        ({"on": (ConnectionError, BaseException)}, "on must name subclasses of Exception"),
        (
            {"on": ()},
            r"on must name at least one .*; to retry no error, use on=lambda error: False",
        ),
        ({"on": int}, "on must be an exception type"),
        ({"on": [ConnectionError]}, "on must be an exception type"),
        ({"on": ConnectionError("an instance")}, "on must be an exception type"),
        ({"attempts": 0}, "attempts must be at least 1, got 0"),
        ({"attempts": 2.5}, "attempts must be a whole number"),
        ({"attempts": True}, "attempts must be a whole number"),
        ({"timeout": 0}, "timeout must be greater than 0"),
        ({"timeout": "1"}, "timeout must be a number"),
        ({"deadline": -1}, "deadline must be greater than 0"),
        ({"deadline": float("nan")}, "deadline must be finite"),
        ({"policy": {"max_attempts": 3}}, r"policy must be a tarry\.Policy"),
        ({"policy": Policy}, r"policy must be a tarry\.Policy"),
        ({"policy": "interactive"}, r"such as tarry\.Policy\.preset\('interactive'\), got"),
        ({"policy": "nowhere"}, r"policy must be a tarry\.Policy\(\.\.\.\), got 'nowhere'"),
        ({"downstream": "payments"}, r"downstream must be a tarry\.Downstream"),
        ({"cancel": object()}, r"cancel must be a tarry\.CancelToken"),
        ({"name": 7}, "name must be a string"),
        ({"random": 7}, "random must be a source"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    """The error for an invalid argument names it."""
    options = {"on": ConnectionError} | options
    with pytest.raises(tarry.ConfigurationError, match=message):
        tarry.retry(**options)
    with pytest.raises(tarry.ConfigurationError, match=message):
        tarry.call(lambda: None, **options)
    with pytest.raises(tarry.ConfigurationError, match=message):
        tarry.attempts(**options)


def test_invalid_until_is_rejected() -> None:
    """An `until` that is not callable is rejected."""
    with pytest.raises(tarry.ConfigurationError, match="until must be a predicate"):
        tarry.retry(until=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [7, "name", None, property(lambda _: None)], ids=repr)
def test_only_callables_can_be_decorated(value: Any) -> None:
    with pytest.raises(tarry.ConfigurationTypeError, match="decorates functions"):
        retry_connection_errors(value)


@pytest.mark.parametrize("fn", [sample_generator, sample_async_generator])
def test_until_of_a_generator_is_rejected(fn: Callable[..., Any]) -> None:
    """`until` is rejected for generators, which have no result."""
    with pytest.raises(tarry.ConfigurationError, match="is a generator, which has no result"):
        tarry.retry(until=bool)(fn)


def test_call_of_a_coroutine_function() -> None:
    """The error of `tarry.call` for a coroutine function names `acall`."""
    with pytest.raises(tarry.ConfigurationTypeError, match=r"await tarry\.acall"):
        tarry.call(sample_coroutine_function, 1, on=ConnectionError)  # type: ignore[unused-coroutine]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_acall_of_a_plain_function(loop: str, clock: VirtualClock) -> None:
    """The error of `acall` for a plain function names `call`, has no note and is not retried."""
    calls = []
    plain_function: Callable[[], Any] = lambda: calls.append(1)  # noqa: E731

    message = r"returned None.* use tarry\.call"
    with pytest.raises(tarry.ConfigurationTypeError, match=message) as caught:
        (clock.run if loop == "asyncio" else clock.run_trio)(
            lambda: tarry.acall(plain_function, on=Exception)
        )

    assert [1] == calls
    assert not hasattr(caught.value, "__notes__")


def test_acall_of_a_plain_function_that_raises(clock: VirtualClock) -> None:
    """An error that is raised before an awaitable is returned has one note that names `call`."""
    error = ConnectionError()

    def plain_function() -> Any:
        raise error

    with pytest.raises(ConnectionError):
        clock.run(lambda: tarry.acall(plain_function, on=ConnectionError))

    notes = [note for note in error.__notes__ if "plain_function returned an awaitable" in note]
    assert 1 == len(notes)
    assert "if it is a plain function, use tarry.call(...)" in notes[0]


def test_loop_without_with_attempt_raises(clock: VirtualClock) -> None:
    payments = Downstream("payments", max_in_flight=1)

    with pytest.raises(tarry.ConfigurationError, match="inside `with attempt:`"):
        for _attempt in tarry.attempts(on=ConnectionError, downstream=payments):
            pass

    assert "done" == tarry.call(Dependency(clock, OK).call, on=ConnectionError, downstream=payments)


def test_loop_that_is_left_before_with_attempt(clock: VirtualClock) -> None:
    """A loop that is left before `with attempt:` frees its place in `max_in_flight`."""
    payments = Downstream("payments", max_in_flight=1)

    for _attempt in tarry.attempts(on=ConnectionError, downstream=payments):
        break

    assert "done" == tarry.call(Dependency(clock, OK).call, on=ConnectionError, downstream=payments)


def test_attempt_has_its_number(clock: VirtualClock) -> None:
    numbers = []

    with pytest.raises(ConnectionError):
        for attempt in tarry.attempts(on=ConnectionError, attempts=3):
            with attempt:
                numbers.append(attempt.number)
                raise ConnectionError

    assert [1, 2, 3] == numbers


def test_block_is_named_after_its_function(clock: VirtualClock) -> None:
    with captured_events() as events:
        for attempt in tarry.attempts(on=ConnectionError):
            with attempt:
                pass

    assert f"{__name__}.test_block_is_named_after_its_function" == events[0].operation


@pytest.mark.parametrize("exit_by", ["break", "continue", "fall through"])
def test_block_left_without_an_error_is_a_success(exit_by: str, clock: VirtualClock) -> None:
    """A block that is left without an error is a success, also by `break` or `continue`."""
    rounds = 0
    with captured_events() as events:
        for attempt in tarry.attempts(on=ConnectionError):
            with attempt:
                rounds += 1
                if exit_by == "break":
                    break
                if exit_by == "continue":
                    continue

    assert 1 == rounds
    assert isinstance(events[-1], tarry.Succeeded)
