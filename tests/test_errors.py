"""Tests of the exceptions: hierarchy, messages, pickle and copy."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

import tarry
from tarry import errors

ALL_ERRORS = [
    error_type
    for error_type in vars(errors).values()
    if isinstance(error_type, type) and issubclass(error_type, Exception)
]
REJECTIONS = [errors.Rejected, errors.BreakerOpen, errors.LimitReached, errors.DeadlineExceeded]


def documented_bases() -> dict[str, set[str]]:
    """Return the bases of each class, from the tree in the docstring of `tarry.errors`."""
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


def test_docstring_has_the_class_tree() -> None:
    """The class tree in the module's docstring matches the code."""
    actual = {
        error_type.__name__: {base.__name__ for base in error_type.__bases__}
        for error_type in ALL_ERRORS
    }
    assert documented_bases() == actual


@pytest.mark.parametrize("error_type", ALL_ERRORS)
def test_every_error_is_public(error_type: type[Exception]) -> None:
    """Every error is available as `tarry.X` and has a docstring."""
    assert error_type is getattr(tarry, error_type.__name__)
    assert error_type.__name__ in tarry.__all__
    assert (error_type.__doc__ or "").endswith(".")


@pytest.mark.parametrize("error_type", ALL_ERRORS)
def test_base_class_catches_every_error(error_type: type[Exception]) -> None:
    """`except TarryError` catches every error of the package."""
    with pytest.raises(errors.TarryError) as caught:
        raise error_type("a message")
    assert "a message" == str(caught.value)
    assert ("a message",) == caught.value.args


@pytest.mark.parametrize(
    ("error_type", "builtin"),
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
def test_builtin_bases(error_type: type[Exception], builtin: type[Exception]) -> None:
    """Errors can be caught as the matching built-in errors."""
    with pytest.raises(builtin, match=r"^a message$"):
        raise error_type("a message")


@pytest.mark.parametrize("error_type", [errors.ConfigurationError, errors.ConfigurationTypeError])
def test_configuration_error_has_field_rule_and_value(
    error_type: type[errors.ConfigurationError],
) -> None:
    """The field, the rule and the value are attributes, and the message combines them."""
    error = error_type("max_attempts", "must be at least 1", 0)
    assert "max_attempts must be at least 1, got 0" == str(error)
    assert ("max_attempts", "must be at least 1", 0) == (error.field, error.rule, error.value)
    assert error.has_value


def test_configuration_error_without_a_value() -> None:
    """Without a value the message ends after the rule; a value of None is shown."""
    error = errors.ConfigurationError("key", "must be 32 bytes")
    assert ("key must be 32 bytes", None, False) == (str(error), error.value, error.has_value)
    assert "key must be a text, got None" == str(
        errors.ConfigurationError("key", "must be a text", None)
    )


def test_configuration_error_without_a_field() -> None:
    """A single argument is the whole message, and with_field() returns the error unchanged."""
    error = errors.ConfigurationError("policy and max_attempts exclude each other")
    assert (None, str(error)) == (error.field, error.rule)
    assert error is error.with_field("max_attempts")


@pytest.mark.parametrize("error_type", [errors.ConfigurationError, errors.ConfigurationTypeError])
def test_with_field_renames_the_field(error_type: type[errors.ConfigurationError]) -> None:
    """with_field() returns an error of the same type with the same rule and value."""
    renamed = error_type("max_attempts", "must be at least 1", 0).with_field("maxAttempts")
    assert error_type is type(renamed)
    assert "maxAttempts must be at least 1, got 0" == str(renamed)
    assert "--server must be a URL" == str(
        error_type("url", "must be a URL").with_field("--server")
    )


def test_with_field_keeps_the_index() -> None:
    error = errors.ConfigurationError("secrets[1]", "must be base64")
    assert "signing_secrets[1]" == error.with_field("signing_secrets").field


@pytest.mark.parametrize("error_type", REJECTIONS)
def test_rejections_have_downstream_and_retry_after(error_type: type[errors.Rejected]) -> None:
    """A rejection has the downstream, and the seconds after which a new call may be made."""
    error = error_type("rejected", downstream="payments", retry_after=2.5)
    assert ("rejected", "payments", 2.5) == (str(error), error.downstream, error.retry_after)


@pytest.mark.parametrize("error_type", REJECTIONS)
def test_rejections_without_details(error_type: type[errors.Rejected]) -> None:
    """Unknown details of a rejection are None."""
    error = error_type("rejected")
    assert (None, None) == (error.downstream, error.retry_after)


def test_result_not_accepted_has_the_result() -> None:
    """ResultNotAccepted has the result that was not accepted, or None."""
    assert [1, 2] == errors.ResultNotAccepted("none accepted", [1, 2]).result
    assert None is errors.ResultNotAccepted("none accepted").result


@pytest.mark.parametrize(
    "error",
    [
        *(
            error_type("rejected", downstream="payments", retry_after=2.5)
            for error_type in REJECTIONS
        ),
        errors.ResultNotAccepted("none accepted", {"state": "pending"}),
        errors.ConfigurationError("max_attempts", "must be at least 1", 0),
        *(error_type("a message") for error_type in ALL_ERRORS),
    ],
    ids=repr,
)
def test_errors_can_be_copied_and_pickled(error: Exception) -> None:
    """A copied or unpickled error has the same type, message, arguments and attributes."""
    error.add_note("a note")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301
        assert type(error) is type(other)
        assert (str(error), error.args, vars(error)) == (str(other), other.args, vars(other))
