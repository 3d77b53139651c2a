"""Bad input: each is refused with its field and its rule, and nothing is stored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tarry.service.api.context import ApiLimits
from tests.service.api.harness import NOW, TARGET, Rig, with_rig

BAD_TASKS: list[tuple[dict[str, Any], str, str]] = [
    # what is sent, the field that is named, a part of the rule
    ({"targetUrl": None}, "targetUrl", "expected string"),
    ({"targetUrl": ""}, "targetUrl", "length >= 1"),
    ({"targetUrl": 7}, "targetUrl", "expected string, got integer"),
    ({"targetUrl": "ftp://a.b/"}, "targetUrl", "must start with http://"),
    ({"targetUrl": "https://user:pw@a.b/"}, "targetUrl", "no user info"),
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
    ({"bodyRef": "default/missing"}, "bodyRef", "not there"),
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
    ({"policy": {"retryableStatusCodes": ["x"]}}, "policy.retryableStatusCodes[0]", "whole"),
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
def test_a_bad_task_is_refused_by_its_field(fields: dict[str, Any], field: str, rule: str) -> None:
    """422 with the field and the rule, alone and in a batch; nothing is stored."""

    async def test(rig: Rig) -> None:
        document = {"targetUrl": TARGET, **fields}
        reply = await rig.ask("POST", "/retry-tasks", document)
        assert (422, field) == (reply.status, reply.problem["field"])
        assert rule in reply.problem["detail"]
        batch = await rig.ask("POST", "/retry-tasks/batch", {"tasks": [document]})
        assert [{"status": 422, "problem": reply.problem}] == batch.json["results"]
        assert (0, {}) == (await rig.count(), rig.shelf.bodies)

    with_rig(test)


@pytest.mark.parametrize(("body", "status", "rule"), BAD_DOCUMENTS)
def test_a_bad_document_is_refused(body: bytes, status: int, rule: str) -> None:
    """What is not JSON is 400, what is no task 422; nothing is stored."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("POST", "/retry-tasks", body=body)
        assert status == reply.status
        assert rule in reply.problem["detail"]
        assert 0 == await rig.count()

    with_rig(test)


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
def test_a_body_that_would_not_be_read_is_refused(
    framed: tuple[str, str], method: str, path: str, detail: str
) -> None:
    """A filter in it was meant to keep something from being done."""

    async def test(rig: Rig) -> None:
        task = await rig.create()
        reply = await rig.ask(
            method, path.format(task=task["taskId"]), body=b"{}", headers=dict([framed])
        )
        assert (422, "body", detail) == (
            reply.status,
            reply.problem["field"],
            reply.problem["detail"],
        )

    with_rig(test)


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
def test_a_query_that_would_not_be_read_is_refused(method: str, path: str) -> None:
    """A replay that was meant to be a dry run must not begin."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask(method, f"{path}?dryRun=true", {})
        assert (422, "dryRun", "dryRun is not a known field.") == (
            reply.status,
            reply.problem["field"],
            reply.problem["detail"],
        )
        assert [] == (await rig.ask("GET", "/dead-letters/replays")).json["items"]

    with_rig(test)


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"]
)
def test_what_does_not_say_that_it_is_json_is_refused(kind: str) -> None:
    """415 with what is taken; pages of other sites cannot send that type unasked."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask(
            "POST", "/retry-tasks", {"targetUrl": TARGET}, headers={"content-type": kind}
        )
        assert (415, "application/json") == (reply.status, reply.header("accept"))
        assert 0 == await rig.count()

    with_rig(test)


def test_parameters_of_the_content_type_are_fine() -> None:
    """`application/json; charset=utf-8` is JSON."""

    async def test(rig: Rig) -> None:
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        reply = await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET}, headers=headers)
        assert 201 == reply.status

    with_rig(test)


@pytest.mark.parametrize("length", ["1001", "9" * 5000])
def test_a_request_that_says_it_is_too_large_is_not_read(length: str) -> None:
    """413 before the first byte of the body is asked for."""

    async def test(rig: Rig) -> None:
        class Endless(list[bytes]):
            def pop(self, *_: object) -> bytes:
                raise AssertionError("it was read")

        reply = await rig.ask(
            "POST", "/retry-tasks", body=Endless([b"x"]), headers={"content-length": length}
        )
        assert 413 == reply.status

    with_rig(test, limits=ApiLimits(max_request_bytes=1000))


