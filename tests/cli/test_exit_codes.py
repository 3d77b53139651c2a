"""Exit codes and error messages of commands."""

from __future__ import annotations

import pytest

from tarry.cli.exit_codes import error_message, exit_code_of
from tarry.client.errors import (
    Conflict,
    InvalidRequest,
    NotAuthorized,
    NotFinished,
    NotFound,
    ServiceError,
    ServiceUnavailable,
    ServiceUnreachable,
    TooManyRequests,
)
from tarry.errors import (
    ConfigurationError,
    MissingExtra,
    Overloaded,
    StoreUnavailable,
    TarryError,
)
from tests.cli.harness import run_command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Conflict("x"), 1),
        (NotFinished("x"), 1),
        (ConfigurationError("x"), 2),
        (InvalidRequest("x"), 2),
        (NotAuthorized("x"), 2),
        (MissingExtra("x"), 2),
        (NotFound("x"), 3),
        (ServiceError("x"), 4),
        (ServiceUnreachable("x"), 4),
        (ServiceUnavailable("x"), 4),
        (TooManyRequests("x"), 4),
        (StoreUnavailable("x"), 4),
        (Overloaded("x", retry_after=1.0), 4),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TarryError) else "",
)
def test_exit_code_of_each_error(error: TarryError, code: int) -> None:
    assert code == exit_code_of(error)


def test_error_message_has_detail_and_hint() -> None:
    """The message is the problem's detail, with a hint about keys or Retry-After."""
    throttled = TooManyRequests(
        "POST / ...", problem={"detail": "Too many tasks."}, retry_after=5.0
    )
    unauthorized = NotAuthorized("GET / ...", problem={"detail": "A key is needed."})

    assert "Too many tasks. Try again in 5 s." == error_message(throttled)
    assert error_message(unauthorized).startswith(
        "A key is needed. Pass an API key with --key or TARRY_KEY;"
    )
    assert "rate must be a number" == error_message(ConfigurationError("rate must be a number"))
    assert "GET / got no answer" == error_message(ServiceError("GET / got no answer"))


def test_error_without_a_service_says_how_to_start_one() -> None:
    result = run_command("tasks", "list", "--server", "http://127.0.0.1:1")

    message = (
        "error: no service answers at http://127.0.0.1:1 (connection refused): start one with "
        "`tarry serve`, or set another address with --server or TARRY_SERVER\n"
    )
    assert (4, "", message) == result


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "--server",
            "127.0.0.1:8080",
            "must be the address of the service, such as http://127.0.0.1",
        ),
        ("--key", "két", "must be an API key of the service"),
    ],
    ids=["server", "key"],
)
def test_invalid_address_or_key_names_the_option(option: str, value: str, message: str) -> None:
    """An invalid --server or --key exits with 2 and names the option."""
    result = run_command("tasks", "list", option, value)

    assert (2, "") == (result.code, result.out)
    assert result.err.startswith(f"error: {option} {message}")
    assert "key=" not in result.err
