"""Idempotency keys that are derived from the key of the current request."""

from __future__ import annotations

from typing import Any

import pytest

import tarry
from tarry.idempotency import derive_key
from tarry.runtime.derived_keys import KeyedRequest, current_request

CHARGE = ("POST", "https://pay.example/charges", b"10 EUR")


def test_the_same_name_gives_the_same_key() -> None:
    """A name gives the same key in each run of a request, however often it is used."""
    first_run, second_run = KeyedRequest("record"), KeyedRequest("record")

    keys = {first_run.derive_key("charge"), first_run.derive_key("charge")}
    assert {second_run.derive_key("charge")} == keys


def test_another_name_or_request_gives_another_key() -> None:
    """Keys differ between names and between requests."""
    keys = {
        KeyedRequest(record).derive_key(name)
        for record in ("one", "two")
        for name in ("charge", "refund")
    }
    assert 4 == len(keys)


def test_calls_have_the_same_keys_in_each_run() -> None:
    """A call with the same method, URL and body has the same key in the next run."""
    calls: list[tuple[str, str, bytes | None]] = [
        CHARGE,
        ("PATCH", *CHARGE[1:]),
        ("POST", "https://pay.example/refunds", b"10 EUR"),
        ("POST", "https://pay.example/charges", b"20 EUR"),
        ("POST", "https://pay.example/charges", None),
    ]
    first_run, second_run = KeyedRequest("record"), KeyedRequest("record")

    keys = [first_run.derive_call_key(*call) for call in calls]

    assert len(calls) == len(set(keys))
    assert keys == [second_run.derive_call_key(*call) for call in reversed(calls)][::-1]


def test_equal_calls_have_different_keys() -> None:
    """The first of two equal calls in one run has another key than the second."""
    first_run, second_run = KeyedRequest("record"), KeyedRequest("record")

    keys = [first_run.derive_call_key(*CHARGE) for _ in range(2)]

    assert keys[0] != keys[1]
    assert keys == [second_run.derive_call_key(*CHARGE) for _ in range(2)]


def test_keys_are_as_long_as_random_keys() -> None:
    """A derived key has 32 hexadecimal digits and does not contain the name."""
    key = KeyedRequest("record").derive_key("charge \udc80")

    assert 32 == len(key)
    assert int(key, 16) > 0


def test_derive_key_uses_the_current_request() -> None:
    token = current_request.set(KeyedRequest("record"))
    try:
        assert KeyedRequest("record").derive_key("charge") == derive_key("charge")
    finally:
        current_request.reset(token)


def test_derive_key_without_a_request_is_random() -> None:
    assert derive_key("charge") != derive_key("charge")


@pytest.mark.parametrize("name", [None, 7, b"charge"])
def test_name_must_be_a_string(name: Any) -> None:
    """A name that is not a string raises."""
    with pytest.raises(tarry.ConfigurationError, match="name must be a string"):
        derive_key(name)
