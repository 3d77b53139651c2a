"""Retries for gRPC clients (`grpc` and `grpc.aio`), and interceptors for servers.

    channel = grpc.intercept_channel(
        grpc.insecure_channel(target, options=channel_options()), RetryInterceptor(target=target)
    )
    channel = grpc.aio.insecure_channel(
        target, options=channel_options(), interceptors=async_retry_interceptors(target=target)
    )

Unary calls are retried, and response streams until their first message. Calls with a request
stream are passed through: the messages that were sent cannot be sent again.
"""

from tarry.adapters.grpc.interceptors import (
    AsyncOneRetryLayerInterceptor,
    OneRetryLayerInterceptor,
    RetryInterceptor,
    async_retry_interceptors,
    channel_options,
)

__all__ = [
    "AsyncOneRetryLayerInterceptor",
    "OneRetryLayerInterceptor",
    "RetryInterceptor",
    "async_retry_interceptors",
    "channel_options",
]
