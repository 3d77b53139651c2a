"""One request at a time on one libcurl handle: its options, what arrives, what came of it.

Bodies are kept up to the excerpt and dropped up to a bound; there the transfer is ended, and the
status counts, for it was sent. Headers are bounded too. libcurl would send a request again when a
kept connection ends without a byte: that would be an attempt nobody counts, so it is not let.
"""

from __future__ import annotations

import socket
from collections import deque
from math import ceil
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.service.delivery.curlfaults import PROXY_SAYS, fault_of
from tarry.service.delivery.exchange import Delivered, Fault
from tarry.service.delivery.fields import headers_of, is_token, lines_of
from tarry.service.delivery.library import pycurl
from tarry.service.delivery.targets import parse_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.delivery.exchange import Request
    from tarry.service.delivery.guard import Guard

MOST_LINES, MOST_HEADER_BYTES = 200, 64 * 1024
"""Of an answer's headers. libcurl itself ends a transfer at 5,000 lines or 300 KiB."""
_LARGE = 64 * 1024
"""Bytes of a body that is not kept with an idle handle."""
_LONGEST_MS = 2**31 - 1
_FIRST_FINAL = 200

_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
"""Methods whose requests say nothing of a body when they have none."""

_CODE, _CONNECTS = pycurl.RESPONSE_CODE, pycurl.NUM_CONNECTS
_TOTAL, _FIRST, _READY = pycurl.TOTAL_TIME_T, pycurl.STARTTRANSFER_TIME_T, pycurl.PRETRANSFER_TIME_T
_REMOTE = pycurl.PRIMARY_IP
_URL, _HEADERS, _BODY = pycurl.URL, pycurl.HTTPHEADER, pycurl.POSTFIELDS
_TIMEOUT = pycurl.TIMEOUT_MS


class _Socket(socket.socket):
    """A socket to hand over: pycurl makes a copy of it, and lets go of this one."""

    def __del__(self) -> None:
        if self.fileno() >= 0:
            self.close()


_MOST_SENDS = 2


