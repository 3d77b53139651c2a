from __future__ import annotations

import resource

import pytest

from tarry.service.file_descriptors import DescriptorShares, raise_limit, share_descriptors


@pytest.mark.parametrize(
    ("limit", "in_flight", "shares"),
    [
        (1_048_576, 512, DescriptorShares(max_connections=4096, max_clients=16_384)),
        (20_000, 512, DescriptorShares(max_connections=4096, max_clients=15_360)),
        (20_000, 8000, DescriptorShares(max_connections=8000, max_clients=11_456)),
        (1024, 512, DescriptorShares(max_connections=256, max_clients=224)),
        (256, 512, DescriptorShares(max_connections=64, max_clients=32)),
        (64, 512, DescriptorShares(max_connections=16, max_clients=1)),
    ],
)
def test_descriptors_are_shared(limit: int, in_flight: int, shares: DescriptorShares) -> None:
    """Connections to targets and from clients never take all descriptors."""
    assert shares == share_descriptors(limit, in_flight)


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, (4096, 4096)),
        (4096, 4096, (4096, 4096)),
        (1024, resource.RLIM_INFINITY, (1_048_576, resource.RLIM_INFINITY)),
        (2_000_000, 4_000_000, (2_000_000, 4_000_000)),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, (1_048_576, resource.RLIM_INFINITY)),
    ],
)
def test_soft_limit_is_raised(
    soft: int, hard: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The soft limit becomes the hard limit, up to a maximum, and is never lowered."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: limits.append(values))
    raise_limit()
    assert expected == limits[-1]


def test_a_limit_that_cannot_be_raised_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of macOS is used if a higher one is refused."""
    limits = [(256, resource.RLIM_INFINITY)]

    def refuse_large(_: int, values: tuple[int, int]) -> None:
        if values[0] > 10_240:
            raise ValueError
        limits.append(values)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", refuse_large)
    raise_limit()
    assert (10_240, resource.RLIM_INFINITY) == limits[-1]
