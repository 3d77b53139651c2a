from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from tarry.service.delivery import DeliveryError, Fault
from tarry.service.delivery.http1 import connector
from tarry.service.delivery.http1.connector import Addresses, DnsCache
from tests.service.delivery.harness import run, wait_for

pytestmark = pytest.mark.usefixtures("either_loop")


class FakeResolver:
    """A resolver that answers when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.says: dict[str, list[str]] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        """Resolve a name."""
        self.asked.append(host)
        self.may_answer.wait(30)
        if host not in self.says:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in self.says[host]]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> FakeResolver:
    """Replace the system's resolver."""
    made = FakeResolver()
    made.says["one.example"] = ["192.0.2.1", "2001:db8::1", "192.0.2.1"]
    monkeypatch.setattr("socket.getaddrinfo", made)
    return made


def test_addresses_keep_the_order_of_the_resolver(resolver: FakeResolver) -> None:
    """Duplicates are removed, and the number of addresses is bounded."""

    async def main() -> tuple[Addresses, Addresses]:
        resolver.says["many.example"] = [f"192.0.2.{number}" for number in range(200)]
        known = DnsCache()
        return await known.resolve("one.example"), await known.resolve("many.example")

    one, many = run(main())
    assert (("192.0.2.1", "2001:db8::1"), 8) == (one, len(many))


def test_concurrent_lookups_share_one_query(resolver: FakeResolver) -> None:
    """Callers share a query, also when the first of them is cancelled."""

    async def main() -> list[Addresses]:
        resolver.may_answer.clear()
        known = DnsCache()
        first, *others = [asyncio.create_task(known.resolve("one.example")) for _ in range(5)]
        await wait_for(lambda: resolver.asked)
        first.cancel()
        resolver.may_answer.set()
        return await asyncio.gather(*others)

    assert 1 == len(set(run(main())))
    assert ["one.example"] == resolver.asked


def test_answers_are_cached_for_a_while(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time to live, the name is resolved again."""

    async def main() -> list[Addresses]:
        known = DnsCache()
        found = [await known.resolve("one.example"), await known.resolve("one.example")]
        monkeypatch.setattr(connector, "_DNS_TTL_S", 0.0)
        known._cached.clear()
        resolver.says["one.example"] = ["192.0.2.9"]
        return [*found, await known.resolve("one.example"), await known.resolve("one.example")]

    first, second, third, fourth = run(main())
    assert first == second
    assert ("192.0.2.9",) == third == fourth
    assert 3 == len(resolver.asked)


def test_failures_are_not_cached(resolver: FakeResolver) -> None:
    """The error describes the failure, and the next call resolves again."""

    async def main() -> Addresses:
        known = DnsCache()
        with pytest.raises(
            DeliveryError, match=r"Could not resolve new.example: Name or service"
        ) as no:
            await known.resolve("new.example")
        assert Fault.DNS is no.value.fault
        resolver.says["new.example"] = ["192.0.2.2"]
        return await known.resolve("new.example")

    assert ("192.0.2.2",) == run(main())


def test_name_that_cannot_be_encoded(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that the codec rejects is a DNS fault."""
    monkeypatch.undo()

    async def main() -> None:
        await DnsCache().resolve("a" * 64 + ".invalid")

    with pytest.raises(DeliveryError, match="Could not resolve"):
        run(main())


def test_cache_is_bounded(resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up names cannot fill the memory."""
    monkeypatch.setattr(connector, "_MAX_CACHED_HOSTS", 4)

    async def main() -> int:
        known = DnsCache()
        for number in range(10):
            resolver.says[f"{number}.example"] = ["192.0.2.1"]
            await known.resolve(f"{number}.example")
        return len(known._cached)

    assert 4 >= run(main())


def test_concurrent_lookups_are_bounded(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled callers are not resolved; the others are, in their order."""
    monkeypatch.setattr(connector, "_MAX_LOOKUPS", 2)

    async def main() -> tuple[list[str], list[str], int]:
        resolver.may_answer.clear()
        known = DnsCache()
        hosts = [f"{number}.example" for number in range(6)]
        for host in hosts:
            resolver.says[host] = ["192.0.2.1"]
        tasks = [asyncio.create_task(known.resolve(host)) for host in hosts]
        await wait_for(lambda: len(resolver.asked) == 2)
        at_once = sorted(resolver.asked)
        for task in tasks[:5]:
            task.cancel()
        await asyncio.wait(tasks[:5])
        resolver.may_answer.set()
        await tasks[5]
        await wait_for(lambda: not known._lookups)
        return at_once, resolver.asked[2:], known._lookup_slots._value

    assert (["0.example", "1.example"], ["5.example"], 2) == run(main())


def test_lack_of_threads_is_an_internal_fault(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that cannot be started frees its place."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> Addresses:
        known = DnsCache()
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", start)
            for _ in range(100):
                with pytest.raises(DeliveryError, match="cannot start a thread") as no:
                    await known.resolve("one.example")
                assert Fault.INTERNAL is no.value.fault
        return await known.resolve("one.example")

    assert ("192.0.2.1", "2001:db8::1") == run(main())


def test_close_fails_waiting_callers(resolver: FakeResolver) -> None:
    """Waiting callers get an internal fault, and the late answer is ignored."""

    async def main() -> Fault:
        resolver.may_answer.clear()
        known = DnsCache()
        task = asyncio.create_task(known.resolve("one.example"))
        await wait_for(lambda: resolver.asked)
        await known.close()
        with pytest.raises(DeliveryError, match="shutting down") as no:
            await task
        resolver.may_answer.set()
        await wait_for(lambda: not known._lookups)
        return no.value.fault

    assert Fault.INTERNAL is run(main())


def test_answer_after_the_loop_is_closed_is_ignored(resolver: FakeResolver) -> None:
    """The thread ends without an error."""
    resolver.may_answer.clear()

    async def main() -> None:
        task = asyncio.create_task(DnsCache().resolve("one.example"))
        await wait_for(lambda: resolver.asked)
        task.cancel()

    before = threading.active_count()
    run(main())
    resolver.may_answer.set()
    for thread in threading.enumerate():
        if thread.name.endswith("(_resolve)"):
            thread.join(30)
    assert threading.active_count() <= before
