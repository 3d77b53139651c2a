"""Retries and hedging for requests.

    session.mount("https://", RetryAdapter())

The adapter handles the requests of the session to URLs with this prefix. When it gives up, it
returns the last response, as an `HTTPAdapter` would: a 503 is returned, not raised.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from tarry.adapters.http import messages
from tarry.adapters.http.messages import DrainedBody, HttpClientFunctions, RequestSnapshot
from tarry.adapters.http.send import RequestSender, reject_unknown_arguments
from tarry.core.extras import require_extra
from tarry.core.outcome import PERMANENT, Kind, Outcome
from tarry.errors import BlockingWait, ConfigurationError, ResultNotAccepted
from tarry.wire import http

with require_extra("tarry.adapters.requests needs requests", "requests"):
    from requests.adapters import DEFAULT_POOLSIZE, HTTPAdapter
    from requests.exceptions import ConnectionError as RequestsConnectionError
    from requests.exceptions import RequestException, SSLError, Timeout
    from urllib3 import Timeout as Urllib3Timeout
    from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
    from urllib3.exceptions import SSLError as Urllib3SSLError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never

    from requests import PreparedRequest, Response

    from tarry.adapters.http.hand_off import SyncHandOff
    from tarry.adapters.http.messages import KeyOption
    from tarry.adapters.http.send import DownstreamArgument
    from tarry.core.hedging import Hedging
    from tarry.core.policy import Policy

_TUNNEL_REFUSAL = re.compile(r"Tunnel connection failed: ([0-9]+)(?: |$)")
"""Matches the text of the error if a proxy refused to open a tunnel; group 1 is the status."""


class RetryAdapter(HTTPAdapter):
    """Retries or hedges the requests of the `requests.Session` on which it is mounted.

    Args:
        policy: the retry policy; by default `tarry.Policy()`.
        hedging: a hedging policy instead of `policy`.
        downstream: one `tarry.Downstream` for all origins, or a function that returns one for an
            origin. By default each origin gets its own, with a breaker and a retry budget.
        idempotency_key: "auto" or a function of the request adds an Idempotency-Key to requests
            that are not idempotent, which makes them repeatable. All attempts send the same key.
            In a handler behind `IdempotencyMiddleware`, "auto" derives the key from the key of the
            request that is being handled; otherwise it is random.
        hand_off: a `tarry.Client` or `tarry.HandOff`. A repeatable request that cannot succeed now
            is enqueued there, and `HandedOff` is raised.
        mark_given_up: whether a response that is returned after the last attempt gets the header
            `x-should-retry: false`, so that an SDK that obeys it does not retry again.
        max_retries: must be 0, so that urllib3 does not retry too.

    The other arguments are those of `HTTPAdapter`.
    """

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        hedging: Hedging | None = None,
        downstream: DownstreamArgument = None,
        idempotency_key: KeyOption = None,
        hand_off: SyncHandOff | None = None,
        mark_given_up: bool = True,
        pool_connections: int = DEFAULT_POOLSIZE,
        pool_maxsize: int = DEFAULT_POOLSIZE,
        pool_block: bool = False,
        max_retries: object = 0,
        **unknown: Never,
    ) -> None:
        reject_unknown_arguments(self, unknown)
        if max_retries != 0:
            rule = (
                f"must be 0, got {max_retries!r}: urllib3 would retry within each attempt, and the "
                "attempts of two layers multiply; use policy=tarry.Policy(max_attempts=4)"
            )
            raise ConfigurationError("max_retries", rule)
        self._options: dict[str, Any] = {
            "policy": policy,
            "hedging": hedging,
            "downstream": downstream,
            "idempotency_key": idempotency_key,
            "hand_off": hand_off,
            "mark_given_up": mark_given_up,
        }
        self._sender = RequestSender(_HTTP_FUNCTIONS, _send_attempt, **self._options)
        super().__init__(pool_connections, pool_maxsize, 0, pool_block)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: the arguments, but no breakers, budgets or latencies."""
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the adapter, with new breakers and budgets."""
        super().__setstate__(state)
        self._sender = RequestSender(_HTTP_FUNCTIONS, _send_attempt, **self._options)

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,  # noqa: FBT001, FBT002 - the signature of HTTPAdapter
        timeout: Any = None,
        verify: Any = True,  # noqa: FBT002 - the same
        cert: Any = None,
        proxies: Any = None,
    ) -> Response:
        """Send a request and retry it; return the last response."""
        body_start = _body_position(request.body)
        # Hedged attempts run in parallel, and cannot read one file at the same time.
        is_shared_file = self._sender.hedging is not None and _is_file(request.body)
        can_resend_body = body_start is not None and not is_shared_file
        send_once = partial(super().send, stream=stream, verify=verify, cert=cert, proxies=proxies)
        response: Any
        try:
            method, url = request.method or "", urlsplit(request.url or "")
            headers, sender = cast("Any", request.headers), self._sender
            repeatable = messages.try_make_repeatable(
                method, headers, sender.idempotency_key, sender.policy, request, _snapshot
            )
            repeatable = repeatable and can_resend_body
            cache_key = method, url.scheme, url.hostname or "", url.port, repeatable
            retry_send = sender.cached_functions.get(cache_key) or sender.send_function(cache_key)
            response = retry_send(send_once, request, body_start, timeout)
        except ResultNotAccepted as error:  # given up: the last response is a failure
            self._sender.hand_off.try_hand_off(request, error)
            response = messages.final_response(error)
            if self._sender.mark_given_up and messages.forbids_more_retries(error):
                response.headers[http.SHOULD_RETRY_HEADER] = "false"
        except BlockingWait as error:  # given up: the wait for a retry would block the event loop
            response = messages.last_response_or_raise(error)
        except Exception as error:
            messages.add_not_repeatable_note(error, can_resend_body=can_resend_body)
            self._sender.hand_off.try_hand_off(request, error)
            raise
        response.request = request  # the user's request, not the changed copy that was sent
        return response  # type: ignore[no-any-return]  # Any: `send_function` is untyped


def _send_attempt(
    send_once: Callable[..., Response],
    request: PreparedRequest,
    body_start: int | None,
    timeout: Any,
    *,
    attempt_timeout: float | None,
    attempt_number: int = 1,
) -> Response:
    """Send one attempt; `timeout` is the user's timeout, and `attempt_timeout` the policy's."""
    if attempt_number > 1 and body_start is not None and _is_file(request.body):
        cast("Any", request.body).seek(body_start)
    time_limit = messages.limit_by_deadline(attempt_timeout)
    if attempt_number > 1 or time_limit is not None:
        request = request.copy()  # the user's request stays unchanged
        messages.set_attempt_headers(cast("Any", request.headers), attempt_number, time_limit)
    if time_limit is not None:
        timeout = _limit_timeout(timeout, max(time_limit, messages.MIN_TIMEOUT_S))
    return send_once(request, timeout=timeout)


def _snapshot(request: PreparedRequest) -> RequestSnapshot:
    body: Any = request.body or b""
    if isinstance(body, str):
        body = body.encode()
    body_bytes = bytes(body) if isinstance(body, (bytes, bytearray)) else None
    headers = [
        (name, value if isinstance(value, str) else value.decode("latin-1"))
        for name, value in request.headers.items()
    ]
    return RequestSnapshot(request.method or "", request.url or "", headers, body_bytes)


def _body_position(body: Any) -> int | None:
    """Return the position from which an attempt reads the body; None if it cannot be rewound."""
    if body is None or isinstance(body, (bytes, bytearray, str)):
        return 0
    try:
        return int(body.tell()) if body.seekable() else None
    except (AttributeError, OSError, ValueError):
        return None


def _is_file(body: Any) -> bool:
    """Return whether the body has a read position, which parallel attempts would share."""
    return hasattr(body, "seek")


def _limit_timeout(timeout: Any, limit: float) -> Any:
    """Return the user's timeout, limited to `limit` seconds (the total of a urllib3 `Timeout`)."""
    if isinstance(timeout, Urllib3Timeout):
        limited = timeout.clone()
        total = limited.total
        limited.total = limit if not isinstance(total, (int, float)) else min(limit, total)
        return limited
    connect, read = cast("Any", timeout) if isinstance(timeout, tuple) else (timeout, timeout)
    return min(limit, connect or limit), min(limit, read or limit)


