"""The OpenAPI document of a service that requires API keys, for generated clients and pages."""

from __future__ import annotations

import json
from typing import Any

from tests.service.api.harness import ApiHarness, run_with_api


def get_openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    return run_with_api(_get_document, keys=True)


async def _get_document(api: ApiHarness) -> dict[str, Any]:
    document: dict[str, Any] = (await api.request("GET", "/openapi.json")).json
    return document


if __name__ == "__main__":
    print(json.dumps(get_openapi_document(), indent=2))
