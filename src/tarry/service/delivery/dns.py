"""Resolves host names: a cache of addresses, and slots for lookups that tenants share fairly.

Each lookup occupies a thread until the DNS server answers, so only some lookups run at a time. A
tenant may occupy a third as many slots for lookups as are free (a dynamic threshold). One tenant
alone therefore occupies at most a quarter of the slots, and others find free slots, even if the
names of several tenants are never answered. Names that were not answered before get half of that
share, so that they do not delay other names of the same tenant.

A lookup that waits too long for a slot or for an answer is a failure of this machine or of its DNS
server, not of the target. Its DeliveryError has a `pause_s`, so the attempt is not counted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter, OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tarry.service.delivery import DeliveryError, Fault

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

Addresses: TypeAlias = "tuple[str, ...]"
_Answer: TypeAlias = "Addresses | _Failure | None"  # None: no DNS server has answered

_logger = logging.getLogger("tarry.service")
_TTL_S = 60.0
_MAX_STALE_S = 3600.0
"""How long expired addresses are still used while no DNS server answers (RFC 8767)."""
_MAX_CACHED_HOSTS = 65_536  # about 350 bytes each
_MAX_LOOKUPS = 128  # at a time
_FREE_SLOTS_PER_OCCUPIED_SLOT = 3
_MAX_HOST_ADDRESSES = 8
_LOOKUP_TIMEOUT_S = 5.0  # from the call of `resolve`: includes the wait for a slot
_LOOKUP_TIMEOUT_WITH_STALE_S = 1.8  # if there are expired addresses to use (RFC 8767, 5)
_MIN_PAUSE_S, _MAX_PAUSE_S = 5.0, 60.0  # before a name without an answer is looked up again
DEADLINE_PAUSE_S = 1.0  # the pause if the deadline of an attempt ends its wait for a lookup
_MAX_UNANSWERED_S = 3600.0
"""After this time without an answer, attempts are counted, so that the task can end. But only if
other names are answered: then the DNS servers of this name have failed, not the local resolver."""
_RECENT_ANSWER_S = 60.0  # an answer within this time shows that the local resolver works
_LOG_INTERVAL_S = 60.0  # tenants choose the names, and could fill the log
_NO_ANSWER_CODES = frozenset({socket.EAI_AGAIN, socket.EAI_MEMORY})  # of `getaddrinfo`


class _Failure(msgspec.Struct, frozen=True):
    """Why a name has no addresses."""

    fault: Fault
    message: str


class _UnansweredName(msgspec.Struct, frozen=True):
    """A name that no DNS server has answered."""

    since: float
    pause_s: float
    retry_at: float


@dataclass(slots=True, eq=False)
class _Lookup:
    """A lookup that is queued or runs. After a timeout `answer` is None; the thread still runs."""

    host: str
    answer: asyncio.Future[_Answer]
    tenants: set[str] = field(default_factory=set)  # in whose queues the lookup is
    waiter_count: int = 0
    slot_owner: str | None = None  # the tenant whose slot it occupies; None: it has not started
    timer: asyncio.TimerHandle | None = None

    @property
    def is_queued(self) -> bool:
        """Whether the lookup has neither started nor timed out."""
        return self.slot_owner is None and not self.answer.done()


class DnsCache:
    """Caches the addresses of host names for a minute, in the order of the system's resolver."""

    def __init__(self) -> None:
        self._cached: OrderedDict[str, tuple[float, Addresses]] = OrderedDict()
        """By host name: the time at which the entry expires, and the addresses; oldest first."""
        self._unanswered: OrderedDict[str, _UnansweredName] = OrderedDict()
        self._last_answer_at = float("-inf")
        self._next_log_at = float("-inf")
        self._lookups: dict[str, _Lookup] = {}
        self._queues: OrderedDict[tuple[str, bool], deque[_Lookup]] = OrderedDict()
        """Lookups that wait for a slot, by tenant and whether the name was not answered before;
        least recently served first."""
        self._free_slots = _MAX_LOOKUPS
        self._occupied_slots: Counter[str] = Counter()  # by tenant
        self.waiting_tasks: set[asyncio.Task[Any] | None] = set()
        """The asyncio tasks that wait for a lookup."""

    async def resolve(self, host: str, tenant: str) -> Addresses:
        """Return the addresses of a host (a canonical name or address), or raise DeliveryError."""
        if ":" in host or host.replace(".", "").isdigit():
            return (host,)
        if host.endswith(".localhost"):
            host = "localhost"  # RFC 6761, 6.3: the same host, which some resolvers do not know
        if host.endswith(".invalid"):  # RFC 6761, 6.4: never exists, also if no server answers
            raise DeliveryError(Fault.DNS, f"Could not resolve {host}: Name or service not known")
        now = asyncio.get_running_loop().time()
        expires_at, addresses = self._cached.get(host, (float("-inf"), ()))
        if now < expires_at:
            return addresses
        has_stale = now < expires_at + _MAX_STALE_S
        answer: _Answer = None
        unanswered = self._unanswered.get(host)
        if unanswered is None or now >= unanswered.retry_at:
            timeout_s = _LOOKUP_TIMEOUT_WITH_STALE_S if has_stale else _LOOKUP_TIMEOUT_S
            answer = await self._look_up(host, tenant, timeout_s)
        if isinstance(answer, _Failure):
            raise DeliveryError(answer.fault, answer.message)
        if answer is not None:
            return answer
        if has_stale:
            return addresses
        raise self._missing_answer_error(host)

    async def close(self) -> None:
        """Fail the callers that wait for a lookup."""
        self._queues.clear()
        for lookup in self._lookups.values():
            _complete(lookup, _Failure(Fault.INTERNAL, "the service is shutting down"))

    async def _look_up(self, host: str, tenant: str, timeout_s: float) -> _Answer:
        """Wait for a new or a running lookup of a name."""
        lookup = self._lookups.get(host)
        if lookup is None:
            loop = asyncio.get_running_loop()
            lookup = self._lookups[host] = _Lookup(host, loop.create_future())
            lookup.timer = loop.call_later(timeout_s, self._on_timeout, lookup)
        elif lookup.answer.done():  # the thread of a lookup that has timed out still runs
            self._mark_unanswered(host)
            return None
        if lookup.is_queued and tenant not in lookup.tenants:
            # If several tenants wait for the same name, the first slot of any of them is used.
            lookup.tenants.add(tenant)
            self._queues.setdefault((tenant, host in self._unanswered), deque()).append(lookup)
            self._start_lookups()
        task = asyncio.current_task()
        self.waiting_tasks.add(task)
        lookup.waiter_count += 1
        try:
            # Shielded: cancelling this caller must not cancel the lookup, for which other callers
            # may be waiting.
            return await asyncio.shield(lookup.answer)
        finally:
            self.waiting_tasks.discard(task)
            lookup.waiter_count -= 1
            if not lookup.waiter_count and lookup.is_queued:
                self._drop(lookup)

    def _start_lookups(self) -> None:
        """Start queued lookups: the queues in turn, while their tenants have free slots."""
        has_started = True
        while has_started:
            has_started = False
            for key, queue in tuple(self._queues.items()):
                while queue and not queue[0].is_queued:
                    queue.popleft()
                if not queue:
                    del self._queues[key]
                    continue
                tenant, was_unanswered = key
                min_free_slots = _FREE_SLOTS_PER_OCCUPIED_SLOT * self._occupied_slots[tenant]
                if min_free_slots * (1 + was_unanswered) < self._free_slots:
                    self._start(queue.popleft(), tenant)
                    self._queues.move_to_end(key)
                    has_started = True

    def _start(self, lookup: _Lookup, tenant: str) -> None:
        try:
            start_lookup_thread(lookup.host, self._on_answer)
        except RuntimeError as error:
            message = f"cannot start a thread for a DNS lookup: {error}"
            _complete(lookup, _Failure(Fault.INTERNAL, message))
            del self._lookups[lookup.host]
            return
        lookup.slot_owner = tenant
        self._free_slots -= 1
        self._occupied_slots[tenant] += 1

    def _on_timeout(self, lookup: _Lookup) -> None:
        if lookup.is_queued:
            self._drop(lookup)
        elif not lookup.answer.done():
            self._mark_unanswered(lookup.host)
            lookup.answer.set_result(None)

    def _drop(self, lookup: _Lookup) -> None:
        """Remove a lookup that was not started; its waiting callers get no answer."""
        _complete(lookup, None)
        del self._lookups[lookup.host]

    def _on_answer(self, host: str, answer: _Answer) -> None:
        lookup, now = self._lookups.pop(host), asyncio.get_running_loop().time()
        tenant = lookup.slot_owner
        assert tenant is not None  # noqa: S101 - it was started
        self._free_slots += 1
        self._occupied_slots[tenant] -= 1
        if not self._occupied_slots[tenant]:
            del self._occupied_slots[tenant]
        if answer is not None:
            self._last_answer_at = now
            self._unanswered.pop(host, None)
        elif not lookup.answer.done():  # else it was marked when it timed out
            self._mark_unanswered(host)
        if isinstance(answer, tuple):
            self._cached[host] = now + _TTL_S, answer
            self._cached.move_to_end(host)
            if len(self._cached) > _MAX_CACHED_HOSTS:
                self._cached.popitem(last=False)
        _complete(lookup, answer)
        self._start_lookups()

    def _mark_unanswered(self, host: str) -> None:
        """Set the time of the next lookup of a name that was not answered."""
        now, before = asyncio.get_running_loop().time(), self._unanswered.get(host)
        if before is not None and now - before.retry_at > _MAX_UNANSWERED_S:
            before = None  # the name was not needed for a long time
        pause_s = _MIN_PAUSE_S if before is None else min(2 * before.pause_s, _MAX_PAUSE_S)
        since = now if before is None else before.since
        self._unanswered[host] = _UnansweredName(since, pause_s, now + pause_s)
        if len(self._unanswered) > _MAX_CACHED_HOSTS:
            self._unanswered.popitem(last=False)
        if now >= self._next_log_at:
            self._next_log_at = now + _LOG_INTERVAL_S
            message = "DNS lookup not answered, host=%s unanswered_hosts=%d"
            _logger.warning(message, host, len(self._unanswered))

    def _missing_answer_error(self, host: str) -> DeliveryError:
        """Return the error of a lookup that was not answered or not started."""
        unanswered, now = self._unanswered.get(host), asyncio.get_running_loop().time()
        if unanswered is None:
            message = f"Could not resolve {host} yet: too many DNS lookups wait for an answer"
            return DeliveryError(Fault.DNS, message, pause_s=_MIN_PAUSE_S)
        message = f"Could not resolve {host}: no DNS server has answered"
        pause_s = unanswered.retry_at - now
        is_server_healthy = now - self._last_answer_at < _RECENT_ANSWER_S
        if now - unanswered.since >= _MAX_UNANSWERED_S and is_server_healthy:
            return DeliveryError(Fault.DNS, message)
        return DeliveryError(Fault.DNS, message, pause_s=pause_s if pause_s > 0 else _MIN_PAUSE_S)


