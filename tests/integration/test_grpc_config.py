"""Exported gRPC service configs in real channels, with a server that records attempts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest

from tarry.core.hedging import Hedging
from tarry.core.policy import PRESETS, Policy
from tarry.policyfile.defence import Defence
from tarry.policyfile.grpc import to_grpc

grpc = import_module("grpc")

SERVICE = "shop.Payments"
QUICK = Policy(initial_delay=0.005, max_delay=0.01)


class PaymentsServer:
    """A service that fails with `failures`, then succeeds, and records its attempts."""

    def __init__(self) -> None:
        self.port = 0
        self.failures: list[Any] = []
        self.first_attempt_s = 0.0
        self.previous_attempts: list[str | None] = []

    def charge(self, _request: bytes, context: Any) -> bytes:
        """Respond to one attempt."""
        metadata = dict(context.invocation_metadata())
        self.previous_attempts.append(metadata.get("grpc-previous-rpc-attempts"))
        if len(self.previous_attempts) == 1:
            time.sleep(self.first_attempt_s)
        if self.failures:
            context.abort(self.failures.pop(0), "not now")
        return b"paid"

    @property
    def attempts(self) -> int:
        """The number of attempts that reached the server."""
        return len(self.previous_attempts)


@pytest.fixture
def payments() -> Iterator[PaymentsServer]:
    """Run a gRPC server with the payments service."""
    service = PaymentsServer()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        handler = grpc.unary_unary_rpc_method_handler(service.charge)
        methods = grpc.method_handlers_generic_handler(
            SERVICE, {"Charge": handler, "Void": handler}
        )
        server.add_generic_rpc_handlers((methods,))
        service.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield service
        server.stop(0).wait()


@contextmanager
def open_channel(port: int, config: str) -> Iterator[Any]:
    """Open a channel with a service config on its own connection."""
    options = [
        ("grpc.service_config", config),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel


def call(service: PaymentsServer, config: str, method: str = "Charge") -> Any:
    """Make one call; return its response or its final status code."""
    with open_channel(service.port, config) as channel:
        try:
            return channel.unary_unary(f"/{SERVICE}/{method}")(b"", timeout=10)
        except grpc.RpcError as error:
            return error.code()


def export_config(policy: Policy | None = None, **parts: Any) -> str:
    """Return the exported service config as JSON."""
    return json.dumps(to_grpc(Defence(policy, **parts), service=SERVICE).documents[0])


def test_channel_rejects_an_invalid_config(payments: PaymentsServer) -> None:
    """A channel validates its config, and a call with an invalid config is not sent."""
    one_attempt = export_config(QUICK).replace('"maxAttempts": 4', '"maxAttempts": 1')

    assert grpc.StatusCode.INVALID_ARGUMENT == call(payments, "{")
    assert grpc.StatusCode.INVALID_ARGUMENT == call(payments, one_attempt)
    assert 0 == payments.attempts


@pytest.mark.parametrize("attempts", [2, 3, 5])
def test_call_makes_the_exported_attempts(payments: PaymentsServer, attempts: int) -> None:
    """A call whose first attempts fail succeeds on its last attempt."""
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * (attempts - 1)

    assert b"paid" == call(payments, export_config(QUICK.replace(max_attempts=attempts)))
    assert [None, "1", "2", "3", "4"][:attempts] == payments.previous_attempts


def test_very_short_delays_are_retried(payments: PaymentsServer) -> None:
    """The export uses a longer delay, because grpcio may hang with a delay of 1 ms."""
    policy = QUICK.replace(max_attempts=5, initial_delay=1e-5, max_delay=1e-5)
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 4

    assert b"paid" == call(payments, export_config(policy))


def test_call_makes_no_more_than_the_exported_attempts(payments: PaymentsServer) -> None:
    """A call whose attempts all fail ends with the last error."""
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 9

    assert grpc.StatusCode.UNAVAILABLE == call(
        payments, export_config(QUICK.replace(max_attempts=3))
    )
    assert 3 == payments.attempts


def test_call_makes_at_most_five_attempts(payments: PaymentsServer) -> None:
    """A channel limits a call to five attempts, which is the maximum of gRPC."""
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 9

    call(payments, export_config(QUICK.replace(max_attempts=9)))

    assert 5 == payments.attempts


@pytest.mark.parametrize(
    ("code", "attempts"), [("RESOURCE_EXHAUSTED", 2), ("INTERNAL", 1), ("INVALID_ARGUMENT", 1)]
)
def test_only_codes_of_the_policy_are_retried(
    payments: PaymentsServer, code: str, attempts: int
) -> None:
    """A call ends with the first code that the policy does not retry."""
    payments.failures = [getattr(grpc.StatusCode, code)]

    call(payments, export_config(QUICK))

    assert attempts == payments.attempts


def test_policy_with_one_attempt_is_not_retried(payments: PaymentsServer) -> None:
    """A policy with one attempt is exported without a retry policy."""
    payments.failures = [grpc.StatusCode.UNAVAILABLE]

    assert grpc.StatusCode.UNAVAILABLE == call(payments, export_config(Policy(max_attempts=1)))
    assert 1 == payments.attempts


def test_total_budget_is_the_deadline(payments: PaymentsServer) -> None:
    """The exported timeout ends a call before the deadline of the caller."""
    payments.first_attempt_s = 0.5

    code = call(payments, export_config(QUICK.replace(total_budget=0.1)))

    assert grpc.StatusCode.DEADLINE_EXCEEDED == code


def test_config_applies_to_the_named_method_only(payments: PaymentsServer) -> None:
    """A config for one method does not affect other methods."""
    config = json.dumps(to_grpc(Defence(QUICK), service=SERVICE, method="Void").documents[0])
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 2

    assert grpc.StatusCode.UNAVAILABLE == call(payments, config, "Charge")
    assert b"paid" == call(payments, config, "Void")


def test_throttle_stops_retries(payments: PaymentsServer) -> None:
    """With four tokens, retries of all calls of a channel stop when two tokens are left."""
    budget = {"kind": "throttle", "max_tokens": 4, "token_ratio": 0.1}
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 9

    with open_channel(
        payments.port, export_config(QUICK.replace(max_attempts=5), budget=budget)
    ) as channel:
        charge = channel.unary_unary(f"/{SERVICE}/Charge")
        attempts = []
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                charge(b"", timeout=10)
            attempts.append(payments.attempts)

    assert [2, 3, 4] == attempts


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("kind", ["token", "ratio", "throttle"])
def test_presets_and_budgets_are_valid(payments: PaymentsServer, preset: str, kind: str) -> None:
    """A channel accepts each preset with each kind of budget."""
    assert b"paid" == call(payments, export_config(PRESETS[preset], budget={"kind": kind}))


def test_hedging_is_accepted_and_ignored(payments: PaymentsServer) -> None:
    """A call with hedging has one attempt, because grpcio does not implement hedging."""
    payments.first_attempt_s = 0.2

    assert b"paid" == call(payments, export_config(hedging=Hedging(after=0.01, max_attempts=3)))
    assert 1 == payments.attempts
