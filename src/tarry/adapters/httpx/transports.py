"""The transports: one that blocks and one for event loops."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from tarry.adapters.http.hand_off import make_hand_off
from tarry.adapters.http.headers import (
    add_safety_note,
    final_response,
    make_repeatable,
    on_blocking_wait,
)
from tarry.adapters.http.origins import Recent
from tarry.adapters.http.send import Sending
from tarry.adapters.httpx import inner
from tarry.adapters.httpx.messages import (
    BYTES,
    arelease,
    can_replay,
    judge,
    outcome_of,
    parts,
    release,
    told,
)
from tarry.errors import BlockingWait, ResultNotAccepted
from tarry.runtime import deadlines
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    import httpx
    import httpx2

    from tarry.adapters.http.hand_off import AsyncService, HandOff, Service
    from tarry.adapters.http.headers import IdempotencyKey
    from tarry.adapters.http.origins import Downstreams
    from tarry.core.hedging import Hedging
    from tarry.core.policy import Policy

    # What both clients want, for type checkers: neither asks for it when it runs.
    class _Transport(httpx.BaseTransport, httpx2.BaseTransport):
        def handle_request(self, request: Any) -> Any: ...

    class _AsyncTransport(httpx.AsyncBaseTransport, httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any: ...

else:
    _Transport = _AsyncTransport = object

_Usual: TypeAlias = "tuple[str, str, str, int | None, type[Any]]"
"""Method, scheme, host and port of a request, and the type of its body."""

_deadline = deadlines.scope.get


class _Retrying:
    """What both transports have in common: everything but the waiting."""

    _transport: Any
    _sending: Sending
    _hand_off: HandOff | None
    _known: Recent[_Usual, Callable[..., Any]]
    """How to send requests that may be repeated whatever their headers say."""
    tarry_retries: ClassVar[bool] = True
    """For whoever would put one of these inside another."""

    def _sender(self, request: Any, usual: _Usual) -> Callable[..., Any]:
        """Return how to send a request, and remember it where nothing more has to be looked at."""
        sending, (method, scheme, host, port, kind) = self._sending, usual
        always = method in http.IDEMPOTENT_METHODS and kind.__name__ == BYTES
        repeatable = always or (
            make_repeatable(method, request.headers, sending.key, request)
            and can_replay(request, at_once=sending.hedging is not None)
        )
        send = sending.made((method, scheme, host, port, repeatable))
        return self._known.keep(usual, send) if always else send

    def _failed(self, request: Any, error: Exception) -> None:
        """Say what a user may not see from the error alone."""
        inner.refuse_other_package(self._transport, request, error)
        add_safety_note(error, replayable=can_replay(request))


class RetryTransport(_Retrying, _Transport):
    """Retries the requests of an `httpx.Client`, or hedges them.

    `downstream`: one for all origins, a function that makes one for an origin, or None for a
    breaker and a budget each. `idempotency_key`: "auto" or a function puts one key on all attempts
    of a request that is not idempotent, which makes it safe to retry. `hedging` takes the place
    of `policy`: a second copy of what may be repeated, when the first takes too long. `hand_off`:
    a `tarry.Client`, which gets what may be repeated and cannot go on now; `HandedOff` is raised.
    """

    def __init__(
        self,
        transport: Any = None,
        *,
        policy: Policy | None = None,
        hedging: Hedging | None = None,
        downstream: Downstreams = None,
        idempotency_key: IdempotencyKey = None,
        hand_off: Service | None = None,
    ) -> None:
        self._transport = transport = inner.checked(transport, "HTTPTransport", "handle_request")
        self._sending = Sending(
            partial(_send, transport),
            partial(_first, transport),
            looped=False,
            policy=policy,
            hedging=hedging,
            downstream=downstream,
            idempotency_key=idempotency_key,
            outcome_of=outcome_of,
            judge=judge,
            release=release,
        )
        self._hand_off = make_hand_off(
            hand_off, policy, looped=False, parts=parts, judge=judge, release=release
        )
        self._known = Recent()

    def handle_request(self, request: Any) -> Any:
        """Send a request until it is answered for good."""
        try:
            url = getattr(request.url, "_uri_reference", request.url)  # where its properties look
            usual = request.method, url.scheme, url.host, url.port, request.stream.__class__
            return (self._known.get(usual) or self._sender(request, usual))(request)
        except ResultNotAccepted as error:
            if self._hand_off is not None:
                self._hand_off.over(request, error)
            return final_response(error)
        except BlockingWait as error:
            return on_blocking_wait(error)
        except Exception as error:
            self._failed(request, error)
            if self._hand_off is not None:
                self._hand_off.over(request, error)
            raise

    if not TYPE_CHECKING:  # to a type checker, they are not there
        handle_async_request = __aenter__ = inner.misplaced

    def close(self) -> None:
        """Close the transport inside."""
        self._transport.close()

    def __enter__(self) -> Self:
        self._transport.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._transport.__exit__(kind, error, trace)


class AsyncRetryTransport(_Retrying, _AsyncTransport):
    """Retries or hedges those of an `httpx.AsyncClient`; the arguments are those of its sibling.

    But `hand_off` is a `tarry.AsyncClient`.
    """

    def __init__(
        self,
        transport: Any = None,
        *,
        policy: Policy | None = None,
        hedging: Hedging | None = None,
        downstream: Downstreams = None,
        idempotency_key: IdempotencyKey = None,
        hand_off: AsyncService | None = None,
    ) -> None:
        transport = inner.checked(transport, "AsyncHTTPTransport", "handle_async_request")
        self._transport = transport
        self._sending = Sending(
            partial(_asend, transport),
            partial(_afirst, transport),
            looped=True,
            policy=policy,
            hedging=hedging,
            downstream=downstream,
            idempotency_key=idempotency_key,
            outcome_of=outcome_of,
            judge=judge,
            release=arelease,
        )
        self._hand_off = make_hand_off(
            hand_off, policy, looped=True, parts=parts, judge=judge, release=arelease
        )
        self._known = Recent()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request until it is answered for good."""
        try:
            url = getattr(request.url, "_uri_reference", request.url)
            usual = request.method, url.scheme, url.host, url.port, request.stream.__class__
            return await (self._known.get(usual) or self._sender(request, usual))(request)
        except ResultNotAccepted as error:
            if self._hand_off is not None:
                await self._hand_off.aover(request, error)
            return final_response(error)
        except Exception as error:
            self._failed(request, error)
            if self._hand_off is not None:
                await self._hand_off.aover(request, error)
            raise

    if not TYPE_CHECKING:
        handle_request = __enter__ = inner.misplaced

    async def aclose(self) -> None:
        """Close the transport inside."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        await self._transport.__aexit__(kind, error, trace)


# Functions and not methods: a transport that holds itself would keep its connections open until
# the garbage collector finds it.
def _send(transport: Any, request: Any, *, limit: float | None, number: int = 1) -> Any:
    if number > 1 or limit is not None or _deadline() is not None:
        request = told(request, number, limit)
        response = transport.handle_request(request)
        response.request = request  # for `release`; the client puts the user's own in its place
        return response
    return transport.handle_request(request)


def _first(transport: Any, request: Any) -> Any:
    return transport.handle_request(request)  # as it is now: somebody may have patched it


async def _asend(transport: Any, request: Any, *, limit: float | None, number: int = 1) -> Any:
    if number > 1 or limit is not None or _deadline() is not None:
        request = told(request, number, limit)
    return await transport.handle_async_request(request)


def _afirst(transport: Any, request: Any) -> Any:
    return transport.handle_async_request(request)