def _complete(lookup: _Lookup, answer: _Answer) -> None:
    """Wake the callers that wait for a lookup, unless it has timed out."""
    if lookup.timer is not None:
        lookup.timer.cancel()
    if not lookup.answer.done():
        lookup.answer.set_result(answer)


def start_lookup_thread(host: str, on_answer: Callable[[str, _Answer], None]) -> None:
    """Start a lookup in a thread of its own, which passes the answer to the event loop."""
    # Not a thread pool: the process would wait for the threads of unanswered lookups at exit.
    loop = asyncio.get_running_loop()
    Thread(target=_resolve, args=(host, loop, on_answer), daemon=True).start()


def _resolve(
    host: str, loop: asyncio.AbstractEventLoop, on_answer: Callable[[str, _Answer], None]
) -> None:
    answer: _Answer
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answer = tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))[:_MAX_HOST_ADDRESSES]
    except (socket.gaierror, UnicodeError) as error:
        message = f"Could not resolve {host}: {getattr(error, 'strerror', None) or error}"
        is_answered = getattr(error, "errno", None) not in _NO_ANSWER_CODES
        answer = _Failure(Fault.DNS, message) if is_answered else None
    except OSError:  # such as no free file descriptor
        answer = None
    with suppress(RuntimeError):  # raised if the loop is closed; then no caller waits
        loop.call_soon_threadsafe(on_answer, host, answer)
