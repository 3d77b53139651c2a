"""Which hosts requests may be sent to, where no key protects the service."""

from __future__ import annotations

import pytest

from tests.service.api.harness import TARGET, Rig, with_rig

HOSTS = frozenset({"127.0.0.1", "Tarry.Internal", "fd00::1"})


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8080",
        "127.0.0.1",
        "127.8.8.8:1",
        "localhost:8080",
        "LOCALHOST.",
        "[::1]:8080",
        "[::1]",
        "tarry.internal:80",
        "tarry.internal.",
        "[fd00::1]:8080",
    ],
)
def test_what_is_meant_for_this_service_is_served(host: str) -> None:
    """Loopback by any of its names, the address it listens on, and what the operator allows."""

    async def test(rig: Rig) -> None:
        for path in ("/retry-tasks", "/retry-tasks", "/metrics", "/healthz"):
            assert 200 == (await rig.ask("GET", path, lines=[(b"host", host.encode())])).status

    with_rig(test, hosts=HOSTS)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8080",
        "evil.example",
        "127.0.0.1.evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1@evil.example",
        "10.0.0.1:8080",
        "[fd00::2]:8080",
        "2130706433",
        "",
        "\xff",
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(host: str) -> None:
    """421 with the setting that would allow it; a page cannot read, and cannot post."""

    async def test(rig: Rig) -> None:
        lines = [(b"host", host.encode("latin-1"))]
        for path in ("/retry-tasks", "/downstreams", "/metrics", "/readyz", "/docs"):
            refused = await rig.ask("GET", path, lines=lines)
            assert (421, "/docs#problem-wrong-host") == (refused.status, refused.problem["type"])
            assert "allow_host" in refused.problem["detail"]
        own = [(b"origin", b"http://" + lines[0][1]), *lines]
        refused = await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET}, lines=own)
        assert (421, 0) == (refused.status, await rig.count())

    with_rig(test, hosts=HOSTS)
