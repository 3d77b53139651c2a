"""Mistakes that a newcomer makes, and what the errors say."""

from __future__ import annotations

from typing import Any

import pytest

import tarry


def test_a_kind_by_its_name() -> None:
    """The class of an outcome may be given by its name; any other name is refused with the list."""
    assert tarry.Outcome(tarry.Kind.TRANSIENT) == tarry.Outcome("transient")  # type: ignore[arg-type]
    with pytest.raises(tarry.ConfigurationError, match=r"kind must be one of .*transient"):
        tarry.Outcome("transiet")  # type: ignore[arg-type]


@pytest.mark.tarry(wait=False)
@pytest.mark.parametrize(("kind", "attempts"), [("permanent", 1), ("transient", 4)])
def test_a_predicate_that_answers_with_a_kind(kind: str, attempts: int) -> None:
    """A predicate may answer with the class alone."""
    made: list[int] = []

    def work() -> None:
        made.append(1)
        raise OSError

    answer: Any = tarry.Kind(kind)
    with pytest.raises(OSError):  # noqa: PT011 - whichever
        tarry.call(work, on=lambda _: answer)
    assert attempts == len(made)


@pytest.mark.parametrize(
    "answer", [tarry.Hint(5.0), tarry.Stop(tarry.Reason.PERMANENT), tarry.Wait(1.0)]
)
def test_a_predicate_that_answers_with_something_else(answer: Any) -> None:
    """A hint or a verdict is no answer of a predicate, and is not taken for a yes."""

    def work() -> None:
        raise OSError

    with pytest.raises(tarry.ConfigurationTypeError, match="on must return True, False or a"):
        tarry.call(work, on=lambda _: answer)


def test_a_class_is_not_decorated() -> None:
    """To decorate a class is refused: it would be a function afterwards."""
    with pytest.raises(tarry.ConfigurationTypeError, match="decorates functions and methods"):
        tarry.retry(on=OSError)(type("K", (), {}))


def test_a_call_instead_of_a_function() -> None:
    """Whoever passes the call instead of the function is told so."""
    wrong: Any = 5
    with pytest.raises(tarry.ConfigurationTypeError, match="takes the function and its arguments"):
        tarry.call(wrong, on=OSError)
    with pytest.raises(tarry.ConfigurationTypeError, match="takes the function and its arguments"):
        tarry.hedge_sync(wrong, after=1.0)


def test_a_coroutine_instead_of_a_function() -> None:
    """A coroutine that was already made is closed, so that Python has nothing to warn about."""

    async def work() -> None: ...

    wrong: Any = work()
    with pytest.raises(tarry.ConfigurationTypeError, match="takes the function and its arguments"):
        tarry.acall(wrong, on=OSError).send(None)


def test_attempts_without_on() -> None:
    """Blocks need to know what is worth a retry as well, and say why."""
    with pytest.raises(tarry.ConfigurationTypeError, match="on is missing"):
        tarry.attempts()


@pytest.mark.parametrize("wrong", [5, None])
def test_a_schedule_that_is_none(wrong: Any) -> None:
    """A schedule is a collection of seconds."""
    with pytest.raises(tarry.ConfigurationTypeError, match="delays must be a collection"):
        tarry.Schedule(wrong)


def test_a_listener_that_is_none() -> None:
    """What cannot be called cannot listen."""
    wrong: Any = 5
    with pytest.raises(tarry.ConfigurationTypeError, match="listen takes a function"):
        tarry.listen(wrong)


def test_a_status_that_is_no_number() -> None:
    """A status is a whole number; a text is refused by its name."""
    wrong: Any = "503"
    with pytest.raises(tarry.ConfigurationTypeError, match="status must be a whole number"):
        tarry.outcome_of_status(wrong, now=0.0)


def test_copies_of_a_hedge_are_called_attempts() -> None:
    """An error about the number of copies names the argument that was given."""
    with pytest.raises(tarry.ConfigurationError, match=r"^max_attempts must be at least 2"):
        tarry.hedge_sync(lambda: 1, after=1.0, max_attempts=1)
