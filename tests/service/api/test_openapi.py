"""The document is true: requests made from it are answered as it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tarry.service.api.problem_types import PROBLEM_TYPES
from tarry.wire.policies import JSON_FIELDS
from tests.service.api.harness import Rig, with_rig

# Rules that no schema can hold (which hosts may be called, which policies there are) make some
# documents wrong that the schema takes for right, so it is not asked that all of those be accepted.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]

rig = Rig()
schema = schemathesis.openapi.from_asgi("/openapi.json", rig.api)


@schema.exclude(path="/events").parametrize()  # it has no end
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_service_answers_as_its_document_says(case: Any) -> None:
    """Statuses, content types and bodies are the documented ones; wrong requests are refused."""
    case.call_and_validate(checks=CHECKS)


def test_every_reference_leads_somewhere() -> None:
    """No form is named that is not there."""
    schemas = schema.raw_schema["components"]["schemas"]
    names = set(re.findall(r"#/components/schemas/([^']+)'", str(schema.raw_schema)))
    assert names <= set(schemas)
    assert {"RetryTaskRequest", "RetryTask", "RetryPolicy", "AttemptLog", "Problem"} <= names


def test_the_fields_of_a_policy_are_those_that_are_checked() -> None:
    """The document knows every field of a policy, for policies and for overrides."""
    schemas = schema.raw_schema["components"]["schemas"]
    assert {*JSON_FIELDS, "policyId"} == set(schemas["PolicyFields"]["properties"])
    overrides = schemas["RetryTaskRequest"]["properties"]["policy"]["anyOf"][0]
    assert set(JSON_FIELDS) == set(overrides["properties"])


def test_the_document_says_where_a_key_is_needed() -> None:
    """Everywhere but for those who watch, and only when keys are demanded."""

    async def secured(rig: Rig) -> set[str]:
        document = (await rig.ask("GET", "/openapi.json")).json
        return {
            path
            for path, methods in document["paths"].items()
            for operation in methods.values()
            if "security" in operation and "401" in operation["responses"]
        }

    paths = set(schema.raw_schema["paths"])
    assert set() == with_rig(secured)
    assert paths - {"/healthz", "/readyz"} == with_rig(secured, keys=True)


def test_the_callback_is_described() -> None:
    """What is posted to a `callbackUrl`, for programs and on the page."""

    async def test(rig: Rig) -> None:
        callbacks = schema.raw_schema["paths"]["/retry-tasks"]["post"]["callbacks"]
        post = callbacks["finished"]["{$request.body#/callbackUrl}"]["post"]
        form = post["requestBody"]["content"]["application/json"]["schema"]
        assert {"$ref": "#/components/schemas/CallbackBody"} == form
        page = (await rig.ask("GET", "/docs")).body.decode()
        assert "<code>{$request.body#/callbackUrl}</code>" in page
        assert 'id="type-CallbackBody"' in page

    with_rig(test)


def test_the_page_shows_every_call_and_needs_nothing_from_elsewhere() -> None:
    """No script, no address of another host, and a policy that forbids both."""

    async def test(rig: Rig) -> None:
        reply = await rig.ask("GET", "/docs")
        page = reply.body.decode()
        assert "text/html; charset=utf-8" == reply.header("content-type")
        assert (reply.header("content-security-policy") or "").startswith("default-src 'none'")
        for path in schema.raw_schema["paths"]:
            assert path in page
        assert not re.search(r"<script|src=|https?://|@import", page)

    with_rig(test)


def test_the_type_of_a_problem_leads_to_words_about_it() -> None:
    """Whoever opens it reads what it means; the document has all of them."""

    async def test(rig: Rig) -> None:
        path, _, place = (await rig.ask("GET", "/nothing")).problem["type"].partition("#")
        page = (await rig.ask("GET", path)).body.decode()
        assert 1 == page.count(f'id="{place}"')
        for kind in PROBLEM_TYPES:
            assert f'id="{kind.type.partition("#")[2]}"' in page
        types = schema.raw_schema["components"]["schemas"]["Problem"]["properties"]["type"]["enum"]
        assert [kind.type for kind in PROBLEM_TYPES] == types
        assert len(PROBLEM_TYPES) == len(set(types))

    with_rig(test)


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_what_tells_about_the_api_is_not_part_of_it(path: str) -> None:
    """The document is about what is behind it."""
    assert path not in schema.raw_schema["paths"]
