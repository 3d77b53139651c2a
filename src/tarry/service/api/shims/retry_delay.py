"""The expressions of QStash for the delay before a retry, such as `1000 * (1 + retried)`."""

from __future__ import annotations

import ast
import math
import warnings
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.wire.policies import MAX_DURATION_MS

if TYPE_CHECKING:
    from collections.abc import Callable

_HEADER = "Upstash-Retry-Delay"
_MAX_CHARS, _MAX_TERMS = 200, 40
"""With 40 terms, the delays of 100 retries take 3 ms, and those of a batch 3 s."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: float.__add__,
    ast.Sub: float.__sub__,
    ast.Mult: float.__mul__,
    ast.Div: float.__truediv__,
    ast.Mod: float.__mod__,
    ast.USub: float.__neg__,
    ast.UAdd: float.__pos__,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "pow": math.pow,
    "sqrt": math.sqrt,
    "abs": abs,
    "exp": math.exp,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "min": min,
    "max": max,
}
_VARIABLE = "retried"


def plan_delays_ms(expression: str, count: int) -> list[int]:
    """Return the delays before retries 1 to `count`, in milliseconds; one if all are equal.

    All numbers are floats, so that no number can become large enough to use up time or memory.
    Raises ConfigurationError for an expression that is invalid, or has an invalid result.
    """
    if len(expression) > _MAX_CHARS:
        raise ConfigurationError(_HEADER, f"must have at most {_MAX_CHARS} characters")
    try:
        with warnings.catch_warnings():
            # The parser warns of texts such as `1if`. Callers must not write to the log.
            warnings.simplefilter("error")
            body = ast.parse(expression.strip(), mode="eval").body
        names = {term.id for term in _list_terms(body) if isinstance(term, ast.Name)}
        delays = [_evaluate(body, retry) for retry in range(count if _VARIABLE in names else 1)]
    except ConfigurationError:
        raise
    except (SyntaxError, MemoryError, RecursionError):
        rule = "must be an expression, such as 1000 * (1 + retried)"
        raise ConfigurationError(_HEADER, rule, expression) from None
    except (ArithmeticError, TypeError, ValueError) as error:
        rule = f"cannot be computed: {error}"
        raise ConfigurationError(_HEADER, rule, expression) from None
    if not all(0 <= delay <= MAX_DURATION_MS for delay in delays):
        rule = f"must have results from 0 to {MAX_DURATION_MS} (milliseconds)"
        raise ConfigurationError(_HEADER, rule, expression)
    return [round(delay) for delay in delays]


def _list_terms(body: ast.expr) -> list[ast.expr]:
    terms = [node for node in ast.walk(body) if isinstance(node, ast.expr)]
    if len(terms) > _MAX_TERMS:
        rule = f"must have at most {_MAX_TERMS} numbers, names, operators and functions"
        raise ConfigurationError(_HEADER, rule)
    return terms


def _evaluate(node: ast.AST, retried: int) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name(id=name) if name == _VARIABLE:
            return float(retried)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return float(_OPERATORS[type(op)](_evaluate(left, retried), _evaluate(right, retried)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return float(_OPERATORS[type(op)](_evaluate(operand, retried)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            arguments: list[Any] = [_evaluate(argument, retried) for argument in args]
            return float(_FUNCTIONS[name](*arguments))
        case _:
            names = ", ".join(_FUNCTIONS)
            rule = f"must consist of numbers, {_VARIABLE}, + - * / % and {names}"
            raise ConfigurationError(_HEADER, rule)
