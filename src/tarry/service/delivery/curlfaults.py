"""What libcurl's errors mean: whose failure it was, in the words of the attempt log."""

from __future__ import annotations

from errno import EADDRNOTAVAIL, ECONNREFUSED, EHOSTUNREACH, EMFILE, ENETUNREACH, ENFILE

from tarry.service.delivery.exchange import Fault
from tarry.service.delivery.library import pycurl

FAULTS: dict[int, Fault] = {
    pycurl.E_UNSUPPORTED_PROTOCOL: Fault.PROTOCOL,  # an answer in HTTP/0.9, or in no HTTP
    pycurl.E_URL_MALFORMAT: Fault.INVALID,
    pycurl.E_COULDNT_RESOLVE_PROXY: Fault.OURS,
    pycurl.E_COULDNT_RESOLVE_HOST: Fault.DNS,
    pycurl.E_COULDNT_CONNECT: Fault.REFUSED,
    pycurl.E_PARTIAL_FILE: Fault.RESET,
    pycurl.E_OUT_OF_MEMORY: Fault.OURS,
    pycurl.E_OPERATION_TIMEDOUT: Fault.TIMEOUT,
    pycurl.E_SSL_CONNECT_ERROR: Fault.TLS,
    pycurl.E_ABORTED_BY_CALLBACK: Fault.RESET,  # see Handle: sent often enough
    pycurl.E_INTERFACE_FAILED: Fault.OURS,
    pycurl.E_GOT_NOTHING: Fault.RESET,
    pycurl.E_SEND_ERROR: Fault.RESET,
    pycurl.E_SSL_CERTPROBLEM: Fault.OURS,
    pycurl.E_SSL_CIPHER: Fault.TLS,
    pycurl.E_PEER_FAILED_VERIFICATION: Fault.TLS,
    pycurl.E_SEND_FAIL_REWIND: Fault.RESET,
    pycurl.E_SSL_CACERT_BADFILE: Fault.OURS,
    pycurl.E_SSL_SHUTDOWN_FAILED: Fault.TLS,
    pycurl.E_AGAIN: Fault.OURS,
    pycurl.E_SSL_CRL_BADFILE: Fault.OURS,
    pycurl.E_SSL_ISSUER_ERROR: Fault.TLS,
    pycurl.E_NO_CONNECTION_AVAILABLE: Fault.OURS,
    pycurl.E_SSL_INVALIDCERTSTATUS: Fault.TLS,
    97: Fault.OURS,  # CURLE_PROXY: the handshake with it failed
    99: Fault.OURS,  # CURLE_UNRECOVERABLE_POLL
}

_OF_ANOTHER = frozenset({0, EADDRNOTAVAIL, ECONNREFUSED, EHOSTUNREACH, ENETUNREACH})
"""No error of this connection: a host's other address was tried first, and libcurl remembers."""


def fault_of(code: int, words: str, os_error: int) -> Fault:
    """Return what an error means. One that is not in the table is the target's: no proper HTTP."""
    if os_error in {EMFILE, ENFILE}:
        return Fault.OURS
    if code == pycurl.E_RECV_ERROR and (os_error not in _OF_ANOTHER or "SSL" in words):
        return Fault.RESET  # else chunks out of order
    return FAULTS.get(code, Fault.PROTOCOL)


PROXY_SAYS = {403: Fault.BLOCKED, 502: Fault.REFUSED, 503: Fault.REFUSED, 504: Fault.REFUSED}
"""What an egress proxy means that does not open the way; all else is a failure of its own."""
