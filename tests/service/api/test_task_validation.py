"""Invalid requests are rejected with the field and the rule, and nothing is stored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tarry.service.api.context import ApiLimits
from tarry.service.api.problems import ApiError
from tarry.service.api.task_validation import check_headers, lower_header_names
from tests.service.api.harness import NOW, TARGET, ApiHarness, run_with_api

BAD_TASKS: list[tuple[dict[str, Any], str, str]] = [
    # what is sent, the field that is named, a part of the rule
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
    ({"method": "post"}, "method", "in capitals"),
    ({"method": "CONNECT"}, "method", "not CONNECT"),
    ({"method": "GET /x HTTP/1.1\r\n"}, "method", "in capitals"),
    ({"method": ""}, "method", "length >= 1"),
    ({"method": "GET", "targetUrl": "grpc://a.b:50051/p.S/M"}, "method", "POST"),
    ({"headers": []}, "headers", "expected object"),
    ({"headers": {"": "x"}}, "headers.", "token"),
    ({"headers": {"a b": "x"}}, "headers.a b", "token"),
    ({"headers": {"X-Ü": "x"}}, "headers.X-Ü", "token"),
    ({"headers": {"X\r\nY": "x"}}, "headers.X\r\nY", "token"),
    ({"headers": {"X-A": 5}}, "headers.X-A", "must be a string"),
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
    ({"policyId": "nobody"}, "policyId", "lists them), got 'nobody'"),
    ({"policyId": "../x"}, "policyId", "matching regex"),
    ({"policyId": "a\n"}, "policyId", "letters, digits"),
    ({"policyId": ""}, "policyId", "length >= 1"),
    ({"policyId": "default", "policyVersion": 3}, "policyVersion", "built in and has no versions"),
    ({"policyVersion": 0}, "policyVersion", ">= 1"),
    ({"idempotencyKey": ""}, "idempotencyKey", "length >= 1"),
    ({"idempotencyKey": "x" * 256}, "idempotencyKey", "length <= 255"),
    ({"idempotencyKey": "ü"}, "idempotencyKey", "visible ASCII characters and spaces"),
    ({"idempotencyKey": "a\n"}, "idempotencyKey", "visible ASCII"),
    ({"delayMs": -1}, "delayMs", ">= 0"),
    ({"delayMs": 1.5}, "delayMs", "expected integer"),
    ({"delayMs": "5"}, "delayMs", "expected integer"),
    ({"delayMs": 10**30}, "delayMs", "<= 3155760000000"),
    ({"delayMs": 5, "nextAttemptAt": NOW}, "nextAttemptAt", "together with delayMs"),
    ({"nextAttemptAt": 2**60}, "nextAttemptAt", "<= 253402300799999"),
    ({"nextAttemptAt": NOW // 1000}, "nextAttemptAt", "are these seconds?"),
    ({"nextAttemptAt": 1}, "nextAttemptAt", "at least 100000000000 (are these seconds?), got 1"),
    ({"nextAttemptAt": True}, "nextAttemptAt", "expected integer"),
    ({"policy": []}, "policy", "expected object"),
    ({"policy": {"maxAttempts": 0}}, "policy.maxAttempts", "at least 1"),
    ({"policy": {"maxAttempts": 10**20}}, "policy.maxAttempts", "at most"),
    ({"policy": {"maxAttempts": "5"}}, "policy.maxAttempts", "whole number"),
    ({"policy": {"initialDelayMs": 0}}, "policy.initialDelayMs", "greater than 0"),
    ({"policy": {"jitterType": "full"}}, "policy.jitterType", "one of"),
    ({"policy": {"retryableStatusCodes": [700]}}, "policy.retryableStatusCodes[0]", "100 to 599"),
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
    ({"url": "x"}, "url", "url is not a known field; the fields are targetUrl, method"),
    ({"tenant": "other"}, "tenant", "tenant is not a known field"),
    ({"idempotencykey": "k"}, "idempotencykey", "did you mean idempotencyKey?"),
    ({"x" * 200: 1}, "x" * 100, f"{'x' * 100} is not a known field"),
]  # fmt: skip

BAD_DOCUMENTS: list[tuple[bytes, int, str]] = [
    (b"", 400, "The body is empty. Send JSON"),
    (b" \n", 400, "The body is empty"),
    (b"{", 400, "is truncated"),
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


@pytest.mark.parametrize(("fields", "field", "rule"), BAD_TASKS)
def test_an_invalid_task_is_422_with_its_field(
    fields: dict[str, Any], field: str, rule: str
) -> None:
    """Alone and in a batch; nothing is stored."""

    async def test(api: ApiHarness) -> None:
        document = {"targetUrl": TARGET, **fields}
        response = await api.request("POST", "/retry-tasks", document)
        assert (422, field) == (response.status, response.problem["field"])
        assert rule in response.problem["detail"]
        batch = await api.request("POST", "/retry-tasks/batch", {"tasks": [document]})
        assert [{"status": 422, "problem": response.problem}] == batch.json["results"]
        assert (0, {}) == (await api.count_tasks(), api.payloads.bodies)

    run_with_api(test)


@pytest.mark.parametrize(("body", "status", "rule"), BAD_DOCUMENTS)
def test_a_document_that_is_not_a_task_is_rejected(body: bytes, status: int, rule: str) -> None:
    """400 if it is not JSON, else 422; nothing is stored."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("POST", "/retry-tasks", body=body)
        assert status == response.status
        assert rule in response.problem["detail"]
        assert 0 == await api.count_tasks()

    run_with_api(test)


