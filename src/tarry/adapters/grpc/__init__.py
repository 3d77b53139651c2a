"""Retries for gRPC clients, plain and asyncio: unary calls, and streams until their first message.

    channel = grpc.intercept_channel(
        grpc.insecure_channel(target, options=channel_options()), RetryInterceptor(target=target)
    )
    channel = grpc.aio.insecure_channel(
        target, options=channel_options(), interceptors=async_retry_interceptors(target=target)
    )

Calls whose requests are streams pass untouched: what was sent is not there to be sent again. The
side of the server is in `server`: it keeps its clients from retrying what it has retried itself.
"""

from tarry.adapters.grpc.blocking import RetryInterceptor
from tarry.adapters.grpc.coroutines import async_retry_interceptors
from tarry.adapters.grpc.options import channel_options
from tarry.adapters.grpc.server import AsyncOneLayerInterceptor, OneLayerInterceptor

__all__ = [
    "AsyncOneLayerInterceptor",
    "OneLayerInterceptor",
    "RetryInterceptor",
    "async_retry_interceptors",
    "channel_options",
]
