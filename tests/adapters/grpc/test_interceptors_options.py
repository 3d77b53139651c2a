"""Channel options that turn off the retries of gRPC, and arguments of the interceptors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import tarry
from tarry.adapters.grpc import RetryInterceptor, async_retry_interceptors, channel_options
from tests.adapters.grpc.fake_service import CHARGE, SEPARATE_CONNECTION, FakeService, grpc

RETRY_POLICY = {
    "maxAttempts": 4,
    "initialBackoff": "0.01s",
    "maxBackoff": "0.01s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def service_config(*names: dict[str, str], **entry: Any) -> tuple[str, str]:
    """Return the channel option of a service config with one entry."""
    return service_config_with_entries({"name": list(names), **entry})


def service_config_with_entries(*entries: Any) -> tuple[str, str]:
    """Return the channel option of a service config with these entries."""
    return "grpc.service_config", json.dumps({"methodConfig": entries})


@pytest.mark.parametrize(
    ("option", "description"),
    [
        (service_config({}, retryPolicy=RETRY_POLICY), "has a retryPolicy for all methods"),
        (
            service_config({"service": "shop.A"}, retryPolicy=RETRY_POLICY),
            "has a retryPolicy for shop.A",
        ),
        (
            service_config({"service": "a"}, {"service": "b", "method": "M"}, hedgingPolicy={}),
            "has a hedgingPolicy for a, b/M",
        ),
        (
            service_config_with_entries({"retryPolicy": RETRY_POLICY}),
            "has a retryPolicy for an entry without a name",
        ),
        (
            service_config_with_entries(
                {"timeout": "3s"}, {"name": [{}], "retryPolicy": RETRY_POLICY}
            ),
            "for all methods",
        ),
        (
            service_config_with_entries(
                7, {"name": [{"service": "shop.A"}], "retryPolicy": RETRY_POLICY}
            ),
            "has a retryPolicy for shop.A",
        ),
        (("grpc.enable_retries", 1), "grpc.enable_retries is 1"),
    ],
)
def test_channel_option_with_retries_raises(option: tuple[str, Any], description: str) -> None:
    """An option that enables retries raises; the error names the option and the methods."""
    with pytest.raises(tarry.ConfigurationError, match="two layers multiply") as caught:
        channel_options([option])

    assert description in str(caught.value)


@pytest.mark.parametrize(
    "option",
    [
        service_config({}, timeout="3s"),
        ("grpc.service_config", "[1]"),
        ("grpc.service_config", json.dumps({"methodConfig": 7})),
        ("grpc.max_receive_message_length", -1),
    ],
)
def test_other_options_are_kept(option: tuple[str, Any]) -> None:
    """Options without retries are kept, and a config with invalid entries is left to gRPC."""
    assert [option, ("grpc.enable_retries", 0)] == channel_options([option])


@pytest.mark.parametrize("options", [{"grpc.x": 1}, "grpc.x", [("grpc.x", 1, 2)], 7])
def test_options_must_be_pairs(options: Any) -> None:
    """Options that are not pairs raise."""
    with pytest.raises(tarry.ConfigurationTypeError, match="options must be pairs of a name and"):
        channel_options(options)


@pytest.mark.parametrize("config", ["{", "", None, {"methodConfig": []}])
def test_service_config_must_be_json(config: Any) -> None:
    """A service config that cannot be parsed raises, because it may contain retries."""
    with pytest.raises(tarry.ConfigurationError, match="service_config must be a service config"):
        channel_options([("grpc.service_config", config)])


def test_enable_retries_is_set_once() -> None:
    """`channel_options` accepts no options, None and its own result."""
    expected = [("grpc.enable_retries", 0)]

    assert expected == channel_options() == channel_options(None) == channel_options(expected)


@pytest.mark.parametrize(("extra_options", "attempts"), [([], 4), (channel_options(), 1)])
def test_channel_options_turn_off_grpc_retries(
    service: FakeService, extra_options: list[Any], attempts: int
) -> None:
    """With the result of `channel_options`, gRPC ignores the retry policy of a service config."""
    service.steps = ["UNAVAILABLE"] * 9
    options = [service_config({}, retryPolicy=RETRY_POLICY), *SEPARATE_CONNECTION, *extra_options]

    channel = grpc.insecure_channel(service.target, options=options)
    with channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(CHARGE)(b"")

    assert attempts == service.attempts


@pytest.mark.parametrize("make_interceptors", [RetryInterceptor, async_retry_interceptors])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": 3}, "policy must be"),
        ({"downstream": "payments"}, "downstream must be"),
        ({"repeatable": "yes"}, "repeatable must be True, False or a function"),
        ({"target": ""}, "target must be the address"),
        ({"target": 50051}, "target must be the address"),
    ],
)
def test_invalid_argument_raises(
    make_interceptors: Any, arguments: dict[str, Any], message: str
) -> None:
    """An invalid argument raises when the interceptor is created."""
    with pytest.raises(tarry.ConfigurationError, match=message):
        make_interceptors(**arguments)


def test_one_downstream_per_service(service: FakeService) -> None:
    """Without a target, each gRPC service has its own downstream."""
    names: list[str] = []

    def make_downstream(name: str) -> tarry.Downstream:
        names.append(name)
        return tarry.Downstream(name)

    interceptor = RetryInterceptor(downstream=make_downstream)
    with grpc.insecure_channel(service.target, options=SEPARATE_CONNECTION) as channel:
        for _ in range(2):
            grpc.intercept_channel(channel, interceptor).unary_unary(CHARGE)(b"")

    assert ["shop.Payments"] == names


def test_missing_grpcio_raises() -> None:
    """Without grpcio, the import raises `MissingExtra` with the install command."""
    code = "import sys; sys.modules['grpc'] = None; import tarry.adapters.grpc"

    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert (
        "MissingExtra: tarry.adapters.grpc needs grpcio: pip install 'tarry[grpc]'"
        in completed.stderr
    )