@pytest.mark.parametrize(
    ("method", "path", "detail"),
    [
        (
            "DELETE",
            "/dead-letters",
            "body must be empty; the query parameters are policyId, lane, reason.",
        ),
        ("DELETE", "/retry-tasks/{task}", "body must be empty."),
        ("POST", "/retry-tasks/{task}/retry", "body must be empty."),
        ("DELETE", "/retry-policies/mine", "body must be empty."),
        ("POST", "/downstreams/https:hooks.example:443/pause", "body must be empty."),
    ],
)
@pytest.mark.parametrize("framed", [("content-length", "2"), ("transfer-encoding", "chunked")])
def test_an_unexpected_body_is_422(
    framed: tuple[str, str], method: str, path: str, detail: str
) -> None:
    """It may contain a filter that was meant to limit the operation."""

    async def test(api: ApiHarness) -> None:
        task = await api.create()
        response = await api.request(
            method, path.format(task=task["taskId"]), body=b"{}", headers=dict([framed])
        )
        assert (422, "body", detail) == (
            response.status,
            response.problem["field"],
            response.problem["detail"],
        )

    run_with_api(test)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/retry-tasks"),
        ("POST", "/retry-tasks/batch"),
        ("POST", "/dead-letters/replays"),
        ("POST", "/retry-policies"),
        ("PUT", "/retry-policies/mine"),
    ],
)
def test_an_unexpected_query_is_422(method: str, path: str) -> None:
    """A replay that was meant to be a dry run must not start."""

    async def test(api: ApiHarness) -> None:
        response = await api.request(method, f"{path}?dryRun=true", {})
        assert (422, "dryRun", "dryRun is not a known field.") == (
            response.status,
            response.problem["field"],
            response.problem["detail"],
        )
        assert [] == (await api.request("GET", "/dead-letters/replays")).json["items"]

    run_with_api(test)


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"]
)
def test_other_content_types_are_415(kind: str) -> None:
    """Pages of other sites cannot send application/json without a preflight."""

    async def test(api: ApiHarness) -> None:
        response = await api.request(
            "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"content-type": kind}
        )
        assert (415, "application/json") == (response.status, response.header("accept"))
        assert 0 == await api.count_tasks()

    run_with_api(test)


def test_the_content_type_may_have_parameters() -> None:
    """`application/json; charset=utf-8` is accepted."""

    async def test(api: ApiHarness) -> None:
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        response = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET}, headers=headers)
        assert 201 == response.status

    run_with_api(test)


@pytest.mark.parametrize("length", ["1001", "9" * 5000])
def test_a_declared_length_above_the_limit_is_413(length: str) -> None:
    """Before any part of the body is read."""

    async def test(api: ApiHarness) -> None:
        class Endless(list[bytes]):
            def pop(self, *_: object) -> bytes:
                raise AssertionError("it was read")

        response = await api.request(
            "POST", "/retry-tasks", body=Endless([b"x"]), headers={"content-length": length}
        )
        assert 413 == response.status

    run_with_api(test, limits=ApiLimits(max_request_bytes=1000))


def test_a_chunked_body_above_the_limit_is_413() -> None:
    """The remaining chunks are not read."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("POST", "/retry-tasks", body=[b" " * 400] * 3 + [b"{}"])
        assert (413, "close") == (response.status, response.header("connection"))
        assert 0 == await api.count_tasks()

    run_with_api(test, limits=ApiLimits(max_request_bytes=1000))


def test_chunks_are_joined() -> None:
    """They form one document."""

    async def test(api: ApiHarness) -> None:
        body = json.dumps({"targetUrl": TARGET}).encode()
        response = await api.request("POST", "/retry-tasks", body=[body[:9], body[9:20], body[20:]])
        assert 201 == response.status

    run_with_api(test)


def test_a_client_that_disconnects_creates_no_task() -> None:
    """The body was not complete."""

    async def test(api: ApiHarness) -> None:
        sent: list[object] = []
        parts: list[dict[str, Any]] = [
            {"type": "http.request", "body": b'{"targetUrl":', "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive() -> dict[str, Any]:
            return parts.pop(0)

        async def send(message: object) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/retry-tasks",
            "headers": [(b"content-type", b"application/json")],
        }
        await api.api(scope, receive, send)
        assert ([], 0) == (sent, await api.count_tasks())

    run_with_api(test)


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ([(b"idempotency-key", b'"a')], "closing quote"),
        ([(b"idempotency-key", b"a b")], "double quotes"),
        ([(b"idempotency-key", b'"a"'), (b"idempotency-key", b'"b"')], "sent once"),
    ],
)
def test_a_malformed_key_header_is_400(lines: list[tuple[bytes, bytes]], rule: str) -> None:
    """A caller that sends a key relies on it."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("POST", "/retry-tasks", {"targetUrl": TARGET}, lines=lines)
        assert (400, "Idempotency-Key") == (response.status, response.problem["field"])
        assert rule in response.problem["detail"]
        assert 0 == await api.count_tasks()

    run_with_api(test)


