"""Invalid tasks are rejected with the field and the rule, and are not stored."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.service.api.context import ApiLimits
from tarry.service.api.problems import ApiError
from tarry.service.api.task_validation import check_header_names, check_headers
from tests.service.api.harness import NOW, TARGET, ApiHarness

INVALID_TASKS: list[tuple[dict[str, Any], str, str]] = [
    # fields of the request, the field in the problem, a part of the rule
    ({"targetUrl": None}, "targetUrl", "expected string"),
    ({"targetUrl": ""}, "targetUrl", "length >= 1"),
    ({"targetUrl": 7}, "targetUrl", "expected string, got integer"),
    ({"targetUrl": "ftp://a.b/"}, "targetUrl", "must start with http://"),
    ({"targetUrl": "https://user:pw@a.b/"}, "targetUrl", "must not have user info"),
    ({"targetUrl": "https://a.b/\r\nX: y"}, "targetUrl", "control characters"),
    ({"targetUrl": "https://[fe80::1%25eth0]/"}, "targetUrl", "zone id"),
    ({"targetUrl": "http://127.0.0.1/"}, "targetUrl", "loopback"),
    ({"targetUrl": "http://2130706433/"}, "targetUrl", "four decimal numbers"),
    ({"targetUrl": "http://[::ffff:10.0.0.1]/"}, "targetUrl", "mapped"),
    ({"targetUrl": "http://169.254.169.254/latest"}, "targetUrl", "metadata"),
    ({"targetUrl": "http://localhost:8080/"}, "targetUrl", "loopback"),
    ({"targetUrl": "https://a.b/" + "x" * 9000}, "targetUrl", "length <= 8192"),
    ({"callbackUrl": "http://10.0.0.1/"}, "callbackUrl", "callbackUrl must be an address"),
    ({"callbackUrl": "x"}, "callbackUrl", "callbackUrl must start with"),
    ({"method": "post"}, "method", "must be one of GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS,"),
    ({"method": "FETCH"}, "method", "can allow others (`allow_methods`), got 'FETCH'"),
    ({"method": "CONNECT"}, "method", "must be one of"),
    ({"method": "GET /x HTTP/1.1\r\n"}, "method", "must be one of"),
    ({"method": ""}, "method", "length >= 1"),
    ({"method": "HEAD", "body": {}}, "body", "HEAD request has no body"),
    ({"method": "HEAD", "bodyRef": "s3://b/k"}, "bodyRef", "HEAD request has no body"),
    ({"method": "GET", "targetUrl": "grpc://a.b:50051/p.S/M"}, "method", "POST"),
    (
        {"headers": {"grpc-Timeout": "1S"}, "targetUrl": "grpc://a.b:50051/p.S/M"},
        "headers.grpc-Timeout",
        "gRPC reserves",
    ),
    (
        {"headers": {"X!": "1"}, "targetUrl": "grpcs://a.b:50051/p.S/M"},
        "headers.X!",
        "does not allow",
    ),
    (
        {"headers": {"X-Bin": "1zz!"}, "targetUrl": "grpc://a.b:50051/p.S/M"},
        "headers.X-Bin",
        "must be base64",
    ),
    ({"headers": []}, "headers", "expected object"),
    ({"headers": {"": "x"}}, "headers.", "token"),
    ({"headers": {"a b": "x"}}, "headers.a b", "token"),
    ({"headers": {"X-Ü": "x"}}, "headers.X-Ü", "token"),
    ({"headers": {"X\r\nY": "x"}}, "headers.X\r\nY", "token"),
    ({"headers": {"X-A": 5}}, "headers.X-A", "must be a string"),
    ({"headers": {"Authorization": ["S"]}}, "headers.Authorization", "must be a string"),
    ({"headers": {"X-A": None}}, "headers.X-A", "must be a string"),
    ({"headers": {"X-A": "a\r\nX-B: c"}}, "headers.X-A", "visible ASCII"),
    ({"headers": {"X-A": "a\n"}}, "headers.X-A", "visible ASCII"),
    ({"headers": {"X-A": "a\x00"}}, "headers.X-A", "visible ASCII"),
    ({"headers": {"X-A": " a"}}, "headers.X-A", "visible ASCII"),
    ({"headers": {"X-A": "ü"}}, "headers.X-A", "visible ASCII"),
    ({"headers": {"X-A": "1", "x-a": "2"}}, "headers.X-A", "twice"),
    ({"headers": {"Connection": "close"}}, "headers.Connection", "one connection"),
    ({"headers": {"TE": "trailers"}}, "headers.TE", "one connection"),
    ({"headers": {"Transfer-Encoding": "x"}}, "headers.Transfer-Encoding", "one connection"),
    ({"headers": {"host": "x"}}, "headers.host", "by the service"),
    ({"headers": {"Content-Length": "5"}}, "headers.Content-Length", "by the service"),
    ({"headers": {"Idempotency-Key": "k"}}, "headers.Idempotency-Key", "by the service"),
    ({"headers": {"Webhook-Id": "k"}}, "headers.Webhook-Id", "by the service"),
    ({"headers": {"X-Retry-Attempt": "2"}}, "headers.X-Retry-Attempt", "by the service"),
    ({"headers": {"traceparent": "x"}}, "headers.traceparent", "by the service"),
    ({"headers": {"X-CloudTasks-QueueName": "q"}}, "headers.X-CloudTasks-QueueName", "by the ser"),
    ({"headers": {"X_CloudTasks-New": "q"}}, "headers.X_CloudTasks-New", "as X-CloudTasks-New"),
    ({"headers": {"Upstash-Signature": "x"}}, "headers.Upstash-Signature", "by the service"),
    ({"headers": {"upstash-Message-id": "x"}}, "headers.upstash-Message-id", "by the service"),
    ({"headers": {"Upstash_Retried": "0"}}, "headers.Upstash_Retried", "as Upstash-Retried"),
    # Many servers (CGI, WSGI) read an underscore in a header name as a hyphen.
    ({"headers": {"Idempotency_Key": "k"}}, "headers.Idempotency_Key", "as Idempotency-Key"),
    ({"headers": {"X-Retry_Attempt": "2"}}, "headers.X-Retry_Attempt", "as X-Retry-Attempt"),
    ({"headers": {"webhook_id": "k"}}, "headers.webhook_id", "as webhook-id"),
    ({"headers": {"Transfer_Encoding": "x"}}, "headers.Transfer_Encoding", "one connection"),
    ({"headers": {f"X-{i}": "" for i in range(101)}}, "headers", "100 fields, got 101"),
    ({"headers": {f"X-{i}": "x" * 4000 for i in range(9)}}, "headers", "32768 bytes"),
    ({"body": "x", "bodyBase64": "eA=="}, "bodyBase64", "together with body"),
    ({"body": {}, "bodyRef": "default/a"}, "bodyRef", "together with body"),
    ({"bodyBase64": "", "bodyRef": "default/a"}, "bodyRef", "together with bodyBase64"),
    ({"bodyBase64": "???"}, "bodyBase64", "must be base64"),
    ({"bodyBase64": "eA"}, "bodyBase64", "must be base64"),
    ({"bodyBase64": "ü"}, "bodyBase64", "must be base64"),
    ({"bodyBase64": 5}, "bodyBase64", "expected string"),
    ({"bodyRef": "other/a"}, "bodyRef", "under default/"),
    ({"bodyRef": "default/missing"}, "bodyRef", "existing object"),
    ({"bodyRef": ""}, "bodyRef", "length >= 1"),
    ({"policyId": "unknown"}, "policyId", "lists them), got 'unknown'"),
    ({"policyId": "quik"}, "policyId", "existing policy (did you mean quick?), got 'quik'"),
    ({"policyId": "../x"}, "policyId", "matching regex"),
    ({"policyId": "a\n"}, "policyId", "1 to 100 characters"),
    ({"policyId": ""}, "policyId", "length >= 1"),
    ({"callbackPolicyId": "quick"}, "callbackPolicyId", "without callbackUrl"),
    (
        {"callbackUrl": TARGET, "callbackPolicyId": "unknown"},
        "callbackPolicyId",
        "must be an existing policy (GET /retry-policies lists them), got 'unknown'",
    ),
    ({"policyId": "default", "policyVersion": 3}, "policyVersion", "built in and has no versions"),
    ({"policyVersion": 0}, "policyVersion", ">= 1"),
    ({"idempotencyKey": ""}, "idempotencyKey", "length >= 1"),
    ({"idempotencyKey": "x" * 256}, "idempotencyKey", "length <= 255"),
    ({"idempotencyKey": "ü"}, "idempotencyKey", "visible ASCII characters, with spaces only"),
    ({"idempotencyKey": "a "}, "idempotencyKey", "with spaces only inside"),
    ({"policy": {"idempotencyKeyHeader": "Host"}}, "policy.idempotencyKeyHeader", "sets itself"),
    ({"policy": {"idempotencyKeyHeader": "webhook_id"}}, "policy.idempotencyKeyHeader", "itself"),
    ({"policy": {"idempotencyKeyHeader": "a b"}}, "policy.idempotencyKeyHeader", "token"),
    ({"policy": {"idempotencyKeyHeader": None}}, "policy.idempotencyKeyHeader", "token"),
    ({"policy": {"idempotencyKeyFormat": "plain"}}, "policy.idempotencyKeyFormat", "PLAIN, QUO"),
    ({"idempotencyKey": "a\n"}, "idempotencyKey", "visible ASCII"),
    ({"laneKey": ""}, "laneKey", "length >= 1"),
    ({"laneKey": "x" * 65}, "laneKey", "length <= 64"),
    ({"laneKey": "-7"}, "laneKey", "begin with a letter or digit, got '-7'"),
    ({"laneKey": "a/b"}, "laneKey", "must consist of A-Z a-z 0-9 . _ ~ -"),
    ({"laneKey": "a@b"}, "laneKey", "must consist of A-Z a-z 0-9 . _ ~ -"),
    ({"laneKey": "a\n"}, "laneKey", "must consist of A-Z a-z 0-9 . _ ~ -"),
    ({"laneKey": 7}, "laneKey", "expected string"),
    ({"delayMs": -1}, "delayMs", ">= 0"),
    ({"delayMs": 1.5}, "delayMs", "expected integer or null, got number"),
    ({"priorAttempts": -1}, "priorAttempts", ">= 0"),
    ({"traceparent": "00-xyz"}, "traceparent", "must be a traceparent of W3C Trace Context"),
    ({"traceparent": "x" * 65}, "traceparent", "length <= 64"),
    ({"traceparent": f"00-{'0' * 32}-{'1' * 16}-00"}, "traceparent", "must be a traceparent"),
    ({"traceparent": f"00-{'1' * 32}-{'0' * 16}-00"}, "traceparent", "must be a traceparent"),
    ({"traceparent": f"ff-{'1' * 32}-{'1' * 16}-00"}, "traceparent", "must be a traceparent"),
    ({"delayMs": "5"}, "delayMs", "expected integer or null, got string"),
    ({"delayMs": 10**30}, "delayMs", "<= 3155760000000"),
    ({"delayMs": 1e300}, "delayMs", "<= 3155760000000"),
    ({"delayMs": "5s"}, "delayMs", "got string; the unit is milliseconds"),
    ({"policyVersion": 0.0}, "policyVersion", ">= 1"),
    ({"delayMs": 5, "nextAttemptAt": NOW}, "nextAttemptAt", "together with delayMs"),
    ({"nextAttemptAt": 2**60}, "nextAttemptAt", "<= 253402300799999"),
    ({"nextAttemptAt": NOW // 1000}, "nextAttemptAt", "are these seconds?"),
    ({"nextAttemptAt": 1}, "nextAttemptAt", "at least 100000000000 (are these seconds?), got 1"),
    ({"nextAttemptAt": True}, "nextAttemptAt", "expected integer"),
    ({"policy": []}, "policy", "expected object"),
    ({"policy": {"maxAttempts": 0}}, "policy.maxAttempts", "at least 1"),
    ({"policy": {"maxAttempts": 100_001}}, "policy.maxAttempts", "at most 100000"),
    ({"policy": {"maxAttempts": "5"}}, "policy.maxAttempts", "whole number"),
    ({"policy": {"maxAttempts": 5.5}}, "policy.maxAttempts", "whole number"),
    ({"policy": {"initialDelayMs": 0}}, "policy.initialDelayMs", "greater than 0"),
    ({"policy": {"initialDelayMs": 5e-324}}, "policy.initialDelayMs", "at least 0.001"),
    ({"policy": {"jitterType": "full"}}, "policy.jitterType", "one of"),
    ({"policy": {"retryableStatusCodes": [700]}}, "policy.retryableStatusCodes[0]", "100 to 599"),
    ({"policy": {"retryableStatusCodes": [503, 204]}}, "policy.retryableStatusCodes[1]", "2xx"),
    ({"policy": {"retryableStatusCodes": ["x"]}}, "policy.retryableStatusCodes[0]", "whole number"),
    ({"policy": {"scheduleMs": [1] * 1001}}, "policy.scheduleMs", "1,000 entries"),
    ({"policy": {"attemptTimeoutMs": 60_001}}, "policy.attemptTimeoutMs", "at most 60000"),
    ({"policy": {"backoffType": "SCHEDULE"}}, "policy.backoffType", "scheduleMs"),
    ({"policy": {"retries": 3}}, "policy.retries", "is not a known field; the fields are"),
    ({"policy": {"maxAttempt": 3}}, "policy.maxAttempt", "did you mean maxAttempts?"),
    ({"policy": {"maxAttempts": {}}}, "policy.maxAttempts", "whole number"),
    ({"policy": {"maxAttempts": None}}, "policy.maxAttempts", "whole number, got null."),
    ({"policy": {"maxDelayMs": 2**53}}, "policy.maxDelayMs", "at most 3155760000000"),
    ({"policy": {"scheduleMs": [2**53]}}, "policy.scheduleMs", "at most 3155760000000"),
    ({"url": "x"}, "url", "url is not a known field; did you mean targetUrl?"),
    ({"uri": "x"}, "uri", "uri is not a known field; the fields are targetUrl, method"),
    ({"tenant": "other"}, "tenant", "tenant is not a known field"),
    ({"idempotencykey": "k"}, "idempotencykey", "did you mean idempotencyKey?"),
    ({"x" * 200: 1}, "x" * 100, f"{'x' * 100} is not a known field"),
]  # fmt: skip

INVALID_DOCUMENTS: list[tuple[bytes, int, str]] = [
    (b"", 400, "The body is empty. Send JSON"),
    (b" \n", 400, "The body is empty"),
    (b"{", 400, "ends too early"),
    (b"{} x", 422, "targetUrl is missing"),
    (b"null", 422, "expected object"),
    (b"[]", 422, "expected object, got array"),
    (b"'x'", 400, "malformed"),
    (b'{"targetUrl": "\xff"}', 400, "not UTF-8"),
    (b'{"targetUrl": "https://a.b/", "body": "\xff"}', 400, "not UTF-8"),
    (b'{"targetUrl": "https://a.b/", "body": {"a": "\xff"}}', 400, "not UTF-8"),
    (b'{"targetUrl": "https://a.b/\\ud800"}', 400, "half of a"),
    (b'{"targetUrl": "https://a.b/", "body": tru}', 400, "malformed"),
    (b'{"targetUrl": "https://a.b/", "body": NaN}', 400, "malformed"),
    (b'{"targetUrl": "https://a.b/", "delayMs": 1e400}', 422, "out of range"),
    (b'{"targetUrl": "https://a.b/", "policy": {"maxAttempts": 1e400}}', 422, "policy is inv"),
    (b'{"body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nested too deeply"),
    (b'{"policy": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", 400, "nested too deeply"),
]


@pytest.mark.parametrize(("fields", "field", "rule"), INVALID_TASKS)
async def test_an_invalid_task_is_422_with_its_field(
    api: ApiHarness, fields: dict[str, Any], field: str, rule: str
) -> None:
    """The problem is the same in a batch, and no task or body is stored."""
    document = {"targetUrl": TARGET, **fields}
    response = await api.request("POST", "/retry-tasks", document)
    assert (422, field) == (response.status, response.problem["field"])
    assert rule in response.problem["detail"]
    batch = await api.request("POST", "/retry-tasks/batch", {"tasks": [document]})
    assert [{"status": 422, "problem": response.problem}] == batch.json["results"]
    assert (0, {}) == (await api.count_tasks(), api.payloads.bodies)


async def test_an_unknown_policy_suggests_one_of_the_tenant(api: ApiHarness) -> None:
    """The similar policy may be one that the tenant has written."""
    await api.request("PUT", "/retry-policies/nightly", {"maxAttempts": 9})
    document = {"targetUrl": TARGET, "policyId": "nightli"}
    response = await api.request("POST", "/retry-tasks", document)
    assert "did you mean nightly?" in response.problem["detail"]


@pytest.mark.parametrize(("body", "status", "rule"), INVALID_DOCUMENTS)
async def test_a_document_that_is_not_a_task_is_rejected(
    api: ApiHarness, body: bytes, status: int, rule: str
) -> None:
    """Invalid JSON gets a 400, other documents a 422, and no task is stored."""
    response = await api.request("POST", "/retry-tasks", body=body)
    assert status == response.status
    assert rule in response.problem["detail"]
    assert 0 == await api.count_tasks()


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ([(b"idempotency-key", b'"a')], "closing quote"),
        ([(b"idempotency-key", b"a\tb")], "visible ASCII"),
        ([(b"idempotency-key", b'"a "')], "spaces only inside"),
        ([(b"idempotency-key", b'"a"'), (b"idempotency-key", b'"b"')], "sent once"),
    ],
)
async def test_a_malformed_idempotency_key_header_is_400(
    api: ApiHarness, lines: list[tuple[bytes, bytes]], rule: str
) -> None:
    """A task with a malformed `Idempotency-Key` header is not stored."""
    response = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET}, lines=lines)
    assert (400, "Idempotency-Key") == (response.status, response.problem["field"])
    assert rule in response.problem["detail"]
    assert 0 == await api.count_tasks()


async def test_different_idempotency_keys_in_field_and_header_are_422(api: ApiHarness) -> None:
    """The same key in field and header is accepted."""
    document = {"targetUrl": TARGET, "idempotencyKey": "a"}
    headers = {"Idempotency-Key": '"b"'}
    response = await api.request("POST", "/retry-tasks", document, headers=headers)
    assert (422, "idempotencyKey") == (response.status, response.problem["field"])
    same = await api.request("POST", "/retry-tasks", document, headers={"Idempotency-Key": '"a"'})
    assert 201 == same.status


async def test_an_idempotency_key_header_on_a_batch_is_400_unless_each_task_has_a_key(
    api: ApiHarness,
) -> None:
    """The header does not apply to tasks, so a retry could create tasks without a key twice."""
    tasks: list[object] = [{"targetUrl": TARGET, "idempotencyKey": "k"}, 7]
    document = {"tasks": [*tasks, {"targetUrl": TARGET}]}
    headers = {"Idempotency-Key": '"a"'}
    response = await api.request("POST", "/retry-tasks/batch", document, headers=headers)
    assert (400, "Idempotency-Key") == (response.status, response.problem["field"])
    assert "each task of a batch its own idempotencyKey" in response.problem["detail"]
    assert 0 == await api.count_tasks()
    response = await api.request("POST", "/retry-tasks/batch", {"tasks": tasks}, headers=headers)
    assert [201, 422] == [result["status"] for result in response.json["results"]]


async def test_a_grpc_target_needs_grpcio() -> None:
    """Without grpcio a task with a gRPC target is rejected, and the problem names the extra."""
    api = ApiHarness(grpc=False)
    response = await api.request(
        "POST", "/retry-tasks", {"targetUrl": "grpc://a.example:50051/p.S/M"}
    )
    assert (422, "targetUrl") == (response.status, response.problem["field"])
    assert "tarry[grpc]" in response.problem["detail"]
    assert 0 == await api.count_tasks()


def test_header_names_are_returned_in_lower_case() -> None:
    """`check_headers` returns the names in the order of the headers."""
    headers = {"X-One": "1", "content-type": "text/plain", "ETag": "", "X_Two": ""}
    names, secret_headers = check_headers(headers, ApiLimits())
    assert (("x-one", "content-type", "etag", "x_two"), None) == (names, secret_headers)


def test_invalid_header_names_are_not_cached() -> None:
    """The cache does not grow with invalid names, which may be long."""
    before = check_header_names.cache_info().currsize
    for i in range(10):
        with pytest.raises(ApiError, match="1 to 256 characters"):
            check_headers({f"x{i}" + "y" * 5000: ""}, ApiLimits())
    assert before == check_header_names.cache_info().currsize


@pytest.mark.parametrize("value", ["", "a", "a b", "a\tb  c", "~!"])
def test_valid_header_value_is_accepted(value: str) -> None:
    """A value is empty, or visible ASCII characters with spaces or tabs between them."""
    names, _ = check_headers({"x": value}, ApiLimits())
    assert ("x",) == names


@pytest.mark.parametrize("value", [" ", " a", "a ", "a\t", "a\nb", "a\r\nb: c", "a\n", "ä", "\x7f"])
def test_invalid_header_value_is_rejected(value: str) -> None:
    """Line breaks, control characters, outer spaces and non-ASCII characters are rejected."""
    with pytest.raises(ApiError, match="x must be visible ASCII"):
        check_headers({"x": value}, ApiLimits())
    for others in ({"a": "a", "b": ""}, {"a": "a b"}, {"a": "a", "b": {"secret": "c"}}):
        with pytest.raises(ApiError, match="x must be visible ASCII"):
            check_headers({**others, "x": value, "y": "a"}, ApiLimits())
