"""Exported gRPC service configs in real channels, with a server that counts attempts."""

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

SERVICE = "shop.PaymentsServer"
QUICK = Policy(initial_delay=0.005, max_delay=0.01)


class PaymentsServer:
    """A service that fails a number of times, then succeeds, and records its requests."""

    def __init__(self) -> None:
        self.port = 0
        self.failures: list[Any] = []
        self.first_takes = 0.0
        self.previous_attempts: list[str | None] = []

    def charge(self, _request: bytes, context: Any) -> bytes:
        """Respond to one attempt."""
        metadata = dict(context.invocation_metadata())
        self.previous_attempts.append(metadata.get("grpc-previous-rpc-attempts"))
        if len(self.previous_attempts) == 1:
            time.sleep(self.first_takes)
        if self.failures:
            context.abort(self.failures.pop(0), "not now")
        return b"paid"

    @property
    def attempts(self) -> int:
        """The number of attempts that reached the server."""
        return len(self.previous_attempts)


@pytest.fixture
def payments() -> Iterator[PaymentsServer]:
    """Run a server."""
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
def channel(port: int, config: str) -> Iterator[Any]:
    """Open a channel with a service config on its own connection."""
    options = [
        ("grpc.service_config", config),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as opened:
        yield opened


def call(service: PaymentsServer, config: str, method: str = "Charge") -> Any:
    """Make one call; return its response or its final status code."""
    with channel(service.port, config) as opened:
        try:
            return opened.unary_unary(f"/{SERVICE}/{method}")(b"", timeout=10)
        except grpc.RpcError as error:
            return error.code()


def exported(policy: Policy | None = None, **parts: Any) -> str:
    """Return a service config for the service as JSON."""
    return json.dumps(to_grpc(Defence(policy, **parts), service=SERVICE).documents[0])


def test_channel_rejects_an_invalid_config(payments: PaymentsServer) -> None:
    """A channel validates its config: no call is made with an invalid one."""
    one = exported(QUICK).replace('"maxAttempts": 4', '"maxAttempts": 1')

    assert grpc.StatusCode.INVALID_ARGUMENT == call(payments, "{")
    assert grpc.StatusCode.INVALID_ARGUMENT == call(payments, one)
    assert 0 == payments.attempts


@pytest.mark.parametrize("attempts", [2, 3, 5])
def test_as_many_attempts_as_exported(payments: PaymentsServer, attempts: int) -> None:
    """A call that fails once less than its attempts succeeds on the last one."""
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * (attempts - 1)

    assert b"paid" == call(payments, exported(QUICK.replace(max_attempts=attempts)))
    assert [None, "1", "2", "3", "4"][:attempts] == payments.previous_attempts


def test_shortest_delays_do_not_lose_the_retry(payments: PaymentsServer) -> None:
    """With a delay of a millisecond grpcio may hang, so the export uses a longer one."""
    policy = QUICK.replace(max_attempts=5, initial_delay=1e-5, max_delay=1e-5)
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 4

    assert b"paid" == call(payments, exported(policy))


def test_no_attempt_more_than_exported(payments: PaymentsServer) -> None:
    """A call that fails too often ends with the last error."""
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 9

    assert grpc.StatusCode.UNAVAILABLE == call(payments, exported(QUICK.replace(max_attempts=3)))
    assert 3 == payments.attempts


def test_more_than_five_attempts_are_five(payments: PaymentsServer) -> None:
    """The limit of gRPC is five attempts, which the export lists as a difference."""
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 9

    call(payments, exported(QUICK.replace(max_attempts=9)))

    assert 5 == payments.attempts


@pytest.mark.parametrize(
    ("code", "attempts"), [("RESOURCE_EXHAUSTED", 2), ("INTERNAL", 1), ("INVALID_ARGUMENT", 1)]
)
def test_only_the_codes_of_the_policy(payments: PaymentsServer, code: str, attempts: int) -> None:
    """A code that the policy does not retry is final."""
    payments.failures = [getattr(grpc.StatusCode, code)]

    call(payments, exported(QUICK))

    assert attempts == payments.attempts


def test_one_attempt_is_one_attempt(payments: PaymentsServer) -> None:
    """A policy without retries is a config without a retry policy."""
    payments.failures = [grpc.StatusCode.UNAVAILABLE]

    assert grpc.StatusCode.UNAVAILABLE == call(payments, exported(Policy(max_attempts=1)))
    assert 1 == payments.attempts


def test_total_budget_is_the_deadline(payments: PaymentsServer) -> None:
    """The exported timeout ends a call before the deadline of the caller."""
    payments.first_takes = 0.5

    code = call(payments, exported(QUICK.replace(total_budget=0.1)))

    assert grpc.StatusCode.DEADLINE_EXCEEDED == code


def test_only_the_named_method(payments: PaymentsServer) -> None:
    """A config for one method does not affect other methods."""
    config = json.dumps(to_grpc(Defence(QUICK), service=SERVICE, method="Void").documents[0])
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 2

    assert grpc.StatusCode.UNAVAILABLE == call(payments, config, "Charge")
    assert b"paid" == call(payments, config, "Void")


def test_throttle_stops_retries(payments: PaymentsServer) -> None:
    """With four tokens, retries stop when two are left, over all calls of a channel."""
    budget = {"kind": "throttle", "max_tokens": 4, "token_ratio": 0.1}
    payments.failures = [grpc.StatusCode.UNAVAILABLE] * 9

    with channel(payments.port, exported(QUICK.replace(max_attempts=5), budget=budget)) as opened:
        charge = opened.unary_unary(f"/{SERVICE}/Charge")
        seen = []
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                charge(b"", timeout=10)
            seen.append(payments.attempts)

    assert [2, 3, 4] == seen


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("kind", ["token", "ratio", "throttle"])
def test_presets_and_budgets_are_valid(payments: PaymentsServer, preset: str, kind: str) -> None:
    """A channel accepts each preset with each kind of budget."""
    assert b"paid" == call(payments, exported(PRESETS[preset], budget={"kind": kind}))


def test_hedging_is_accepted_and_ignored(payments: PaymentsServer) -> None:
    """Hedging is not implemented by grpcio: there is one copy, as the export says."""
    payments.first_takes = 0.2

    assert b"paid" == call(payments, exported(hedging=Hedging(after=0.01, max_attempts=3)))
    assert 1 == payments.attempts
