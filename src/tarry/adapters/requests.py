"""Retries and hedges for requests.

    session.mount("https://", RetryAdapter())

The adapter sees every request and every answer of the session. It returns the last answer as the
session would without it: no exception is made of a 503.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import urlsplit

from tarry.adapters.http.hand_off import Parts, make_hand_off
from tarry.adapters.http.headers import (
    MAX_DRAINED_BYTES,
    MIN_TIMEOUT_S,
    add_safety_note,
    attempt_time_limit,
    classify_proxy_refusal,
    drain_timeout,
    final_response,
    is_permanent_tls_error,
    is_worth_draining,
    make_repeatable,
    on_blocking_wait,
    response_classifier,
    set_attempt_headers,
)
from tarry.adapters.http.send import Sending
from tarry.core.outcome import PERMANENT, Kind, Outcome
from tarry.errors import BlockingWait, ConfigurationError, MissingExtra, ResultNotAccepted
from tarry.runtime.clocks import system

try:
    from requests.adapters import HTTPAdapter
    from requests.exceptions import ConnectionError as ConnectionFailed
    from requests.exceptions import RequestException, SSLError, Timeout
    from urllib3 import Timeout as Timeouts
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
    from urllib3.exceptions import SSLError as WrappedSSLError
except ImportError as _missing:
    _message = "this needs requests: pip install 'tarry[requests]'"
    raise MissingExtra(_message) from _missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from requests import PreparedRequest, Response

    from tarry.adapters.http.hand_off import HandOff, Service
    from tarry.adapters.http.headers import IdempotencyKey
    from tarry.adapters.http.origins import Downstreams
    from tarry.core.hedging import Hedging
    from tarry.core.policy import Policy

_Pair: TypeAlias = "tuple[float | None, float | None]"

_POOL = 10
"""What requests itself takes."""
_TUNNEL = "Tunnel connection failed: "
"""What urllib3 says, and then the status, where a proxy refused to connect us."""


class RetryAdapter(HTTPAdapter):
    """Retries the requests of a `requests.Session` that it is mounted on, or hedges them.

    `downstream`: one for all origins, a function that makes one for an origin, or None for a
    breaker and a budget each. `idempotency_key`: "auto" or a function puts one key on all attempts
    of a request that is not idempotent, which makes it safe to retry. `hedging` takes the place
    of `policy`: a second copy of what may be repeated, when the first takes too long. `hand_off`:
    a `tarry.Client`, which gets what may be repeated and cannot go on now; `HandedOff` is raised.
    The others are those of `HTTPAdapter`; its own retries stay off.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        hedging: Hedging | None = None,
        downstream: Downstreams = None,
        idempotency_key: IdempotencyKey = None,
        hand_off: Service | None = None,
        pool_connections: int = _POOL,
        pool_maxsize: int = _POOL,
        pool_block: bool = False,
        max_retries: object = 0,
    ) -> None:
        if max_retries != 0:
            rule = (
                f"must be 0, got {max_retries!r}: urllib3 would retry below each attempt, and two "
                "layers multiply; say it with policy=tarry.Policy(max_attempts=4)"
            )
            raise ConfigurationError("max_retries", rule)
        self._options: dict[str, Any] = {
            "policy": policy,
            "hedging": hedging,
            "downstream": downstream,
            "idempotency_key": idempotency_key,
        }
        self._sending = _sending(self._options)
        self._hand_off: HandOff | None = make_hand_off(
            hand_off, policy, looped=False, parts=_parts, judge=_judge, release=_release
        )
        super().__init__(pool_connections, pool_maxsize, 0, pool_block)

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle: the arguments, and none of what was learned."""
        ours = {"_options": self._options, "_hand_off": self._hand_off}
        return {**super().__getstate__(), **ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew."""
        super().__setstate__(state)
        self._sending = _sending(self._options)

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
        replayable = start is not None and not (self._sending.hedging and _is_file(request.body))
        send = partial(super().send, stream=stream, verify=verify, cert=cert, proxies=proxies)
        response: Any
        try:
            sender = self._sender(request, replayable=replayable)
            response = sender(send, request, start, timeout)
        except ResultNotAccepted as error:
            if self._hand_off is not None:
                self._hand_off.over(request, error)
            response = final_response(error)
        except BlockingWait as error:
            response = on_blocking_wait(error)
        except Exception as error:
            add_safety_note(error, replayable=replayable)
            if self._hand_off is not None:
                self._hand_off.over(request, error)
            raise
        response.request = request  # and not the copy that was sent
        return response  # type: ignore[no-any-return]

    def _sender(self, request: PreparedRequest, *, replayable: bool) -> Callable[..., Any]:
        method, url, headers = request.method or "", urlsplit(request.url or ""), request.headers
        repeatable = make_repeatable(method, cast("Any", headers), self._sending.key, request)
        kind = (method, url.scheme, url.hostname or "", url.port, repeatable and replayable)
        return self._sending.known.get(kind) or self._sending.made(kind)


