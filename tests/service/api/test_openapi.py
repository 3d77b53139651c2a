"""The OpenAPI document matches the behaviour of the service."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from jsonschema_rs import Draft202012Validator
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tarry.service.analysis_process import AnalysisRunner
from tarry.service.api.events import EventStream
from tarry.service.api.problems import PROBLEM_TYPES
from tarry.wire.http import Send
from tarry.wire.policies import JSON_FIELDS
from tarry.wire.tasks import PolicySimulation
from tests.service.api.harness import ApiHarness, run_with_api
from tests.service.api.schemathesis_hooks import valid_request_is_accepted
from tests.service.api.test_policy_analysis import record_attempts

api = ApiHarness()
schema = schemathesis.openapi.from_asgi("/openapi.json", api.api)


@pytest.fixture
def short_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """End event streams, and skip the simulation of a policy, which takes up to 10 s."""
    responses = schema.raw_schema["paths"]["/policy-simulations"]["post"]["responses"]
    example = responses["200"]["content"]["application/json"]["example"]

    async def send_first_line(_stream: EventStream, send: Send) -> None:
        await send({"type": "http.response.body", "body": b": hello\n\n", "more_body": True})

    async def simulate_storm(_runner: AnalysisRunner, _policy: dict[str, Any]) -> PolicySimulation:
        return msgspec.convert(example, PolicySimulation)

    monkeypatch.setattr(EventStream, "_send_events", send_first_line)
    monkeypatch.setattr(AnalysisRunner, "simulate_storm", simulate_storm)


@pytest.mark.usefixtures("short_operations")
@schema.parametrize()
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_generated_requests_get_documented_responses(case: Any) -> None:
    """Statuses, content types and bodies match the schema; only invalid requests are rejected."""
    excluded_checks = [positive_data_acceptance]
    case.call_and_validate(
        additional_checks=[valid_request_is_accepted], excluded_checks=excluded_checks
    )


def test_every_reference_has_a_schema() -> None:
    """No `$ref` points to a missing schema."""
    schemas = schema.raw_schema["components"]["schemas"]
    names = set(re.findall(r"#/components/schemas/([^']+)'", str(schema.raw_schema)))
    assert names <= set(schemas)
    assert {"RetryTaskRequest", "RetryTask", "RetryPolicy", "AttemptLog", "Problem"} <= names


def test_problem_of_a_batch_result_has_its_type() -> None:
    """Generated clients know the fields of the problem of a rejected task in a batch."""
    problem = schema.raw_schema["components"]["schemas"]["BatchResult"]["properties"]["problem"]
    assert [{"$ref": "#/components/schemas/Problem"}, {"type": "null"}] == problem["anyOf"]


def test_policy_fields_match_the_validation() -> None:
    """The schemas of policies and of overrides have the fields that the service validates."""
    schemas = schema.raw_schema["components"]["schemas"]
    assert {*JSON_FIELDS, "policyId"} == set(schemas["NewPolicy"]["properties"])
    assert ["policyId"] == schemas["NewPolicy"]["required"]
    assert set(JSON_FIELDS) == set(schemas["PolicyFields"]["properties"])
    overrides = schemas["RetryTaskRequest"]["properties"]["policy"]["anyOf"][0]
    assert set(JSON_FIELDS) == set(overrides["properties"])


def test_security_is_documented() -> None:
    """All operations except health checks have `security`, if keys are required."""

    async def secured_paths(api: ApiHarness) -> set[str]:
        document = (await api.request("GET", "/openapi.json")).json
        return {
            path
            for path, methods in document["paths"].items()
            for operation in methods.values()
            if "security" in operation and "401" in operation["responses"]
        }

    paths = set(schema.raw_schema["paths"])
    security_schemes = schema.raw_schema["components"]["securitySchemes"]
    assert {"http", "apiKey"} == {scheme["type"] for scheme in security_schemes.values()}
    assert set() == run_with_api(secured_paths)
    assert paths - {"/healthz", "/readyz"} == run_with_api(secured_paths, keys=True)


def json_contents() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield method, path and media type object of each JSON request and successful response."""
    for path, methods in schema.raw_schema["paths"].items():
        for method, operation in methods.items():
            messages = [operation.get("requestBody", {})]
            messages += [body for status, body in operation["responses"].items() if status < "300"]
            messages += [
                post["post"]["requestBody"]
                for callback in operation.get("callbacks", {}).values()
                for post in callback.values()
            ]
            for message in messages:
                if content := message.get("content", {}).get("application/json"):
                    yield method.upper(), path, content


def test_examples_match_their_schemas() -> None:
    """Every JSON request, successful response and callback has an example that is valid."""
    for _, _, content in json_contents():
        document = {**content["schema"], "components": schema.raw_schema["components"]}
        Draft202012Validator(document).validate(content["example"])


async def test_examples_of_requests_are_accepted(api: ApiHarness) -> None:
    """The service accepts the example of each request body."""
    await record_attempts(api, 200, "https://api.example.com/")  # for /policy-advice
    for path, methods in schema.raw_schema["paths"].items():
        for method, operation in methods.items():
            if body := operation.get("requestBody"):
                example = body["content"]["application/json"]["example"]
                url = path.format(policyId="nightly", lane="https:api.example.com:443")
                response = await api.request(method.upper(), url, example)
                assert response.status in {200, 201}, response.body


def test_the_callback_is_described() -> None:
    """The document describes the callback request."""
    callbacks = schema.raw_schema["paths"]["/retry-tasks"]["post"]["callbacks"]
    post = callbacks["finished"]["{$request.body#/callbackUrl}"]["post"]
    body_schema = post["requestBody"]["content"]["application/json"]["schema"]
    assert {"$ref": "#/components/schemas/CallbackBody"} == body_schema


def test_problem_types_are_listed() -> None:
    """The document has one enum value per problem type."""
    types = schema.raw_schema["components"]["schemas"]["Problem"]["properties"]["type"]["enum"]
    assert [problem_type.type for problem_type in PROBLEM_TYPES] == types
    assert len(PROBLEM_TYPES) == len(set(types))


def test_operations_are_grouped() -> None:
    """Each operation has one tag, by which clients and `/docs` group operations."""
    tags = {
        tag
        for methods in schema.raw_schema["paths"].values()
        for operation in methods.values()
        for [tag] in [operation["tags"]]
    }
    expected = {"Tasks", "Dead letters", "Policies", "Downstreams", "Signing secrets", "Monitoring"}
    assert expected <= tags


@pytest.mark.parametrize("path", ["/", "/dashboard/main.js", "/docs", "/openapi.json"])
def test_pages_are_not_documented(path: str) -> None:
    """The dashboard, `/docs` and `/openapi.json` are not operations of the document."""
    assert path not in schema.raw_schema["paths"]