def test_different_keys_in_field_and_header_are_422() -> None:
    """They must be equal."""

    async def test(api: ApiHarness) -> None:
        document = {"targetUrl": TARGET, "idempotencyKey": "a"}
        headers = {"Idempotency-Key": '"b"'}
        response = await api.request("POST", "/retry-tasks", document, headers=headers)
        assert (422, "idempotencyKey") == (response.status, response.problem["field"])
        same = await api.request(
            "POST", "/retry-tasks", document, headers={"Idempotency-Key": '"a"'}
        )
        assert 201 == same.status

    run_with_api(test)


def test_a_key_header_on_a_batch_is_400_unless_each_task_has_a_key() -> None:
    """If it were ignored, a retry could create tasks twice."""

    async def test(api: ApiHarness) -> None:
        tasks: list[object] = [{"targetUrl": TARGET, "idempotencyKey": "k"}, 7]
        document = {"tasks": [*tasks, {"targetUrl": TARGET}]}
        headers = {"Idempotency-Key": '"a"'}
        response = await api.request("POST", "/retry-tasks/batch", document, headers=headers)
        assert (400, "Idempotency-Key") == (response.status, response.problem["field"])
        assert "each task of a batch its own idempotencyKey" in response.problem["detail"]
        assert 0 == await api.count_tasks()
        response = await api.request(
            "POST", "/retry-tasks/batch", {"tasks": tasks}, headers=headers
        )
        assert [201, 422] == [one["status"] for one in response.json["results"]]

    run_with_api(test)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/retry-tasks", "GET, HEAD, OPTIONS, POST"),
        ("GET", "/retry-tasks/batch", "OPTIONS, POST"),
        ("POST", "/retry-tasks/x", "DELETE, GET, HEAD, OPTIONS"),
        ("POST", "/healthz", "GET, HEAD, OPTIONS"),
        ("BREW", "/dead-letters", "DELETE, GET, HEAD, OPTIONS"),
    ],
)
def test_an_unsupported_method_is_405(method: str, path: str, allowed: str) -> None:
    """With `Allow`; OPTIONS returns the same header without an error."""

    async def test(api: ApiHarness) -> None:
        response = await api.request(method, path)
        assert (405, allowed) == (response.status, response.header("allow"))
        options = await api.request("OPTIONS", path)
        assert (204, allowed, b"") == (options.status, options.header("allow"), options.body)
        assert options.header("content-length") is None

    run_with_api(test)


@pytest.mark.parametrize("path", ["/", "/nothing", "/retry-tasks/", "/retry-tasks//x", "/docs/x"])
def test_an_unknown_path_is_404(path: str) -> None:
    """As a problem."""

    async def test(api: ApiHarness) -> None:
        assert "Not found" == (await api.request("GET", path)).problem["title"]

    run_with_api(test)