class Handle:
    """A handle. `prepare` it, have it performed, then ask for what `answered` or `failed`."""

    __slots__ = (
        "_common",
        "_excerpt",
        "_failure",
        "_guard",
        "_large",
        "_limit",
        "_lines",
        "_max_body",
        "_opened",
        "_proxied",
        "_refusal",
        "_sent",
        "_shape",
        "_size",
        "_timeout_ms",
        "_url",
        "curl",
    )

    def __init__(
        self, guard: Guard, common: list[tuple[int, Any]], max_body: int, *, proxied: bool
    ) -> None:
        self.curl: Any = pycurl.Curl()
        self._guard = guard
        self._common = common
        self._max_body = max_body
        self._proxied = proxied
        self._lines: deque[bytes] = deque(maxlen=MOST_LINES + 3)  # first, last, too many
        self._shape: tuple[str, bool] | None = None
        self._timeout_ms = 0
        self._large = False
        self._forget("", 0)

    def _forget(self, url: str, limit: int) -> None:
        self._url = url
        self._limit = limit
        self._excerpt = b""
        self._size = 0
        self._sent, self._opened = 0, False
        self._refusal: tuple[Fault, str] | None = None
        self._failure: OSError | None = None
        self._lines.clear()

    # --- before ---------------------------------------------------------------------------------

    def prepare(self, request: Request) -> str | None:
        """Take on a request; what is returned says why it cannot be sent."""
        self._forget(request.url, request.max_excerpt)
        lines, body = lines_of(request.headers), request.body
        if lines is None:
            return "headers must have names that are tokens, and no line breaks in their values"
        shape = request.method, bool(body)
        if shape != self._shape and (why := self._take_shape(*shape)):
            return why
        setopt = self.curl.setopt
        if body:
            setopt(_BODY, body)
            self._large = len(body) > _LARGE
        setopt(_HEADERS, lines)
        timeout_ms = min(max(ceil(request.timeout * 1000), 1), _LONGEST_MS)
        if timeout_ms != self._timeout_ms:
            setopt(_TIMEOUT, timeout_ms)
            self._timeout_ms = timeout_ms
        try:
            setopt(_URL, request.url)
        except (UnicodeEncodeError, ValueError):
            return "targetUrl must be in its canonical form"
        return None

    def _take_shape(self, method: str, has_body: bool) -> str | None:  # noqa: FBT001 - half of a shape
        """Set the options that stay while requests of one method follow each other."""
        if not is_token(method) or method.upper() in {"CONNECT", "TRACE"}:
            return f"method must be an HTTP method other than CONNECT and TRACE, got {method!r}"
        if method == "HEAD" and has_body:
            return "body must be empty: a HEAD request has none"
        self.curl.reset()
        self._shape, self._timeout_ms = (method, has_body), 0
        setopt = self.curl.setopt
        for option, value in self._common:
            setopt(option, value)
        setopt(pycurl.OPENSOCKETFUNCTION, self._open)
        setopt(pycurl.PREREQFUNCTION, self._about_to_send)
        setopt(pycurl.HEADERFUNCTION, self._lines.append)
        setopt(pycurl.WRITEFUNCTION, self._write)
        if has_body or method not in _BODILESS:
            setopt(pycurl.POST, 1)
            setopt(_BODY, b"")
        if method == "HEAD":
            setopt(pycurl.NOBODY, 1)
        if method not in {"GET", "POST"} or (has_body and method == "GET"):
            setopt(pycurl.CUSTOMREQUEST, method)
        return None

    # --- called by libcurl ------------------------------------------------------------------------

    def _open(self, purpose: int, address: Any) -> Any:
        """Open a socket for an address, unless the guard refuses it: here no name deceives."""
        del purpose
        if not self._proxied:
            self._refusal = self._judge(address.addr[0])
            if self._refusal is not None:
                return pycurl.SOCKET_BAD
        try:
            opened = _Socket(address.family, address.socktype, address.protocol)
        except OSError as error:
            self._failure = error
            return pycurl.SOCKET_BAD
        self._opened = True
        return opened

    def _judge(self, address: object) -> tuple[Fault, str] | None:
        try:
            target = parse_target(self._url)
        except ConfigurationError as error:
            return Fault.INVALID, str(error)
        why = self._guard.refusal(str(address), target.host)
        return None if why is None else (Fault.BLOCKED, why)

    def _about_to_send(self, *_: object) -> int:
        # A kept connection that was closed in silence is found out by using it. Then, and if no
        # byte came back, libcurl sends once more on a new one (RFC 9112, 9.3.1): the
        # target has most likely seen nothing, and the key covers the rest. Once is enough.
        self._sent += 1
        return int(pycurl.PREREQFUNC_ABORT if self._sent > _MOST_SENDS else pycurl.PREREQFUNC_OK)

    def _write(self, chunk: bytes) -> int | None:
        kept = len(self._excerpt)
        if kept < self._limit:
            more = chunk[: self._limit - kept]
            self._excerpt = self._excerpt + more if kept else more
        self._size += len(chunk)
        return 0 if self._size > self._max_body else None  # 0 ends the transfer

    # --- after ------------------------------------------------------------------------------------

    def answered(self) -> Delivered:
        """Return the answer."""
        lines = self._lines
        if len(lines) > MOST_LINES + 2 or sum(map(len, lines)) > MOST_HEADER_BYTES:
            return self._faulty(Fault.PROTOCOL, "the answer has too many headers")
        headers = headers_of(lines)
        if headers is None:
            return self._faulty(Fault.RESET, "The connection ended within the headers")
        getinfo = self.curl.getinfo
        status = getinfo(_CODE)
        if status < _FIRST_FINAL:
            return self._faulty(Fault.PROTOCOL, f"{status} is no answer to this request")
        delivered = Delivered(
            status=status,
            headers=headers,
            excerpt=self._excerpt,
            remote=getinfo(_REMOTE),
            duration_ms=getinfo(_TOTAL) / 1000,
            first_byte_ms=(getinfo(_FIRST) - getinfo(_READY)) / 1000,
        )
        if self._size > self._limit:
            delivered.truncated = True
        if getinfo(_CONNECTS):
            _add_phases(delivered, getinfo)
        return delivered

    def failed(self, code: int, words: str) -> Delivered:
        """Return what an error of libcurl came to."""
        if code == pycurl.E_WRITE_ERROR and self._size > self._max_body:
            return self.answered()
        fault = fault_of(code, words, self.curl.getinfo(pycurl.OS_ERRNO))
        if not self._opened and self._failure is not None:
            fault, words = Fault.OURS, f"no socket: {self._failure.strerror}"
        elif not self._opened and self._refusal is not None:
            fault, words = self._refusal
        elif code == pycurl.E_URL_MALFORMAT:
            words = _words_about(self._url) or words
        elif code == pycurl.E_ABORTED_BY_CALLBACK:
            words = "The connection ended without an answer"
        elif self._proxied and not self._sent:
            fault = self._of_proxy(fault)
        elif fault is Fault.TIMEOUT and self.curl.getinfo(pycurl.CONN_ID) < 0:
            fault, words = Fault.OURS, "No connection came free in time: raise the limits"
        return self._faulty(fault, words or f"The answer is out of order (libcurl error {code})")

    def _of_proxy(self, fault: Fault) -> Fault:
        """Return whose fault it is that the way through the proxy did not open."""
        said = self.curl.getinfo(pycurl.HTTP_CONNECTCODE)
        if said >= 300:  # noqa: PLR2004 - its refusal
            return PROXY_SAYS.get(said, Fault.OURS)
        return fault if fault is Fault.TLS else Fault.OURS

    def _faulty(self, fault: Fault, message: str) -> Delivered:
        getinfo = self.curl.getinfo
        delivered = Delivered(
            fault=fault,
            error=message,
            remote=getinfo(_REMOTE) or None,
            duration_ms=getinfo(_TOTAL) / 1000,
        )
        _add_phases(delivered, getinfo)
        return delivered

    def rest(self) -> None:
        """Let go of a large body: an idle handle may be idle for long."""
        if self._large:
            self.curl.setopt(_BODY, b"")
            self._large = False


def _words_about(url: str) -> str | None:
    try:
        parse_target(url)
    except ConfigurationError as error:
        return str(error)
    return None


def _add_phases(delivered: Delivered, getinfo: Callable[[int], int]) -> None:
    """Add how long the phases of a new connection took; one that was not reached stays None."""
    looked_up, connected = getinfo(pycurl.NAMELOOKUP_TIME_T), getinfo(pycurl.CONNECT_TIME_T)
    secured = getinfo(pycurl.APPCONNECT_TIME_T)
    if looked_up:
        delivered.dns_ms = looked_up / 1000
    if connected:
        delivered.connect_ms = (connected - looked_up) / 1000
    if secured:
        delivered.tls_ms = (secured - connected) / 1000
