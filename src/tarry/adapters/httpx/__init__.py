"""Retries and hedges for httpx, and for httpx2, which has the same shape.

    client = httpx.Client(transport=RetryTransport(httpx.HTTPTransport()))

The transport sees every request and every answer of the client. It returns the last answer as the
client would without it: no exception is made of a 503.
"""

from tarry.adapters.httpx.transports import AsyncRetryTransport, RetryTransport

__all__ = ["AsyncRetryTransport", "RetryTransport"]