def test_a_request_that_turns_out_too_large_is_not_read_to_its_end() -> None:
    """413 with the chunk that goes beyond; those that follow are left."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("POST", "/retry-tasks", body=[b" " * 400] * 3 + [b"{}"])
        assert (413, "close") == (reply.status, reply.header("connection"))
        assert 0 == await rig.count()

    with_rig(test, limits=ApiLimits(max_request_bytes=1000))


def test_a_body_in_parts_is_put_together() -> None:
    """Chunks make one document."""

    async def test(rig: Rig) -> None:
        body = json.dumps({"targetUrl": TARGET}).encode()
        reply = await rig.ask("POST", "/retry-tasks", body=[body[:9], body[9:20], body[20:]])
        assert 201 == reply.status

    with_rig(test)


def test_a_client_that_goes_away_gets_no_answer_and_no_task() -> None:
    """The body was never complete."""

    async def test(rig: Rig) -> None:
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
        await rig.api(scope, receive, send)
        assert ([], 0) == (sent, await rig.count())

    with_rig(test)


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        ([(b"idempotency-key", b'"a')], "closing quote"),
        ([(b"idempotency-key", b"a b")], "double quotes"),
        ([(b"idempotency-key", b'"a"'), (b"idempotency-key", b'"b"')], "sent once"),
    ],
)
def test_a_malformed_key_in_the_header_is_refused(
    lines: list[tuple[bytes, bytes]], rule: str
) -> None:
    """400, because who sends a key counts on it."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("POST", "/retry-tasks", {"targetUrl": TARGET}, lines=lines)
        assert (400, "Idempotency-Key") == (reply.status, reply.problem["field"])
        assert rule in reply.problem["detail"]
        assert 0 == await rig.count()

    with_rig(test)


def test_two_keys_that_differ_are_refused() -> None:
    """The field and the header must say the same."""

    async def test(rig: Rig) -> None:
        document = {"targetUrl": TARGET, "idempotencyKey": "a"}
        headers = {"Idempotency-Key": '"b"'}
        reply = await rig.ask("POST", "/retry-tasks", document, headers=headers)
        assert (422, "idempotencyKey") == (reply.status, reply.problem["field"])
        same = await rig.ask("POST", "/retry-tasks", document, headers={"Idempotency-Key": '"a"'})
        assert 201 == same.status

    with_rig(test)


def test_a_key_of_a_batch_is_none_of_its_tasks() -> None:
    """400 while a task has none: ignored, it would let a retry add that twice."""

    async def test(rig: Rig) -> None:
        tasks: list[object] = [{"targetUrl": TARGET, "idempotencyKey": "k"}, 7]
        document = {"tasks": [*tasks, {"targetUrl": TARGET}]}
        headers = {"Idempotency-Key": '"a"'}
        reply = await rig.ask("POST", "/retry-tasks/batch", document, headers=headers)
        assert (400, "Idempotency-Key") == (reply.status, reply.problem["field"])
        assert "each task of a batch its own idempotencyKey" in reply.problem["detail"]
        assert 0 == await rig.count()
        taken = await rig.ask("POST", "/retry-tasks/batch", {"tasks": tasks}, headers=headers)
        assert [201, 422] == [one["status"] for one in taken.json["results"]]

    with_rig(test)


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
def test_a_method_that_a_path_does_not_have(method: str, path: str, allowed: str) -> None:
    """405 with `Allow`; OPTIONS says the same without an error."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask(method, path)
        assert (405, allowed) == (reply.status, reply.header("allow"))
        options = await rig.ask("OPTIONS", path)
        assert (204, allowed, b"") == (options.status, options.header("allow"), options.body)
        assert options.header("content-length") is None

    with_rig(test)


@pytest.mark.parametrize("path", ["/", "/nothing", "/retry-tasks/", "/retry-tasks//x", "/docs/x"])
def test_a_path_that_is_not_there(path: str) -> None:
    """404 as a problem."""

    async def test(rig: Rig) -> None:
        assert "Not found" == (await rig.ask("GET", path)).problem["title"]

    with_rig(test)


def test_head_is_get_without_the_body() -> None:
    """The same status and headers."""

    async def test(rig: Rig) -> None:
        for path in ("/retry-tasks", "/healthz", "/nothing", "/retry-tasks/x", "/docs"):
            get, head = await rig.ask("GET", path), await rig.ask("HEAD", path)
            assert get.messages[0] == head.messages[0]
            assert b"" == head.body != get.body

    with_rig(test)


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
def test_a_bad_query_is_refused_by_its_parameter(query: str, field: str) -> None:
    """422 with the parameter's name."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("GET", f"/retry-tasks?{query}")
        assert (422, field) == (reply.status, reply.problem["field"])

    with_rig(test)


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("status=pending", "CANCELLED or EXHAUSTED or IN_FLIGHT or PENDING or SUCCEEDED"),
        ("reason=bogus", "permanent or overloaded or"),
    ],
)
def test_a_value_that_there_is_not_is_told_those_that_there_are(query: str, values: str) -> None:
    """Nobody has to guess; an empty list would look as if all were well."""

    async def test(rig: Rig) -> None:
        detail = (await rig.ask("GET", f"/retry-tasks?{query}")).problem["detail"]
        assert f"must be {values}" in detail

    with_rig(test)


