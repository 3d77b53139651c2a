"""Error messages for common mistakes."""

from __future__ import annotations

from typing import Any

import pytest

import tarry


def test_a_kind_may_be_given_by_name() -> None:
    """The kind of an outcome may be given by name; an unknown name is rejected with the list."""
    assert tarry.Outcome(tarry.Kind.TRANSIENT) == tarry.Outcome("transient")  # type: ignore[arg-type]
    with pytest.raises(tarry.ConfigurationError, match=r"kind must be one of .*transient"):
        tarry.Outcome("transiet")  # type: ignore[arg-type]


@pytest.mark.tarry(wait=False)
@pytest.mark.parametrize(("kind", "attempts"), [("permanent", 1), ("transient", 4)])
def test_a_predicate_that_returns_a_kind(kind: str, attempts: int) -> None:
    """A predicate may return a kind, which decides whether the error is retried."""
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        raise OSError

    returned: Any = tarry.Kind(kind)
    with pytest.raises(OSError):  # noqa: PT011 - it has no message
        tarry.call(work, on=lambda _: returned)
    assert attempts == len(calls)


@pytest.mark.parametrize(
    "returned",
    [tarry.Hint(5.0), tarry.Stop(tarry.Reason.PERMANENT), tarry.Wait(1.0), "yes", None, object()],
)
def test_a_predicate_that_returns_an_invalid_value(returned: Any) -> None:
    """A predicate that returns a hint, a verdict or any other value is rejected."""

    def work() -> None:
        raise OSError

    with pytest.raises(
        tarry.ConfigurationTypeError, match=r"on must .* a delay \(seconds or a timedelta\)"
    ):
        tarry.call(work, on=lambda _: returned)


@pytest.mark.parametrize("returned", [-1, -0.5, float("nan"), float("inf")])
def test_a_predicate_that_returns_an_invalid_delay(returned: float) -> None:
    """A predicate that returns a negative or infinite delay is rejected."""

    def work() -> None:
        raise OSError

    with pytest.raises(tarry.ConfigurationError, match="the result of on must be"):
        tarry.call(work, on=lambda _: returned)


def test_a_class_is_not_decorated() -> None:
    """Decorating a class is rejected: it would become a function."""
    with pytest.raises(tarry.ConfigurationTypeError, match="decorates functions and methods"):
        tarry.retry(on=OSError)(type("K", (), {}))


def test_a_call_instead_of_a_function() -> None:
    """Passing the result of a call instead of the function is rejected."""
    invalid: Any = 5
    with pytest.raises(tarry.ConfigurationTypeError, match="takes the function and its arguments"):
        tarry.call(invalid, on=OSError)
    with pytest.raises(tarry.ConfigurationTypeError, match="takes the function and its arguments"):
        tarry.hedge_sync(invalid, after=1.0)


def test_a_coroutine_instead_of_a_function() -> None:
    """A coroutine passed instead of a function is closed, so that Python does not warn."""

    async def work() -> None: ...

    invalid: Any = work()
    with pytest.raises(tarry.ConfigurationTypeError, match="takes the function and its arguments"):
        tarry.acall(invalid, on=OSError).send(None)


def test_attempts_without_on() -> None:
    with pytest.raises(tarry.ConfigurationTypeError, match="on is missing"):
        tarry.attempts()


@pytest.mark.parametrize("invalid", [5, None])
def test_an_invalid_schedule(invalid: Any) -> None:
    """A schedule that is not a collection is rejected."""
    with pytest.raises(tarry.ConfigurationTypeError, match="delays must be a collection"):
        tarry.Schedule(invalid)


def test_an_invalid_listener() -> None:
    """A listener that is not callable is rejected."""
    invalid: Any = 5
    with pytest.raises(tarry.ConfigurationTypeError, match="listen takes a function"):
        tarry.listen(invalid)


def test_a_status_that_is_not_a_number() -> None:
    """A status that is not a whole number is rejected."""
    invalid: Any = "503"
    with pytest.raises(tarry.ConfigurationTypeError, match="status must be a whole number"):
        tarry.outcome_of_status(invalid, now=0.0)


def test_too_few_copies_of_a_hedge() -> None:
    """An error about the number of copies names the argument."""
    with pytest.raises(tarry.ConfigurationError, match=r"^max_attempts must be at least 2"):
        tarry.hedge_sync(lambda: 1, after=1.0, max_attempts=1)


ENTRY_POINTS: dict[str, Any] = {
    "retry": tarry.retry,
    "call": lambda **options: tarry.call(lambda: None, **options),
    "acall": lambda **options: tarry.acall(async_function, **options).send(None),
    "attempts": tarry.attempts,
}


