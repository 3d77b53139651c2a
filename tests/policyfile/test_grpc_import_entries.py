"""Which entry of a gRPC service config is imported."""

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
    ("service", "method", "seconds", "lines"),
    [
        ("a.A", None, 1, 0),
        ("a.A", "M", 2, 0),
        ("a.A", "N", 1, 1),
        ("b.B", "M", 2, 1),
        ("c.C", "M", 3, 1),
        (None, None, 3, 2),
    ],
)
def test_entry_is_the_one_that_a_channel_would_use(
    service: str | None, method: str | None, seconds: float, lines: int
) -> None:
    """The method counts before the service, and the service before the default."""
    made = from_grpc(ENTRIES, service=service, method=method)

    assert seconds == made.defence.policy.attempt_timeout
    assert lines == len(made.differences)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        (("a.a", None), "methodConfig[2] = a.a: no entry has this name, so the entry of all calls"),
        (("a.A", "N"), "methodConfig[0] = a.A/N: no entry has this name, so the entry of a.A"),
    ],
    ids=str,
)
def test_entry_in_place_of_one_that_is_not_there(name: tuple[str, str | None], start: str) -> None:
    """Where an entry stands in, the line says which, and which names there are."""
    service, method = name

    (difference,) = from_grpc(ENTRIES, service=service, method=method).differences

    assert f"{start} is imported; the entries have the names a.A, a.A/M, b.B" == str(difference)


def test_service_that_is_not_there_is_refused() -> None:
    """The message has the names that could have been meant."""
    document = {"methodConfig": ENTRIES["methodConfig"][:2]}

    with pytest.raises(ConfigurationError, match=r"applies to c\.C: choose one of a\.A, a\.A/M"):
        from_grpc(document, service="c.C")
    with pytest.raises(ConfigurationError, match="applies to all calls"):
        from_grpc(document)
    with pytest.raises(ConfigurationError, match=r"applies to c\.C: no entry names a service$"):
        from_grpc({"methodConfig": []}, service="c.C")


def test_method_needs_its_service() -> None:
    """A method alone would be taken for all calls."""
    with pytest.raises(ConfigurationError, match=r"^method needs service: name the service of 'M'"):
        from_grpc(ENTRIES, method="M")
