from __future__ import annotations

import asyncio
import errno
import socket
import threading
from typing import Any

import pytest

from tarry.service.delivery import DeliveryError, Fault
from tarry.service.delivery import dns as dns_module
from tarry.service.delivery.dns import DnsCache
from tarry.service.delivery.grpc import GrpcDeliveryClient
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tests.service.delivery.harness import LOOPBACK_GUARD, new_request, run, send_all, wait_for

pytestmark = pytest.mark.usefixtures("each_loop")


class FakeResolver:
    """A resolver that blocks while `may_answer` is not set."""

    def __init__(self) -> None:
        self.lookups: list[str] = []
        self.addresses: dict[str, list[str]] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self, host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        """Resolve a name."""
        self.lookups.append(host)
        self.may_answer.wait(30)
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in self.addresses[host]]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> FakeResolver:
    """Replace the resolver of the system."""
    fake = FakeResolver()
    fake.addresses["one.example"] = ["192.0.2.1", "2001:db8::1", "192.0.2.1"]
    monkeypatch.setattr("socket.getaddrinfo", fake)
    return fake


async def test_addresses_keep_the_order_of_the_resolver(resolver: FakeResolver) -> None:
    """Addresses keep their order, without duplicates, up to a maximum number."""
    resolver.addresses["many.example"] = [f"192.0.2.{number}" for number in range(200)]
    cache = DnsCache()
    one, many = (
        await cache.resolve("one.example", "default"),
        await cache.resolve("many.example", "default"),
    )
    assert (("192.0.2.1", "2001:db8::1"), 8) == (one, len(many))


async def test_concurrent_lookups_share_one_query(resolver: FakeResolver) -> None:
    """Concurrent callers share a query, even if the first caller is cancelled."""
    resolver.may_answer.clear()
    cache = DnsCache()
    first, *others = [
        asyncio.create_task(cache.resolve("one.example", "default")) for _ in range(5)
    ]
    await wait_for(lambda: resolver.lookups)
    first.cancel()
    resolver.may_answer.set()
    assert 1 == len(set(await asyncio.gather(*others)))
    assert ["one.example"] == resolver.lookups


