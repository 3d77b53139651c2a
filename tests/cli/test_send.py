"""`tarry send`: the delivered request, the output and the exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tarry.client import Client
from tests.cli.harness import CommandResult
from tests.integration.flaky import FlakyServer

RunCli = Callable[..., CommandResult]


def test_result_and_response_are_printed(run_cli: RunCli, target: FlakyServer) -> None:
    """With --wait, a call that succeeds after a retry exits with 0 and prints the response."""
    result = run_cli("send", f"{target.url}/?plan=503,200", "-d", "hello", "--wait", "30s")

    summary, *rest = result.out.split("\n", 1)
    assert (0, "") == (result.code, result.err)
    assert summary.endswith(" SUCCEEDED after 2 attempts")
    assert ["the target answered 200\nanswer 2\n"] == rest


def test_delivered_request(run_cli: RunCli, target: FlakyServer) -> None:
    """Each attempt has the method, the headers and the idempotency key of the command."""
    result = run_cli(
        "send", f"{target.url}/?plan=503,200", "-X", "PUT", "-H", "X-Shop: 7",
        "--idempotency-key", "order-7", "--wait", "30",
    )  # fmt: skip

    assert 0 == result.code, result.err
    for request in target.received_requests[""]:
        assert "PUT" == request.method
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert ("7", "order-7") == (headers["x-shop"], headers["idempotency-key"])


def test_lane_key(run_cli: RunCli, target: FlakyServer) -> None:
    task = run_cli("send", target.url, "--lane-key", "customer-7", "--json").json

    assert task["lane"].endswith("@customer-7")


def test_callback_and_its_policy(run_cli: RunCli, target: FlakyServer) -> None:
    """The task has the URL and the policy of the callback."""
    task = run_cli(
        "send", target.url, "--callback", f"{target.url}/done", "--callback-policy", "quick",
        "--json",
    ).json  # fmt: skip

    assert (f"{target.url}/done", "quick") == (task["callbackUrl"], task["callbackPolicyId"])


@pytest.mark.parametrize(
    ("data", "stdin", "body", "content_type"),
    [
        ("text", b"", b"text", None),
        ('{"order": 7}', b"", b'{"order": 7}', "application/json"),
        ("{no json", b"", b"{no json", None),
        ("@FILE", b"", b"[1,\n 2]", "application/json"),
        ("@-", b"\xff\x00", b"\xff\x00", None),
    ],
    ids=["text", "JSON", "invalid JSON", "file", "standard input"],
)
def test_body_is_unchanged(
    run_cli: RunCli,
    target: FlakyServer,
    tmp_path: Path,
    data: str,
    stdin: bytes,
    body: bytes,
    content_type: str | None,
) -> None:
    """A body from text, file or standard input is unchanged; JSON gets its content type."""
    file = tmp_path / "order.json"
    file.write_bytes(b"[1,\n 2]")

    result = run_cli(
        "send", target.url, "-d", data.replace("FILE", str(file)), "--wait", "30", stdin=stdin
    )

    (request,) = target.received_requests[""]
    headers = {name.lower(): value for name, value in request.headers.items()}
    assert 0 == result.code, result.err
    assert body == request.body
    assert (content_type == "application/json") == (
        headers.get("content-type") == "application/json"
    )


def test_content_type_of_the_user_is_kept(run_cli: RunCli, target: FlakyServer) -> None:
    run_cli("send", target.url, "-d", "{}", "-H", "content-type: text/plain", "--wait", "30")

    (request,) = target.received_requests[""]
    headers = {name.lower(): value for name, value in request.headers.items()}
    assert "text/plain" == headers["content-type"]


def test_failed_call_exits_with_1(run_cli: RunCli, target: FlakyServer) -> None:
    """A failed call exits with 1 and prints how to see the cause."""
    result = run_cli("send", f"{target.url}/?plan=404", "--wait", "30")

    assert 1 == result.code
    assert " EXHAUSTED after 1 attempt: permanent\nthe target answered 404\n" in result.out
    assert "tarry tasks explain " in result.out


def test_the_error_of_a_call_without_a_response_is_printed(run_cli: RunCli) -> None:
    """With --wait, a call that no server has answered prints the error of its last attempt."""
    options = ("send", "http://127.0.0.1:1", "--policy", "quick", "--wait", "30")
    result = run_cli(*options)

    summary, error, hint = result.out.splitlines()
    assert 1 == result.code
    assert summary.endswith(" EXHAUSTED after 5 attempts: attempts")
    assert error.startswith("the last attempt failed: refused")
    assert hint.startswith("to see why: tarry tasks explain ")


def test_unfinished_call_exits_with_1(run_cli: RunCli) -> None:
    """A call that is unfinished after --wait exits with 1; the task continues."""
    options = ("send", "http://127.0.0.1:1", "--delay", "1h", "--wait", "500ms")
    assert "not finished yet; to follow it: tarry tasks show " in run_cli(*options).out
    result = run_cli(*options, "--json")

    assert (1, "PENDING") == (result.code, result.json["status"])


def test_command_without_wait_returns_at_once(
    run_cli: RunCli, client: Client, target: FlakyServer
) -> None:
    """Without --wait, the command returns when the task is added."""
    result = run_cli("send", f"{target.url}/?plan=hang", "--policy", "patient", "--json")

    assert 0 == result.code, result.err
    assert "patient" == client.get(result.json["taskId"]).policy_id
    target.may_continue.set()


def test_same_key_adds_one_task(run_cli: RunCli) -> None:
    """Sending twice with one key adds one task; other content with that key is rejected."""
    command = ("send", "http://127.0.0.1:1", "--delay", "1h", "--idempotency-key", "once", "--json")

    first, again, other = run_cli(*command), run_cli(*command), run_cli(*command, "-d", "other")

    assert first.json["taskId"] == again.json["taskId"]
    assert 2 == other.code
    assert "once" not in other.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-H", "no colon"], "--header must have the format 'Name: value'\n"),
        (["-H", "A: 1", "-H", "a: 2"], "--header sets a twice"),
        (["-H", "A: 1", "--secret-header", "a: b"], "--secret-header sets a twice"),
        (
            ["--secret-header", "A: none"],
            "headers.A.secret must be a secret that the operator has defined in the setting",
        ),
        (["-d", "@none.json"], "--data: cannot read none.json: No such file or directory"),
        (
            ["--delay", "soon"],
            "--delay must be a time such as 500ms, 2s, 10m, 24h or 7d, got 'soon'",
        ),
        (["--wait", "0"], "--wait must be greater than 0"),
        (["--policy", "none"], "error: --policy must be an existing policy"),
        (["--policy", "quik"], "error: --policy must be an existing policy (did you mean quick?)"),
        (["-X", "FETCH"], "error: --method must be one of GET, HEAD, POST, "),
        (["--lane-key", "-"], "error: --lane-key must "),
    ],
    ids=[
        "header",
        "header twice",
        "secret twice",
        "secret",
        "file",
        "delay",
        "wait",
        "policy",
        "similar policy",
        "method",
        "lane key",
    ],
)
def test_invalid_options_are_reported(run_cli: RunCli, options: list[str], message: str) -> None:
    """Invalid options exit with 2 and are named."""
    result = run_cli("send", "http://127.0.0.1:1", *options)

    assert (2, "") == (result.code, result.out)
    assert message in result.err


def test_forbidden_target_is_rejected(run_cli: RunCli) -> None:
    """The service's explanation of a forbidden target is printed."""
    result = run_cli("send", "http://10.0.0.1/")

    assert 2 == result.code
    assert "error: URL must be an address that is allowed: 10.0.0.1" in result.err
