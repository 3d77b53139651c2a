"""Retries for httpx, and for httpx2, which has the same shape.

    client = httpx.Client(transport=RetryTransport(httpx.HTTPTransport()))

The transport sees every request and every answer of the client. It returns the last answer as the
client would without it: no exception is made of a 503.
"""

from __future__ import annotations

from contextlib import suppress
from ssl import SSLError
from typing import TYPE_CHECKING, Any

from tarry.core.outcome import PERMANENT, Kind, Outcome
from tarry.errors import MissingExtra, ResultNotAccepted
from tarry.runtime import asynchronous, outgoing, sync
from tarry.runtime.origins import Origins
from tarry.runtime.run import Run
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    import httpx
    import httpx2

    from tarry.core.policy import Policy
    from tarry.runtime.origins import Downstreams
    from tarry.runtime.outgoing import Key

    # What both clients want, for type checkers: neither asks for it when it runs.
    class _Transport(httpx.BaseTransport, httpx2.BaseTransport):
        def handle_request(self, request: Any) -> Any: ...

    class _AsyncTransport(httpx.AsyncBaseTransport, httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any: ...

else:
    _Transport = _AsyncTransport = object

_PHASES = ("connect", "read", "write", "pool")
# By name: there are two packages, and none of them may be there.
_NEVER_SENT = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout"})
_PERHAPS_READ = frozenset({"TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"})


class _Retrying:
    """What both transports have in common: everything but the waiting."""

    def __init__(
        self,
        transport: Any,
        policy: Policy | None,
        downstream: Downstreams,
        idempotency_key: Key,
        release: Callable[[Any], Any],
    ) -> None:
        self._transport = transport
        self._key = outgoing.checked_key(idempotency_key)
        self._origins = Origins(policy, downstream, _outcome_of, _judge, release)
        self._limit = self._origins.policy.attempt_timeout

    def _begin(self, request: Any, *, replayable: bool) -> Run:
        method, url = request.method, request.url
        keyed = outgoing.put_key(request.headers, method, self._key, request)
        origin = http.origin_of(url.scheme, url.host, url.port)
        repeatable = replayable and http.repeatable(method, keyed=keyed)
        return Run.new(self._origins.spec(method, origin, repeatable=repeatable))

    def _prepare(self, request: Any, attempt: int) -> None:
        limit = outgoing.announce(request.headers, attempt, self._limit)
        if limit is not None:
            given: dict[str, float | None] = request.extensions.get("timeout") or {}
            least = {phase: min(limit, given.get(phase) or limit) for phase in _PHASES}
            request.extensions = {**request.extensions, "timeout": least}


class RetryTransport(_Retrying, _Transport):
    """Retries the requests of an `httpx.Client`.

    `downstream`: one for all origins, a function that makes one for an origin, or None for a
    breaker and a budget each. `idempotency_key`: "auto" or a function puts one key on all attempts
    of a request that is not idempotent, which makes it safe to retry.
    """

    def __init__(
        self,
        transport: Any = None,
        *,
        policy: Policy | None = None,
        downstream: Downstreams = None,
        idempotency_key: Key = None,
    ) -> None:
        inner = _default("HTTPTransport") if transport is None else transport
        super().__init__(inner, policy, downstream, idempotency_key, _release)
        # The client's own timeouts cut an attempt off; a thread for each would cost more than it.
        self._origins.policy = self._origins.policy.replace(attempt_timeout=None)

    def handle_request(self, request: Any) -> Any:
        """Send a request until it is answered for good."""
        replayable = _can_replay(request)
        run = self._begin(request, replayable=replayable)
        try:
            return sync.drive(run, self._send, (run, request), {})
        except ResultNotAccepted as error:
            return error.result
        except Exception as error:
            outgoing.explain(error, replayable=replayable)
            raise

    def _send(self, run: Run, request: Any) -> Any:
        self._prepare(request, run.attempts)
        return self._transport.handle_request(request)

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
    """Retries the requests of an `httpx.AsyncClient`; the arguments are those of its sibling."""

    def __init__(
        self,
        transport: Any = None,
        *,
        policy: Policy | None = None,
        downstream: Downstreams = None,
        idempotency_key: Key = None,
    ) -> None:
        inner = _default("AsyncHTTPTransport") if transport is None else transport
        super().__init__(inner, policy, downstream, idempotency_key, _arelease)

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request until it is answered for good."""
        replayable = _can_replay(request)
        run = self._begin(request, replayable=replayable)
        try:
            return await asynchronous.drive(run, self._send, (run, request), {})
        except ResultNotAccepted as error:
            return error.result
        except Exception as error:
            outgoing.explain(error, replayable=replayable)
            raise

    async def _send(self, run: Run, request: Any) -> Any:
        self._prepare(request, run.attempts)
        return await self._transport.handle_async_request(request)

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


def _default(transport: str) -> Any:
    try:
        import httpx
    except ImportError:
        try:
            import httpx2 as httpx  # type: ignore[no-redef]
        except ImportError:
            msg = "this needs httpx: pip install 'tarry[httpx]'"
            raise MissingExtra(msg) from None
    return getattr(httpx, transport)()


def _can_replay(request: Any) -> bool:
    """Say whether the body can be sent a second time: bytes can, an iterator is used up."""
    stream = request.stream
    kind = type(stream).__name__
    # A form goes back to the start of its files by itself.
    return kind == "ByteStream" or (
        kind == "MultipartStream" and all(map(_can_rewind, stream.fields))
    )


def _can_rewind(field: Any) -> bool:
    file = getattr(field, "file", b"")
    return isinstance(file, (bytes, str)) or (hasattr(file, "seekable") and bool(file.seekable()))


def _outcome_of(error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001
    names = {base.__name__ for base in type(error).__mro__}
    detail = type(error).__name__
    timeout = "TimeoutException" in names
    if names & _NEVER_SENT:
        if _is_about_tls(error):
            return PERMANENT
        return Outcome(Kind.TRANSIENT, timeout=timeout, detail=detail)
    if names & _PERHAPS_READ:
        return Outcome(Kind.TRANSIENT, safe=repeatable, timeout=timeout, detail=detail)
    return PERMANENT


def _is_about_tls(error: BaseException | None) -> bool:
    """Say whether a certificate or the like kept the connection from being made: it stays so."""
    while error is not None and not isinstance(error, SSLError):
        error = error.__cause__ or error.__context__
    return error is not None


def _judge(response: Any, policy: Policy, repeatable: bool) -> Outcome:  # noqa: FBT001
    return outgoing.judge(response.status_code, response.headers, policy, repeatable=repeatable)


def _release(response: Any) -> None:
    """Give the connection back, open if the rest of the answer is short."""
    with suppress(Exception):  # a connection that cannot be kept is closed
        if outgoing.is_short(response.headers):
            for _ in response.iter_raw():
                pass
    response.close()


async def _arelease(response: Any) -> None:
    """Do what `_release` does."""
    with suppress(Exception):
        if outgoing.is_short(response.headers):
            async for _ in response.aiter_raw():
                pass
    await response.aclose()