async def test_answers_are_cached(resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call uses the cached addresses, and an expired name is resolved again."""
    cache = DnsCache()
    cached = [
        await cache.resolve("one.example", "default"),
        await cache.resolve("one.example", "default"),
    ]
    monkeypatch.setattr(dns_module, "_TTL_S", 0.0)
    cache._cached.clear()
    resolver.addresses["one.example"] = ["192.0.2.9"]
    first, second, third, fourth = [
        *cached,
        await cache.resolve("one.example", "default"),
        await cache.resolve("one.example", "default"),
    ]
    assert first == second
    assert ("192.0.2.9",) == third == fourth
    assert 3 == len(resolver.lookups)


async def test_failures_are_not_cached(resolver: FakeResolver) -> None:
    """A failed lookup is a DNS fault, and the next call resolves the name again."""
    cache = DnsCache()
    with pytest.raises(
        DeliveryError, match=r"Could not resolve new.example: Name or service"
    ) as raised:
        await cache.resolve("new.example", "default")
    assert Fault.DNS is raised.value.fault
    resolver.addresses["new.example"] = ["192.0.2.2"]
    assert ("192.0.2.2",) == (await cache.resolve("new.example", "default"))


def test_name_that_cannot_be_encoded_is_a_dns_fault(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that the IDNA codec rejects raises DeliveryError."""
    monkeypatch.undo()

    async def main() -> None:
        await DnsCache().resolve("a" * 64 + ".example", "default")

    with pytest.raises(DeliveryError, match="Could not resolve"):
        run(main())


async def test_cache_is_bounded(resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that was resolved first is removed when the cache is full."""
    monkeypatch.setattr(dns_module, "_MAX_CACHED_HOSTS", 4)

    cache = DnsCache()
    for number in range(10):
        resolver.addresses[f"{number}.example"] = ["192.0.2.1"]
        await cache.resolve(f"{number}.example", "default")
    assert [f"{number}.example" for number in (6, 7, 8, 9)] == list(cache._cached)


async def test_concurrent_lookups_are_bounded(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant has a quarter of the slots. Lookups of cancelled callers are not started."""
    monkeypatch.setattr(dns_module, "_MAX_LOOKUPS", 8)

    resolver.may_answer.clear()
    cache = DnsCache()
    hosts = [f"{number}.example" for number in range(6)]
    for host in hosts:
        resolver.addresses[host] = ["192.0.2.1"]
    tasks = [asyncio.create_task(cache.resolve(host, "default")) for host in hosts]
    await wait_for(lambda: len(resolver.lookups) == 2)
    started = sorted(resolver.lookups)
    for task in tasks[:5]:
        task.cancel()
    await asyncio.wait(tasks[:5])
    resolver.may_answer.set()
    await tasks[5]
    await wait_for(lambda: not cache._lookups)
    assert (["0.example", "1.example"], ["5.example"], 8) == (
        started,
        resolver.lookups[2:],
        cache._free_slots,
    )


async def test_lack_of_threads_is_an_internal_fault(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup whose thread cannot be started fails and frees its slot."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    cache = DnsCache()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(100):
            with pytest.raises(DeliveryError, match="cannot start a thread") as raised:
                await cache.resolve("one.example", "default")
            assert Fault.INTERNAL is raised.value.fault
    assert ("192.0.2.1", "2001:db8::1") == (await cache.resolve("one.example", "default"))


async def test_close_fails_waiting_callers(resolver: FakeResolver) -> None:
    """Waiting callers get an INTERNAL fault, and the late answer is ignored."""
    resolver.may_answer.clear()
    cache = DnsCache()
    task = asyncio.create_task(cache.resolve("one.example", "default"))
    await wait_for(lambda: resolver.lookups)
    await cache.close()
    with pytest.raises(DeliveryError, match="shutting down") as raised:
        await task
    resolver.may_answer.set()
    await wait_for(lambda: not cache._lookups)
    assert Fault.INTERNAL is raised.value.fault


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_MEMORY, None])
def test_errors_that_are_no_answer(
    resolver: FakeResolver, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of this machine or its DNS server have a pause, so no attempt is counted."""

    def fail(*_: object, **__: object) -> None:
        if code is None:
            raise OSError(errno.EMFILE, "Too many open files")
        raise socket.gaierror(code, "Temporary failure in name resolution")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    with pytest.raises(DeliveryError, match="no DNS server has answered") as raised:
        run(DnsCache().resolve("one.example", "default"))
    assert Fault.DNS is raised.value.fault
    assert raised.value.pause_s is not None


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_deadline_during_a_lookup_is_not_counted(resolver: FakeResolver, scheme: str) -> None:
    """If the deadline of an attempt passes before its name is resolved, it has a pause."""
    resolver.may_answer.clear()

    client = (HttpDeliveryClient if scheme == "http" else GrpcDeliveryClient)(LOOPBACK_GUARD)
    [result] = await send_all(client, new_request(f"{scheme}://one.example:1/S/M", timeout=0.05))
    resolver.may_answer.set()
    assert (Fault.DNS, 1.0) == (result.fault, result.pause_s)
    assert "not resolved" in (result.error or "")


async def test_answer_after_the_loop_is_closed_is_ignored(resolver: FakeResolver) -> None:
    """The resolver's thread ends without an error when the event loop is closed."""
    resolver.may_answer.clear()

    before = threading.active_count()
    task = asyncio.create_task(DnsCache().resolve("one.example", "default"))
    await wait_for(lambda: resolver.lookups)
    task.cancel()
    resolver.may_answer.set()
    for thread in threading.enumerate():
        if thread.name.endswith("(_resolve)"):
            thread.join(30)
    assert threading.active_count() <= before