def test_head_is_get_without_the_body() -> None:
    """The same status and headers."""

    async def test(api: ApiHarness) -> None:
        for path in ("/retry-tasks", "/healthz", "/nothing", "/retry-tasks/x", "/docs"):
            get, head = await api.request("GET", path), await api.request("HEAD", path)
            assert get.messages[0] == head.messages[0]
            assert b"" == head.body != get.body

    run_with_api(test)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("status=DONE", "status"),
        ("status=pending", "status"),
        ("cursor=%F0%9F%92%A9", "cursor"),
        ("sort=up", "sort"),
        ("limit=1&limit=2", "limit"),
        ("policyId=", "policyId"),
        ("policyId=a/b", "policyId"),
        ("status=null", "status"),
        ("cursor=null", "cursor"),
    ],
)
def test_an_invalid_query_is_422_with_its_parameter(query: str, field: str) -> None:
    """The problem names the parameter."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("GET", f"/retry-tasks?{query}")
        assert (422, field) == (response.status, response.problem["field"])

    run_with_api(test)


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("status=pending", "CANCELLED or EXHAUSTED or IN_FLIGHT or PENDING or SUCCEEDED"),
        ("reason=bogus", "permanent or overloaded or"),
    ],
)
def test_an_unknown_value_lists_the_valid_ones(query: str, values: str) -> None:
    """An empty list would look as if there were no such tasks."""

    async def test(api: ApiHarness) -> None:
        detail = (await api.request("GET", f"/retry-tasks?{query}")).problem["detail"]
        assert f"must be {values}" in detail

    run_with_api(test)


@pytest.mark.parametrize("query", ["lane=%FF", "x" * 9000, "&".join(["a=b"] * 101)])
def test_a_malformed_query_is_rejected(query: str) -> None:
    """Not UTF-8, too long, or too many parameters."""

    async def test(api: ApiHarness) -> None:
        response = await api.request("GET", f"/retry-tasks?{query}")
        assert response.status in {400, 422}
        assert "query" == response.problem["field"]

    run_with_api(test)


def test_cross_site_writes_are_403() -> None:
    """A browser sends the `Origin` of another site."""

    async def test(api: ApiHarness) -> None:
        document = {"targetUrl": TARGET}
        foreign = {"Origin": "https://evil.example"}
        own = {"Origin": "http://tarry.test"}
        assert 403 == (await api.request("POST", "/retry-tasks", document, headers=foreign)).status
        assert 403 == (await api.request("DELETE", "/dead-letters", headers=foreign)).status
        assert 200 == (await api.request("GET", "/retry-tasks", headers=foreign)).status
        assert 201 == (await api.request("POST", "/retry-tasks", document, headers=own)).status

    run_with_api(test)


@pytest.mark.parametrize("place", ["body", "headers", "policy"])
def test_deeply_nested_json_is_never_500(place: str) -> None:
    """It is accepted or rejected, alone and in a batch."""

    async def test(api: ApiHarness) -> None:
        for depth in (10, 300, 500, 700, 800, 900, 950, 980, 1_000, 2_000):
            nested = "[" * depth + "]" * depth
            field = {"headers": "X-A", "policy": "maxAttempts"}.get(place)
            value = nested if field is None else f'{{"{field}": {nested}}}'
            task = f'{{"targetUrl": "{TARGET}", "{place}": {value}}}'
            alone = await api.request("POST", "/retry-tasks", body=task.encode())
            assert alone.status in {201, 400, 422}
            batch = await api.request(
                "POST", "/retry-tasks/batch", body=f'{{"tasks": [{task}]}}'.encode()
            )
            assert batch.status in {200, 400}
            if batch.status == 200:
                assert batch.json["results"][0]["status"] in {201, 400, 422}

    run_with_api(test)


def test_web_sockets_are_closed() -> None:
    """The API has none."""

    async def test(api: ApiHarness) -> None:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/x", "root_path": "", "headers": []}
        await api.api(scope, receive, send)
        assert ["websocket.close"] == [message["type"] for message in sent]

    run_with_api(test)


def test_a_grpc_target_needs_grpcio() -> None:
    """A service without grpcio rejects a task that it could not send."""

    async def test(api: ApiHarness) -> None:
        response = await api.request(
            "POST", "/retry-tasks", {"targetUrl": "grpc://a.example:50051/p.S/M"}
        )
        assert (422, "targetUrl") == (response.status, response.problem["field"])
        assert "tarry[grpc]" in response.problem["detail"]
        assert 0 == await api.count_tasks()

    run_with_api(test, grpc=False)


def test_header_names_are_returned_in_lower_case() -> None:
    """In the order of the headers."""
    headers = {"X-One": "1", "content-type": "text/plain", "ETag": ""}
    assert ("x-one", "content-type", "etag") == check_headers(headers, ApiLimits())


def test_invalid_header_names_are_not_cached() -> None:
    """A caller cannot fill the memory with long names."""
    before = lower_header_names.cache_info().currsize
    for i in range(10):
        with pytest.raises(ApiError, match="1 to 256 characters"):
            check_headers({f"x{i}" + "y" * 5000: ""}, ApiLimits())
    assert before == lower_header_names.cache_info().currsize


@pytest.mark.parametrize("value", ["", "a", "a b", "a\tb  c", "~!"])
def test_valid_header_values(value: str) -> None:
    """Visible characters with blanks between them, or empty."""
    assert ("x",) == check_headers({"x": value}, ApiLimits())


@pytest.mark.parametrize("value", [" ", " a", "a ", "a\t", "a\nb", "a\r\nb: c", "a\n", "ä", "\x7f"])
def test_invalid_header_values(value: str) -> None:
    """No second header can be injected."""
    with pytest.raises(ApiError, match="x must be visible ASCII"):
        check_headers({"x": value}, ApiLimits())
