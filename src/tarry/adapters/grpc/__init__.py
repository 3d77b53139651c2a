"""Retries for gRPC clients (`grpc` and `grpc.aio`), and interceptors for gRPC servers.

    channel = grpc.intercept_channel(
        grpc.insecure_channel(target, options=channel_options()), RetryInterceptor(target=target)
    )
    channel = grpc.aio.insecure_channel(
        target, options=channel_options(), interceptors=async_retry_interceptors(target=target)
    )

Unary calls are retried. Calls with a response stream are retried until the first message arrives.
Calls with a request stream are not retried, because the messages that were sent are not kept.
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
