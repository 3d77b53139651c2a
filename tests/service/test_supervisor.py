"""The sockets and the restart delays of the supervisor; its processes run in integration tests."""

from __future__ import annotations

import socket
from errno import EADDRINUSE

import pytest

from tarry.service.supervisor import Supervisor, restart_delay_s


def test_restart_delays_grow_up_to_half_a_minute() -> None:
    """The first restart is made at once; the delay doubles with each further early exit."""
    assert [0, 0, 1, 2, 4, 8, 16, 30, 30] == [restart_delay_s(count) for count in range(9)]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_processes_share_a_free_port(host: str) -> None:
    """With port 0, all sockets have the same port, which the URL names."""
    supervisor = Supervisor(3, host, 0)
    url = supervisor.open_listeners()
    sockets = [listener for each in supervisor._processes for listener in each.listeners]
    ports = {listener.getsockname()[1] for listener in sockets}
    for listener in sockets:
        listener.close()
    assert len(sockets) >= 3
    assert [url.rpartition(":")[2]] == [str(port) for port in ports]
    assert ("[::1]" in url) == (host == "::1" or "::1" in url)


def test_a_port_in_use_is_an_error() -> None:
    """A port on which another program listens is refused, even if that program would share it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use") as caught:
            Supervisor(2, "127.0.0.1", other.getsockname()[1]).open_listeners()
    assert EADDRINUSE == caught.value.errno
