"""DNS lookups that are slow or never answered, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tarry.service.delivery import DeliveryError, Fault
from tarry.service.delivery import dns as dns_module
from tarry.service.delivery.dns import Addresses, DnsCache
from tests.service.engine.harness import run

ADDRESSES: Addresses = ("192.0.2.1",)


@pytest.fixture(autouse=True)
def run_async() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Run coroutine functions on virtual time."""
    return run


class FakeLookups:
    """Lookups without threads. A name with "hung" in it is not answered for `hang_s`."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.hung_names = "hung"
        self.hang_s = 30.0

    def __call__(self, host: str, on_answer: Callable[[str, Any], None]) -> None:
        """Start a lookup."""
        self.started.append(host)
        is_hung = self.hung_names in host
        delay, answer = (self.hang_s, None) if is_hung else (0.005, ADDRESSES)
        asyncio.get_running_loop().call_later(delay, on_answer, host, answer)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> FakeLookups:
    """Replace the threads of lookups."""
    fake = FakeLookups()
    monkeypatch.setattr(dns_module, "start_lookup_thread", fake)
    return fake


async def fail_to_resolve(cache: DnsCache, host: str, tenant: str = "ann") -> DeliveryError:
    """Return the error of a lookup."""
    with pytest.raises(DeliveryError) as raised:
        await cache.resolve(host, tenant)
    assert Fault.DNS is raised.value.fault
    return raised.value


async def hang(cache: DnsCache, count: int, tenant: str = "ann") -> list[asyncio.Task[Any]]:
    """Start to resolve names that are not answered."""
    hosts = [f"{number}.{tenant}-hung.example" for number in range(count)]
    tasks = [asyncio.create_task(fail_to_resolve(cache, host, tenant)) for host in hosts]
    await asyncio.sleep(0)
    return tasks


async def test_unanswered_names_of_a_tenant_do_not_delay_others(lookups: FakeLookups) -> None:
    """Names of other tenants are looked up at once: a tenant has a quarter of the slots."""
    cache, now = DnsCache(), asyncio.get_running_loop().time
    tasks = await hang(cache, 200)
    assert 32 == len(lookups.started)
    started_at = now()
    for number in range(20):
        assert ADDRESSES == await cache.resolve("a.example", f"tenant-{number}")
    assert now() - started_at == pytest.approx(0.005)  # the first lookup; then it is cached
    await asyncio.wait(tasks)


async def test_many_tenants_with_unanswered_names_leave_slots(lookups: FakeLookups) -> None:
    """The share of each tenant shrinks with the number of tenants."""
    cache = DnsCache()
    tasks = [task for number in range(9) for task in await hang(cache, 50, f"t{number}")]
    counts = [sum(f".t{number}-" in host for host in lookups.started) for number in range(9)]
    assert (32, 3, 9) == (counts[0], counts[8], 128 - sum(counts))
    assert ADDRESSES == await cache.resolve("a.example", "ben")
    await asyncio.wait(tasks)


async def test_unanswered_names_do_not_delay_other_names_of_their_tenant(
    lookups: FakeLookups,
) -> None:
    """Names that were not answered before have a smaller share than other names."""
    cache, now = DnsCache(), asyncio.get_running_loop().time
    await asyncio.wait(await hang(cache, 32))
    await asyncio.sleep(60)
    lookups.started.clear()
    tasks = await hang(cache, 32)
    assert 19 == len(lookups.started)
    started_at = now()
    assert ADDRESSES == await cache.resolve("a.example", "ann")
    assert now() - started_at == pytest.approx(0.005)
    await asyncio.wait(tasks)


async def test_queues_of_tenants_are_served_in_turn(
    lookups: FakeLookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant with many waiting lookups does not keep another tenant waiting."""
    monkeypatch.setattr(dns_module, "_MAX_LOOKUPS", 1)

    cache = DnsCache()
    requests = [(f"{number}.ann", "ann") for number in range(9)] + [("0.ben", "ben")]
    await asyncio.gather(*[cache.resolve(host, tenant) for host, tenant in requests])
    assert ["0.ann", "1.ann", "0.ben"] == lookups.started[:3]
    assert 10 == len(lookups.started)


