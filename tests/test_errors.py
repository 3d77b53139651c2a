"""Tests for the exceptions: hierarchy, messages, pickle and copy."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

import tarry
from tarry import errors

ALL = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)
]
REJECTIONS = [errors.Rejected, errors.BreakerOpen, errors.LimitReached, errors.DeadlineExceeded]


def tree_of_the_docstring() -> dict[str, set[str]]:
    """Read each class's bases from the tree that the module's docstring draws."""
    bases: dict[str, set[str]] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.fullmatch(r"([│├└─ ]*)(\w+)(?: \((\w+)\))?", line)
        if found is None:
            continue
        depth = len(found[1]) // 4
        del parents[depth:]
        bases[found[2]] = {parents[-1] if parents else "Exception", *(found[3] or "").split()}
        parents.append(found[2])
    return bases


def test_the_docstring_draws_the_tree() -> None:
    """The tree in the module's docstring is the tree in the code."""
    actual = {kind.__name__: {base.__name__ for base in kind.__bases__} for kind in ALL}
    assert tree_of_the_docstring() == actual


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_public(kind: type[Exception]) -> None:
    """Every error is available as `tarry.X` and has a docstring."""
    assert kind is getattr(tarry, kind.__name__)
    assert kind.__name__ in tarry.__all__
    assert (kind.__doc__ or "").endswith(".")


@pytest.mark.parametrize("kind", ALL)
def test_one_base_catches_them_all(kind: type[Exception]) -> None:
    """`except TarryError` catches everything that tarry raises itself."""
    with pytest.raises(errors.TarryError) as caught:
        raise kind("what happened")
    assert "what happened" == str(caught.value)
    assert ("what happened",) == caught.value.args


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.ConfigurationTypeError, ValueError),
        (errors.ConfigurationTypeError, TypeError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.AttemptTimeout, TimeoutError),
        (errors.BlockingWait, RuntimeError),
        (errors.MissingExtra, ImportError),
    ],
)
def test_builtin_bases(kind: type[Exception], builtin: type[Exception]) -> None:
    """The errors can be caught by built-in types."""
    with pytest.raises(builtin, match=r"^what happened$"):
        raise kind("what happened")


@pytest.mark.parametrize("kind", [errors.ConfigurationError, errors.ConfigurationTypeError])
def test_configuration_errors_carry_their_parts(kind: type[errors.ConfigurationError]) -> None:
    """The field, the rule and the value are attributes, and the message is made of them."""
    error = kind("max_attempts", "must be at least 1", 0)
    assert "max_attempts must be at least 1, got 0" == str(error)
    assert ("max_attempts", "must be at least 1", 0) == (error.field, error.rule, error.value)
    assert error.has_value


def test_a_configuration_error_need_not_show_the_value() -> None:
    """Without a value the message ends after the rule; None is a value like any other."""
    error = errors.ConfigurationError("key", "must be 32 bytes")
    assert ("key must be 32 bytes", None, False) == (str(error), error.value, error.has_value)
    assert "key must be a text, got None" == str(
        errors.ConfigurationError("key", "must be a text", None)
    )


def test_a_configuration_error_about_no_field() -> None:
    """A single argument is the message; such an error has no field to rename."""
    error = errors.ConfigurationError("policy and max_attempts exclude each other")
    assert (None, str(error)) == (error.field, error.rule)
    assert error is error.with_field("max_attempts")


@pytest.mark.parametrize("kind", [errors.ConfigurationError, errors.ConfigurationTypeError])
def test_a_configuration_error_under_another_name(kind: type[errors.ConfigurationError]) -> None:
    """with_field() returns an error of the same type with the same rule and value."""
    renamed = kind("max_attempts", "must be at least 1", 0).with_field("maxAttempts")
    assert kind is type(renamed)
    assert "maxAttempts must be at least 1, got 0" == str(renamed)
    assert "--server must be a URL" == str(kind("url", "must be a URL").with_field("--server"))


def test_another_name_keeps_the_index() -> None:
    """with_field() keeps the index of a field."""
    error = errors.ConfigurationError("secrets[1]", "must be base64")
    assert "signing_secrets[1]" == error.with_field("signing_secrets").field


@pytest.mark.parametrize("kind", REJECTIONS)
def test_rejections_have_downstream_and_retry_after(kind: type[errors.Rejected]) -> None:
    """A rejection has the name of the downstream and the seconds until a new call."""
    error = kind("refused", downstream="payments", retry_after=2.5)
    assert ("refused", "payments", 2.5) == (str(error), error.downstream, error.retry_after)


@pytest.mark.parametrize("kind", REJECTIONS)
def test_rejections_without_details(kind: type[errors.Rejected]) -> None:
    """Unknown details of a rejection are None."""
    error = kind("refused")
    assert (None, None) == (error.downstream, error.retry_after)


def test_the_last_result_is_kept() -> None:
    """The error has the result that was not accepted."""
    assert [1, 2] == errors.ResultNotAccepted("none accepted", [1, 2]).result
    assert None is errors.ResultNotAccepted("none accepted").result


@pytest.mark.parametrize(
    "error",
    [
        *(kind("refused", downstream="payments", retry_after=2.5) for kind in REJECTIONS),
        errors.ResultNotAccepted("none accepted", {"state": "pending"}),
        errors.ConfigurationError("max_attempts", "must be at least 1", 0),
        *(kind("what happened") for kind in ALL),
    ],
    ids=repr,
)
def test_errors_travel(error: Exception) -> None:
    """An error survives copy and pickle, as process pools and test runners need it to."""
    error.add_note("a note")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301
        assert type(error) is type(other)
        assert (str(error), error.args, vars(error)) == (str(other), other.args, vars(other))
