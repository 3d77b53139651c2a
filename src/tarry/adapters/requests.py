"""Retries for requests.

    session.mount("https://", RetryAdapter())

The adapter sees every request and every answer of the session. It returns the last answer as the
session would without it: no exception is made of a 503.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import urlsplit

from tarry.core.outcome import PERMANENT, Kind, Outcome
from tarry.errors import ConfigurationError, MissingExtra, ResultNotAccepted
from tarry.runtime import outgoing, sync
from tarry.runtime.origins import Origins
from tarry.runtime.run import Run
from tarry.wire import http

try:
    from requests.adapters import HTTPAdapter
    from requests.exceptions import ConnectionError as ConnectionFailed
    from requests.exceptions import ProxyError, SSLError, Timeout
    from urllib3 import Timeout as Timeouts
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
except ImportError as _missing:
    _message = "this needs requests: pip install 'tarry[requests]'"
    raise MissingExtra(_message) from _missing

if TYPE_CHECKING:
    from requests import PreparedRequest, Response

    from tarry.core.policy import Policy
    from tarry.runtime.origins import Downstreams
    from tarry.runtime.outgoing import Key

_Pair: TypeAlias = "tuple[float | None, float | None]"

_POOL = 10
"""What requests itself takes."""


class RetryAdapter(HTTPAdapter):
    """Retries the requests of a `requests.Session` that it is mounted on.

    `downstream`: one for all origins, a function that makes one for an origin, or None for a
    breaker and a budget each. `idempotency_key`: "auto" or a function puts one key on all attempts
    of a request that is not idempotent, which makes it safe to retry. The others are those of
    `HTTPAdapter`; its own retries stay off.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        downstream: Downstreams = None,
        idempotency_key: Key = None,
        pool_connections: int = _POOL,
        pool_maxsize: int = _POOL,
        pool_block: bool = False,
        max_retries: object = 0,
    ) -> None:
        if max_retries != 0:
            msg = (
                f"max_retries must be 0, got {max_retries!r}: urllib3 would retry below each "
                "attempt, and two layers multiply; say it with policy=tarry.Policy(max_attempts=4)"
            )
            raise ConfigurationError(msg)
        self._key = outgoing.checked_key(idempotency_key)
        self._origins = Origins(policy, downstream, _outcome_of, _judge, _release)
        self._limit = self._origins.policy.attempt_timeout
        # The session's own timeouts cut an attempt off; a thread for each would cost more.
        self._origins.policy = self._origins.policy.replace(attempt_timeout=None)
        super().__init__(pool_connections, pool_maxsize, 0, pool_block)

    def send(  # its positions are those of HTTPAdapter
        self,
        request: PreparedRequest,
        stream: bool = False,  # noqa: FBT001, FBT002
        timeout: Any = None,
        verify: Any = True,  # noqa: FBT002
        cert: Any = None,
        proxies: Any = None,
    ) -> Response:
        """Send a request until it is answered for good."""
        start = _position(request.body)
        replayable = start is not None
        headers: Any = request.headers
        run = self._begin(request, headers, replayable=replayable)
        send = super().send

        def attempt() -> Response:
            if run.attempts > 1:
                _rewind(request.body, start)
            limit = outgoing.announce(headers, run.attempts, self._limit)
            given = timeout if limit is None else _bounded(timeout, limit)
            return send(request, stream, given, verify, cert, proxies)

        try:
            return sync.drive(run, attempt, (), {})
        except ResultNotAccepted as error:
            response: Any = error.result
            return response  # type: ignore[no-any-return]
        except Exception as error:
            outgoing.explain(error, replayable=replayable)
            raise

    def _begin(self, request: PreparedRequest, headers: Any, *, replayable: bool) -> Run:
        method, url = request.method or "", urlsplit(request.url or "")
        keyed = outgoing.put_key(headers, method, self._key, request)
        origin = http.origin_of(url.scheme, url.hostname or "", url.port)
        repeatable = replayable and http.repeatable(method, keyed=keyed)
        return Run.new(self._origins.spec(method, origin, repeatable=repeatable))


def _position(body: Any) -> int | None:
    """Return where the body begins, None for one that cannot be brought back there."""
    if body is None or isinstance(body, (bytes, bytearray, str)):
        return 0
    try:
        return int(body.tell()) if body.seekable() else None
    except (AttributeError, OSError, ValueError):
        return None


def _rewind(body: Any, start: int | None) -> None:
    if start is not None and hasattr(body, "seek"):
        body.seek(start)


def _bounded(timeout: Any, limit: float) -> Any:
    """Return the user's timeout for connecting and reading, neither longer than `limit`."""
    if isinstance(timeout, Timeouts):
        bounded = timeout.clone()
        total = bounded.total
        bounded.total = limit if not isinstance(total, (int, float)) else min(limit, total)
        return bounded
    connect, read = cast("_Pair", timeout) if isinstance(timeout, tuple) else (timeout, timeout)
    return min(limit, connect or limit), min(limit, read or limit)


def _outcome_of(error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001
    detail = type(error).__name__
    timeout = isinstance(error, Timeout)
    if isinstance(error, SSLError):  # a certificate does not heal
        return PERMANENT
    if _never_sent(error):
        return Outcome(Kind.TRANSIENT, timeout=timeout, detail=detail)
    if isinstance(error, (ConnectionFailed, Timeout)):
        return Outcome(Kind.TRANSIENT, safe=repeatable, timeout=timeout, detail=detail)
    return PERMANENT


def _never_sent(error: Exception) -> bool:
    """Say whether no connection was made, which only the error of urllib3 inside tells."""
    inside: Any = error.args[0] if error.args else None
    reason = getattr(inside, "reason", inside)
    # urllib3 has another error for a proxy that was reached.
    return isinstance(error, ProxyError) or isinstance(
        reason, (NewConnectionError, ConnectTimeoutError)
    )


def _judge(response: Response, policy: Policy, repeatable: bool) -> Outcome:  # noqa: FBT001
    return outgoing.judge(response.status_code, response.headers, policy, repeatable=repeatable)


def _release(response: Response) -> None:
    """Give the connection back, open if the rest of the answer is short."""
    if outgoing.is_short(response.headers):
        response.raw.drain_conn()
    response.close()