@pytest.mark.parametrize("query", ["lane=%FF", "x" * 9000, "&".join(["a=b"] * 101)])
def test_a_query_that_cannot_be_read_is_refused(query: str) -> None:
    """Bytes that are no UTF-8, and more than anybody means."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("GET", f"/retry-tasks?{query}")
        assert reply.status in {400, 422}
        assert "query" == reply.problem["field"]

    with_rig(test)


def test_pages_of_other_sites_are_not_served() -> None:
    """A browser's `Origin` that is not the service's own may not change anything."""

    async def test(rig: Rig) -> None:
        document = {"targetUrl": TARGET}
        foreign = {"Origin": "https://evil.example"}
        own = {"Origin": "http://tarry.test"}
        assert 403 == (await rig.ask("POST", "/retry-tasks", document, headers=foreign)).status
        assert 403 == (await rig.ask("DELETE", "/dead-letters", headers=foreign)).status
        assert 200 == (await rig.ask("GET", "/retry-tasks", headers=foreign)).status
        assert 201 == (await rig.ask("POST", "/retry-tasks", document, headers=own)).status

    with_rig(test)


@pytest.mark.parametrize("place", ["body", "headers", "policy"])
def test_any_depth_gets_an_answer_that_is_no_mistake_of_ours(place: str) -> None:
    """However deep a document is, it is taken or refused, alone and in a batch."""

    async def test(rig: Rig) -> None:
        for depth in (10, 300, 500, 700, 800, 900, 950, 980, 1_000, 2_000):
            nested = "[" * depth + "]" * depth
            field = {"headers": "X-A", "policy": "maxAttempts"}.get(place)
            value = nested if field is None else f'{{"{field}": {nested}}}'
            task = f'{{"targetUrl": "{TARGET}", "{place}": {value}}}'
            alone = await rig.ask("POST", "/retry-tasks", body=task.encode())
            assert alone.status in {201, 400, 422}
            batch = await rig.ask(
                "POST", "/retry-tasks/batch", body=f'{{"tasks": [{task}]}}'.encode()
            )
            assert batch.status in {200, 400}
            if batch.status == 200:
                assert batch.json["results"][0]["status"] in {201, 400, 422}

    with_rig(test)


def test_a_socket_is_closed() -> None:
    """There is nothing here for web sockets."""

    async def test(rig: Rig) -> None:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/x", "root_path": "", "headers": []}
        await rig.api(scope, receive, send)
        assert ["websocket.close"] == [message["type"] for message in sent]

    with_rig(test)


def test_a_grpc_target_is_refused_where_it_could_not_be_called() -> None:
    """A service without grpcio says so at once, and does not accept what it can never send."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("POST", "/retry-tasks", {"targetUrl": "grpc://a.example:50051/p.S/M"})
        assert (422, "targetUrl") == (reply.status, reply.problem["field"])
        assert "tarry[grpc]" in reply.problem["detail"]
        assert 0 == await rig.count()

    with_rig(test, grpc=False)