def _classify_error(error: Exception, repeatable: bool) -> Outcome:  # noqa: FBT001 - passed by position
    detail, timeout = type(error).__name__, isinstance(error, Timeout)
    original = _original_error(error)
    if isinstance(original, OSError) and (refusal := _TUNNEL_REFUSAL.match(str(original))):
        return messages.classify_proxy_refusal(int(refusal[1]))
    if isinstance(original, (NewConnectionError, ConnectTimeoutError)):
        return Outcome(Kind.TRANSIENT, timeout=timeout, detail=detail)
    if messages.is_permanent_tls_error(original) or (
        # Such as urllib3's CertificateError: the certificate is for another host name.
        isinstance(error, SSLError) and not isinstance(original, OSError)
    ):
        return PERMANENT
    if isinstance(error, (RequestsConnectionError, Timeout)):
        return Outcome(Kind.TRANSIENT, repeatable=repeatable, timeout=timeout, detail=detail)
    return PERMANENT


def _original_error(error: Exception) -> Any:
    """Return the original error, whose type shows whether the request may have been sent.

    The type of the requests error does not: an `SSLError` may mean that the connection was lost
    after the request was sent. The requests error contains a `MaxRetryError` of urllib3, which
    contains the original error. With a proxy or TLS, another error is between these two.
    """
    max_retry_error: Any = error.args[0] if error.args else None
    inner = getattr(max_retry_error, "reason", max_retry_error)
    inner = getattr(inner, "original_error", inner)
    return inner.args[0] if isinstance(inner, Urllib3SSLError) and inner.args else inner


def _release_connection(response: Response) -> bool:
    """Drain a short body, and release the connection; return whether the whole body was read."""
    is_complete = False
    with suppress(RequestException, OSError):  # if reading fails, the connection is closed
        if messages.is_worth_draining(response.headers):
            body = DrainedBody()
            socket = getattr(getattr(response.raw, "connection", None), "sock", None)
            if socket is not None:
                socket.settimeout(body.timeout)  # the next request sets its own timeout
            if all(map(body.add, response.iter_content(1024))):  # not too long or too slow
                response._content = body.content()  # noqa: SLF001 - no public setter  # pyright: ignore[reportPrivateUsage]
                is_complete = True
    response.close()
    return is_complete


_HTTP_FUNCTIONS = HttpClientFunctions(
    is_async=False,
    classify_error=_classify_error,
    classify_response=messages.make_response_classifier(
        lambda response: response.raw.headers.iteritems()
    ),
    release_connection=_release_connection,
    snapshot=_snapshot,
    async_client="aiohttp or an httpx.AsyncClient",
)
