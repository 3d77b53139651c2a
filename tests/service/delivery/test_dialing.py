from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tarry.service.delivery import dialing
from tarry.service.delivery.dialing import dial
from tests.service.delivery.sending import run, until

pytestmark = [
    pytest.mark.usefixtures("either_loop"),
    pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address on Linux alone"),
]

FIRST, SECOND, NOBODY = "127.0.0.2", "127.0.0.1", "127.0.0.3"


@pytest.fixture
def port() -> Iterator[int]:
    """Open on SECOND, refused on NOBODY, and on FIRST nobody answers: the queue there is full."""
    with socket.socket() as answers, socket.socket() as is_full:
        answers.bind((SECOND, 0))
        answers.listen()
        number: int = answers.getsockname()[1]
        is_full.bind((FIRST, number))
        is_full.listen(0)
        queued = [socket.socket() for _ in range(4)]
        for each in queued:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect((FIRST, number))
        yield number
        for each in queued:
            each.close()


@pytest.mark.parametrize(
    "addresses",
    [[SECOND], [SECOND, FIRST], [NOBODY, SECOND], [NOBODY, "::1", SECOND], [SECOND, SECOND]],
)
def test_the_first_that_answers_is_taken(port: int, addresses: list[str]) -> None:
    """One that refuses does not hold up the next."""

    async def main() -> tuple[str, str]:
        made, address = await dial(addresses, port)
        with made:
            return address, made.getpeername()[0]

    assert (SECOND, SECOND) == run(main())


@pytest.mark.parametrize("addresses", [[FIRST, SECOND], [FIRST, NOBODY, SECOND]])
def test_one_that_does_not_answer_holds_up_for_a_moment(
    port: int, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the next is tried beside it, and the loser is let go."""
    monkeypatch.setattr(dialing, "_HEAD_START", 0.01)

    async def main() -> tuple[str, int]:
        made, address = await dial(addresses, port)
        made.close()
        await asyncio.sleep(0)
        return address, len(asyncio.all_tasks())

    assert (SECOND, 1) == run(main())


def test_when_all_refuse_the_last_says_why(port: int) -> None:
    """One address, or several, or none."""

    async def main(addresses: list[str]) -> None:
        await dial(addresses, port)

    for addresses in ([NOBODY], [NOBODY, "127.0.0.4"]):
        with pytest.raises(ConnectionRefusedError):
            run(main(addresses))
    with pytest.raises(OSError, match="no address"):
        run(main([]))


def test_two_that_answer_at_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is taken, the other closed: an open socket would be a warning here."""
    monkeypatch.setattr(dialing, "_HEAD_START", 0.0)

    async def main() -> None:
        for _ in range(20):
            made, _ = await dial([SECOND] * 4, port)
            made.close()

    run(main())


@pytest.mark.parametrize("addresses", [[FIRST], [FIRST, FIRST]])
def test_a_cancelled_one_leaves_no_socket(
    port: int, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a task."""
    monkeypatch.setattr(dialing, "_HEAD_START", 0.0)
    made: list[socket.socket] = []

    class Kept(socket.socket):
        def __init__(self, *kind: int) -> None:
            super().__init__(*kind)
            made.append(self)

    monkeypatch.setattr(dialing, "socket", Kept)

    async def main() -> int:
        task = asyncio.create_task(dial(addresses, port))
        await until(lambda: len(made) == len(addresses))
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: len(asyncio.all_tasks()) == 1)
        return sum(each.fileno() >= 0 for each in made)

    assert 0 == run(main())
    assert len(addresses) == len(made)


def test_small_pieces_are_not_held_back(port: int) -> None:
    """A head and the body after it go out at once; a peer that is gone is noticed."""

    async def main() -> tuple[int, int]:
        made, _ = await dial([SECOND], port)
        with made:
            return (
                made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
                made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            )

    assert (1, 1) == run(main())
