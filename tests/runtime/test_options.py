"""The options of `retry` are the same wherever they are listed."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import pytest

import tarry
from tarry.runtime.config import NO_FALLBACK, POLICY_ATTEMPTS, RetryConfig
from tarry.runtime.options import OPTION_NAMES, RetryOptions, options_from

FUNCTIONS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "retry": (tarry.retry, set()),
    "call": (tarry.call, set()),
    "acall": (tarry.acall, {"cancel", "blocking"}),
    "attempts": (tarry.attempts, {"fallback"}),
    "RetryConfig": (RetryConfig.__init__, set()),
}
"""The functions that repeat the options, with the options that they do not have."""
NARROWER_TYPES = {"call": {"on", "until", "fallback"}, "acall": {"until", "fallback"}}
"""Options whose types are narrower, because the function and its result are known."""
OTHER_ARGUMENTS = {
    *("misused", "hedging", "unknown", "fn", "args", "kwargs", "self"),
    *("classify_result", "release_connection", "repeatable", "passes_attempt_number"),
}

every_function = pytest.mark.parametrize("name", FUNCTIONS)


def options_of(name: str) -> dict[str, Parameter]:
    """Return the parameters of a public function that are options."""
    parameters = inspect.signature(FUNCTIONS[name][0]).parameters
    return {name: each for name, each in parameters.items() if name not in OTHER_ARGUMENTS}


@every_function
def test_functions_have_the_options_in_the_same_order(name: str) -> None:
    """Each function has all options, except those that make no sense for it."""
    missing = FUNCTIONS[name][1]

    assert [each for each in OPTION_NAMES if each not in missing] == list(options_of(name))


@every_function
def test_options_have_the_same_types(name: str) -> None:
    """The types in a signature are those of `RetryOptions`, as written in the source."""
    types = {each: hint.__forward_arg__ for each, hint in RetryOptions.__annotations__.items()}
    options = options_of(name).items()
    narrower = NARROWER_TYPES.get(name, set())

    actual = {each: option.annotation for each, option in options if each not in narrower}

    assert {each: types[each] for each in actual} == actual


@every_function
def test_options_have_the_same_defaults(name: str) -> None:
    """The default of an option is None, unless None has a meaning of its own."""
    defaults = {"attempts": POLICY_ATTEMPTS, "fallback": NO_FALLBACK}

    for each, option in options_of(name).items():
        assert option.default is defaults.get(each), each
        assert Parameter.KEYWORD_ONLY == option.kind or name == "RetryConfig", each


class Recorder(Exception):
    """Raised in place of a configuration, with its arguments."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        bound = inspect.signature(RetryConfig.__init__).bind(self, *args, **kwargs)
        self.options = {name: bound.arguments.get(name) for name in OPTION_NAMES}


@pytest.mark.parametrize("name", ["retry", "call", "acall", "attempts"])
def test_options_reach_the_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function passes all its options on, each under its own name."""

    def raise_arguments(*args: object, **kwargs: object) -> None:
        raise Recorder(*args, **kwargs)

    async def load() -> None:
        """Do nothing."""

    monkeypatch.setattr("tarry.runtime.retry.RetryConfig", raise_arguments)
    function, missing = FUNCTIONS[name]
    options: dict[str, Any] = {each: f"<{each}>" for each in OPTION_NAMES if each not in missing}

    with pytest.raises(Recorder) as caught:
        if name == "acall":
            asyncio.run(function(load, **options))
        else:
            function(*[print] * (name == "call"), **options)

    assert dict.fromkeys(missing) | options == caught.value.options


def test_docstring_explains_each_option() -> None:
    """The docstring of `retry` has a paragraph for each option, and for no other."""
    documented = re.findall(r"^ {4}(\w+): ", tarry.retry.__doc__ or "", re.MULTILINE)

    assert {*OPTION_NAMES, "hedging"} == set(documented)


def test_options_are_selected_from_the_arguments() -> None:
    """`options_from` leaves out other arguments, and options that the function does not have."""
    assert {"on": OSError, "stop": None} == options_from({"on": OSError, "fn": len, "stop": None})
