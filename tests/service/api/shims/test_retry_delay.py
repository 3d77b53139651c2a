"""The expressions of QStash for the delay before a retry."""

from __future__ import annotations

import warnings

import pytest

from tarry.errors import ConfigurationError
from tarry.service.api.shims.retry_delay import plan_delays_ms


@pytest.mark.parametrize(
    ("expression", "delays"),
    [
        ("1000", [1000]),
        ("1000 * (1 + retried)", [1000, 2000, 3000]),
        ("pow(2, retried) * 1000", [1000, 2000, 4000]),
        ("max(10, min(pow(2, retried), 3))", [10, 10, 10]),
        ("abs(-5) + floor(1.9) + ceil(1.1) + round(2.6)", [11]),
        ("exp(retried) - sqrt(4) / 2", [0, 2, 6]),
        (" +retried % 2 ", [0, 1, 0]),
    ],
)
def test_delays_are_the_results_of_the_expression(expression: str, delays: list[int]) -> None:
    """An expression is computed for each retry, or once if it does not depend on the retry."""
    assert delays == plan_delays_ms(expression, 3)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "must be an expression, such as 1000 * (1 + retried)"),
        ("1000 *", "must be an expression"),
        ("__import__('os')", "must consist of numbers, retried, + - * / % and pow, sqrt"),
        ("retried.real", "must consist of numbers"),
        ("'a'", "must consist of numbers"),
        ("True", "must consist of numbers"),
        ("2 ** 8", "must consist of numbers"),
        ("attempt", "must consist of numbers"),
        ("pow(2, x=1)", "must consist of numbers"),
        ("pow(2)", "cannot be computed"),
        ("1 / retried", "cannot be computed: float division by zero"),
        ("sqrt(-1)", "cannot be computed"),
        ("pow(9, pow(9, 9))", "cannot be computed"),
        ("9" * 199, "must have results from 0 to"),
        ("retried - 1", "must have results from 0 to"),
        ("1e308 * 10 - 1e308 * 10", "must have results from 0 to"),
        ("1" * 201, "must have at most 200 characters"),
        ("(" * 100 + "1" + ")" * 100, "must have at most 200 characters"),
        ("-" * 199 + "1", "must have at most 40 numbers, names, operators and functions"),
        ("-" * 40 + "1", "must have at most 40 numbers"),
        ("-" * 39 + "1", "must have results from 0 to"),
    ],
)
def test_invalid_expressions(expression: str, message: str) -> None:
    """An expression that is not arithmetic, or has an invalid result, is rejected."""
    with pytest.raises(ConfigurationError, match="Upstash-Retry-Delay") as caught:
        plan_delays_ms(expression, 3)

    assert caught.value.rule.startswith(message.partition(":")[0])


def test_parser_does_not_warn() -> None:
    """A caller cannot write the warnings of Python's parser to the log of the service."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        with pytest.raises(ConfigurationError, match="must be an expression"):
            plan_delays_ms("1if 1else 2", 3)

    assert [] == recorded