async def test_name_that_several_tenants_wait_for_uses_the_first_slot(lookups: FakeLookups) -> None:
    """A name that waits for a slot of one tenant is looked up at once for another tenant."""
    cache, now = DnsCache(), asyncio.get_running_loop().time
    tasks = await hang(cache, 32)
    started_at = now()
    resolved = await asyncio.gather(
        *[cache.resolve("a.example", tenant) for tenant in ("ann", "ben")]
    )
    assert [ADDRESSES, ADDRESSES] == resolved
    assert now() - started_at == pytest.approx(0.005)
    await asyncio.wait(tasks)
    assert 1 == lookups.started.count("a.example")


async def test_lookup_that_gets_no_slot_has_a_pause(lookups: FakeLookups) -> None:
    """A lookup waits five seconds for a slot. Its name gets the usual share afterwards."""
    cache, now = DnsCache(), asyncio.get_running_loop().time
    tasks = await hang(cache, 32)
    started_at = now()
    error = await fail_to_resolve(cache, "a.example")
    assert "too many DNS lookups" in str(error)
    assert (5.0, 5.0) == pytest.approx((error.pause_s, now() - started_at))
    assert "a.example" not in lookups.started
    await asyncio.wait(tasks)
    await asyncio.sleep(30)
    assert ADDRESSES == await cache.resolve("a.example", "ann")


async def test_pauses_of_an_unanswered_name_grow(lookups: FakeLookups) -> None:
    """The name is not looked up during a pause. An answer ends the pauses."""
    lookups.hang_s = 1.0

    cache, pauses = DnsCache(), []
    for _ in range(6):
        error = await fail_to_resolve(cache, "hung.example")
        assert error.pause_s is not None
        pauses.append(error.pause_s)
        await asyncio.sleep(error.pause_s / 2)
        await fail_to_resolve(cache, "hung.example")
        await asyncio.sleep(error.pause_s / 2)
    assert [5.0, 10.0, 20.0, 40.0, 60.0, 60.0] == pytest.approx(pauses)
    assert 6 == len(lookups.started)

    lookups.hung_names = "none"
    assert ADDRESSES == await cache.resolve("hung.example", "ann")


async def test_lookup_that_hangs_is_not_repeated(lookups: FakeLookups) -> None:
    """A name occupies one slot, however long its lookup takes."""
    lookups.hang_s = 400.0

    cache, now = DnsCache(), asyncio.get_running_loop().time
    started_at = now()
    while now() - started_at < 290:
        error = await fail_to_resolve(cache, "hung.example")
        assert error.pause_s is not None
        await asyncio.sleep(error.pause_s)
    assert ["hung.example"] == lookups.started
    assert 127 == cache._free_slots


async def test_expired_addresses_are_used_without_an_answer(lookups: FakeLookups) -> None:
    """Addresses are used for an hour after they have expired (RFC 8767)."""
    cache, now = DnsCache(), asyncio.get_running_loop().time
    assert ADDRESSES == await cache.resolve("a.example", "ann")
    await asyncio.sleep(61)
    lookups.hung_names = "a.example"
    for expected_s in (1.8, 0.0):  # the second call is in the pause of the name
        started_at = now()
        assert ADDRESSES == await cache.resolve("a.example", "ann")
        assert now() - started_at == pytest.approx(expected_s)
    await asyncio.sleep(3600)
    await fail_to_resolve(cache, "a.example")


@pytest.mark.parametrize("are_others_answered", [False, True])
async def test_name_that_is_never_answered_is_counted_after_an_hour(
    lookups: FakeLookups, are_others_answered: bool
) -> None:
    """After an hour an attempt is counted, so that its task ends, unless no name is answered."""
    cache, now = DnsCache(), asyncio.get_running_loop().time
    started_at = now()
    while now() - started_at < 3600:
        error = await fail_to_resolve(cache, "hung.example")
        assert error.pause_s is not None
        await asyncio.sleep(error.pause_s)
    if are_others_answered:
        await cache.resolve("a.example", "ben")
    error = await fail_to_resolve(cache, "hung.example")
    assert (error.pause_s is None) is are_others_answered


async def test_unanswered_names_are_logged_once_a_minute(
    lookups: FakeLookups, caplog: pytest.LogCaptureFixture
) -> None:
    """The line has one of the names, and their number."""
    cache = DnsCache()
    await asyncio.wait(await hang(cache, 20))
    await asyncio.wait(await hang(cache, 20, "ben"))
    assert ["DNS lookup not answered, host=0.ann-hung.example unanswered_hosts=1"] == (
        caplog.messages
    )
    await asyncio.sleep(60)
    await fail_to_resolve(cache, "hung.example")
    assert caplog.messages[1].endswith("host=hung.example unanswered_hosts=41")