async def async_function() -> None:
    """Return None."""


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize(
    ("option", "spelling"),
    [
        ("initial_delay", "policy=tarry.Policy(initial_delay=...)"),
        ("jitter", "policy=tarry.Policy(jitter=...)"),
        ("wait_max", "policy=tarry.Policy(max_delay=...)"),
        ("breaker", 'downstream=tarry.Downstream("name", breaker=...)'),
        ("budget", 'downstream=tarry.Downstream("name", budget=...)'),
        ("tries", "attempts="),
        ("stop_after", "attempts="),
        ("stop_after_delay", "deadline="),
        ("max_attempts", "attempts="),
        ("max_time", "deadline="),
        ("exceptions", "on="),
        ("atempts", "attempts="),
        ("giveup", "on="),
        ("before_sleep", "on_retry="),
        ("on_backoff", "on_retry="),
    ],
)
def test_unknown_option(entry_point: str, option: str, spelling: str) -> None:
    """The error for an unknown option has the right spelling."""
    with pytest.raises(tarry.ConfigurationTypeError) as caught:
        ENTRY_POINTS[entry_point](on=OSError, **{option: 1})

    message = f"tarry.{entry_point} has no argument {option}=; use {spelling}"
    assert message == str(caught.value)


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_option_that_is_not_needed(entry_point: str) -> None:
    """The error for `reraise` of tenacity says that the last error is always raised."""
    with pytest.raises(tarry.ConfigurationTypeError, match="reraise=; leave it out, because the"):
        ENTRY_POINTS[entry_point](on=OSError, reraise=True)


@pytest.mark.parametrize(
    ("arguments", "on"),
    [
        ((ConnectionError,), "ConnectionError"),
        ((ConnectionError, KeyError), "(ConnectionError, KeyError)"),
        (((ConnectionError, KeyError),), "(ConnectionError, KeyError)"),
    ],
)
def test_errors_by_position(arguments: tuple[Any, ...], on: str) -> None:
    """The error for exception types without `on=` says what to write."""
    with pytest.raises(tarry.ConfigurationTypeError) as caught:
        tarry.retry(*arguments)

    assert str(caught.value).endswith(f": write @tarry.retry(on={on})")


CONSTRUCTORS: dict[str, Any] = {
    "Policy": tarry.Policy,
    "Breaker": tarry.Breaker,
    "Downstream": lambda **options: tarry.Downstream("name", **options),
    "hedge": lambda **options: tarry.hedge(async_function, after=1, **options).send(None),
    "hedge_sync": lambda **options: tarry.hedge_sync(print, after=1, **options),
}


@pytest.mark.parametrize(
    ("name", "option", "advice"),
    [
        ("Policy", "attempts", "use max_attempts="),
        ("Policy", "max_dely", "did you mean 'max_delay'?"),
        ("Breaker", "fail_max", "use consecutive="),
        ("Breaker", "open_four", "did you mean 'open_for'?"),
        ("Downstream", "circuit_breaker", "use breaker="),
        ("Downstream", "zzz", "it has breaker, budget, limiter, max_in_flight"),
        ("hedge", "attempts", "use max_attempts="),
        ("hedge_sync", "delay", "use after="),
        ("hedge_sync", "nam", "did you mean 'name'? (arguments of the function go into kwargs=)"),
    ],
)
def test_unknown_argument_of_a_class_or_of_hedge(name: str, option: str, advice: str) -> None:
    """The error for an unknown argument names the right one."""
    with pytest.raises(tarry.ConfigurationTypeError) as caught:
        CONSTRUCTORS[name](**{option: 1})

    assert f"tarry.{name} has no argument {option}=; {advice}" == str(caught.value)


def test_option_of_other_functions() -> None:
    """The error for an option that only other functions have names these functions."""
    options: dict[str, Any] = {"fallback": 1}
    with pytest.raises(
        tarry.ConfigurationTypeError,
        match=r"tarry.attempts has no argument fallback=; tarry.retry and tarry.call have it",
    ):
        tarry.attempts(on=OSError, **options)


@pytest.mark.parametrize("entry_point", ["call", "acall"])
def test_argument_of_the_function(entry_point: str) -> None:
    """The error for an option that is like no other says how to pass it to the function."""
    with pytest.raises(tarry.ConfigurationTypeError) as caught:
        ENTRY_POINTS[entry_point](on=OSError, sep="")

    message = str(caught.value)
    assert message.startswith(f"tarry.{entry_point} has no argument sep=; it has on, until, ")
    assert message.endswith(
        "on_retry, blocking, kwargs; for an argument of the function, use kwargs={'sep': ...}"
    )


def test_unknown_option_without_a_similar_one() -> None:
    """The error for an option that is like no other lists the options."""
    options: dict[str, Any] = {"zzz": 1}
    with pytest.raises(
        tarry.ConfigurationTypeError, match=r"no argument zzz=; it has on, until, attempts, .*name"
    ):
        tarry.retry(on=OSError, **options)
