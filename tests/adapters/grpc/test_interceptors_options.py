"""Channel options that turn off gRPC's own retries, and invalid arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import tarry
from tarry.adapters.grpc import RetryInterceptor, async_retry_interceptors, channel_options
from tests.adapters.grpc.fake_service import CHARGE, OWN_CONNECTION, FakeService, grpc

RETRY = {
    "maxAttempts": 4,
    "initialBackoff": "0.01s",
    "maxBackoff": "0.01s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def service_config(*names: dict[str, str], **entry: Any) -> tuple[str, str]:
    """Return a service config with one entry."""
    return service_config_of({"name": list(names), **entry})


def service_config_of(*entries: Any) -> tuple[str, str]:
    """Return a service config with these entries."""
    return "grpc.service_config", json.dumps({"methodConfig": entries})


@pytest.mark.parametrize(
    ("option", "found"),
    [
        (service_config({}, retryPolicy=RETRY), "has a retryPolicy for all methods"),
        (service_config({"service": "shop.A"}, retryPolicy=RETRY), "has a retryPolicy for shop.A"),
        (
            service_config({"service": "a"}, {"service": "b", "method": "M"}, hedgingPolicy={}),
            "has a hedgingPolicy for a, b/M",
        ),
        (
            service_config_of({"retryPolicy": RETRY}),
            "has a retryPolicy for an entry without a name",
        ),
        (
            service_config_of({"timeout": "3s"}, {"name": [{}], "retryPolicy": RETRY}),
            "for all methods",
        ),
        (
            service_config_of(7, {"name": [{"service": "shop.A"}], "retryPolicy": RETRY}),
            "has a retryPolicy for shop.A",
        ),
        (("grpc.enable_retries", 1), "grpc.enable_retries is 1"),
    ],
)
def test_channel_retries_raise(option: tuple[str, Any], found: str) -> None:
    """The error names the option that retries, and why that is bad."""
    with pytest.raises(tarry.ConfigurationError, match="two layers multiply") as caught:
        channel_options([option])

    assert found in str(caught.value)


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
    """Options without retries are kept, and an invalid config is left for gRPC to reject."""
    assert [option, ("grpc.enable_retries", 0)] == channel_options([option])


@pytest.mark.parametrize("wrong", [{"grpc.x": 1}, "grpc.x", [("grpc.x", 1, 2)], 7])
def test_options_must_be_pairs(wrong: Any) -> None:
    """Options in another format raise."""
    with pytest.raises(tarry.ConfigurationTypeError, match="options must be pairs of a name and"):
        channel_options(wrong)


@pytest.mark.parametrize("wrong", ["{", "", None, {"methodConfig": []}])
def test_service_config_must_be_json(wrong: Any) -> None:
    """A config that cannot be parsed raises, because it may contain retries."""
    with pytest.raises(tarry.ConfigurationError, match="service_config must be a service config"):
        channel_options([("grpc.service_config", wrong)])


def test_enable_retries_is_set_once() -> None:
    """The options may be None, or the result of an earlier call."""
    off = [("grpc.enable_retries", 0)]

    assert off == channel_options() == channel_options(None) == channel_options(off)


@pytest.mark.parametrize(("switch", "attempts"), [([], 4), (channel_options(), 1)])
def test_grpc_obeys_enable_retries(service: FakeService, switch: list[Any], attempts: int) -> None:
    """With the option, a service config from a resolver does not retry."""
    service.steps = ["UNAVAILABLE"] * 9
    options = [service_config({}, retryPolicy=RETRY), *OWN_CONNECTION, *switch]

    opened = grpc.insecure_channel(service.target, options=options)
    with opened, pytest.raises(grpc.RpcError):
        opened.unary_unary(CHARGE)(b"")

    assert attempts == service.attempts


@pytest.mark.parametrize("make", [RetryInterceptor, async_retry_interceptors])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"policy": 3}, "policy must be"),
        ({"downstream": "payments"}, "downstream must be"),
        ({"repeatable": "yes"}, "repeatable must be True, False or a function"),
        ({"target": ""}, "target must be the address"),
        ({"target": 50051}, "target must be the address"),
    ],
)
def test_invalid_argument_raises(make: Any, wrong: dict[str, Any], message: str) -> None:
    """An invalid argument raises at once."""
    with pytest.raises(tarry.ConfigurationError, match=message):
        make(**wrong)


def test_one_downstream_per_service(service: FakeService) -> None:
    """Without a target, each gRPC service has its own downstream."""
    targets: list[str] = []

    def make(name: str) -> tarry.Downstream:
        targets.append(name)
        return tarry.Downstream(name)

    interceptor = RetryInterceptor(downstream=make)
    with grpc.insecure_channel(service.target, options=OWN_CONNECTION) as opened:
        for _ in range(2):
            grpc.intercept_channel(opened, interceptor).unary_unary(CHARGE)(b"")

    assert ["shop.Payments"] == targets


def test_missing_grpcio() -> None:
    """Without grpcio, the error has the command that installs it."""
    code = "import sys; sys.modules['grpc'] = None; import tarry.adapters.grpc"

    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert (
        "MissingExtra: tarry.adapters.grpc needs grpcio: pip install 'tarry[grpc]'"
        in completed.stderr
    )