def _sending(options: dict[str, Any]) -> Sending:
    return Sending(
        _send, looped=False, outcome_of=_outcome_of, judge=_judge, release=_release, **options
    )


def _send(
    send: Callable[..., Response],
    request: PreparedRequest,
    start: int | None,
    timeout: Any,
    *,
    limit: float | None,
    number: int = 1,
) -> Response:
    if number > 1:
        _rewind(request.body, start)
    limit = attempt_time_limit(limit)
    if number > 1 or limit is not None:
        request = request.copy()  # the user's own stays as it is
        set_attempt_headers(cast("Any", request.headers), number, limit)
    given = timeout if limit is None else _bounded(timeout, max(limit, MIN_TIMEOUT_S))
    return send(request, timeout=given)


def _parts(request: PreparedRequest) -> Parts:
    body: Any = request.body or b""
    if isinstance(body, str):
        body = body.encode()
    sent = bytes(body) if isinstance(body, (bytes, bytearray)) else None
    lines = [(name, _text(value)) for name, value in request.headers.items()]
    return Parts(request.method or "", request.url or "", lines, sent)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _position(body: Any) -> int | None:
    """Return where the body begins, None for one that cannot be brought back there."""
    if body is None or isinstance(body, (bytes, bytearray, str)):
        return 0
    try:
        return int(body.tell()) if body.seekable() else None
    except (AttributeError, OSError, ValueError):
        return None


def _is_file(body: Any) -> bool:
    """Say whether two who send the body at once would read from one another."""
    return hasattr(body, "seek")


def _rewind(body: Any, start: int | None) -> None:
    if start is not None and _is_file(body):
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
    reason = _reason(error)
    if isinstance(reason, OSError) and (refused := _refused(str(reason))).isdecimal():
        return classify_proxy_refusal(int(refused))
    if isinstance(reason, (NewConnectionError, ConnectTimeoutError)):
        return Outcome(Kind.TRANSIENT, timeout=timeout, detail=detail)
    if is_permanent_tls_error(reason) or (
        isinstance(error, SSLError) and not isinstance(reason, OSError)  # a name that is wrong
    ):
        return PERMANENT
    if isinstance(error, (ConnectionFailed, Timeout)):
        return Outcome(Kind.TRANSIENT, safe=repeatable, timeout=timeout, detail=detail)
    return PERMANENT


def _reason(error: Exception) -> Any:
    """Return the error inside, which alone tells what happened.

    That is in a `MaxRetryError` of urllib3, and there in one more where there was a proxy or TLS.
    What is wrapped so may have been sent: requests says `ProxyError` also when the proxy has read
    the request, and `SSLError` also when a connection is lost later.
    """
    inside: Any = error.args[0] if error.args else None
    reason = getattr(inside, "reason", inside)
    reason = getattr(reason, "original_error", reason)
    return reason.args[0] if isinstance(reason, WrappedSSLError) and reason.args else reason


def _refused(text: str) -> str:
    return text.removeprefix(_TUNNEL).partition(" ")[0] if text.startswith(_TUNNEL) else ""


def _pairs(response: Response) -> Iterable[tuple[str, str]]:
    lines: Iterable[tuple[str, str]] = response.raw.headers.iteritems()
    return lines


_judge = response_classifier(_pairs)


def _release(response: Response) -> bool:
    """Give the connection back, open if the rest of the answer is short: then it is kept."""
    kept = False
    with suppress(RequestException, OSError):  # a connection that cannot be kept is closed
        kept = is_worth_draining(response.headers) and _read(response, drain_timeout())
    response.close()
    return kept


def _read(response: Response, brief: float) -> bool:
    """Read the rest of an answer, if that is not much and does not take long."""
    socket = getattr(getattr(response.raw, "connection", None), "sock", None)
    if socket is not None:
        socket.settimeout(brief)  # until it is used again, when it gets another
    pieces: list[bytes] = []
    room, end = MAX_DRAINED_BYTES, system.now() + brief
    for piece in response.iter_content(1024):
        pieces.append(piece)
        room -= len(piece)
        if room < 0 or system.now() > end:
            return False
    response._content = b"".join(pieces)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return True
