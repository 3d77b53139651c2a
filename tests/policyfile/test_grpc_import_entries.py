"""Tests for the choice of the entry of a gRPC service config."""

from __future__ import annotations

import pytest

from tarry.errors import ConfigurationError
from tarry.policyfile.grpc import from_grpc

ENTRIES = {
    "methodConfig": [
        {"name": [{"service": "a.A"}], "timeout": "1s"},
        {"name": [{"service": "a.A", "method": "M"}, {"service": "b.B"}], "timeout": "2s"},
        {"name": [{}], "timeout": "3s"},
    ]
}


@pytest.mark.parametrize(
    ("service", "method", "timeout_s", "difference_count"),
    [
        ("a.A", None, 1, 0),
        ("a.A", "M", 2, 0),
        ("a.A", "N", 1, 1),
        ("b.B", "M", 2, 1),
        ("c.C", "M", 3, 1),
        (None, None, 3, 2),
    ],
)
def test_most_specific_entry_is_imported(
    service: str | None, method: str | None, timeout_s: float, difference_count: int
) -> None:
    """As in a channel, an entry of the method precedes one of the service and one of all calls."""
    result = from_grpc(ENTRIES, service=service, method=method)

    assert timeout_s == result.defence.policy.attempt_timeout
    assert difference_count == len(result.differences)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        (("a.a", None), "methodConfig[2] = a.a: no entry has this name, so the entry of all calls"),
        (("a.A", "N"), "methodConfig[0] = a.A/N: no entry has this name, so the entry of a.A"),
    ],
    ids=str,
)
def test_fallback_entry_is_reported(name: tuple[str, str | None], start: str) -> None:
    """If a less specific entry is imported, a difference names it and lists all entries."""
    service, method = name

    (difference,) = from_grpc(ENTRIES, service=service, method=method).differences

    assert f"{start} is imported; the entries have the names a.A, a.A/M, b.B" == str(difference)


def test_unknown_service_is_rejected() -> None:
    """If no entry matches, the error has the names of all entries."""
    document = {"methodConfig": ENTRIES["methodConfig"][:2]}

    with pytest.raises(ConfigurationError, match=r"applies to c\.C: choose one of a\.A, a\.A/M"):
        from_grpc(document, service="c.C")
    with pytest.raises(ConfigurationError, match="applies to all calls"):
        from_grpc(document)
    with pytest.raises(ConfigurationError, match=r"applies to c\.C: no entry names a service$"):
        from_grpc({"methodConfig": []}, service="c.C")


def test_method_needs_its_service() -> None:
    """A method without its service is rejected."""
    with pytest.raises(
        ConfigurationError, match=r"^method requires service: give the service of 'M'"
    ):
        from_grpc(ENTRIES, method="M")
