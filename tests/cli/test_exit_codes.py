"""What each failure means: an exit code, and words that help."""

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
def test_code_tells_failures_apart(error: TarryError, code: int) -> None:
    """A script can tell what to do next."""
    assert code == exit_code_of(error)


def test_words_are_the_service_own_and_say_what_helps() -> None:
    """The detail without the request; when to come back; where a key comes from."""
    busy = TooManyRequests("POST / ...", problem={"detail": "Too many tasks."}, retry_after=5.0)
    shut = NotAuthorized("GET / ...", problem={"detail": "A key is needed."})

    assert "Too many tasks. Try again in 5 s." == error_message(busy)
    assert error_message(shut).startswith("A key is needed. Pass a key with --key or TARRY_KEY;")
    assert "rate must be a number" == error_message(ConfigurationError("rate must be a number"))
    assert "GET / got no answer" == error_message(ServiceError("GET / got no answer"))


def test_no_service_says_how_to_start_one() -> None:
    """The most usual failure of all."""
    done = run_command("tasks", "list", "--server", "http://127.0.0.1:1")

    said = (
        "error: no service answers at http://127.0.0.1:1 (connection refused): start one with "
        "`tarry serve`, or set another address with --server or TARRY_SERVER\n"
    )
    assert (4, "", said) == done


@pytest.mark.parametrize(
    ("option", "value", "said"),
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
def test_wrong_address_or_key_is_a_mistake(option: str, value: str, said: str) -> None:
    """Nothing is sent; the option is named, and not what Python calls it."""
    done = run_command("tasks", "list", option, value)

    assert (2, "") == (done.code, done.out)
    assert done.err.startswith(f"error: {option} {said}")
    assert "key=" not in done.err
